"""Types of special functions and draws, of complex numbers and their parts, and of rarer losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ltc.device.shapes.formulas.operands import (
    BOOL,
    COMPLEX,
    FLOATS,
    FULL,
    REALS,
    WHOLE,
    axis_of,
    broadcast,
    is_real,
    is_value,
    joined,
    number_of,
    of_one_dtype,
    of_one_type,
    type_of,
)
from ltc.device.shapes.formulas.table import Formula, Types, add, in_place, types_of

# --- functions of one number --------------------------------------------------------------------


@types_of("aten::nan_to_num")
def _with_numbers(x: Any, *numbers: Any) -> Types | None:
    return (type_of(x),) if is_value(x) and x.dtype in REALS | BOOL else None


add(in_place(_with_numbers), "aten::nan_to_num_")


@types_of("aten::logit", "aten::celu")
def _of_floats(x: Any, number: Any = None) -> Types | None:
    """`number`: how near to 0 and 1 it may come; the scale, which is not 0."""
    is_known = number is None or (is_real(number) and number_of(number) > 0)
    return (type_of(x),) if is_known and is_value(x) and x.dtype in FLOATS else None


add(in_place(_of_floats), "aten::logit_", "aten::celu_")


@types_of("aten::logit_backward")
def _logit_gradient(gradient: Any, x: Any, eps: Any = None) -> Types | None:
    return _of_floats(x, eps) if of_one_type(FLOATS, gradient, x) else None


@types_of("aten::i0", "aten::special_i0e", "aten::special_i1", "aten::special_i1e")
def _bessel(x: Any) -> Types | None:
    return (type_of(x),) if is_value(x) and x.dtype in FULL else None


@types_of("aten::polygamma")
def _polygamma(n: int, x: Any) -> Types | None:
    return _bessel(x) if n >= 0 else None


# --- whole numbers and sets of them -------------------------------------------------------------


@types_of("aten::__lshift__.Scalar", "aten::__rshift__.Scalar")
def _shifted(x: Any, y: Any) -> Types | None:
    is_known = is_value(x) and x.dtype in WHOLE and number_of(y).__class__ is int
    return (type_of(x),) if is_known else None


@types_of("aten::__lshift__.Tensor", "aten::__rshift__.Tensor")
@types_of("aten::bitwise_left_shift.Tensor", "aten::bitwise_right_shift.Tensor")
def _shifted_each(x: Any, y: Any) -> Types | None:
    found = joined(x, y) if of_one_dtype(WHOLE, x, y) else None
    return None if found is None else (found,)


@types_of("aten::histc")
def _histogram(x: Any, bins: int = 100, min: Any = 0, max: Any = 0) -> Types | None:
    is_known = is_value(x) and x.dtype in FULL and is_real(min) and is_real(max) and bins > 0
    return (
        (((bins,), x.dtype),)
        if is_known and -1e30 < number_of(min) < number_of(max) < 1e30
        else None
    )


@types_of("aten::isin.Tensor_Tensor")
def _is_among(
    x: Any, tested: Any, *, assume_unique: bool = False, invert: bool = False
) -> Types | None:
    return ((x.shape, torch.bool),) if of_one_dtype(REALS, x, tested) else None


# --- complex numbers ----------------------------------------------------------------------------


@types_of("aten::complex", "aten::polar")
def _complex(real: Any, imaginary: Any) -> Types | None:
    if not of_one_dtype(FULL, real, imaginary):
        return None
    shape = broadcast(real.shape, imaginary.shape)
    return None if shape is None else ((shape, real.dtype.to_complex()),)


@types_of("aten::_conj", "aten::_conj_physical", "aten::conj_physical")
def _conjugate(x: Any) -> Types | None:
    return (type_of(x),) if is_value(x) and x.dtype in COMPLEX else None


@types_of("aten::view_as_real", "aten::view_as_real_copy")
def _parts(x: Any) -> Types | None:
    return (((*x.shape, 2), x.dtype.to_real()),) if is_value(x) and x.dtype in COMPLEX else None


@types_of("aten::view_as_complex", "aten::view_as_complex_copy")
def _of_parts(x: Any) -> Types | None:
    if not is_value(x) or x.dtype not in FULL or x.shape[-1:] != (2,):
        return None
    return ((x.shape[:-1], x.dtype.to_complex()),)


# --- draws --------------------------------------------------------------------------------------


def _over(is_known: Callable[..., bool]) -> Formula:
    """Of what writes draws over floats, where numbers say how they lie: those that torch may refuse
    are asked of it."""

    def formula(x: Any, *numbers: Any, generator: Any = None) -> Types | None:
        if not is_value(x) or x.dtype not in FLOATS or not all(map(is_real, numbers)):
            return None
        return (type_of(x),) if is_known(*map(number_of, numbers)) else None

    return formula


def _has_spread(mean: float = 0.0, spread: float = 1.0) -> bool:
    return abs(mean) < 1e4 and 0 < spread < 1e4


add(_over(_has_spread), "aten::normal_", "aten::cauchy_", "aten::log_normal_")
add(_over(lambda rate=1.0: 0 < rate < 1e4), "aten::exponential_")
add(_over(lambda p: 0 < p < 1), "aten::geometric_")
add(_over(lambda p=0.5: 0 <= p <= 1), "aten::bernoulli_.float")
add(_over(lambda low=0.0, high=1.0: -1e4 < low <= high < 1e4), "aten::uniform_")


@types_of("aten::normal.Tensor_float", "aten::normal.float_Tensor", "aten::normal.Tensor_Tensor")
def _normal(mean: Any, std: Any = 1.0, *, generator: Any = None) -> Types | None:
    """How far they lie apart may be a tensor, whose numbers nobody looks at."""
    values = [one for one in (mean, std) if is_value(one)]
    if not values or not of_one_dtype(FLOATS, *values):
        return None
    if not is_value(std) and not (is_real(std) and 0 < number_of(std) < 1e4):
        return None
    if not is_value(mean) and not is_real(mean):
        return None
    shape = broadcast(values[0].shape, values[-1].shape)
    return None if shape is None else ((shape, values[0].dtype),)


@types_of("aten::_standard_gamma")
def _gamma(alpha: Any, generator: Any = None) -> Types | None:
    return (type_of(alpha),) if is_value(alpha) and alpha.dtype in FULL else None


@types_of("aten::_standard_gamma_grad")
def _gamma_gradient(alpha: Any, drawn: Any) -> Types | None:
    return (type_of(alpha),) if of_one_type(FULL, alpha, drawn) else None


# --- layers and losses --------------------------------------------------------------------------


@types_of("aten::rrelu_with_noise")
def _leaky_by_chance(
    x: Any, noise: Any, lower: Any, upper: Any, training: bool = False, generator: Any = None
) -> Types | None:
    """Of the noise, which is written, and of the result."""
    if not of_one_type(FULL, x, noise) or not training:
        return None
    is_known = is_real(lower) and is_real(upper) and number_of(lower) <= number_of(upper)
    return (type_of(noise), type_of(x)) if is_known else None


@types_of("aten::rrelu_with_noise_backward")
def _leaky_by_chance_gradient(
    gradient: Any, x: Any, noise: Any, lower: Any, upper: Any, training: bool, is_result: bool
) -> Types | None:
    is_known = of_one_type(FULL, gradient, x, noise) and training and not is_result
    return (type_of(x),) if is_known and is_real(lower) and is_real(upper) else None


@types_of("aten::renorm")
def _renormed(x: Any, p: Any, dim: int, maxnorm: Any) -> Types | None:
    if not is_value(x) or x.dtype not in FULL or len(x.shape) < 2 or 0 in x.shape:
        return None
    numbers = [number_of(one) for one in (p, maxnorm)]
    is_known = all(is_real(one) and number_of(one) > 0 for one in numbers)
    return (type_of(x),) if is_known and axis_of(dim, len(x.shape)) is not None else None


@types_of("aten::_weight_norm_interface")
def _weight_norm(v: Any, g: Any, dim: int = 0) -> Types | None:
    """The weight, and the norms of `v` along one axis, of which `g` are the lengths."""
    if not of_one_dtype(FULL, v, g) or len(v.shape) < 2 or 0 in v.shape:
        return None
    if dim not in (0, len(v.shape) - 1) or g.shape != _kept_along(v, dim):
        return None
    return type_of(v), type_of(g)


def _kept_along(v: Any, dim: int) -> tuple[int, ...]:
    return tuple([extent if axis == dim else 1 for axis, extent in enumerate(v.shape)])


@types_of("aten::_weight_norm_interface_backward")
def _weight_norm_gradients(gradient: Any, v: Any, g: Any, norms: Any, dim: int) -> Types | None:
    found = _weight_norm(v, g, dim)
    return found if found == (type_of(gradient), type_of(norms)) else None


@types_of("aten::multi_margin_loss")
def _margin_loss(
    x: Any, target: Any, p: Any = 1, margin: Any = 1, weight: Any = None, reduction: int = 1
) -> Types | None:
    if not is_value(x, target) or x.dtype not in FULL or len(x.shape) != 2 or 0 in x.shape:
        return None
    if type_of(target) != (x.shape[:1], torch.int64) or weight is not None:
        return None
    if number_of(p) not in (1, 2) or not is_real(margin) or reduction not in (0, 1, 2):
        return None
    return ((x.shape[:1] if reduction == 0 else (), x.dtype),)


@types_of("aten::multi_margin_loss_backward")
def _margin_loss_gradient(gradient: Any, x: Any, target: Any, *settings: Any) -> Types | None:
    found = _margin_loss(x, target, *settings)
    return (type_of(x),) if found == (type_of(gradient),) else None
