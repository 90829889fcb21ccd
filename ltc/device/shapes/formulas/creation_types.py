"""Types of tensors that are made of nothing, and of draws."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from ltc.aten.promote import number_dtype
from ltc.device.shapes.formulas.movement_types import PLAIN_FORMATS
from ltc.device.shapes.formulas.operands import (
    FLOATS,
    MOST_ELEMENTS,
    VALUES,
    is_real,
    is_value,
    number_of,
    type_of,
)
from ltc.device.shapes.formulas.table import Types, types_of
from ltc.support.sizes.extent import Extent

_NUMBER_CLASSES = (bool, int, float)
_MOST_CATEGORIES = 1 << 24  # that are drawn from
_INT64 = (torch.int64, 4)  # also as a schema's default has it


def _made(
    size: Sequence[int],
    dtype: torch.dtype | None,
    options: dict[str, Any],
    dtypes: frozenset[torch.dtype] = VALUES,
) -> Types | None:
    """One tensor of that size; the default dtype where none is given."""
    found = torch.get_default_dtype() if dtype is None else dtype
    if found not in dtypes or any(extent < 0 for extent in size) or prod(size) > MOST_ELEMENTS:
        return None
    if options.get("memory_format") not in PLAIN_FORMATS or options.get("pin_memory"):
        return None
    if options.get("layout") not in (None, torch.strided):
        return None
    return ((tuple(size), found),)


@types_of("aten::zeros", "aten::ones", "aten::empty.memory_format")
def _constant(
    size: Sequence[int], dtype: torch.dtype | None = None, **options: Any
) -> Types | None:
    return _made(size, dtype, options)


@types_of("aten::rand", "aten::randn")
def _drawn(size: Sequence[int], dtype: torch.dtype | None = None, **options: Any) -> Types | None:
    return _made(size, dtype, options, FLOATS)


@types_of("aten::normal.float_float")
def _normal(
    mean: Any, std: Any, size: Sequence[int], dtype: torch.dtype | None = None, **options: Any
) -> Types | None:
    is_known = is_real(mean) and is_real(std) and 0 < number_of(std) < 1e4
    return _made(size, dtype, options, FLOATS) if is_known else None


@types_of("aten::full")
def _full(
    size: Sequence[int], fill_value: Any, dtype: torch.dtype | None = None, **options: Any
) -> Types | None:
    number = number_of(fill_value)
    if number.__class__ not in _NUMBER_CLASSES:
        return None
    fits = dtype is None or dtype in FLOATS or number.__class__ is bool
    if not fits and not (dtype is torch.int64 and number.__class__ is int):
        return None  # a number may not fit
    return _made(size, number_dtype(number) if dtype is None else dtype, options)


@types_of("aten::eye", "aten::eye.m")
def _identity(*extents: int, dtype: torch.dtype | None = None, **options: Any) -> Types | None:
    return _made((extents[0], extents[-1]), dtype, options)


@types_of("aten::scalar_tensor")
def _scalar_tensor(s: Any, dtype: torch.dtype | None = None, **options: Any) -> Types | None:
    number = number_of(s)
    if number.__class__ not in _NUMBER_CLASSES or (dtype is not None and dtype not in FLOATS):
        return None
    return _made((), dtype, options)


@types_of("aten::zeros_like", "aten::ones_like", "aten::empty_like")
def _like(x: Any, dtype: torch.dtype | None = None, **options: Any) -> Types | None:
    return _made(x.shape, x.dtype if dtype is None else dtype, options)


@types_of("aten::rand_like", "aten::randn_like")
def _drawn_like(x: Any, dtype: torch.dtype | None = None, **options: Any) -> Types | None:
    return _made(x.shape, x.dtype if dtype is None else dtype, options, FLOATS)


@types_of("aten::bernoulli")
def _chosen(probabilities: Any, **options: Any) -> Types | None:
    return (type_of(probabilities),) if probabilities.dtype in FLOATS else None


@types_of("aten::multinomial")
def _multinomial(
    weights: Any, num_samples: int, replacement: bool = False, generator: Any = None
) -> Types | None:
    """Positions, of each row; as many as there are at most, where none is drawn twice."""
    if not is_value(weights) or weights.dtype not in FLOATS or len(weights.shape) not in (1, 2):
        return None
    *rows, categories = weights.shape
    if 0 in rows or not 0 < categories <= _MOST_CATEGORIES or num_samples < 1:
        return None
    if not replacement and num_samples > categories:
        return None
    return (((*rows, num_samples), torch.int64),)


@types_of("aten::randint", "aten::randint.low")
def _drawn_integers(
    *arguments: Any, dtype: torch.dtype | int = torch.int64, **options: Any
) -> Types | None:
    """Of a limit, or two, and a size."""
    low, high, size = arguments if len(arguments) == 3 else (0, *arguments)
    if any(bound.__class__ not in (int, Extent) for bound in (low, high)) or not low < high:
        return None
    return _made(size, torch.int64, options) if dtype in _INT64 else None


@types_of("aten::full_like")
def _full_like(
    x: Any, fill_value: Any, dtype: torch.dtype | None = None, **options: Any
) -> Types | None:
    return _full(x.shape, fill_value, x.dtype if dtype is None else dtype, **options)


@types_of("aten::new_zeros", "aten::new_ones", "aten::new_empty")
def _new(
    x: Any, size: Sequence[int], dtype: torch.dtype | None = None, **options: Any
) -> Types | None:
    found = x.dtype if dtype is None else dtype
    return _made(size, found, options) if x.dtype in VALUES else None


@types_of("aten::new_full")
def _new_full(
    x: Any, size: Sequence[int], fill_value: Any, dtype: torch.dtype | None = None, **options: Any
) -> Types | None:
    return _full(size, fill_value, x.dtype if dtype is None else dtype, **options)


@types_of("aten::new_empty_strided")
def _new_strided(
    x: Any,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Types | None:
    extents = [max(extent, 1) for extent in size]
    contiguous = [prod(extents[axis + 1 :]) for axis in range(len(size))]
    return _new(x, size, dtype, **options) if list(stride) == contiguous else None


@types_of("aten::arange", "aten::arange.start", "aten::arange.start_step")
def _arange(*bounds: Any, dtype: torch.dtype | None = None, **options: Any) -> Types | None:
    """Of integers, whose number is certain."""
    if not all(
        bound.__class__ in (int, Extent) and abs(bound) <= MOST_ELEMENTS for bound in bounds
    ):
        return None
    start, end, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    found = torch.int64 if dtype is None else dtype
    if step == 0 or (end - start) * step < 0 or found not in FLOATS | {torch.int64}:
        return None
    return _made((-((start - end) // step),), found, options)


@types_of("aten::linspace", "aten::logspace")
def _spaced(
    start: Any, end: Any, steps: int, base: float = 10.0, *, dtype: Any = None, **options: Any
) -> Types | None:
    is_known = is_real(start) and is_real(end) and steps >= 0
    return _made((steps,), dtype, options, FLOATS) if is_known else None


# --- over what is there -------------------------------------------------------------------------


@types_of("aten::zero_")
def _zeroed(x: Any) -> Types | None:
    return (type_of(x),) if x.dtype in VALUES else None


@types_of("aten::fill_.Scalar", "aten::fill_.Tensor")
def _refilled(x: Any, value: Any) -> Types | None:
    if is_value(value):
        is_known = not value.shape and value.dtype is x.dtype and x.dtype in VALUES
    else:
        is_known = number_of(value).__class__ in _NUMBER_CLASSES and x.dtype in FLOATS
    return (type_of(x),) if is_known else None
