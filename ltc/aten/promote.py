"""The dtype in which a formula over mixed operands computes: torch's promotion, step by step.

An operand is a node or a Python number. Tensors with dimensions outrank 0-dim ones, and those
outrank numbers, unless the lower rank is of a higher category (bool, integer, float, complex).
Source: `update_result_type_state` and `result_type` in ATen/native/TypeProperties.cpp.
"""

from __future__ import annotations

from typing import Any

import torch

from ltc.aten.unnamed_dtype import default_dtype
from ltc.ir import build
from ltc.ir.node import Node, constant, is_number
from ltc.ir.tensor_type import LOW_PRECISION

WRAPPED = {bool: torch.bool, int: torch.int64}
COMPLEX_OF = {
    torch.float16: torch.complex32,
    torch.bfloat16: torch.complex64,
    torch.float32: torch.complex64,
    torch.float64: torch.complex128,
}


def number_dtype(operand: Any) -> torch.dtype:
    """Return the dtype of a wrapped number: a float is of the default dtype."""
    dtype = operand.dtype if isinstance(operand, Node) else WRAPPED.get(type(operand))
    if dtype in (torch.bool, torch.int64):
        return dtype
    default = default_dtype()
    is_complex = isinstance(operand, complex) or (dtype is not None and dtype.is_complex)
    return COMPLEX_OF[default] if is_complex else default


def _combine(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
    if higher is None or lower is None:
        return higher or lower
    if higher.is_complex:
        return higher
    if higher.is_floating_point:
        return COMPLEX_OF[higher] if lower.is_complex else higher
    if higher == torch.bool or lower.is_floating_point or lower.is_complex:
        return torch.promote_types(higher, lower)
    return higher


def _highest(dtypes: list[torch.dtype]) -> torch.dtype | None:
    result = None
    for dtype in dtypes:
        result = dtype if result is None else torch.promote_types(result, dtype)
    return result


def common_dtype(*operands: Any) -> torch.dtype:
    """torch.result_type of these operands; None among them is left out."""
    operands = tuple(x for x in operands if x is not None)
    tensors = [x for x in operands if isinstance(x, Node) and not is_number(x)]
    return dtype_of_ranks(
        [x.dtype for x in tensors if x.shape],
        [x.dtype for x in tensors if not x.shape],
        [number_dtype(x) for x in operands if is_number(x)],
    )


def dtype_of_ranks(
    dimensioned: list[torch.dtype], zero_dim: list[torch.dtype], numbers: list[torch.dtype]
) -> torch.dtype:
    """The same of the operands' dtypes: of tensors with dimensions, of 0-dim ones, of numbers."""
    dtype = _combine(_highest(dimensioned), _combine(_highest(zero_dim), _highest(numbers)))
    assert dtype is not None, "promotion of nothing"
    return dtype


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Low precision computes in float32; the result is rounded once, when a rule returns it."""
    return torch.float32 if dtype in LOW_PRECISION else dtype


def to_dtype(operand: Any, dtype: torch.dtype) -> Any:
    """A tensor or number as a node of `dtype`; None stays None."""
    if operand is None:
        return None
    return build.cast(operand, dtype) if isinstance(operand, Node) else constant(operand, dtype)


def _widened(operand: Any, dtype: torch.dtype) -> Any:
    """The operand rounded to `dtype`, then as what that computes in."""
    return to_dtype(to_dtype(operand, dtype), compute_dtype(dtype))


def promote(*operands: Any) -> tuple[Node, ...]:
    """The operands as nodes of the dtype in which torch computes with them."""
    dtype = common_dtype(*operands)
    return tuple(_widened(x, dtype) for x in operands)


def promote_exact(*operands: Any) -> tuple[Node, ...]:
    """The same without the step to float32: for comparisons, minima and bit operations."""
    dtype = common_dtype(*operands)
    return tuple(to_dtype(x, dtype) for x in operands)


def float_dtype(*operands: Any) -> torch.dtype:
    """Return the dtype of a function of real numbers: integers and bool become the default float."""
    dtype = common_dtype(*operands)
    is_number = dtype.is_floating_point or dtype.is_complex
    return dtype if is_number else default_dtype()


def promote_float(*operands: Any) -> tuple[Node, ...]:
    """The same as `promote`, for a function of real numbers."""
    dtype = float_dtype(*operands)
    return tuple(_widened(x, dtype) for x in operands)


def promote_factors(x: Any, y: Any, real: bool = False) -> tuple[Node, Node]:
    """The same for products and quotients, of which torch does not round a 0-dim right operand.

    Args:
        real: A quotient: integers become the default float.
    """
    dtype = float_dtype(x, y) if real else common_dtype(x, y)
    whole = not isinstance(y, Node) or not y.shape
    right = to_dtype(y, compute_dtype(dtype)) if whole else _widened(y, dtype)
    return _widened(x, dtype), right
