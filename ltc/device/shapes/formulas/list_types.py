"""Types of operations on lists of tensors: what joins them, and what optimizers are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ltc.device.shapes.formulas.operands import (
    FLOATS,
    VALUES,
    Type,
    axis_of,
    is_real,
    is_value,
    of_one_dtype,
    of_one_type,
    type_of,
    with_extent,
)
from ltc.device.shapes.formulas.table import Types, add, types_of

_LISTS = ("add", "sub", "mul", "div", "maximum", "minimum", "clamp_min", "clamp_max", "pow")
_FUSED_LISTS = ("addcmul", "addcdiv")
_FUNCTIONS = ("sqrt", "rsqrt", "neg", "abs", "exp", "reciprocal", "sign", "sigmoid", "tanh", "log")


def _float_type(operand: Any) -> Type | None:
    is_known = operand.__class__ is not list and is_value(operand) and operand.dtype in FLOATS
    return (operand.shape, operand.dtype) if is_known else None


def _like_the_first(*operands: Any, alpha: Any = 1, value: Any = 1) -> Types | None:
    """The types of the first list, if all lists agree with it and the rest are real numbers."""
    if operands[0].__class__ is not list or not (is_real(alpha) and is_real(value)):
        return None
    types = tuple([_float_type(x) for x in operands[0]])
    for operand in operands[1:]:
        if operand.__class__ is not list:
            if not is_real(operand):
                return None
        elif len(operand) != len(types) or not (
            types == tuple([_float_type(x) for x in operand]) or all(map(is_real, operand))
        ):
            return None
    return None if None in types or not types else types


def _by_one_tensor(xs: Any, other: Any, alpha: Any = 1) -> Types | None:
    """Each with the same 0-dim tensor."""
    is_known = is_value(other) and not other.shape and is_real(alpha)
    is_known = is_known and all(is_value(x) and x.dtype is other.dtype for x in xs)
    return _like_the_first(xs) if is_known else None


for _base in _LISTS:
    for _overload in ("Scalar", "List", "ScalarList"):
        add(_like_the_first, f"aten::_foreach_{_base}.{_overload}")
        add(_like_the_first, f"aten::_foreach_{_base}_.{_overload}")
for _base in ("add", "mul", "div"):
    add(_by_one_tensor, f"aten::_foreach_{_base}.Tensor", f"aten::_foreach_{_base}_.Tensor")
for _base in _FUSED_LISTS:
    for _overload in ("Scalar", "ScalarList"):
        add(_like_the_first, f"aten::_foreach_{_base}.{_overload}")
        add(_like_the_first, f"aten::_foreach_{_base}_.{_overload}")
for _overload in ("List", "Scalar", "ScalarList"):
    add(_like_the_first, f"aten::_foreach_lerp.{_overload}")
    add(_like_the_first, f"aten::_foreach_lerp_.{_overload}")
for _base in _FUNCTIONS:
    add(_like_the_first, f"aten::_foreach_{_base}", f"aten::_foreach_{_base}_")
add(_like_the_first, "aten::_foreach_zero_")


@types_of("aten::_foreach_norm.Scalar")
def _norms(xs: Sequence[Any], ord: Any = 2, dtype: torch.dtype | None = None) -> Types | None:
    if dtype is not None or not is_real(ord) or any(0 in x.shape for x in xs):
        return None
    types = _like_the_first(xs)
    return None if types is None else tuple([((), x.dtype) for x in xs])


@types_of("aten::_foreach_copy_")
def _copies(xs: Any, src: Any, non_blocking: bool = False) -> Types | None:
    return _like_the_first(xs, src)


# --- optimizers ---------------------------------------------------------------------------------


@types_of("aten::_fused_adamw_", "aten::_fused_adam_")
def _adam(
    params: list,
    grads: list,
    averages: list,
    squares: list,
    maxima: list,
    steps: list,
    *,
    amsgrad: bool,
    grad_scale: Any = None,
    found_inf: Any = None,
    **settings: Any,
) -> Types | None:
    """All that is written to.  The gradients are left as they are: only a scale divides them."""
    if grad_scale is not None or found_inf is not None or bool(maxima) != amsgrad or not params:
        return None
    lists = [params, grads, averages, squares, *[maxima] * amsgrad]
    if any(len(values) != len(params) for values in (*lists, steps)):
        return None
    if not all(of_one_type(FLOATS, *values) for values in zip(*lists)):
        return None
    if not all(type_of(count) == ((), torch.float32) for count in steps):
        return None
    return tuple([type_of(value) for values in (params, *lists[2:]) for value in values])


@types_of("ltc::adam_")
def _default_adam(
    params: list, grads: list, averages: list, squares: list, maxima: list, *settings: Any
) -> Types | None:
    lists = [params, grads, averages, squares, *[maxima] * bool(maxima)]
    if not params or any(len(values) != len(params) for values in lists):
        return None
    if not all(of_one_type(FLOATS, *values) for values in zip(*lists)):
        return None
    return tuple([type_of(value) for values in (params, *lists[2:]) for value in values])


# --- gradient scaling ---------------------------------------------------------------------------


def _are_single_floats(*values: Any) -> bool:
    return all(v.shape in ((), (1,)) and v.dtype is torch.float32 for v in values)


@types_of("aten::_amp_foreach_non_finite_check_and_unscale_")
def _unscaled(grads: Sequence[Any], found_inf: Any, inv_scale: Any) -> Types | None:
    if not grads or not is_value(*grads) or not _are_single_floats(found_inf, inv_scale):
        return None
    if any(grad.dtype not in FLOATS for grad in grads):
        return None
    return *map(type_of, grads), type_of(found_inf)


@types_of("aten::_amp_update_scale_")
def _next_scale(scale: Any, tracker: Any, found_inf: Any, *settings: Any) -> Types | None:
    is_count = tracker.shape in ((), (1,)) and tracker.dtype is torch.int32
    if not is_count or not _are_single_floats(scale, found_inf):
        return None
    return type_of(scale), type_of(tracker)


# --- joined ----------------------------------------------------------------------------------------


@types_of("aten::cat")
def _cat(tensors: Sequence[Any], dim: int = 0) -> Types | None:
    if not tensors or not of_one_dtype(VALUES, *tensors):
        return None
    joined = [x.shape for x in tensors if not _begins_empty(x.shape)]
    if not joined:
        return ((tensors[0].shape, tensors[0].dtype),)
    shape = joined[0]
    axis = axis_of(dim, len(shape))
    if axis is None:
        return None
    around = shape[:axis], shape[axis + 1 :]
    if any(len(x) != len(shape) or (x[:axis], x[axis + 1 :]) != around for x in joined):
        return None
    return ((with_extent(shape, axis, sum([x[axis] for x in joined])), tensors[0].dtype),)


def _begins_empty(shape: tuple[int, ...]) -> bool:
    """A tensor without elements, of one dimension, which PyTorch joins to any: a cache at first."""
    return len(shape) == 1 and isinstance(shape[0], int) and shape[0] == 0


@types_of("aten::stack")
def _stack(tensors: Sequence[Any], dim: int = 0) -> Types | None:
    if not tensors or not of_one_dtype(VALUES, *tensors):
        return None
    shape = tensors[0].shape
    axis = axis_of(dim, len(shape) + 1)
    if axis is None or any(x.shape != shape for x in tensors):
        return None
    return (((*shape[:axis], len(tensors), *shape[axis:]), tensors[0].dtype),)
