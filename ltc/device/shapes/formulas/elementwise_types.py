"""Types of what is computed element by element."""

from __future__ import annotations

from typing import Any

import torch

from ltc.device.shapes.formulas.operands import (
    BOOL,
    COMPLEX,
    FLOATS,
    NUMBERS,
    REALS,
    VALUES,
    WHOLE,
    axis_of,
    broadcast,
    is_number,
    is_real,
    is_value,
    joined,
    number_of,
    of_one_dtype,
    of_one_type,
    type_of,
    with_extent,
)
from ltc.device.shapes.formulas.table import Formula, Types, add, in_place, types_of

_INEXACT = FLOATS | COMPLEX
_Dtypes = frozenset[torch.dtype]


def _with_in_place(formula: Formula, *bases: str, overloads: tuple[str, ...] = ("",)) -> None:
    """Let it be the formula of "add.Tensor" and the like, and of their in-place forms."""
    for base in bases:
        for overload in overloads:
            add(formula, f"aten::{base}{overload}")
            add(in_place(formula), f"aten::{base}_{overload}")


# --- one operand --------------------------------------------------------------------------------


def _same(dtypes: _Dtypes) -> Formula:
    """The operand's type, where it is of one of these dtypes."""

    def formula(x: Any, *numbers: Any, **options: Any) -> Types | None:
        return ((x.shape, x.dtype),) if is_value(x) and x.dtype in dtypes else None

    return formula


def _real_function(dtypes: _Dtypes) -> Formula:
    """Integers and bool become the default float."""

    def formula(x: Any) -> Types | None:
        if not is_value(x) or x.dtype not in dtypes:
            return None
        return ((x.shape, x.dtype if x.dtype in _INEXACT else torch.get_default_dtype()),)

    return formula


def _truth(dtypes: _Dtypes) -> Formula:
    def formula(x: Any) -> Types | None:
        return ((x.shape, torch.bool),) if is_value(x) and x.dtype in dtypes else None

    return formula


_with_in_place(_same(NUMBERS), "neg", "sgn")
_with_in_place(_same(REALS), "abs", "sign", "relu", "floor", "ceil", "trunc", "round")
_with_in_place(_same(WHOLE | BOOL), "bitwise_not")
_with_in_place(_same(FLOATS), "frac", "silu", "mish", "gelu", "hardswish", "hardsigmoid")
_with_in_place(_real_function(VALUES), "exp", "log", "sqrt", "rsqrt", "tanh", "sigmoid")
_with_in_place(_real_function(VALUES), "sin", "cos", "tan", "sinh", "cosh", "log2", "log10")
_with_in_place(_real_function(VALUES), "asin", "acos", "atan", "asinh", "acosh", "atanh")
_with_in_place(_real_function(VALUES), "reciprocal", "expm1", "exp2", "log1p")
_with_in_place(_real_function(REALS | BOOL), "erf", "erfc", "erfinv", "lgamma", "digamma")
_with_in_place(_truth(VALUES), "logical_not")
add(_truth(VALUES), "aten::isnan", "aten::isinf")
add(_truth(REALS | BOOL), "aten::isposinf", "aten::isneginf", "aten::signbit")


@types_of("aten::abs")
def _magnitude(x: Any) -> Types | None:
    """Of a complex number its length, which is real."""
    if is_value(x) and x.dtype in COMPLEX:
        return ((x.shape, x.dtype.to_real()),)
    return _same(REALS)(x)


def _shaped_by_numbers(dtypes: _Dtypes) -> Formula:
    """Of one tensor and real numbers."""

    def formula(x: Any, *numbers: Any) -> Types | None:
        if not is_value(x) or x.dtype not in dtypes or not all(map(is_real, numbers)):
            return None
        return ((x.shape, x.dtype),)

    return formula


_with_in_place(_shaped_by_numbers(FLOATS), "leaky_relu", "elu", "hardtanh", "threshold")
add(_shaped_by_numbers(FLOATS), "aten::softplus", "aten::hardshrink")


@types_of("aten::softshrink")
def _softshrink(x: Any, lambd: Any = 0.5) -> Types | None:
    return _shaped_by_numbers(FLOATS)(x) if is_real(lambd) and 0 <= number_of(lambd) < 1e4 else None


@types_of("aten::log_sigmoid_forward")
def _log_sigmoid(x: Any) -> Types | None:
    if not is_value(x) or x.dtype not in FLOATS:
        return None
    return type_of(x), (x.shape, x.dtype)


# --- arithmetic ---------------------------------------------------------------------------------


def _alpha_fits(alpha: Any, dtype: torch.dtype) -> bool:
    """Whether torch takes that factor for results of that dtype."""
    kind = number_of(alpha).__class__
    return dtype in NUMBERS if kind is int else kind is float and dtype in _INEXACT


def _sum(x: Any, y: Any, alpha: Any = 1) -> Types | None:
    found = joined(x, y)
    if found is None or not (_alpha_fits(alpha, found[1])):
        return None
    return (found,)


