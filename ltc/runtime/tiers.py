"""When a program is compiled: not before it has run often enough for that to pay.

A program that is new runs at once, call by call, on PyTorch's own kernels (backends/interpreter/):
nothing is expanded, fused or compiled for it.  It is compiled when it comes back as a loop brings
it, or when it has taken as long as compiling it would.  So no step waits for a compiler that it does
not need, and a program costs at most about twice what the better of both ways costs.  For a program
of one call, which makes one tensor, a loop is no reason: there is nothing to fuse, and PyTorch's
kernel does all of it.

LTC_TIER=native compiles every program before its first run: then the same bits in every run.  So
does whatever asks for the same bits in several places at once, replicas above all.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ltc import config
from ltc.aten.call import Call
from ltc.backends.interface import ComputationCapabilities
from ltc.backends.plain_dispatch import PlainDispatch
from ltc.debug import metrics
from ltc.debug.often import counting
from ltc.explaining.explanation import TIERS, Explanation
from ltc.explaining.history import note
from ltc.passes import pipeline
from ltc.runtime import core_reservation, physical_dtype
from ltc.runtime.background import compile_behind
from ltc.runtime.background.compile_behind import Request
from ltc.runtime.transfers import capabilities
from ltc.support.process.fork_safe_lock import renewed_lock

NEAR = 4  # programs from one run to the next: as many as a loop's step may have
REPEATS = 2  # runs so near to the one before that make a loop
_compiling = renewed_lock(globals(), "_compiling")  # each compiles with every processor
LARGE_CALLS = 100  # of a program that takes about half a second to compile
COMPILE_SECONDS = 0.1, 0.004  # about: of any program, and for each of its recorded calls
# How many other calls take as long to compile; each is several kernels of its own.
_AS_LONG_AS = {"aten::convolution": 8, "aten::convolution_backward": 16}
_REASONS = {
    "Repeated": "it comes back as a loop brings it",
    "Paid": "its runs have taken as long as compiling it does",
    "Failed": "one of its calls has failed",
}
_count_run = counting("InterpretedRuns")
_asked = config.reader("LTC_TIER", "LTC_DUMP")
_replicas = config.reader("XRT_SHARD_WORLD_SIZE", "LTC_NUM_DEVICES")
_CURES = {"Failed": "the error that is raised says what is wrong"}


def begin_interpreted() -> bool:
    """Whether new programs run at once, as far as the process's settings go."""
    tier, dumped = _asked()
    return bool(
        tier != "native"
        and capabilities().host_tensors
        and not dumped  # who looks at the passes wants them to run
        and not physical_dtype.kept_as()
        and not _has_replicas()
    )


def looks_inside() -> bool:
    """Whether the passes are to be seen: then they have to run.

    Raises ValueError where LTC_DUMP names a stage that neither ltc nor the backend has.
    """
    asked = pipeline.dumped()
    known = (*[one.name for one in pipeline.PIPELINE], *capabilities().stages)
    if not asked <= set(known):
        raise ValueError(
            f"LTC_DUMP={config.value('LTC_DUMP')}: expected some of {', '.join(known)}, with commas "
            f"between them. It sets: stages to print when a step is compiled."
        )
    return bool(asked)


def _has_replicas() -> bool:
    """Whether several replicas may run one program: on each of them it gives the same bits."""
    return bool(max(_replicas()) > 1)


def calls_to_compile(calls: Iterable[Call]) -> int:
    """How many calls a program has, where those that take longer to compile count as several."""
    return sum([_AS_LONG_AS.get(call.name, 1) for call in calls])


