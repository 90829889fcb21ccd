"""How many threads PyTorch's kernels may use that the calling thread runs, and no other thread's.

torch.set_num_threads counts for threads to come as well: one that begins while it is lower keeps that.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

Result = TypeVar("Result")


def at_most(threads: int, run: Callable[..., Result], *arguments: object) -> Result:
    """What `run` gives, whose kernels use so many threads at most."""
    openmp, mkl = _setters()
    before = torch.get_num_threads()
    if openmp is None or before <= threads:
        return run(*arguments)
    openmp(threads)
    mkls = 0 if mkl is None else mkl(threads)
    try:
        return run(*arguments)
    finally:
        openmp(before)
        if mkl is not None:
            mkl(mkls)


@functools.cache
def _setters() -> tuple[Callable[[int], object] | None, Callable[[int], int] | None]:
    """Of OpenMP, and of the Intel library for products, which gives what was set; None: not there."""
    return (
        _function("lib/libgomp*", "omp_set_num_threads"),
        _function("lib/libtorch_cpu.*", "MKL_Set_Num_Threads_Local"),
    )


def _function(files: str, name: str) -> Callable[[int], int] | None:
    """Of the libraries that torch brings."""
    for path in sorted(Path(torch.__file__).parent.glob(files)):
        found = getattr(ctypes.CDLL(str(path)), name, None)
        if found is not None:
            return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(
                ctypes.cast(found, ctypes.c_void_p).value or 0
            )
    return None
