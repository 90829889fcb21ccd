"""Random bits inside kernels: Philox4x32-10, the same bits as the reference's backends/reference/philox.py.

An element's bits depend on the seed, the stream and its position alone, so neither the number of
threads nor the width of vectors changes them.
"""

from __future__ import annotations

from ltc.llvm.emit.builder import Builder, multiples

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
INCREMENTS = (0x9E3779B9, 0xBB67AE85)


def random_bits(b: Builder, seed: str, position: str, bits: int, stream: int) -> str:
    """`bits` random bits as i64, of each position in its lane.

    Args:
        seed: A scalar i64.
        position: An i64 of `b.width` lanes, not negative.
    """
    words_each = 1 if bits <= 32 else 2
    per_block = 4 // words_each
    block = _shifted(b, position, 2 if words_each == 1 else 1)
    words = _philox(b, seed, block, stream)
    which = b.binary("and", "i64", position, b.constant("i64", per_block - 1))
    chosen = [words[k * words_each : (k + 1) * words_each] for k in range(per_block)]
    picked = list(chosen[0])
    for k in range(1, per_block):
        is_k = b.compare("eq", "i64", which, b.constant("i64", k))
        picked = [b.select(is_k, "i64", new, old) for new, old in zip(chosen[k], picked)]
    if words_each == 1:
        return _shifted(b, picked[0], 32 - bits)
    low, high = picked
    whole = b.binary("or", "i64", low, b.binary("shl", "i64", high, b.constant("i64", 32)))
    return _shifted(b, whole, 64 - bits)


def adjacent_bits(b: Builder, seed: str, first: str, bits: int, stream: int) -> str:
    """Draw as `random_bits` for positions side by side: each block's four words fill four lanes.

    Args:
        first: The first position, a scalar i64: a multiple of 4.
        bits: At most 32.
    """
    blocks = b.width // 4
    if blocks == 1:  # four doubles of 32 bytes, in an epilogue: no vectors of one lane
        with b.lanes(1):
            words = block_bits(b, seed, first, bits, stream)
        return b.vector_of("i64", words)
    with b.lanes(blocks):
        start = b.splat("i64", _shifted_scalar(b, first, 2))
        block = b.value(f"add <{blocks} x i64> {start}, {multiples(blocks, 1, 'i64')}")
        words = _philox(b, seed, block, stream)
        words = [_shifted(b, word, 32 - bits) for word in words]
    first_pair, second_pair = [_interleaved(b, x, y, blocks, 1) for x, y in (words[:2], words[2:])]
    return _interleaved(b, first_pair, second_pair, 2 * blocks, 2)


def _interleaved(b: Builder, x: str, y: str, lanes: int, run: int) -> str:
    """`run` lanes of x, as many of y, the next of x, and so on; each has `lanes` of i64."""
    order = [
        lane + k + source
        for lane in range(0, lanes, run)
        for source in (0, lanes)
        for k in range(run)
    ]
    mask = ", ".join(f"i32 {lane}" for lane in order)
    vector = f"<{lanes} x i64>"
    return b.value(f"shufflevector {vector} {x}, {vector} {y}, <{2 * lanes} x i32> <{mask}>")


def block_bits(b: Builder, seed: str, position: str, bits: int, stream: int) -> list[str]:
    """Draw as `random_bits` for four positions from the given one, a multiple of 4.

    Args:
        bits: At most 32.
    """
    words = _philox(b, seed, _shifted(b, position, 2), stream)
    return [_shifted(b, word, 32 - bits) for word in words]


def following_bits(b: Builder, seed: str, position: str, bits: int, stream: int) -> list[str]:
    """Draw as `block_bits`, but from any first position: the four lie in two blocks."""
    block = _shifted(b, position, 2)
    next_block = b.binary("add", "i64", block, b.constant("i64", 1))
    words = _philox(b, seed, block, stream) + _philox(b, seed, next_block, stream)
    for step in (1, 2):  # by so many where that bit of the position is set
        bit = b.binary("and", "i64", position, b.constant("i64", step))
        is_set = b.compare("eq", "i64", bit, b.constant("i64", step))
        later = zip(words, words[step:])
        words = [b.select(is_set, "i64", moved, word) for word, moved in later]
    return [_shifted(b, word, 32 - bits) for word in words[:4]]


def _shifted(b: Builder, x: str, amount: int) -> str:
    return b.binary("lshr", "i64", x, b.constant("i64", amount)) if amount else x


def _shifted_scalar(b: Builder, x: str, amount: int) -> str:
    with b.lanes(1):
        return _shifted(b, x, amount)


def _low(b: Builder, x: str) -> str:
    return b.binary("and", "i64", x, b.constant("i64", 0xFFFFFFFF))


def _philox(b: Builder, seed: str, block: str, stream: int) -> list[str]:
    """Four words below 2**32 of each block."""
    counter = [_low(b, block), _shifted(b, block, 32), b.constant("i64", stream)]
    counter.append(b.constant("i64", 0))
    keys = _keys(b, seed)
    for first, second in keys:
        c0, c1, c2, c3 = counter
        product_0 = b.binary("mul", "i64", c0, b.constant("i64", MULTIPLIERS[0]))
        product_1 = b.binary("mul", "i64", c2, b.constant("i64", MULTIPLIERS[1]))
        counter = [
            _mixed(b, product_1, c1, first),
            _low(b, product_1),
            _mixed(b, product_0, c3, second),
            _low(b, product_0),
        ]
    return counter


def _mixed(b: Builder, product: str, word: str, key: str) -> str:
    high = b.binary("xor", "i64", _shifted(b, product, 32), word)
    return b.binary("xor", "i64", high, b.splat("i64", key))


def _keys(b: Builder, seed: str) -> list[tuple[str, ...]]:
    """The two keys of each round, as scalars."""
    with b.lanes(1):
        key = [_low(b, seed), _shifted(b, seed, 32)]
        return [
            tuple(
                _low(b, b.index(word) + (step * number & 0xFFFFFFFF))
                for word, step in zip(key, INCREMENTS)
            )
            for number in range(ROUNDS)
        ]
