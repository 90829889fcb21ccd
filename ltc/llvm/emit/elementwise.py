"""Instructions of each elementwise op: registers of its operands -> register of its result."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ltc.ir import ops
from ltc.ir.loop_nest import Value
from ltc.ir.node import Node
from ltc.ir.ops import Op
from ltc.llvm.emit import math_float
from ltc.llvm.emit.builder import Builder
from ltc.llvm.emit.conversions import from_memory, to_memory
from ltc.llvm.emit.dtype import FORMS, Form
from ltc.llvm.emit.float_ops import Floats

# --- Division, shifts and powers of integers, where processors differ from what torch says -------

# A zero divisor is reported by the caller; here it is taken for 1, so that nothing traps, and so
# is -1 below the least number, whose quotient wraps around to itself.


def _integer_sign(form: Form) -> str:
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
    quotient = b.binary(f"{_integer_sign(form)}div", form.computed, x, y)
    return quotient, b.binary("sub", form.computed, x, b.binary("mul", form.computed, quotient, y))


def trunc_divide(b: Builder, form: Form, x: str, y: str) -> str:
    return _divided(b, form, x, y)[0]


def fmod(b: Builder, form: Form, x: str, y: str) -> str:
    return _divided(b, form, x, y)[1]


def _differs(b: Builder, form: Form, rest: str, y: str) -> str:
    """Return whether a rest is left, of another sign than the divisor."""
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
    """Return whether a shift is by fewer bits than there are; a negative one is not."""
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


# (builder, form of the operands, operands) -> result, in the computed type of the result
Row = Callable[..., str]

# --- rounding and casting ------------------------------------------------------------------------


def rounded(b: Builder, form: Form, x: str) -> str:
    """A float rounded to the nearest value of f16 or bf16; other forms stay."""
    if not form.is_rounded:
        return x
    if form.stored == "half":
        return from_memory(b, form, to_memory(b, form, x))
    # The instruction for bf16 would flush denormal numbers; integer arithmetic does not.
    bits = b.convert("bitcast", "float", x, "i32")
    low = b.binary("lshr", "i32", bits, b.constant("i32", 16))
    low = b.binary("and", "i32", low, b.constant("i32", 1))
    up = b.binary("add", "i32", bits, b.binary("add", "i32", low, b.constant("i32", 0x7FFF)))
    quiet = b.binary("or", "i32", bits, b.constant("i32", 0x400000))
    is_nan = b.compare("uno", "float", x, x)
    up = b.select(is_nan, "i32", quiet, up)
    up = b.binary("and", "i32", up, b.constant("i32", 0xFFFF0000))
    return b.convert("bitcast", "i32", up, "float")


def cast(b: Builder, source: Form, target: Form, x: str) -> str:
    if target.kind == "bool":
        return _is_nonzero(b, source, x)
    if source.is_float:
        if target.is_float:
            return rounded(b, target, _float_to_float(b, source.computed, target.computed, x))
        return _float_to_integer(b, source, target, x)
    if target.is_float:
        op = "sitofp" if source.kind == "signed" else "uitofp"
        return rounded(b, target, b.convert(op, source.computed, x, target.computed))
    return _integer_to_integer(b, source, target, x)


def _is_nonzero(b: Builder, source: Form, x: str) -> str:
    if source.kind == "bool":
        return x
    predicate = "une" if source.is_float else "ne"
    return b.compare(predicate, source.computed, x, b.constant(source.computed, 0))


def _float_to_float(b: Builder, source: str, target: str, x: str) -> str:
    if source == target:
        return x
    return b.convert("fpext" if target == "double" else "fptrunc", source, x, target)


def _float_to_integer(b: Builder, source: Form, target: Form, x: str) -> str:
    wide = target.computed if target.bytes >= 4 else "i32"  # as C++ does for narrow integers
    result = b.convert("fptosi", source.computed, x, wide)
    return result if wide == target.computed else b.convert("trunc", wide, result, target.computed)


def _integer_to_integer(b: Builder, source: Form, target: Form, x: str) -> str:
    if source.computed == target.computed:
        return x
    if source.kind != "bool" and source.bytes > target.bytes:
        return b.convert("trunc", source.computed, x, target.computed)
    op = "sext" if source.kind == "signed" else "zext"
    return b.convert(op, source.computed, x, target.computed)


def _bitcast(b: Builder, source: Form, target: Form, x: str) -> str:
    x = to_memory(b, source, x)
    if source.stored != target.stored:
        x = b.convert("bitcast", source.stored, x, target.stored)
    return from_memory(b, target, x)


# --- rows ----------------------------------------------------------------------------------------


def _by_kind(float_op: str, integer_op: str, bool_op: str | None = None) -> Row:
    def row(b: Builder, form: Form, x: str, y: str) -> str:
        by_kind = {"float": float_op, "bool": bool_op}
        return b.binary(by_kind.get(form.kind, integer_op), form.computed, x, y)

    return row


def _integer(op: str) -> Row:
    return lambda b, form, x, y: b.binary(op, form.computed, x, y)


def _comparison(float_predicate: str, predicate: str) -> Row:
    def row(b: Builder, form: Form, x: str, y: str) -> str:
        chosen = float_predicate
        if not form.is_float:
            ordered = predicate not in ("eq", "ne")
            chosen = ("s" if form.kind == "signed" else "u") * ordered + predicate
        return b.compare(chosen, form.computed, x, y)

    return row


def _extreme(float_predicate: str, predicate: str, bool_op: str) -> Row:
    """The larger or the smaller; NaN where either is."""

    def row(b: Builder, form: Form, x: str, y: str) -> str:
        if form.kind == "bool":
            return b.binary(bool_op, "i1", x, y)
        if not form.is_float:
            sign = "s" if form.kind == "signed" else "u"
            test = b.compare(sign + predicate, form.computed, x, y)
            return b.select(test, form.computed, x, y)
        test = b.compare(float_predicate, form.computed, x, y)
        best = b.select(test, form.computed, x, y)
        return b.select(b.compare("uno", form.computed, x, x), form.computed, x, best)

    return row


def _intrinsic(name: str) -> Row:
    return lambda b, form, *operands: b.intrinsic(name, form.computed, *operands)


def _copysign(b: Builder, form: Form, x: str, sign: str) -> str:
    return Floats(b, form.computed).copysign(x, sign)


def _function(name: str) -> Row:
    return lambda b, form, *operands: math_float.call(b, name, form.computed, *operands)


def _neg(b: Builder, form: Form, x: str) -> str:
    if form.is_float:
        return b.value(f"fneg {b.of(form.computed)} {x}")
    return b.binary("sub", form.computed, b.constant(form.computed, 0), x)


def _abs(b: Builder, form: Form, x: str) -> str:
    if form.is_float:
        return b.intrinsic("fabs", form.computed, x)
    if form.kind != "signed":
        return x
    negative = b.compare("slt", form.computed, x, b.constant(form.computed, 0))
    return b.select(negative, form.computed, _neg(b, form, x), x)


def _sign(b: Builder, form: Form, x: str) -> str:
    if form.kind == "bool":
        return x
    zero, one, minus = (b.constant(form.computed, n) for n in (0, 1, -1))
    if not form.is_float:
        positive = b.select(b.compare("ne", form.computed, x, zero), form.computed, one, zero)
        if form.kind == "unsigned":
            return positive
        return b.select(b.compare("slt", form.computed, x, zero), form.computed, minus, positive)
    positive = b.select(b.compare("ogt", form.computed, x, zero), form.computed, one, zero)
    return b.select(b.compare("olt", form.computed, x, zero), form.computed, minus, positive)


def _not(b: Builder, form: Form, x: str) -> str:
    return b.binary("xor", form.computed, x, b.constant(form.computed, -1))


def _rsqrt(b: Builder, form: Form, x: str) -> str:
    root = b.intrinsic("sqrt", form.computed, x)
    return b.binary("fdiv", form.computed, b.constant(form.computed, 1.0), root)


def _trunc_divide(b: Builder, form: Form, x: str, y: str) -> str:
    return b.intrinsic("trunc", form.computed, b.binary("fdiv", form.computed, x, y))


def _fmod(b: Builder, form: Form, x: str, y: str) -> str:
    return math_float.call(b, "fmod", form.computed, x, y)


def _turns(b: Builder, form: Form, rest: str, y: str) -> str:
    """Return whether a division's rest is not zero, and of another sign than the divisor."""
    type, zero = form.computed, b.constant(form.computed, 0.0)
    is_left = b.compare("une", type, rest, zero)
    signs = b.binary(
        "xor", "i1", b.compare("olt", type, rest, zero), b.compare("olt", type, y, zero)
    )
    return b.binary("and", "i1", is_left, signs)


