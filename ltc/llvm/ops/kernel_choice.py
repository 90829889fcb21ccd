"""The faster of two ways to compute a node: generated kernels, or PyTorch's own.

Both run once for each class of shapes and machine, in the process that compiles, by the time of its own
thread: what other processes do meanwhile hardly shows. The ratio is kept in the disk cache. A program
whose bits may depend on no measurement has the generated kernels: `Graph.reproducible`.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import platform
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from ltc.llvm.compiler import llvm_binding
from ltc.llvm.emit.vectors import GeneratedKernel
from ltc.llvm.native.kernel_cache import kernel_name, load
from ltc.support.bounded_table import BoundedTable
from ltc.support.disk_cache import disk_cache
from ltc.support.process import processors
from ltc.support.version import source_digest

GAIN = 1.03  # less is no reason to call: bits would depend on a measurement for nothing
MOST_WORK = 1 << 28  # multiply-adds of a trial: about 10 ms of one AVX2 thread
TRIAL_IMAGES = 16  # of a convolution, at most
SAMPLES, SAMPLE_SECONDS = 6, 0.001  # of each way, at most; the fastest counts
FEWEST_SAMPLES = 2
Way = Callable[[], object]
_ratios: BoundedTable[str, float] = BoundedTable("KernelRatios", 4096)


def is_call_faster(shapes: Hashable, ways: Callable[[], tuple[Way, Way]]) -> bool:
    """Return True if a program should call PyTorch's kernel; measure if need be.

    Args:
        shapes: The class, whose ratio is known if it was measured before.
        ways: Makes the generated way ready to run, and the call.
    """
    name = _class_name(shapes)
    ratio = _ratios.get(name)
    if ratio is None:
        ratio = _ratios.keep(name, _kept(name) or _measured(name, ways))
    return ratio > GAIN


def way_of(kernels: Sequence[GeneratedKernel], buffers: Mapping[str, torch.Tensor]) -> Way:
    """Kernels that run in a row, all tasks of each as one.

    Args:
        buffers: The memory of each argument, by the name that the kernels give it.
    """
    loaded = load({kernel_name(kernel.text): kernel.text for kernel in kernels})
    held = [_runner(loaded[kernel_name(k.text)].entry, k, buffers) for k in kernels]

    def run() -> None:
        for call, arguments in held:
            call(arguments, 0, 1)

    run.loaded, run.buffers = loaded, buffers  # type: ignore[attr-defined]  # as long as it may run
    return run


def _runner(
    entry: int, kernel: GeneratedKernel, buffers: Mapping[str, torch.Tensor]
) -> tuple[Any, Any]:
    words = [*[buffers[name].data_ptr() for name in kernel.arguments], *kernel.numbers]
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)(entry)
    return call, (ctypes.c_int64 * len(words))(*words)


def _class_name(shapes: Hashable) -> str:
    """Names a class on this machine; the kernels' texts follow from the version of ltc."""
    parts = (
        "ratio of kernels", shapes, source_digest(), torch.__version__,
        llvm_binding.name_of(""), platform.node(), processors.count(),
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _kept(name: str) -> float | None:
    disk = disk_cache()
    return None if disk is None else disk.read_as(name, lambda data: float(json.loads(data)))


def _measured(name: str, ways: Callable[[], tuple[Way, Way]]) -> float:
    """Time both ways; return the time of the generated one as a multiple of the call's."""
    # The first call of a thread sets its number of threads; a copy of a process may not make a team.
    torch.get_num_threads()
    generated_seconds, called_seconds = _fastest(list(ways()))
    ratio = generated_seconds / called_seconds
    disk = disk_cache()
    if disk is not None:
        disk.write(name, json.dumps(ratio).encode())
    return ratio


def _fastest(ways: list[Way]) -> list[float]:
    """Seconds of this thread for a run of the generated way and of the call, which take turns."""
    repeats = [max(1, int(SAMPLE_SECONDS / (_seconds(way, 1) + 1e-9))) for way in ways]
    generated: list[float] = []
    called: list[float] = []
    while len(generated) < SAMPLES and not _is_settled(generated, called):
        for samples, way, n in zip((generated, called), ways, repeats):
            samples.append(max(_seconds(way, n), 1e-9))
    return [min(generated), min(called)]


def _is_settled(generated: list[float], called: list[float]) -> bool:
    """Return True if any sample of the one beside any of the other gives the same choice."""
    if len(generated) < FEWEST_SAMPLES:
        return False
    most, least = max(generated) / min(called), min(generated) / max(called)
    return (most > GAIN) == (least > GAIN)


def _seconds(way: Way, repeats: int) -> float:
    began = time.thread_time()
    for _ in range(repeats):
        way()
    return (time.thread_time() - began) / repeats
