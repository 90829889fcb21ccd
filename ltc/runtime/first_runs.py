"""First runs of a program that is not compiled: its calls, one by one, on PyTorch's own kernels.

Calls run when they are made as long as nothing is known of their path, so this is for a followed
path that ends where there is no program: other tensors are alive, or the path was left.

LTC_TIER=native compiles every program before its first run: then the same bits in every run. So
does whatever asks for the same bits in several places at once, replicas above all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ltc import config
from ltc.backends.interface import BackendRegistrar, ComputationCapabilities
from ltc.backends.plain_dispatch import PlainDispatch
from ltc.explaining import faults
from ltc.explaining.explanation import TIERS, Explanation
from ltc.explaining.history import note
from ltc.passes import pipeline
from ltc.runtime import core_reservation, physical_dtype
from ltc.runtime.background import compile_behind
from ltc.runtime.background.compile_behind import Request
from ltc.runtime.graph_compiler import has_peers, is_fault
from ltc.runtime.transfers import capabilities
from ltc.support.observation import metrics
from ltc.support.observation.often import counting
from ltc.support.process.fork_safe_lock import renewed_lock

_compiling = renewed_lock(globals(), "_compiling")  # each compiles with every processor
_count_run = counting("CallByCallRuns")


def _allow(tier: str, dumped: str, backend: str, processes: int, devices: int) -> bool:
    """The part of the answer that settings give; one for each combination: kept_as() is fixed."""
    return bool(
        tier != "native"
        and processes <= 1 >= devices
        and not dumped  # who looks at the passes wants them to run
        and not physical_dtype.kept_as()
        and BackendRegistrar.capabilities(backend).host_tensors
    )


_settings_allow = config.reader(
    "LTC_TIER", "LTC_DUMP", "LTC_BACKEND", "XRT_SHARD_WORLD_SIZE", "LTC_NUM_DEVICES", of=_allow
)


def may_run_uncompiled() -> bool:
    """Return True if the process's settings let calls run before there is a program.

    Several replicas, and processes that train one model, are all to have the same bits.
    """
    return _settings_allow() and not has_peers()


def looks_inside() -> bool:
    """Return True if the passes are to be seen: then they have to run.

    Raises:
        ValueError: If LTC_DUMP names a stage that neither ltc nor the backend has.
    """
    asked = pipeline.dumped()
    known = (*[one.name for one in pipeline.PIPELINE], *capabilities().stages)
    if not asked <= set(known):
        raise ValueError(
            f"LTC_DUMP={config.value('LTC_DUMP')}: expected some of {', '.join(known)}, "
            f"separated by commas. It sets: stages to print when a step is compiled."
        )
    return bool(asked)


class FirstRuns:
    """The runs of a program before it is compiled, and the request to compile it.

    Attributes:
        by_calls: Runs its calls one by one.
        why: The reason for the program; None if it is not known.
    """

    def __init__(
        self,
        by_calls: Any,
        compile: Callable[[], Any],
        begin_behind: Callable[[], Request | None],
        calls: int,
    ) -> None:
        """
        Args:
            compile: gives the backend's computation.
            begin_behind: has another process make it; None where that cannot be.
            calls: the number of recorded calls that it runs.
        """
        self.by_calls = _Observed(by_calls, self)
        self._compile, self._begin_behind = compile, begin_behind
        self._calls = calls
        self._behind: Request | None = None
        self._native: Any = None
        self.has_failed = False
        self.why: Explanation | None = None

    def ask(self) -> None:
        """Have it compiled: by another process, else here when it is needed the next time.

        Under torch.use_deterministic_algorithms the caller waits, so that the run which takes over
        depends on counts alone.
        """
        if self._behind is None:
            self._behind = compile_behind.HERE
            if compile_behind.is_possible():
                with PlainDispatch():
                    self._behind = self._begin_behind() or compile_behind.HERE
        if torch.are_deterministic_algorithms_enabled():
            self._behind.wait()

    @property
    def is_ready(self) -> bool:
        """True if the next run is compiled, or compiles it."""
        return self.has_failed or (self._behind is not None and self._behind.is_over)

    def chosen(self) -> tuple[Any, bool]:
        """Return what runs it this time, and whether that is compiled."""
        return (self.native(), True) if self.is_ready else (self.by_calls, False)

    def native(self) -> Any:
        """Return the compiled program; it is made once."""
        with _compiling:
            if self._native is None:
                with PlainDispatch():
                    self._native = self._compile()
                metrics.count("TierUp")
                self._explain()
            return self._native

    def _explain(self) -> None:
        reason = "one of its calls has failed" if self.has_failed else "its path came back"
        what = f"a program of {self._calls} calls is compiled: {reason}"
        why = (
            self.why.difference if self.why is not None else "the reason why it is new is not known"
        )
        stack = self.why.stack if self.why is not None else ()
        cure = "see the error that is raised" if self.has_failed else ""
        note(
            Explanation(TIERS, stack, what, why, cure, "failed" if self.has_failed else "repeated")
        )


class _Observed:
    """The calls; where one fails, the compiled program says what is wrong."""

    def __init__(self, interpreted: Any, first_runs: FirstRuns) -> None:
        self._interpreted, self._first_runs = interpreted, first_runs
        self.upload, self.download = interpreted.upload, interpreted.download
        self.wait = interpreted.wait

    block_bytes = 0  # calls make what they need as they run

    @property
    def capabilities(self) -> ComputationCapabilities:
        return ComputationCapabilities(timed=self, python_calls=self._interpreted.calls)

    def launch(self, buffers: list[Any], scalars: list[Any]) -> list[Any]:
        return self._launched(self._interpreted.launch, buffers, scalars)

    def launch_timed(
        self, buffers: list[Any], scalars: list[Any], told: Callable[[bytes], object]
    ) -> list[Any]:
        launch = functools.partial(self._interpreted.launch_timed, told=told)
        return self._launched(launch, buffers, scalars)

    def shown(self, *arguments: Any) -> Callable[[list[Any], list[Any]], list[Any]]:
        return self.launch  # PyTorch's kernels show themselves

    def times(self, stamps: bytes) -> Any:
        return self._interpreted.times(stamps)

    def kernels(self, graph_of: Callable[[], Any] | None, donated: frozenset[int]) -> Any:
        return self._interpreted.kernels()

    def _launched(
        self, launch: Callable[..., list[Any]], buffers: list[Any], scalars: list[Any]
    ) -> list[Any]:
        try:
            made = core_reservation.beside_compiler(launch, buffers, scalars)
        except Exception as error:
            if getattr(error, "overwritten", ()) or not faults.is_own(error):
                raise
            self._first_runs.has_failed = True
            made = self._by_native(buffers, scalars)
            if is_fault(error):  # else the program would have failed as well
                faults.note(error, "the run of a program's calls one by one")
            return made
        _count_run()
        return made

    def _by_native(self, buffers: list[Any], scalars: list[Any]) -> list[Any]:
        native = self._first_runs.native()
        made: list[Any] = native.launch(buffers, scalars)
        for _, *others in ComputationCapabilities.of(native).aliased_outputs:
            for position in others:  # who launched it expects each in a place of its own
                made[position] = made[position].clone()
        return made
