"""A launch that is looked at: by ltc.profile, which keeps its times, or by torch's profiler.

The latter is shown a span for the launch and one for each kernel. As it sees the calling thread
alone, the program runs there, one kernel at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from typing import Any

from ltc.backends.capabilities import ComputationCapabilities, TimedLaunches
from ltc.profiling import spans
from ltc.runtime.account import account_of
from ltc.runtime.executor import Executor
from ltc.runtime.transfers import capabilities
from ltc.support.torch_private import is_profiled, record_region

_timed: weakref.WeakKeyDictionary[Any, TimedLaunches | None] = weakref.WeakKeyDictionary()


def is_wanted() -> bool:
    """Whether anybody looks at launches now."""
    return spans.timeline is not None or is_profiled()


def of(
    program: Any,
    chosen: tuple[Any, ComputationCapabilities],
    executor: Executor,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
) -> ProfiledLaunch:
    """How a program is launched that somebody looks at.

    chosen  what runs it, with what that can do
    """
    computation, own = chosen
    timed, launch, timeline = _timed_of(computation, own), None, spans.timeline
    if timeline is not None:
        device = executor.device
        held = account_of(device).bytes + (0 if timed is None else timed.block_bytes)
        launch = timeline.ask(program, timed, device, held, inputs, outputs)
        launch.tier = "native" if program.tiers is None else "interpreted"
    if is_profiled():
        executor.wait()  # then it runs here
        return _ShownToTorch(program, computation, timed, launch)
    return ProfiledLaunch(program, computation, timed, launch)


class ProfiledLaunch:
    """In place of a computation: launches it, and tells when it ran.

    is_inline  whether it has to run in the thread that asks for it
    """

    is_inline = False

    def __init__(
        self, program: Any, computation: Any, timed: TimedLaunches | None, launch: Any
    ) -> None:
        """
        timed   the same computation, with times for its kernels
        launch  a spans.LaunchRecord, or None where ltc.profile does not look
        """
        self._program, self._computation = program, computation
        self._timed, self._launch = timed, launch
        self._told: Callable[[bytes], object] = bytes if launch is None else launch.told

    def launch(self, buffers: list[Any], scalars: list[Any]) -> list[Any]:
        begin = spans.now()
        try:
            return self._launched(buffers, scalars)
        finally:
            if self._launch is not None:
                self._launch.ran(begin, spans.now(), get_ident())

    def _launched(self, buffers: list[Any], scalars: list[Any]) -> list[Any]:
        made: list[Any]
        if self._timed is None:
            made = self._computation.launch(buffers, scalars)
        else:
            made = self._timed.launch_timed(buffers, scalars, self._told)
        return made

    def prepared(
        self, buffers: list[Any], scalars: list[Any], queue: Any, lent: Mapping[int, Any]
    ) -> Any:
        """As `prepared` of backends/capabilities.py; asked only where the program can be queued."""
        assert self._timed is not None
        return self._timed.prepared_timed(buffers, scalars, queue, lent, self._told)

    def was_queued(self, nanoseconds: int, thread: int) -> None:
        """The queue has run it in so long, in that thread."""
        launch = self._launch
        if launch is not None:
            times = list(self._timed.times(launch.stamps)) if self._timed is not None else []
            end = times[-1][1] if times else spans.now()
            launch.ran(end - nanoseconds, end, thread)


class _ShownToTorch(ProfiledLaunch):
    is_inline = True

    def _launched(self, buffers: list[Any], scalars: list[Any]) -> list[Any]:
        program, launch = self._program, self._computation.launch
        if self._timed is not None:
            launch = self._timed.shown(program.graph_of, program.donated, record_region)
        with record_region(f"ltc::launch of {program.calls} calls"):
            made: list[Any] = launch(buffers, scalars)
        return made

    def prepared(self, *arguments: Any) -> Any:
        return None  # it is to run here


def _timed_of(computation: Any, own: ComputationCapabilities) -> TimedLaunches | None:
    if own.timed is not None:
        return own.timed
    if computation not in _timed:
        make = capabilities().timed
        _timed[computation] = make(computation) if make is not None else None
    return _timed[computation]