def _remainder(b: Builder, form: Form, x: str, y: str) -> str:
    rest = _fmod(b, form, x, y)
    more = b.binary("fadd", form.computed, rest, y)
    return b.select(_turns(b, form, rest, y), form.computed, more, rest)


def _floor_divide(b: Builder, form: Form, x: str, y: str) -> str:
    """Divide as Python's //: the exact quotient's floor, and x / y where y is zero."""
    type, rest = form.computed, _fmod(b, form, x, y)
    quotient = b.binary("fdiv", type, b.binary("fsub", type, x, rest), y)
    less = b.binary("fsub", type, quotient, b.constant(type, 1.0))
    quotient = b.select(_turns(b, form, rest, y), type, less, quotient)
    below = b.intrinsic("floor", type, quotient)
    gap = b.binary("fsub", type, quotient, below)
    above = b.binary("fadd", type, below, b.constant(type, 1.0))
    whole = b.select(b.compare("ogt", type, gap, b.constant(type, 0.5)), type, above, below)
    plain = b.binary("fdiv", type, x, y)
    nought = Floats(b, type).copysign(0.0, plain)
    whole = b.select(b.compare("oeq", type, quotient, b.constant(type, 0.0)), type, nought, whole)
    return b.select(b.compare("oeq", type, y, b.constant(type, 0.0)), type, plain, whole)


