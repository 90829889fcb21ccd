"""Reduction of angles in double: x = n pi / 2 + r + low with |r| < 0.79.

Below 2**20 three parts of pi / 2 are subtracted (W. J. Cody and W. Waite, "Software Manual for the
Elementary Functions", 1980).  Larger angles, which are rare, are multiplied by the bits of 2 / pi that
count for their exponent, in integers (M. H. Payne and R. N. Hanek, "Radian reduction for trigonometric
functions", 1983).
"""

from __future__ import annotations

import functools
import math

from ltc.llvm.emit.builder import Builder
from ltc.llvm.emit.float_ops import INFINITY, Floats

ROUNDER = 6755399441055744.0  # 1.5 * 2**52: added to a number it leaves the nearest whole one
ROUNDER_BITS = 0x4338000000000000
# pi / 2 in three parts, the first two of 33 bits, so that their products with n < 2**20 are exact.
HALF_PI = (1.57079632673412561417, 6.07710050630396597660e-11, 2.02226624879595063154e-21)
LARGEST_REDUCED = 2.0**20
TWO_PI = (6.283185307179586, 2.4492935982947064e-16)

ZERO_BITS = 64  # before the point, for angles below 2**53
TABLE_WORDS = 42  # of 32 bits: exponents up to 2**1024 and the bits behind
MOST_LANES = 8  # of the function for large angles, whose code is long
_TABLE, _LAST = "@two_over_pi", TABLE_WORDS - 8
_LOW_WORD = 0xFFFFFFFF


def reduced(f: Floats, x: str, is_float: bool = False) -> tuple[str, str, str]:
    """Return r, low, and a number whose lowest two bits are those of n.

    Args:
        is_float: True if x is a float that was widened; r is then for results rounded to float.
    """
    sum_ = f.fma(x, 2 / math.pi, ROUNDER)
    n = f.sub(sum_, ROUNDER)
    first, second, third = HALF_PI
    t = f.fma(n, -first, x)  # exact
    w = f.mul(n, second)
    high = f.sub(t, w)
    low = f.fma(n, -third, f.sub(f.sub(t, high), w))
    r = f.add(high, low)
    low = f.add(f.sub(high, r), low)
    large = f.test("uge", f.abs(x), LARGEST_REDUCED)
    r, low, quadrant = f.where_any(large, (r, low, sum_), lambda: _called(f.builder, x, is_float))
    return r, low, quadrant


def _called(b: Builder, x: str, is_float: bool) -> list[str]:
    """Call the function for large angles, which a module holds once."""
    lanes = min(b.width, MOST_LANES)
    name = f"large_angle_{'float' if is_float else 'double'}_{lanes}"
    with b.lanes(lanes):
        vector = b.of("double")
    type = f"{{{vector}, {vector}, {vector}}}"
    if not any(f"@{name}(" in text for text in b.declarations):
        _define(b, name, type, lanes, is_float)

    def part(k: int) -> str:
        def extracted(b: Builder, x: str) -> str:
            result = b.value(f"call {type} @{name}({vector} {x})")
            return b.value(f"extractvalue {type} {result}, {k}")

        return b.by_parts(extracted, lanes, "double", x)

    return [part(k) for k in range(3)]


def _define(b: Builder, name: str, type: str, lanes: int, is_float: bool) -> None:
    inner = Builder(lanes)
    vector, result = inner.of("double"), "poison"
    for k, part in enumerate(_by_table(Floats(inner, "double"), "%x", is_float)):
        result = inner.value(f"insertvalue {type} {result}, {vector} {part}, {k}")
    b.declarations |= inner.declarations
    b.declarations.add(
        f"define internal {type} @{name}({vector} %x) noinline #0 {{\nentry:\n"
        f"{inner.body()}\n  ret {type} {result}\n}}"
    )


def _by_table(f: Floats, x: str, is_float: bool) -> tuple[str, str, str]:
    """The three results of `reduced` for any x of at least 2**20."""
    size = f.bits(f.abs(x))
    bits_left = 29 if is_float else 0  # of the mantissa, at its end
    exponent = f.integer("lshr", size, 52)
    mantissa = f.integer("or", f.integer("and", size, (1 << 52) - 1), 1 << 52)
    # Bits before this one add multiples of four quarter turns.
    first = f.integer("sub", exponent, 1077 - ZERO_BITS - bits_left)
    count = 3 if is_float else 6
    columns = _product(
        f, f.integer("lshr", mantissa, bits_left), _window(f, first, count), is_float
    )
    quarter = f.integer("lshr", f.integer("add", columns[0], 1 << 29), 30)
    columns[0] = f.integer("sub", columns[0], f.integer("shl", quarter, 30))
    turns = [
        f.mul(_number(f, column), 2.0 ** (-32 * (k + 1))) for k, column in enumerate(columns[:5])
    ]
    high = f.add(turns[0], turns[1])
    low = f.add(f.sub(turns[0], high), turns[1])
    for part in turns[2:]:
        low = f.add(low, part)
    r = f.mul(high, TWO_PI[0])
    low = f.add(
        f.fma(high, TWO_PI[0], f.negative(r)), f.fma(low, TWO_PI[0], f.mul(high, TWO_PI[1]))
    )
    sign = f.integer("and", f.bits(x), -(1 << 63))
    r, low = (f.from_bits(f.integer("xor", f.bits(part), sign)) for part in (r, low))
    opposite = f.integer("sub", f.word(0), quarter)
    is_negative = f.integer("icmp ne", sign, 0)
    r = f.select(f.test("olt", f.abs(x), INFINITY), r, math.nan)
    return r, low, f.select(is_negative, f.from_bits(opposite), f.from_bits(quarter))


