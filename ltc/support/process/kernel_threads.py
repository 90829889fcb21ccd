"""How many threads PyTorch's kernels may use that the calling thread runs, and no other thread's.

torch.set_num_threads counts for threads to come as well: one that begins while it is lower keeps that.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import TypeVar

import torch

from ltc.support.process import torch_libraries

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
        _function("libgomp", "omp_set_num_threads"),
        _function("libtorch_cpu.", "MKL_Set_Num_Threads_Local"),
    )


def _function(library: str, name: str) -> Callable[[int], int] | None:
    for one in torch_libraries.loaded(library):
        found = getattr(one, name, None)
        if found is not None:
            found.argtypes, found.restype = [ctypes.c_int], ctypes.c_int
            called: Callable[[int], int] = found
            return called
    return None
