"""From an element in memory to the value it is computed with, and back."""

from __future__ import annotations

from ltc.llvm.compiler import llvm_binding
from ltc.llvm.emit.builder import Builder
from ltc.llvm.emit.dtype import Form

_EXPONENT_BITS = 10  # below them, of float16; 23 of float32
_SHIFT = 23 - _EXPONENT_BITS
_INFINITE = 0x7C00 << _SHIFT  # float16's, with its bits where float32 has them
_REBIAS = 127 - 15
_FLOAT_INFINITE, _QUIET = 0x7F800000, 0x400000


def from_memory(b: Builder, form: Form, x: str) -> str:
    """Return a loaded value as it is computed with."""
    if form.stored == form.computed:
        return x
    if form.kind == "bool":
        return b.compare("ne", "i8", x, b.constant("i8", 0))
    if form.stored == "half":
        return _float_from_half(b, x)
    wide = b.binary("shl", "i32", b.convert("zext", "i16", x, "i32"), b.constant("i32", 16))
    return b.convert("bitcast", "i32", wide, "float")


def to_memory(b: Builder, form: Form, x: str) -> str:
    """Return a computed value as it is stored; floats are rounded already."""
    if form.stored == form.computed:
        return x
    if form.kind == "bool":
        return b.convert("zext", "i1", x, "i8")
    if form.stored == "half":
        return _half_from_float(b, x)
    bits = b.convert("bitcast", "float", x, "i32")
    return b.convert("trunc", "i32", b.binary("lshr", "i32", bits, b.constant("i32", 16)), "i16")


# --- float16 ----------------------------------------------------------------------------------
# By the processor's instruction, or by integers where it has none: there LLVM would call a function
# for each lane, which no library has to have.  Both give the same bits: nearest, ties to even,
# denormal numbers kept, NaNs quiet, with what fits of their payload.


def _float_from_half(b: Builder, x: str) -> str:
    if _has_instruction():
        return b.convert("fpext", "half", x, "float")
    bits = b.convert("zext", "i16", b.convert("bitcast", "half", x, "i16"), "i32")
    sign = _shifted(b, "shl", _and(b, bits, 0x8000), 16)
    magnitude = _shifted(b, "shl", _and(b, bits, 0x7FFF), _SHIFT)
    # a multiplication moves the exponent, of denormal numbers too
    power = b.constant("float", 2.0**_REBIAS)
    scaled = b.binary("fmul", "float", b.convert("bitcast", "i32", magnitude, "float"), power)
    finite = b.convert("bitcast", "float", scaled, "i32")
    special = _or(b, magnitude, _FLOAT_INFINITE)
    is_nan = b.compare("ugt", "i32", magnitude, b.constant("i32", _INFINITE))
    special = b.select(is_nan, "i32", _or(b, special, _QUIET), special)
    is_special = b.compare("uge", "i32", magnitude, b.constant("i32", _INFINITE))
    value = b.select(is_special, "i32", special, finite)
    return b.convert("bitcast", "i32", b.binary("or", "i32", value, sign), "float")


def _half_from_float(b: Builder, x: str) -> str:
    if _has_instruction():
        return b.convert("fptrunc", "float", x, "half")
    bits = b.convert("bitcast", "float", x, "i32")
    sign = _and(b, _shifted(b, "lshr", bits, 16), 0x8000)
    magnitude = _and(b, bits, 0x7FFFFFFF)
    result = b.select(
        b.compare("ult", "i32", magnitude, b.constant("i32", (_REBIAS + 1) << 23)), "i32",
        _denormal(b, magnitude), _normal(b, magnitude),
    )  # fmt: skip
    too_large = b.compare("uge", "i32", magnitude, b.constant("i32", (_REBIAS + 31) << 23))
    result = b.select(too_large, "i32", b.constant("i32", 0x7C00), result)
    payload = _and(b, _shifted(b, "lshr", magnitude, _SHIFT), 0x3FF)
    is_nan = b.compare("ugt", "i32", magnitude, b.constant("i32", _FLOAT_INFINITE))
    result = b.select(is_nan, "i32", _or(b, payload, 0x7E00), result)
    result = b.convert("trunc", "i32", b.binary("or", "i32", result, sign), "i16")
    return b.convert("bitcast", "i16", result, "half")


def _has_instruction() -> bool:
    return any(map(llvm_binding.has_feature, ("f16c", "avx512f", "neon")))


def _normal(b: Builder, magnitude: str) -> str:
    """Half of the last place is added, less by one where the last kept bit is 0; a carry is right."""
    odd = _and(b, _shifted(b, "lshr", magnitude, _SHIFT), 1)
    bias = b.constant("i32", (1 << (_SHIFT - 1)) - 1 - (_REBIAS << 23))
    rounded = b.binary("add", "i32", b.binary("add", "i32", magnitude, bias), odd)
    return _shifted(b, "lshr", rounded, _SHIFT)


def _denormal(b: Builder, magnitude: str) -> str:
    """An addition rounds: the sum with 2**-1 has the last place of float16's denormal numbers."""
    x = b.convert("bitcast", "i32", magnitude, "float")
    total = b.binary("fadd", "float", x, b.constant("float", 0.5))
    bits = b.convert("bitcast", "float", total, "i32")
    return b.binary("sub", "i32", bits, b.constant("i32", 0x3F000000))


def _and(b: Builder, x: str, number: int) -> str:
    return b.binary("and", "i32", x, b.constant("i32", number))


def _or(b: Builder, x: str, number: int) -> str:
    return b.binary("or", "i32", x, b.constant("i32", number))


def _shifted(b: Builder, direction: str, x: str, places: int) -> str:
    return b.binary(direction, "i32", x, b.constant("i32", places))
