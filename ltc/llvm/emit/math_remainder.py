"""The remainder of a division of doubles, which is exact."""

from __future__ import annotations

from ltc.llvm.emit.builder import Builder
from ltc.llvm.emit.float_ops import INFINITY, Floats

EXPONENT = 0x7FF << 52
STEP_BITS = 52  # by which one step shortens a quotient
SMALLEST_NORMAL = 2.0**-1022
FAR = 2.0**540  # a quotient is finite by the divisor times its square, its first power, or 1


def fmod(b: Builder, x: str, y: str) -> str:
    """Exact in one step where the quotient is below 2**53, which is rounded up at most to the next."""
    f = Floats(b, "double")
    a, d = f.abs(x), f.abs(y)
    quotient = f.div(a, d)
    rest = f.fma(f.negative(f.trunc(quotient)), d, a)
    rest = f.select(f.test("olt", rest, 0.0), f.add(rest, d), rest)
    large = f.test("uge", quotient, 2.0**53)
    rare = b.binary("or", "i1", large, f.test("oeq", d, INFINITY))
    (rest,) = f.where_any(rare, (rest,), lambda: (_by_steps(f, a, d),))
    return f.copysign(rest, x)


def _by_steps(f: Floats, a: str, d: str) -> str:
    """The remainder by long division: each step takes the 53 highest bits of the quotient."""
    far = f.mul(d, FAR)
    farther = f.mul(far, FAR)

    def step(_: object, carried: list[str]) -> list[str]:
        (rest,) = carried
        divisor = f.select(f.test("ogt", rest, far), far, d)
        divisor = f.select(f.test("ogt", rest, farther), farther, divisor)
        quotient = f.trunc(f.div(rest, divisor))
        # A difference of less than this unit times the divisor has no more than 53 bits.
        unit = f.mul(f.from_bits(f.integer("and", f.bits(quotient), EXPONENT)), 2.0**-52)
        unit = f.select(f.test("olt", quotient, 2.0**53), 1.0, unit)
        rest = f.fma(f.negative(quotient), divisor, rest)
        return [f.select(f.test("olt", rest, 0.0), f.fma(unit, divisor, rest), rest)]

    (rest,) = f.builder.loop(0, _steps(f, a, d), 1, [(f.vector, a)], step)
    is_a = f.builder.binary("and", "i1", f.test("oeq", d, INFINITY), f.test("olt", a, INFINITY))
    return f.select(is_a, a, rest)


def _steps(f: Floats, a: str, d: str) -> str:
    """A number of steps that is enough in every lane; at least one, for what is not finite."""
    bits = f.integer("sub", f.integer("lshr", f.bits(a), 52), f.integer("lshr", f.bits(d), 52))
    denormal = f.test("olt", d, SMALLEST_NORMAL)
    bits = f.select_words(denormal, f.integer("add", bits, STEP_BITS), bits)
    steps = f.integer("add", bits, STEP_BITS)
    steps = f.integer("sdiv", steps, STEP_BITS)
    scaled = f.integer("icmp sgt", bits, 500)  # a step that ends with a multiple of the divisor
    steps = f.select_words(scaled, f.integer("add", steps, 2), steps)
    f.builder.declare("llvm.smax.i64", "i64", "i64", "i64")
    most = steps
    if f.width > 1:
        name = f"llvm.vector.reduce.smax.v{f.width}i64"
        most = f.builder.pure_call(name, "i64", (f.words, steps))
    return f.builder.value(f"call i64 @llvm.smax.i64(i64 {most}, i64 1)")
