"""Random bits that depend on a seed and an element's position alone: Philox4x32-10 in NumPy.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; its multipliers and
key increments are the constants below.
"""

from __future__ import annotations

import numpy as np

ROUNDS = 10
MULTIPLIER_0, MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
INCREMENT_0, INCREMENT_1 = 0x9E3779B9, 0xBB67AE85
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)

Words = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Four random words for each counter.

    Args:
        counter: Four uint64 arrays of one shape, each element below 2**32.
        key: Two integers below 2**32.

    Returns:
        Four uint64 arrays of that shape, each element below 2**32.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product_0, product_1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        c0, c1, c2, c3 = (
            (product_1 >> HALF) ^ c1 ^ np.uint64(k0),
            product_1 & LOW,
            (product_0 >> HALF) ^ c3 ^ np.uint64(k1),
            product_0 & LOW,
        )
        k0, k1 = (k0 + INCREMENT_0) & 0xFFFFFFFF, (k1 + INCREMENT_1) & 0xFFFFFFFF
    return c0, c1, c2, c3


def random_words(seed: int, count: int, stream: int) -> np.ndarray:
    """`count` words: word i is lane i % 4 of the block whose counter is (i // 4, stream)."""
    block = np.arange(-(-count // 4), dtype=np.uint64)
    zero = np.zeros_like(block)
    counter = (block & LOW, block >> HALF, np.full_like(block, stream), zero)
    key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    words: np.ndarray = np.stack(philox(counter, key), axis=1).reshape(-1)[:count]
    return words


def random_bits(seed: int, count: int, bits: int, stream: int) -> np.ndarray:
    """`count` int64 below 2**bits: the top bits of word i, or of words 2i (low), 2i + 1 (high)."""
    top: np.ndarray
    if bits <= 32:
        top = random_words(seed, count, stream) >> np.uint64(32 - bits)
        return top.astype(np.int64)
    low, high = random_words(seed, 2 * count, stream).reshape(count, 2).T
    top = (high << HALF | low) >> np.uint64(64 - bits)
    return top.astype(np.int64)