def _either(of_floats: Row, of_integers: Row) -> Row:
    def row(b: Builder, form: Form, x: str, y: str) -> str:
        return (of_floats if form.is_float else of_integers)(b, form, x, y)

    return row


ROWS: dict[Op, Row] = {
    ops.NEG: _neg,
    ops.ABS: _abs,
    ops.SIGN: _sign,
    ops.EXP: _function("exp"),
    ops.EXP2: _function("exp2"),
    ops.EXPM1: _function("expm1"),
    ops.LOG: _function("log"),
    ops.LOG1P: _function("log1p"),
    ops.LOG2: _function("log2"),
    ops.LOG10: _function("log10"),
    ops.SQRT: _intrinsic("sqrt"),
    ops.RSQRT: _rsqrt,
    ops.SIN: _function("sin"),
    ops.COS: _function("cos"),
    ops.TAN: _function("tan"),
    ops.ASIN: _function("asin"),
    ops.ACOS: _function("acos"),
    ops.ATAN: _function("atan"),
    ops.SINH: _function("sinh"),
    ops.COSH: _function("cosh"),
    ops.TANH: _function("tanh"),
    ops.ASINH: _function("asinh"),
    ops.ACOSH: _function("acosh"),
    ops.ATANH: _function("atanh"),
    ops.ERF: _function("erf"),
    ops.ERFC: _function("erfc"),
    ops.ERFINV: _function("erfinv"),
    ops.LGAMMA: _function("lgamma"),
    ops.DIGAMMA: _function("digamma"),
    ops.FLOOR: _intrinsic("floor"),
    ops.CEIL: _intrinsic("ceil"),
    ops.TRUNC: _intrinsic("trunc"),
    ops.ROUND: _intrinsic("roundeven"),
    ops.NOT: _not,
    ops.ADD: _by_kind("fadd", "add", "or"),
    ops.SUB: _by_kind("fsub", "sub"),
    ops.MUL: _by_kind("fmul", "mul", "and"),
    ops.DIV: _by_kind("fdiv", ""),
    ops.FLOOR_DIVIDE: _either(_floor_divide, floor_divide),
    ops.TRUNC_DIVIDE: _either(_trunc_divide, trunc_divide),
    ops.REMAINDER: _either(_remainder, remainder),
    ops.FMOD: _either(_fmod, fmod),
    ops.POW: _either(_function("pow"), power),
    ops.ATAN2: _function("atan2"),
    ops.HYPOT: _function("hypot"),
    ops.NEXTAFTER: math_float.nextafter,
    ops.COPYSIGN: _copysign,
    ops.MAXIMUM: _extreme("ogt", "gt", "or"),
    ops.MINIMUM: _extreme("olt", "lt", "and"),
    ops.AND: _integer("and"),
    ops.OR: _integer("or"),
    ops.XOR: _integer("xor"),
    ops.SHIFT_LEFT: shift_left,
    ops.SHIFT_RIGHT: shift_right,
    ops.EQ: _comparison("oeq", "eq"),
    ops.NE: _comparison("une", "ne"),
    ops.LT: _comparison("olt", "lt"),
    ops.LE: _comparison("ole", "le"),
    ops.GT: _comparison("ogt", "gt"),
    ops.GE: _comparison("oge", "ge"),
}

