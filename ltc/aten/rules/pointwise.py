"""Rules of the overloads that compute each element from the elements at its place."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ltc.aten.promote import (
    common_dtype,
    compute_dtype,
    float_dtype,
    promote,
    promote_exact,
    promote_factors,
    promote_float,
    to_dtype,
)
from ltc.aten.registry import traces
from ltc.ir import build, ops
from ltc.ir.build import where
from ltc.ir.node import Node, Operand, is_number, like, make

# --- functions of one real number ----------------------------------------------------------------

REAL_FUNCTIONS = {
    "exp": build.exp,
    "exp2": build.exp2,
    "expm1": build.expm1,
    "log": build.log,
    "log1p": build.log1p,
    "log2": build.log2,
    "log10": build.log10,
    "sqrt": build.sqrt,
    "rsqrt": build.rsqrt,
    "sin": build.sin,
    "cos": build.cos,
    "tan": build.tan,
    "asin": build.asin,
    "acos": build.acos,
    "atan": build.atan,
    "sinh": build.sinh,
    "cosh": build.cosh,
    "tanh": build.tanh,
    "asinh": build.asinh,
    "acosh": build.acosh,
    "atanh": build.atanh,
    "erf": build.erf,
    "erfc": build.erfc,
    "erfinv": build.erfinv,
    "lgamma": build.lgamma,
    "digamma": build.digamma,
    "special_erfinv": build.erfinv,
}


def real_function(name: str) -> Callable[[Node], Node]:
    """The rule of a function in REAL_FUNCTIONS: integers and bool become floats first."""
    function = REAL_FUNCTIONS[name]

    def rule(x: Node) -> Node:
        return function(build.cast(x, float_dtype(x)))  # one operation rounds once by itself

    return rule


for _name in REAL_FUNCTIONS:
    traces(f"aten::{_name}")(real_function(_name))


@traces("aten::reciprocal")
def reciprocal(x: Node) -> Node:
    (x,) = promote_float(x)
    return 1.0 / x


@traces("aten::sigmoid")
def sigmoid(x: Node) -> Node:
    (x,) = promote_float(x)
    return 1.0 / (1.0 + build.exp(-x))


@traces("aten::logit")
def logit(x: Node, eps: Operand | None = None) -> Node:
    """log(x / (1 - x)), of x clamped to [eps, 1 - eps]."""
    (x,) = promote_float(x)
    if eps is not None:
        low = like(eps, x)
        x = where(x < low, low, where(x > 1.0 - low, 1.0 - low, x))
    return build.log(x / (1.0 - x))


@traces("aten::deg2rad")
def deg2rad(x: Node) -> Node:
    (x,) = promote_float(x)
    return x * (math.pi / 180.0)


@traces("aten::rad2deg")
def rad2deg(x: Node) -> Node:
    (x,) = promote_float(x)
    return x * (180.0 / math.pi)


@traces("aten::sinc")
def sinc(x: Node) -> Node:
    """sin(pi x) / (pi x), and 1 at 0."""
    (x,) = promote_float(x)
    angle = x * math.pi
    return where(build.eq(x, 0), 1.0, build.sin(angle) / angle)


@traces("aten::neg")
def neg(x: Node) -> Node:
    return -x


@traces("aten::abs")
def absolute(x: Node) -> Node:
    return x if x.dtype in (torch.bool, torch.uint8) else build.absolute(x)


@traces("aten::sign", "aten::sgn")
def sign(x: Node) -> Node:
    return build.sign(x)


@traces("aten::positive", "aten::conj_physical", "aten::_conj_physical")
def unchanged(x: Node) -> Node:
    return x


@traces("aten::square")
def square(x: Node) -> Node:
    return multiply(x, x)


WHOLE_FUNCTIONS = {
    "floor": build.floor,
    "ceil": build.ceil,
    "trunc": build.trunc,
    "round": build.round_half_even,
}


def whole_function(name: str) -> Callable[[Node], Node]:
    """The rule of a function in WHOLE_FUNCTIONS: an integer is whole already."""
    function = WHOLE_FUNCTIONS[name]

    def rule(x: Node) -> Node:
        return function(x) if x.dtype.is_floating_point else x

    return rule


for _name in WHOLE_FUNCTIONS:
    traces(f"aten::{_name}")(whole_function(_name))


@traces("aten::frac")
def frac(x: Node) -> Node:
    return x - build.trunc(x)


@traces("aten::isnan")
def isnan(x: Node) -> Node:
    return build.is_nan(x)


@traces("aten::isinf")
def isinf(x: Node) -> Node:
    if not x.dtype.is_floating_point:
        return build.full(x.shape, False, torch.bool)
    return build.eq(build.absolute(x), math.inf)


@traces("aten::isposinf")
def isposinf(x: Node) -> Node:
    if not x.dtype.is_floating_point:
        return build.full(x.shape, False, torch.bool)
    return build.eq(x, math.inf)


@traces("aten::isneginf")
def isneginf(x: Node) -> Node:
    if not x.dtype.is_floating_point:
        return build.full(x.shape, False, torch.bool)
    return build.eq(x, -math.inf)


@traces("aten::signbit")
def signbit(x: Node) -> Node:
    if not x.dtype.is_floating_point:
        return x < 0 if x.dtype != torch.bool else build.full(x.shape, False, torch.bool)
    return build.copysign(build.full_like(x, 1.0), x) < 0


@traces("aten::nan_to_num")
def nan_to_num(
    x: Node,
    nan: Operand | None = None,
    posinf: Operand | None = None,
    neginf: Operand | None = None,
) -> Node:
    if not x.dtype.is_floating_point:
        return x
    limits = torch.finfo(x.dtype)
    result = where(build.is_nan(x), 0.0 if nan is None else nan, x)
    result = where(build.eq(x, math.inf), limits.max if posinf is None else posinf, result)
    return where(build.eq(x, -math.inf), limits.min if neginf is None else neginf, result)


# --- arithmetic ----------------------------------------------------------------------------------


ALPHA = {"alpha": (1,)}  # the sum as it is usually meant needs no product


def _scaled(y: Node, alpha: Any) -> Node:
    if isinstance(alpha, (bool, int, float)) and alpha == 1:
        return y
    return y * alpha


@traces("aten::add.Tensor", "aten::add.Scalar", static=ALPHA)
def add(x: Node, y: Operand, alpha: Operand = 1) -> Node:
    x, y = promote(x, y)
    if x.dtype == torch.bool:
        return x | (y & like(alpha, y))
    return x + _scaled(y, alpha)


@traces("aten::sub.Tensor", "aten::sub.Scalar", static=ALPHA)
def subtract(x: Node, y: Operand, alpha: Operand = 1) -> Node:
    x, y = promote(x, y)
    return x - _scaled(y, alpha)


@traces("aten::rsub.Tensor", "aten::rsub.Scalar", static=ALPHA)
def subtract_from(x: Node, y: Operand, alpha: Operand = 1) -> Node:
    return subtract(y, x, alpha)


@traces("aten::mul.Tensor", "aten::mul.Scalar")
def multiply(x: Node, y: Operand) -> Node:
    x, y = promote_factors(x, y)
    return x & y if x.dtype == torch.bool else x * y


@traces("aten::div.Tensor", "aten::div.Scalar")
def divide(x: Node, y: Operand) -> Node:
    x, y = promote_factors(x, y, real=True)
    return x / y


@traces("aten::div.Tensor_mode", "aten::div.Scalar_mode")
def divide_rounding(x: Node, y: Operand, rounding_mode: str | None = None) -> Node:
    if rounding_mode is None:
        return divide(x, y)
    if rounding_mode == "floor":
        return floor_divide(x, y)
    x, y = _promote_dividend(x, y)
    if x.dtype == torch.bool:
        return NotImplemented
    return build.trunc(x / y) if x.dtype.is_floating_point else build.trunc_divide(x, y)


@traces("aten::floor_divide", "aten::floor_divide.Scalar")
def floor_divide(x: Node, y: Operand) -> Node:
    x, y = _promote_dividend(x, y)
    if x.dtype == torch.bool:
        return NotImplemented
    return build.floor_divide(x, y)


def _promote_dividend(x: Node, y: Operand) -> tuple[Node, Node]:
    """Torch computes a whole quotient by one number in float32, and one of tensors in their dtype."""
    if not isinstance(y, Node) or not y.shape:
        return promote_factors(x, y)
    x, y = promote(x, y)
    return x, y


@traces("aten::remainder.Tensor", "aten::remainder.Scalar", "aten::remainder.Scalar_Tensor")
def remainder(x: Operand, y: Operand) -> Node:
    x, y = promote(x, y)
    return NotImplemented if x.dtype == torch.bool else build.remainder(x, y)


@traces("aten::fmod.Tensor", "aten::fmod.Scalar")
def fmod(x: Node, y: Operand) -> Node:
    x, y = promote(x, y)
    return NotImplemented if x.dtype == torch.bool else build.fmod(x, y)


# pow with one of these exponents is another formula, and torch rounds as that formula does.
EXPONENTS = (-2, -1, -0.5, 0, 0.5, 1, 2, 3)


@traces("aten::pow.Tensor_Scalar", static={"exponent": EXPONENTS})
def power_of_number(x: Node, exponent: Operand) -> Node:
    dtype = common_dtype(x, exponent)
    if dtype == torch.bool or (isinstance(exponent, Node) and not is_number(exponent)):
        return NotImplemented
    x = to_dtype(x, compute_dtype(dtype))
    formula = None if isinstance(exponent, Node) else POWERS.get(exponent)
    if formula is not None and (dtype.is_floating_point or exponent in (0, 1, 2, 3)):
        return formula(x)
    if not dtype.is_floating_point:
        return NotImplemented  # torch's kernel checks for a negative exponent
    return build.power(x, exponent)


POWERS: dict[float | complex, Callable[[Node], Node]] = {
    -2: lambda x: 1.0 / (x * x),
    -1: lambda x: 1.0 / x,
    -0.5: build.rsqrt,
    0: lambda x: build.full_like(x, 1),
    0.5: build.sqrt,
    1: lambda x: x,
    2: lambda x: x * x,
    3: lambda x: x * x * x,
}


@traces("aten::pow.Tensor_Tensor", "aten::pow.Scalar")
def power(x: Operand, exponent: Node) -> Node:
    x, exponent = promote(x, exponent)
    return NotImplemented if x.dtype == torch.bool else build.power(x, exponent)


@traces("aten::float_power.Tensor_Scalar", static={"exponent": None})
def float_power(x: Node, exponent: float) -> Node:
    return power_of_number(build.cast(x, torch.float64), exponent)


@traces("aten::addcmul")
def addcmul(x: Node, a: Node, b: Node, value: Operand = 1) -> Node:
    """x + value * a * b"""
    x, a, b = promote(x, a, b)
    return x + _scaled(a, value) * b


@traces("aten::addcdiv")
def addcdiv(x: Node, a: Node, b: Node, value: Operand = 1) -> Node:
    """x + value * a / b"""
    x, a, b = promote(x, a, b)
    if not x.dtype.is_floating_point:
        return NotImplemented
    return x + _scaled(a, value) / b


@traces("aten::lerp.Scalar", "aten::lerp.Tensor")
def lerp(x: Node, end: Node, weight: Operand) -> Node:
    """From x to end by weight, measured from the nearer end: exact at 0 and at 1."""
    x, end, weight = promote(x, end, weight)
    step = end - x
    return where(build.absolute(weight) < 0.5, x + weight * step, end - step * (1.0 - weight))


@traces("aten::maximum", "aten::max.other")
def maximum(x: Node, y: Node) -> Node:
    x, y = promote_exact(x, y)
    return x | y if x.dtype == torch.bool else build.maximum(x, y)


@traces("aten::minimum", "aten::min.other")
def minimum(x: Node, y: Node) -> Node:
    x, y = promote_exact(x, y)
    return x & y if x.dtype == torch.bool else build.minimum(x, y)


@traces("aten::fmax")
def fmax(x: Node, y: Node) -> Node:
    """The maximum of what is a number."""
    x, y = promote_exact(x, y)
    if not x.dtype.is_floating_point:
        return maximum(x, y)
    return where(build.is_nan(y), x, where(build.is_nan(x), y, build.maximum(x, y)))


@traces("aten::fmin")
def fmin(x: Node, y: Node) -> Node:
    """The minimum of what is a number."""
    x, y = promote_exact(x, y)
    if not x.dtype.is_floating_point:
        return minimum(x, y)
    return where(build.is_nan(y), x, where(build.is_nan(x), y, build.minimum(x, y)))


@traces("aten::clamp", "aten::clamp.Tensor")
def clamp(x: Node, min: Operand | None = None, max: Operand | None = None) -> Node:
    x, low, high = promote_exact(x, min, max)
    if x.dtype == torch.bool:
        return NotImplemented
    if low is not None:
        x = build.maximum(x, low)
    return x if high is None else build.minimum(x, high)


@traces("aten::clamp_min", "aten::clamp_min.Tensor")
def clamp_min(x: Node, min: Operand) -> Node:
    return clamp(x, min, None)


@traces("aten::clamp_max", "aten::clamp_max.Tensor")
def clamp_max(x: Node, max: Operand) -> Node:
    return clamp(x, None, max)


@traces("aten::atan2")
def atan2(x: Node, y: Node) -> Node:
    x, y = promote_float(x, y)
    return build.atan2(x, y)


@traces("aten::hypot")
def hypot(x: Node, y: Node) -> Node:
    x, y = promote(x, y)
    return build.hypot(x, y)


@traces("aten::copysign.Tensor", "aten::copysign.Scalar")
def copysign(x: Node, y: Operand) -> Node:
    x, y = promote_float(x, y)
    return build.copysign(x, y)


@traces("aten::nextafter")
def nextafter(x: Node, y: Node) -> Node:
    x, y = promote_exact(x, y)
    return build.nextafter(x, y)


@traces("aten::xlogy.Tensor", "aten::xlogy.Scalar_Self", "aten::xlogy.Scalar_Other")
def xlogy(x: Operand, y: Operand) -> Node:
    """x * log(y), and 0 where x is 0 unless y is NaN."""
    x, y = promote_float(x, y)
    return where(build.is_nan(y), math.nan, where(build.eq(x, 0), 0.0, x * build.log(y)))


@traces("aten::logaddexp")
def logaddexp(x: Node, y: Node) -> Node:
    """log(exp(x) + exp(y)), from the larger one so that nothing overflows."""
    x, y = promote(x, y)
    high = build.maximum(x, y)
    same_infinity = build.eq(x, y) & build.eq(build.absolute(x), math.inf)
    return where(same_infinity, x, high + build.log1p(build.exp(-build.absolute(x - y))))


@traces("aten::heaviside")
def heaviside(x: Node, values: Node) -> Node:
    """0 below zero, 1 above it and at NaN as torch has it, `values` at zero."""
    x, values = promote_exact(x, values)
    return where(build.eq(x, 0), values, build.cast(x > 0, x.dtype))


# --- conversions ---------------------------------------------------------------------------------


@traces("aten::_to_copy", "aten::to.dtype", "aten::to.device", moves=True)
def to_copy(x: Node, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Node:
    return x if dtype is None else build.cast(x, dtype)


@traces("aten::copy", moves=True)
def copy(x: Node, source: Node, non_blocking: bool = False) -> Node:
    """`source` in the shape and dtype of x."""
    if not isinstance(source, Node):
        return build.full(x.shape, source, x.dtype)
    return build.expand(build.cast(source, x.dtype), x.shape)


@traces("aten::clone", "aten::contiguous", "aten::lift", "aten::lift_fresh_copy", moves=True)
def clone(x: Node, memory_format: torch.memory_format | None = None) -> Node:
    return x


@traces("ltc::barrier", moves=True)
def barrier(x: Node, position: int) -> Node:
    return make(ops.BARRIER, x, position=position)


# --- Rules of comparisons, of logic and bits, and of choices by a mask ---------------------------


def _on_promoted(function: Callable[[Node, Node], Node]) -> Callable[[Any, Any], Node]:
    def rule(x: Any, y: Any) -> Node:
        return function(*promote_exact(x, y))

    return rule


for _name, _function in {
    "eq": build.eq,
    "ne": build.ne,
    "lt": build.lt,
    "le": build.le,
    "gt": build.gt,
    "ge": build.ge,
}.items():
    traces(f"aten::{_name}.Tensor", f"aten::{_name}.Scalar")(_on_promoted(_function))


def _as_bool(x: Any) -> Node:
    return build.cast(x, torch.bool)


@traces("aten::logical_not")
def logical_not(x: Node) -> Node:
    return ~_as_bool(x)


@traces("aten::logical_and")
def logical_and(x: Node, y: Node) -> Node:
    return _as_bool(x) & _as_bool(y)


@traces("aten::logical_or")
def logical_or(x: Node, y: Node) -> Node:
    return _as_bool(x) | _as_bool(y)


@traces("aten::logical_xor")
def logical_xor(x: Node, y: Node) -> Node:
    return _as_bool(x) ^ _as_bool(y)


@traces("aten::bitwise_not")
def bitwise_not(x: Node) -> Node:
    return ~x


for _name, _op in {
    "bitwise_and": ops.AND,
    "bitwise_or": ops.OR,
    "bitwise_xor": ops.XOR,
    "bitwise_left_shift": ops.SHIFT_LEFT,
    "bitwise_right_shift": ops.SHIFT_RIGHT,
}.items():
    _scalar_form = "Tensor_Scalar" if "shift" in _name else "Scalar"
    for _variant in ("Tensor", _scalar_form, "Scalar_Tensor"):
        traces(f"aten::{_name}.{_variant}")(_on_promoted(partial(make, _op)))

for _name, _op in {"and": ops.AND, "or": ops.OR, "xor": ops.XOR}.items():
    _rule = _on_promoted(partial(make, _op))
    traces(f"aten::__{_name}__.Tensor", f"aten::__{_name}__.Scalar")(_rule)

for _name, _op in {"lshift": ops.SHIFT_LEFT, "rshift": ops.SHIFT_RIGHT}.items():
    _rule = _on_promoted(partial(make, _op))
    traces(f"aten::__{_name}__.Tensor", f"aten::__{_name}__.Scalar")(_rule)


@traces(
    "aten::where.self", "aten::where.ScalarSelf", "aten::where.ScalarOther", "aten::where.Scalar"
)
def where_rule(condition: Node, x: Operand, y: Operand) -> Node:
    x, y = promote_exact(x, y)
    return where(_as_bool(condition), x, y)


# Known values tell a mask of attention, and its gradient, from other fills.
@traces("aten::masked_fill.Scalar", "aten::masked_fill.Tensor", static={"value": (-math.inf, 0)})
def masked_fill(x: Node, mask: Node, value: Operand) -> Node:
    value = to_dtype(value, x.dtype)
    return where(_as_bool(mask), value, x)