def _number(f: Floats, whole: str) -> str:
    """A whole number below 2**51 as a double."""
    return f.sub(f.from_bits(f.integer("add", whole, ROUNDER_BITS)), ROUNDER)


def _product(f: Floats, m: str, words: list[str], is_float: bool) -> list[str]:
    """The digits of the fraction of m * 0.words, to the base 2**32, the highest first."""
    low = [f.integer("mul", f.integer("and", m, _LOW_WORD), word) for word in words]
    high = [] if is_float else [f.integer("mul", f.integer("lshr", m, 32), word) for word in words]
    digits, carry = [], f.word(0)
    for k in reversed(range(len(words))):
        total = f.integer("add", carry, f.integer("and", low[k], _LOW_WORD))
        for product, place in ((low, k + 1), (high, k + 2)):
            if place < len(product):
                total = f.integer("add", total, f.integer("lshr", product[place], 32))
        if k + 1 < len(high):
            total = f.integer("add", total, f.integer("and", high[k + 1], _LOW_WORD))
        digits.append(f.integer("and", total, _LOW_WORD))
        carry = f.integer("lshr", total, 32)
    return digits[::-1]


# --- the bits of 2 / pi ---------------------------------------------------------------------------


def _window(f: Floats, first: str, count: int) -> list[str]:
    """So many words of 32 bits of 2 / pi, from bit number `first` of the table on."""
    b = f.builder
    word = f.integer("ashr", first, 5)
    inside = f.integer("icmp ult", word, _LAST)  # lanes that need no table may have any number
    word = f.select_words(inside, word, f.word(0))
    shift = f.integer("and", first, 31)
    _declare_table(b)
    windows = []
    for k in range(count):
        pair = _gathered(f, f.integer("add", word, k))
        windows.append(f.integer("lshr", f.integer("shl", pair, shift), 32))
    return windows


def _gathered(f: Floats, index: str) -> str:
    """The words of the table at the index of each lane."""
    b = f.builder
    if f.width == 1:
        place = b.value(f"getelementptr i64, ptr {_TABLE}, i64 {index}")
        return b.value(f"load i64, ptr {place}")
    places = b.value(f"getelementptr i64, ptr {_TABLE}, {f.words} {index}")
    pointers, mask = f"<{f.width} x ptr>", "splat (i1 true)"
    name = f"llvm.masked.gather.v{f.width}i64.v{f.width}p0"
    return b.pure_call(
        name,
        f.words,
        (pointers, places),
        ("i32", "8"),
        (f.mask_type, mask),
        (f.words, "zeroinitializer"),
    )


def _declare_table(b: Builder) -> None:
    words = table()
    text = ", ".join(f"i64 {word - (1 << 64) if word >> 63 else word}" for word in words)
    b.declarations.add(f"{_TABLE} = private constant [{len(words)} x i64] [{text}], align 64")


@functools.cache
def table() -> tuple[int, ...]:
    """Zeros and 2 / pi: 64 bits from each multiple of 32 on."""
    count = 32 * (TABLE_WORDS + 1)
    bits = (2 << (2 * count - ZERO_BITS)) // _scaled_pi(count)
    return tuple((bits >> (count - 64 - 32 * k)) & ((1 << 64) - 1) for k in range(TABLE_WORDS))


def _scaled_pi(bits: int) -> int:
    """The whole part of pi * 2**bits, by J. Machin's formula (1706)."""
    spare = 32
    one = 1 << (bits + spare)
    return (16 * _scaled_arctangent(5, one) - 4 * _scaled_arctangent(239, one)) >> spare


def _scaled_arctangent(inverse: int, one: int) -> int:
    total, power, k = 0, one // inverse, 0
    while power:
        total += (-1) ** k * (power // (2 * k + 1))
        power //= inverse**2
        k += 1
    return total
