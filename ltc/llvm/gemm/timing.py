"""Kernels on their own, outside of any program: to be timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch

from ltc.llvm.emit.vectors import GeneratedKernel
from ltc.llvm.native.kernel_cache import kernel_name, load
from ltc.llvm.native.kernel_run import KernelCall, KernelRun

Way = TypeVar("Way", bound=Hashable)
FEWEST_ROUNDS, MOST_ROUNDS = 3, 25
SECONDS = 0.02  # after which no further round begins


class Trial:
    """Kernels that run in a row, by one native call, on buffers of their own."""

    def __init__(
        self, kernels: tuple[GeneratedKernel, ...], buffers: Mapping[str, torch.Tensor]
    ) -> None:
        """`buffers`: what the kernels call their arguments."""
        names = [kernel_name(kernel.text) for kernel in kernels]
        self._loaded = load(dict(zip(names, (kernel.text for kernel in kernels))))
        self._buffers = buffers  # held, so that the addresses stay right
        calls: list[Any] = []
        frame: list[int] = []
        for name, kernel in zip(names, kernels):
            words = [*[buffers[a].data_ptr() for a in kernel.arguments], *kernel.numbers]
            arguments = tuple(n for k in range(len(words)) for n in (len(frame) + k, 0))
            frame += words
            calls.append(KernelCall(self._loaded[name].entry, arguments, kernel.tasks))
        self._frame = np.array(frame + frame, dtype=np.int64)  # the addresses, then the arguments
        self._run = KernelRun(calls, len(frame))

    def __call__(self) -> None:
        self._run.launch(self._frame.ctypes.data)


def quickest(ways: Mapping[Way, Callable[[], object]]) -> Way:
    """The way whose best time is the least; they take turns, and the first of each is not timed.

    The best time, because whatever else runs on the machine only ever adds to it.
    """
    for run in ways.values():
        run()
    best = dict.fromkeys(ways, float("inf"))
    ends = time.perf_counter() + SECONDS
    for turn in range(MOST_ROUNDS):
        if turn >= FEWEST_ROUNDS and time.perf_counter() > ends:
            break
        for way, run in ways.items():
            started = time.perf_counter()
            run()
            best[way] = min(best[way], time.perf_counter() - started)
    return min(best, key=best.__getitem__)