def _difference(x: Any, y: Any, alpha: Any = 1) -> Types | None:
    for operand in (x, y):
        operand = number_of(operand)
        if operand.__class__ is bool or getattr(operand, "dtype", None) is torch.bool:
            return None
    return _sum(x, y, alpha)


def _product(x: Any, y: Any) -> Types | None:
    found = joined(x, y)
    return None if found is None or found[1] not in VALUES else (found,)


def _quotient(x: Any, y: Any) -> Types | None:
    found = joined(x, y)
    if found is None or found[1] not in VALUES:
        return None
    return ((found[0], found[1] if found[1] in _INEXACT else torch.get_default_dtype()),)


def _whole_quotient(x: Any, y: Any, rounding_mode: str | None = None) -> Types | None:
    if rounding_mode is None:
        return _quotient(x, y)
    is_known = rounding_mode in ("floor", "trunc") and is_value(x)
    return _remainder(x, y) if is_known else None


def _common(dtypes: _Dtypes) -> Formula:
    """Of two operands that are computed with in one of these dtypes."""

    def formula(x: Any, y: Any) -> Types | None:
        found = joined(x, y)
        return None if found is None or found[1] not in dtypes else (found,)

    return formula


def _of_tensors(formula: Formula) -> Formula:
    """For overloads that take no number in place of a tensor."""

    def checked(*operands: Any) -> Types | None:
        given = [x for x in operands if x is not None]
        return None if any(map(is_number, given)) else formula(*operands)

    return checked


def _power(x: Any, y: Any) -> Types | None:
    found = joined(x, y)
    if found is None or found[1] not in FLOATS:
        return None  # integers have no negative powers
    return (found,)


def _of_floats(x: Any, y: Any) -> Types | None:
    return _common(FLOATS)(x, y) if is_value(x, y) else None


def _remainder(x: Any, y: Any) -> Types | None:
    """Of whole numbers too, but for a 0 that the user wrote."""
    return _common(REALS)(x, y) if is_value(y) or number_of(y) != 0 else None


def _whole(x: Any, y: Any) -> Types | None:
    return _remainder(x, y) if is_value(x) else None


_BOTH = (".Tensor", ".Scalar")
_with_in_place(_sum, "add", overloads=_BOTH)
_with_in_place(_difference, "sub", overloads=_BOTH)
add(_difference, "aten::rsub.Tensor", "aten::rsub.Scalar")
_with_in_place(_product, "mul", overloads=_BOTH)
_with_in_place(_quotient, "div", overloads=_BOTH)
_with_in_place(_whole_quotient, "div", overloads=(".Tensor_mode", ".Scalar_mode"))
for _base in ("remainder", "fmod"):
    _with_in_place(_of_tensors(_common(REALS)), _base, overloads=(".Tensor",))
    _with_in_place(_remainder, _base, overloads=(".Scalar",))
add(_whole, "aten::floor_divide")
add(in_place(_whole), "aten::floor_divide_.Tensor")
add(_power, "aten::pow.Tensor_Scalar", "aten::pow.Scalar")
add(in_place(_power), "aten::pow_.Scalar")
add(_of_tensors(_power), "aten::pow.Tensor_Tensor")
add(in_place(_of_tensors(_power)), "aten::pow_.Tensor")
add(_of_tensors(_common(REALS | BOOL)), "aten::maximum", "aten::minimum")
add(_of_tensors(_common(FLOATS)), "aten::fmax", "aten::fmin")
add(_of_floats, "aten::logaddexp", "aten::logaddexp2")
_with_in_place(_of_tensors(_common(FLOATS)), "atan2", "hypot", "nextafter")
_with_in_place(_of_tensors(_common(FLOATS)), "xlogy", overloads=(".Tensor",))
_with_in_place(_of_floats, "copysign", overloads=(".Tensor",))
for _base in ("bitwise_and", "bitwise_or", "bitwise_xor"):
    _with_in_place(_of_tensors(_common(WHOLE | BOOL)), _base, overloads=(".Tensor",))
    _with_in_place(_common(WHOLE | BOOL), _base, overloads=(".Scalar",))


def _into(formula: Formula) -> Formula:
    """Of the form that writes over `out`, where that is of the result's type."""

    def written(x: Any, y: Any, *, out: Any) -> Types | None:
        found = formula(x, y) if is_value(x, y, out) else None
        return found if found == (type_of(out),) else None

    return written


add(_into(_product), "aten::mul.out")
add(_into(_quotient), "aten::div.out")


# --- comparisons and choices --------------------------------------------------------------------


def _comparison(dtypes: _Dtypes) -> Formula:
    def formula(x: Any, y: Any) -> Types | None:
        found = joined(x, y)
        return None if found is None or found[1] not in dtypes else ((found[0], torch.bool),)

    return formula


for _bases, _dtypes in ((("eq", "ne"), VALUES), (("lt", "le", "gt", "ge"), REALS | BOOL)):
    _with_in_place(_of_tensors(_comparison(_dtypes)), *_bases, overloads=(".Tensor",))
    _with_in_place(_comparison(_dtypes), *_bases, overloads=(".Scalar",))
_with_in_place(_of_tensors(_comparison(VALUES)), "logical_and", "logical_or", "logical_xor")


