"""LTC_ISA: fewer instructions than this processor has, as a smaller one would be given.

Kernels for other processors are tested so, and machines that share a cache of kernels can agree on
what all of them have. The levels are those of the System V ABI, AMD64 supplement, 3.1.1.
"""

from __future__ import annotations

import platform

from ltc import config
from ltc.errors import Unsupported

_V2 = (
    "cmov", "cx8", "fxsr", "mmx", "sse", "sse2", "cx16", "crc32", "popcnt", "sahf", "sse3", "ssse3",
    "sse4.1", "sse4.2",
)  # fmt: skip
_V3 = (*_V2, "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave")
_LEVELS = {"sse4": ("x86-64-v2", _V2), "avx2": ("x86-64-v3", _V3)}  # LLVM's names


def allowed(cpu: str, features: str) -> tuple[str, str]:
    """(processor, features) that LLVM is told of, where it says these of the machine.

    Raises Unsupported where the machine lacks what LTC_ISA asks for.
    """
    wanted = config.value("LTC_ISA")
    if wanted == "native":
        return cpu, features
    level, names = _LEVELS[wanted]
    there = features.split(",")
    if platform.machine() != "x86_64" or not all(f"+{name}" in there for name in names):
        raise Unsupported(
            f"LTC_ISA={wanted} asks for instructions that this processor does not have ({level}). "
            f"Leave it out, and ltc takes what is there."
        )
    return level, ",".join(f"+{name}" for name in names)
