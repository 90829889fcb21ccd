"""Launches given ahead to a thread that stays in native code: their frames are filled in already.

A queued launch has a frame of its own, and works in a block that it shares with those before and
behind it, as they run one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ltc.backends.llvm.workspace import Blocks, WorkBlock
from ltc.llvm.native import runner
from ltc.llvm.native.kernel_run import KernelRun
from ltc.llvm.native.launch_ring import Ring

MOST_BYTES_AHEAD = 8 << 20  # of new outputs: more would be memory that waits


@dataclass(slots=True)
class LlvmLaunch:
    """A launch whose frame is filled in.

    outputs  the buffers that it makes or writes over
    frames   where its frame goes when it is over
    error    what the call of that number stands for; it holds all that the frame has addresses of
    """

    run: KernelRun
    frame: WorkBlock
    outputs: list[torch.Tensor]
    frames: Blocks
    error: Callable[[int], Exception]

    def end(self) -> None:
        """The frame may serve another launch."""
        self.frames.give_back(self.frame)


class LlvmQueue:
    """A `LaunchQueue` of backends/interface.py."""

    def __init__(self, blocks: Blocks) -> None:
        self._ring, self._blocks = Ring(), blocks
        self._taken: list[WorkBlock] = []  # that queued launches work in

    def block(self, nbytes: int) -> WorkBlock:
        """Memory for launches from now on, until `rest`."""
        if not self._taken or self._taken[-1].nbytes < nbytes:
            self._taken.append(self._blocks.take(nbytes))
        return self._taken[-1]

    def rest(self) -> None:
        """Nothing is queued: the memory may serve others."""
        while self._taken:
            self._blocks.give_back(self._taken.pop())

    def give(self, launch: LlvmLaunch) -> int:
        return self._ring.give(launch.run.address, launch.frame.address, runner.thread_count())

    def leave_processor_after_next(self, nanoseconds: int) -> None:
        self._ring.leave_processor_after_next(runner.first_to_leave(), nanoseconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ring, name)


def is_possible() -> bool:
    """Whether this process has what the queue's thread is made of."""
    return runner.has_pool()


def may_run_ahead(made: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> bool:
    """Whether outputs of these types may be there before their program runs."""
    nbytes = sum([prod(shape) * dtype.itemsize for shape, dtype in made])
    return nbytes <= MOST_BYTES_AHEAD
