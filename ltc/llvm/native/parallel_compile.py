"""Kernels compiled side by side: by the thread that wants them, and by helpers beside it.

LLVM compiles a text in one thread. A network has a hundred texts, and while the first are compiled
the others are still being written.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from ltc.llvm.compiler import llvm_binding
from ltc.llvm.compiler.llvm_private import ObjectCompiler
from ltc.llvm.compiler.public_compiler import PublicCompiler
from ltc.llvm.native.runner import thread_count

MOST_HELPERS = 7  # more would wait for one another: Python has a little to do for each kernel


class Compiling:
    """`with Compiling() as compiling:` texts are given, then taken as machine code.

    begun  how many texts were given

    No helper is left when the block ends; what none has begun by then is not compiled.
    """

    def __init__(self) -> None:
        self.begun = 0
        self._changed = threading.Condition()  # guards all that follows
        self._waiting: list[tuple[str, str]] = []
        self._running = 0
        self._codes: list[tuple[str, bytes]] = []
        self._error: Exception | None = None
        self._is_closed = False
        self._helpers: list[threading.Thread] = []

    def __enter__(self) -> Compiling:
        return self

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for helper in self._helpers:
            helper.join()

    def begin(self, name: str, text: str) -> None:
        """Have a text compiled, now or by `finished`."""
        self.begun += 1
        with self._changed:
            self._waiting.append((name, text))
            self._changed.notify()
        if len(self._helpers) < min(thread_count() - 1, MOST_HELPERS):
            self._add_helper()

    def finished(self) -> Iterator[tuple[str, bytes]]:
        """(name, machine code) of everything begun, as it comes; this thread compiles as well.

        Raises what went wrong with a text.
        """
        emitter = None
        while True:
            with self._changed:
                codes, self._codes = self._codes, []
                error, job = self._error, self._taken()
            yield from codes
            if error is not None:
                raise error
            if job is not None:
                emitter = emitter or llvm_binding.emitter()
                self._compile(emitter, *job)
            elif not self._is_more_to_come():
                return

    def _is_more_to_come(self) -> bool:
        """Whether a helper has finished anything else, once one has or all are idle."""
        with self._changed:
            self._changed.wait_for(lambda: self._codes or self._error or not self._running)
            return bool(self._codes or self._error)

    def _add_helper(self) -> None:
        helper = threading.Thread(
            target=self._help, args=(llvm_binding.emitter(),), name="ltc compiling"
        )
        try:
            helper.start()
        except RuntimeError:
            return  # the system has no thread left, or Python is ending: `finished` does it all
        self._helpers.append(helper)

    def _help(self, emitter: ObjectCompiler | PublicCompiler) -> None:
        while (job := self._next()) is not None:
            self._compile(emitter, *job)

    def _next(self) -> tuple[str, str] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            return None if self._is_closed else self._taken()

    def _taken(self) -> tuple[str, str] | None:
        """The longest text that waits, so that none is left to one thread at the end."""
        if not self._waiting:
            return None
        job = max(self._waiting, key=lambda job: len(job[1]))
        self._waiting.remove(job)
        self._running += 1
        return job

    def _compile(self, emitter: ObjectCompiler | PublicCompiler, name: str, text: str) -> None:
        code, error = None, None
        try:
            code = emitter.object_code(text)
        except Exception as raised:
            error = raised
        finally:
            with self._changed:
                self._running -= 1
                self._error = self._error or error
                if code is not None:
                    self._codes.append((name, code))
                self._changed.notify_all()
