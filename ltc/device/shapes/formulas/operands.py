"""What formulas ask of operands: common dtype, common shape, axes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch

from ltc.aten.call import CallResult, Scalar
from ltc.aten.promote import dtype_of_ranks, number_dtype

Shape = tuple[int, ...]
Type = tuple[Shape, torch.dtype]

NARROW = frozenset({torch.float16, torch.bfloat16})
FULL = frozenset({torch.float32, torch.float64})
FLOATS = NARROW | FULL
COMPLEX = frozenset({torch.complex64, torch.complex128})
WHOLE = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
REALS = WHOLE | FLOATS
NUMBERS = REALS | COMPLEX
BOOL = frozenset({torch.bool})
VALUES = NUMBERS | BOOL
INDICES = frozenset({torch.int32, torch.int64})
MOST_ELEMENTS = 1 << 40  # of a result: torch refuses what has too many bytes to count

# Of a number's class: the dtypes that it leaves as they are.
_LEFT_BY = {bool: VALUES, int: NUMBERS, float: FLOATS | COMPLEX, complex: COMPLEX}
_NO_DTYPES: frozenset[torch.dtype] = frozenset()


def is_value(*operands: Any) -> bool:
    """Whether each is a tensor of the recording."""
    return all(operand.__class__ is CallResult for operand in operands)


def number_of(operand: Any) -> Any:
    """A Python number that stands for the operand, or a 0-dim CPU tensor, or what it is."""
    return operand.sample if operand.__class__ is Scalar else operand


def is_real(operand: Any) -> bool:
    """Whether it is an integer or a float of Python's."""
    return number_of(operand).__class__ in (int, float)


def is_number(operand: Any) -> bool:
    """Whether the user wrote a Python number there."""
    return operand.__class__ is not CallResult and not isinstance(number_of(operand), torch.Tensor)


def type_of(value: Any) -> Type:
    return value.shape, value.dtype


# --- several operands, element by element -------------------------------------------------------


def joined(*operands: Any) -> Type | None:
    """Common shape and dtype of what is computed of these; None where torch may refuse."""
    shape: Shape | None = None
    dtype: Any = None
    is_mixed = False
    for x in operands:
        if x.__class__ is CallResult:
            if dtype is None:
                shape, dtype = x.shape, x.dtype
                continue
            if x.shape != shape:
                shape = broadcast(shape, x.shape)
                if shape is None:
                    return None
            is_mixed = is_mixed or x.dtype is not dtype
        elif dtype is None or dtype not in _LEFT_BY.get(number_of(x).__class__, _NO_DTYPES):
            is_mixed = True
    if is_mixed:
        dtype = common_dtype(operands)
    return None if dtype is None or shape is None else (shape, dtype)


def common_dtype(operands: Iterable[Any]) -> torch.dtype | None:
    """What torch promotes the operands to; None where one is of a dtype that is not known here."""
    dimensioned: list[torch.dtype] = []
    zero_dim: list[torch.dtype] = []
    numbers: list[torch.dtype] = []
    for x in operands:
        if x.__class__ is CallResult:
            (dimensioned if x.shape else zero_dim).append(x.dtype)
        elif isinstance(x := number_of(x), torch.Tensor):
            zero_dim.append(x.dtype)
        elif x.__class__ in _LEFT_BY:
            numbers.append(number_dtype(x))
        else:
            return None
    if not VALUES.issuperset((*dimensioned, *zero_dim)):
        return None
    found = dtype_of_ranks(dimensioned, zero_dim, numbers)
    return found if found in VALUES else None


def broadcast(one: Any, other: Shape) -> Shape | None:
    """The common shape of two; None where they have none, or it is too large."""
    if len(one) == len(other) and one == other:  # not from the left, where lengths differ
        return other
    if len(one) < len(other):
        one, other = other, one
    found = list(one)
    for axis in range(-len(other), 0):
        extent = other[axis]
        if extent != found[axis] and extent != 1:
            if found[axis] != 1:
                return None
            found[axis] = extent
    return tuple(found) if prod(found) <= MOST_ELEMENTS else None


def of_one_dtype(dtypes: frozenset[torch.dtype], *values: Any) -> bool:
    """Whether all are values of the same dtype, one of `dtypes`."""
    first = values[0]
    return (
        is_value(*values)
        and first.dtype in dtypes
        and all(value.dtype is first.dtype for value in values)
    )


def of_one_type(dtypes: frozenset[torch.dtype], *values: Any) -> bool:
    """The same, of one shape too."""
    return of_one_dtype(dtypes, *values) and all(v.shape == values[0].shape for v in values)


# --- axes ---------------------------------------------------------------------------------------


def axis_of(dim: int, rank: int) -> int | None:
    """The axis counted from 0; None where there is none."""
    if -rank <= dim < rank:
        return dim % rank
    return None


def axes_of(dims: Sequence[int] | None, rank: int) -> frozenset[int] | None:
    """The axes counted from 0, all where none is named; None where one is wrong or named twice."""
    if not dims:
        return frozenset(range(rank))
    if any(not -rank <= dim < rank for dim in dims):
        return None
    axes = frozenset([dim % rank for dim in dims])
    return axes if len(axes) == len(dims) else None


def reduced(shape: Shape, axes: frozenset[int], keepdim: bool) -> Shape:
    """The shape that is left of one whose axes are reduced."""
    if keepdim:
        return tuple([1 if axis in axes else extent for axis, extent in enumerate(shape)])
    return tuple([extent for axis, extent in enumerate(shape) if axis not in axes])


def with_extent(shape: Shape, axis: int, extent: int) -> Shape:
    """The shape with another extent along one axis."""
    return (*shape[:axis], extent, *shape[axis + 1 :])
