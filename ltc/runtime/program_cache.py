"""Programs by the structure of their graph: each is compiled once, the least used are dropped."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable

from ltc import config
from ltc.runtime.program import Program
from ltc.support.observation import metrics

_uses = itertools.count(1)


def note_use(program: Program) -> None:
    """The program is the one used last: it is the last to be dropped."""
    program.last_use = next(_uses)


class ProgramCache:
    """At most LTC_CACHE_PROGRAMS programs; threads that ask for one that is being compiled wait."""

    def __init__(self) -> None:
        self._programs: dict[Hashable, Program] = {}
        self._compiling: dict[Hashable, threading.Lock] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, compile: Callable[[], Program]) -> tuple[Program, bool]:
        """The program of `key`, and whether it had to be compiled; raises what `compile` raises."""
        program = self._look_up(key)
        if program is not None:
            return program, False
        with self._lock:
            compiling = self._compiling.setdefault(key, threading.Lock())
        with compiling:
            program = self._look_up(key)  # another thread may just have compiled it
            if program is not None:
                return program, False
            try:
                program = compile()
                self._keep(key, program)
            finally:
                with self._lock:
                    self._compiling.pop(key, None)
        return program, True

    def _look_up(self, key: Hashable) -> Program | None:
        program = self._programs.get(key)
        if program is not None:
            note_use(program)
        return program

    def _keep(self, key: Hashable, program: Program) -> None:
        note_use(program)
        with self._lock:
            self._programs[key] = program
            while len(self._programs) > config.value("LTC_CACHE_PROGRAMS"):
                least = min(self._programs, key=lambda key: self._programs[key].last_use)
                del self._programs[least]
                metrics.count("Forgotten.Programs")

    def clear(self) -> None:
        """Forget every program; recorded paths keep theirs until they end."""
        with self._lock:
            self._programs.clear()

    def __len__(self) -> int:
        return len(self._programs)

    def after_fork_in_child(self) -> None:
        self._lock = threading.Lock()
        self._compiling = {}


PROGRAMS = ProgramCache()
