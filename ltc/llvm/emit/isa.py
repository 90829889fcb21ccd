"""The facts of a processor for kernel makers: the width of its vectors, and how many it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# What lies so far apart shares one set of the first-level cache, which holds 8 to 12 lines.
ALIASING_BYTES, LINES_OF_A_SET = 4096, 8
# Of a level-2 cache: no less on most processors, so that what takes half of it leaves room for the rest.
# What a kernel does follows from it, so it is no fact of one machine: programs and bits would differ.
LEVEL_2_BYTES = 512 * 1024
LEVEL_3_BYTES_A_CYCLE = 16  # that come from the cache behind it, of what is read in order


@dataclass(frozen=True)
class Isa:
    """The vector instructions of one kind of processor.

    Attributes:
        vector_bytes: The size of one register.
        registers: The most vectors that a kernel may hold at once.
        fused: True if a product and a sum are one instruction.
        bfloat16_dot: True if pairs of bfloat16 multiply and add into a float32 lane.
    """

    name: str
    vector_bytes: int
    registers: int
    fused: bool
    bfloat16_dot: bool = False

    def lanes(self, element_bytes: int) -> int:
        return self.vector_bytes // element_bytes


AVX512 = Isa("avx512", 64, 32, fused=True)
AVX512_BF16 = Isa("avx512_bf16", 64, 32, fused=True, bfloat16_dot=True)
AVX2 = Isa("avx2", 32, 16, fused=True)
SSE2 = Isa("sse2", 16, 16, fused=False)
NEON = Isa("neon", 16, 32, fused=True)


def host_isa(has_feature: Callable[[str], bool]) -> Isa:
    """The best description of a host, which says of an LLVM feature name whether it has that."""
    if all(map(has_feature, ("avx512f", "avx512bw", "avx512dq", "avx512vl"))):
        return AVX512_BF16 if has_feature("avx512bf16") else AVX512
    if has_feature("avx2") and has_feature("fma"):
        return AVX2
    return NEON if has_feature("neon") else SSE2