@types_of("aten::where.self")
def _where(condition: Any, x: Any, y: Any) -> Types | None:
    if not is_value(condition) or condition.dtype is not torch.bool:
        return None
    if is_number(x) or is_number(y):
        return None
    found = joined(x, y)
    shape = None if found is None else broadcast(condition.shape, found[0])
    if found is None or shape is None or found[1] not in VALUES:
        return None
    return ((shape, found[1]),)


def _filled(x: Any, mask: Any, value: Any) -> Types | None:
    if not is_value(x, mask) or mask.dtype is not torch.bool or x.dtype not in VALUES:
        return None
    shape = broadcast(x.shape, mask.shape)
    if shape is None or not _holds(x.dtype, value):
        return None
    return ((shape, x.dtype),)


def _holds(dtype: torch.dtype, value: Any) -> bool:
    """Whether that value, a number or a 0-dim tensor, fits into results of that dtype."""
    if is_value(value):
        return not value.shape and value.dtype is dtype
    kind = number_of(value).__class__
    return dtype in _INEXACT if kind is float else dtype in NUMBERS and kind in (int, bool)


_with_in_place(_filled, "masked_fill", overloads=(".Scalar", ".Tensor"))


def _clamped(x: Any, low: Any = None, high: Any = None) -> Types | None:
    bounds = [bound for bound in (low, high) if bound is not None]
    found = joined(x, *bounds) if is_value(x) and bounds else None
    return None if found is None or found[1] not in REALS else (found,)


_CLAMPS = ("clamp", "clamp_min", "clamp_max")
_with_in_place(_clamped, *_CLAMPS)
_with_in_place(_of_tensors(_clamped), *_CLAMPS, overloads=(".Tensor",))


# --- several operands ---------------------------------------------------------------------------


def _fused(x: Any, y: Any, z: Any, value: Any = 1) -> Types | None:
    """addcmul, addcdiv, and lerp by a tensor."""
    found = joined(x, y, z) if of_one_dtype(FLOATS, x, y, z) and is_real(value) else None
    return None if found is None else (found,)


def _between(x: Any, y: Any, weight: Any) -> Types | None:
    """lerp by a number."""
    return _fused(x, y, y) if is_real(weight) else None


_with_in_place(_fused, "addcmul", "addcdiv")
_with_in_place(_between, "lerp", overloads=(".Scalar",))
_with_in_place(_fused, "lerp", overloads=(".Tensor",))


# --- gradients ----------------------------------------------------------------------------------


@types_of("aten::tanh_backward", "aten::sigmoid_backward")
@types_of("aten::silu_backward", "aten::gelu_backward", "aten::hardswish_backward")
@types_of("aten::hardsigmoid_backward", "aten::mish_backward")
def _gradient(gradient: Any, x: Any, *numbers: Any, **options: Any) -> Types | None:
    return (type_of(x),) if of_one_type(FLOATS, gradient, x) else None


@types_of(
    "aten::threshold_backward",
    "aten::leaky_relu_backward",
    "aten::hardtanh_backward",
    "aten::softplus_backward",
)
@types_of("aten::softshrink_backward", "aten::hardshrink_backward")
def _gradient_with_numbers(gradient: Any, x: Any, *numbers: Any) -> Types | None:
    return _gradient(gradient, x) if all(is_real(n) or n is False for n in numbers) else None


@types_of("aten::elu_backward")
def _gradient_of_elu(
    gradient: Any, alpha: Any, scale: Any, input_scale: Any, is_result: bool, x: Any
) -> Types | None:
    if is_result or not all(map(is_real, (alpha, scale, input_scale))):
        return None
    return _gradient(gradient, x)


@types_of("aten::log_sigmoid_backward")
def _gradient_of_log_sigmoid(gradient: Any, x: Any, buffer: Any) -> Types | None:
    return _gradient(gradient, x) if of_one_type(FLOATS, x, buffer) else None


# --- gates --------------------------------------------------------------------------------------


@types_of("aten::glu")
def _gated(x: Any, dim: int = -1) -> Types | None:
    if not is_value(x) or x.dtype not in FLOATS:
        return None
    axis = axis_of(dim, len(x.shape))
    if axis is None or x.shape[axis] % 2:
        return None
    return ((with_extent(x.shape, axis, x.shape[axis] // 2), x.dtype),)


@types_of("aten::glu_backward")
def _gated_gradient(gradient: Any, x: Any, dim: int) -> Types | None:
    forward = _gated(x, dim)
    return (type_of(x),) if forward is not None and forward == (type_of(gradient),) else None


@types_of("aten::_prelu_kernel")
def _prelu(x: Any, weight: Any) -> Types | None:
    found = joined(x, weight) if of_one_dtype(FLOATS, x, weight) else None
    return None if found is None else (found,)


@types_of("aten::_prelu_kernel_backward")
def _prelu_gradient(gradient: Any, x: Any, weight: Any) -> Types | None:
    """Of the operand and, for each of its elements, of the weight."""
    found = joined(gradient, x, weight) if of_one_dtype(FLOATS, gradient, x, weight) else None
    return (found, found) if found == type_of(x) else None
