"""Division, shifts and powers of integers, where processors differ from what torch says.

A zero divisor is reported by the caller; here it is taken for 1, so that nothing traps, and so is
-1 below the least number, whose quotient wraps around to itself.
"""

from __future__ import annotations

from ltc.llvm.emit.builder import Builder
from ltc.llvm.emit.dtype import Form


def _sign(form: Form) -> str:
    return "s" if form.kind == "signed" else "u"


def _safe(b: Builder, form: Form, x: str, y: str) -> str:
    """A divisor that does not trap."""
    type, one = form.computed, b.constant(form.computed, 1)
    wrong = b.compare("eq", type, y, b.constant(type, 0))
    if form.kind == "signed":
        least = b.compare("eq", type, x, b.constant(type, -(1 << (8 * form.bytes - 1))))
        overflows = b.compare("eq", type, y, b.constant(type, -1))
        wrong = b.binary("or", "i1", wrong, b.binary("and", "i1", least, overflows))
    return b.select(wrong, type, one, y)


def _divided(b: Builder, form: Form, x: str, y: str) -> tuple[str, str]:
    """The quotient towards zero, and what is left."""
    y = _safe(b, form, x, y)
    quotient = b.binary(f"{_sign(form)}div", form.computed, x, y)
    return quotient, b.binary("sub", form.computed, x, b.binary("mul", form.computed, quotient, y))


def trunc_divide(b: Builder, form: Form, x: str, y: str) -> str:
    return _divided(b, form, x, y)[0]


def fmod(b: Builder, form: Form, x: str, y: str) -> str:
    return _divided(b, form, x, y)[1]


def _differs(b: Builder, form: Form, rest: str, y: str) -> str:
    """Whether something is left, of another sign than the divisor."""
    type, zero = form.computed, b.constant(form.computed, 0)
    signs = b.compare("slt", type, b.binary("xor", type, rest, y), zero)
    return b.binary("and", "i1", signs, b.compare("ne", type, rest, zero))


def floor_divide(b: Builder, form: Form, x: str, y: str) -> str:
    quotient, rest = _divided(b, form, x, y)
    if form.kind != "signed":
        return quotient
    less = b.binary("sub", form.computed, quotient, b.constant(form.computed, 1))
    return b.select(_differs(b, form, rest, y), form.computed, less, quotient)


def remainder(b: Builder, form: Form, x: str, y: str) -> str:
    _, rest = _divided(b, form, x, y)
    if form.kind != "signed":
        return rest
    more = b.binary("add", form.computed, rest, y)
    return b.select(_differs(b, form, rest, y), form.computed, more, rest)


def _fits(b: Builder, form: Form, count: str) -> str:
    """Whether a shift is by fewer bits than there are; a negative one is not."""
    return b.compare("ult", form.computed, count, b.constant(form.computed, 8 * form.bytes))


def shift_left(b: Builder, form: Form, x: str, count: str) -> str:
    type, zero = form.computed, b.constant(form.computed, 0)
    fits = _fits(b, form, count)
    shifted = b.binary("shl", type, x, b.select(fits, type, count, zero))
    return b.select(fits, type, shifted, zero)


def shift_right(b: Builder, form: Form, x: str, count: str) -> str:
    type = form.computed
    fits = _fits(b, form, count)
    if form.kind == "signed":  # all of them leave the sign
        most = b.constant(type, 8 * form.bytes - 1)
        return b.binary("ashr", type, x, b.select(fits, type, count, most))
    zero = b.constant(type, 0)
    shifted = b.binary("lshr", type, x, b.select(fits, type, count, zero))
    return b.select(fits, type, shifted, zero)


def power(b: Builder, form: Form, x: str, y: str) -> str:
    """x to the y by squaring, wrapping around; to a negative y it is 0 unless x is 1 or -1."""
    type, vector = form.computed, b.of(form.computed)
    zero, one = b.constant(type, 0), b.constant(type, 1)

    def step(_: str, carried: list[str]) -> list[str]:
        result, square, left = carried
        is_odd = b.compare("ne", type, b.binary("and", type, left, one), zero)
        result = b.select(is_odd, type, b.binary("mul", type, result, square), result)
        return [result, b.binary("mul", type, square, square), b.binary("lshr", type, left, one)]

    starts = [(vector, one), (vector, x), (vector, y)]
    result = b.loop(0, 8 * form.bytes, 1, starts, step)[0]
    if form.kind != "signed":
        return result
    minus = b.constant(type, -1)
    is_odd = b.compare("ne", type, b.binary("and", type, y, one), zero)
    alternating = b.select(is_odd, type, minus, one)
    small = b.select(b.compare("eq", type, x, minus), type, alternating, zero)
    small = b.select(b.compare("eq", type, x, one), type, one, small)
    return b.select(b.compare("slt", type, y, zero), type, small, result)