# Functions of many instructions.
COSTLY = frozenset(
    {
        ops.EXP, ops.EXP2, ops.EXPM1, ops.LOG, ops.LOG1P, ops.LOG2, ops.LOG10, ops.SIN, ops.COS,
        ops.TAN, ops.TANH, ops.SINH, ops.COSH, ops.ERF, ops.ERFC, ops.POW, ops.LGAMMA,
    }
)  # fmt: skip

# Results that need no rounding: they are values of the dtype already.
_EXACT = frozenset(
    {
        ops.NEG, ops.ABS, ops.SIGN, ops.FLOOR, ops.CEIL, ops.TRUNC, ops.ROUND, ops.COPYSIGN,
        ops.MAXIMUM, ops.MINIMUM, ops.FMOD, ops.NEXTAFTER,
    }
)  # fmt: skip
_NOT_ON_BOOL = frozenset(
    {
        ops.NEG, ops.ABS, ops.SUB, ops.SIGN, ops.FLOOR_DIVIDE, ops.TRUNC_DIVIDE, ops.REMAINDER,
        ops.FMOD, ops.POW, ops.SHIFT_LEFT, ops.SHIFT_RIGHT,
    }
)  # fmt: skip
_OTHERS = frozenset({ops.WHERE, ops.CAST, ops.BITCAST})


def can_compute(node: Node) -> bool:
    """Return True if `computed` has instructions for an elementwise node, of these dtypes."""
    dtypes = [node.dtype, *[n.dtype for n in node.inputs]]
    if any(dtype not in FORMS for dtype in dtypes):
        return False
    if node.op is ops.BITCAST:
        return torch.bool not in dtypes
    if node.op in _OTHERS:
        return True
    kind = FORMS[node.inputs[0].dtype].kind
    return node.op in ROWS and not (node.op in _NOT_ON_BOOL and kind == "bool")


def computed(b: Builder, value: Value, operands: list[str]) -> str:
    """The register of a cell, its operands being registers of `b.width` lanes."""
    target = FORMS[value.dtype]
    source = FORMS[value.operands[0].dtype]
    if value.op is ops.WHERE:
        return b.select(operands[0], target.computed, operands[1], operands[2])
    if value.op is ops.CAST:
        return cast(b, source, target, operands[0])
    if value.op is ops.BITCAST:
        return _bitcast(b, source, target, operands[0])
    assert value.op is not None  # a cell has one
    result = ROWS[value.op](b, source, *operands)
    exact = value.op in _EXACT or not target.is_float
    return result if exact else rounded(b, target, result)
