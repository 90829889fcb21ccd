"""The shared libraries that torch brings and has loaded: its own, OpenMP's, the Intel library inside."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch


def loaded(name: str) -> list[ctypes.CDLL]:
    """Return loaded libraries whose file begins so, as "libgomp" or "libtorch_cpu."; none without
    them.
    """
    files = sorted((Path(torch.__file__).parent / "lib").glob(f"{name}*"))
    return [ctypes.CDLL(str(file)) for file in files]