class Tiers:
    """A program that is not compiled yet, and how it comes to be.

    interpreted  what runs it till then
    why          why there is such a program; None where nobody has told
    """

    def __init__(
        self,
        interpreted: Any,
        compile: Callable[[], Any],
        begin_behind: Callable[[], Request | None],
        calls: Sequence[Call],
    ) -> None:
        """
        compile       gives the backend's computation
        begin_behind  has another process make it; None where that cannot be
        calls         the recorded calls that it runs
        """
        self.interpreted = _Timed(interpreted, self)
        self._is_one_kernel = interpreted.is_one_kernel
        self._compile, self._begin_behind = compile, begin_behind
        self._calls, self._to_compile = len(calls), calls_to_compile(calls)
        self._behind: Request | None = None
        self._native: Any = None
        self._last_use = self._repeats = 0
        self._is_put_off = False
        self.seconds = 0.0  # that its runs have taken
        self.has_failed = False
        self.why: Explanation | None = None

    def chosen(self, use: int) -> tuple[Any, bool]:
        """What runs it this time, and whether that is compiled.

        use  the number of this run, over all programs
        """
        near = 0 < use - self._last_use <= NEAR and self._last_use > 0
        self._repeats = self._repeats + int(not self._is_put_off) if near else 0
        self._last_use, self._is_put_off = use, False
        reason = self._reason()
        if reason is None or (reason != "Failed" and self._is_compiled_behind()):
            return self.interpreted, False
        return self.native(reason), True

    def put_off(self) -> None:
        """The run that follows is no reason to compile it: its calls may soon need no program."""
        self._is_put_off = True

    def _is_compiled_behind(self) -> bool:
        """Whether another process is at it, which begins where it takes long."""
        if (
            self._native is not None
            or self._to_compile < LARGE_CALLS
            or not compile_behind.is_possible()
        ):
            return False
        if self._behind is None:
            with PlainDispatch():
                self._behind = self._begin_behind() or compile_behind.HERE
        return not self._behind.is_over

    def _reason(self) -> str | None:
        """Why it is to be compiled now; None where it is not."""
        if self.has_failed:
            return "Failed"
        if self._repeats >= REPEATS and not self._is_one_kernel:
            return "Repeated"
        least, for_each = COMPILE_SECONDS
        return "Paid" if self.seconds >= least + for_each * self._to_compile else None

    def native(self, reason: str) -> Any:
        """The compiled program; made once."""
        with _compiling:
            if self._native is None:
                with PlainDispatch():
                    self._native = self._compile()
                metrics.count(f"TierUp{reason}")
                self._explain(reason)
            return self._native

    def _explain(self, reason: str) -> None:
        what = f"a program of {self._calls} calls is compiled: {_REASONS[reason]}"
        why = self.why.difference if self.why is not None else "nobody has told why it is new"
        stack = self.why.stack if self.why is not None else ()
        note(Explanation(TIERS, stack, what, why, _CURES.get(reason, ""), reason.lower()))


class _Timed:
    """The interpreted computation; where it fails, the compiled one says what is wrong."""

    def __init__(self, interpreted: Any, tiers: Tiers) -> None:
        self._interpreted, self._tiers = interpreted, tiers
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

    def prepared_timed(self, *arguments: Any) -> None:
        return None  # it needs Python

    def kernels(self, graph_of: Callable[[], Any] | None, donated: frozenset[int]) -> Any:
        return self._interpreted.kernels()

    def _launched(
        self, launch: Callable[..., list[Any]], buffers: list[Any], scalars: list[Any]
    ) -> list[Any]:
        started = time.perf_counter()
        try:
            made = core_reservation.beside_compiler(launch, buffers, scalars)
        except Exception as error:
            if getattr(error, "overwritten", ()):
                raise
            self._tiers.has_failed = True
            return self._by_native(buffers, scalars)
        self._tiers.seconds += time.perf_counter() - started
        _count_run()
        return made

    def _by_native(self, buffers: list[Any], scalars: list[Any]) -> list[Any]:
        native = self._tiers.native("Failed")
        made: list[Any] = native.launch(buffers, scalars)
        for _, *others in ComputationCapabilities.of(native).aliased_outputs:
            for position in others:  # who launched it expects each in a place of its own
                made[position] = made[position].clone()
        return made
