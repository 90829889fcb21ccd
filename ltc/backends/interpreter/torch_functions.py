"""What is to be known of PyTorch's functions before one is called in place of a recorded call."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch

from ltc.aten.schema import schema_of
from ltc.aten.wide_sums import cpu_function_of, in_wide_sums
from ltc.errors import OutOfRangeIndexError
from ltc.support.torch_private import bound_function, has_kernel

# Overloads that torch's functions tell apart by what they are given: tensors or numbers, one
# argument more or less; those of numbers alone, for TorchScript, of `out=`, and of named dimensions
# (`names_dim`, until torch 2.12).
_TOLD_APART = frozenset(
    """
    default Tensor Scalar Tensor_Tensor Tensor_Scalar Scalar_Tensor other self ScalarOther ScalarSelf
    dim dims dim_int dim_IntList dtype Tensor_mode Scalar_mode
""".split()
)
_NEVER_MEANT = re.compile(
    r"((int|float|complex|bool|str|enum|device|t|to|left|right|list|Scalar)_?)+|.*([oO]ut|imname|names).*|dim_(max|min)"
)


# a number before a number is an `alpha` to these, of old, with a warning
_TAKEN_FOR_OTHERS = frozenset({"aten::add.Scalar", "aten::sub.Scalar"})


@functools.cache
def quick_function(name: str, overload: Any) -> Callable[..., Any] | None:
    """torch's Python function, where it comes to no other overload than this one; else None.

    It takes its arguments in half the time, and is to be given all that are positional. Of a number
    `add.Scalar` and its like make a tensor first, as their kernels do.

    name  of the overload: "aten::add.Scalar"
    """
    base, _, variant = name.removeprefix("aten::").partition(".")
    if name in _TAKEN_FOR_OTHERS or name in _LOOKS_FIRST or not name.startswith("aten::"):
        return None
    if torch.Tag.nondeterministic_seeded in overload.tags:
        return None
    known = set(overload.overloadpacket.overloads()) - {variant or "default"}
    others = {one for one in known if one in _TOLD_APART or not _NEVER_MEANT.fullmatch(one)}
    if others and not {variant or "default", *others} <= _TOLD_APART:
        return None
    quick = bound_function(base)
    return None if quick is None else in_wide_sums(overload, quick)


def function_in_place_of(name: str, overload: Any) -> Callable[..., Any]:
    """The overload's CPU function; for a gradient whose kernel trusts that its forward has looked at
    the values, which nobody runs where its result is not needed, one that looks first."""
    return _LOOKS_FIRST.get(name) or cpu_function_of(overload)


def _bce_gradient(
    grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, *rest: Any, **named: Any
) -> torch.Tensor:
    _aten.binary_cross_entropy(x, target)
    made: torch.Tensor = _aten.binary_cross_entropy_backward(grad, x, target, *rest, **named)
    return made


def _embedding_gradient(
    grad: torch.Tensor, indices: torch.Tensor, num_weights: int, *rest: Any, **named: Any
) -> torch.Tensor:
    if indices.numel():
        low, high = torch.aminmax(indices)
        if low < 0 or high >= num_weights:
            raise OutOfRangeIndexError("index out of range in self")
    kernel = cpu_function_of(_aten.embedding_dense_backward.default)
    made: torch.Tensor = kernel(grad, indices, num_weights, *rest, **named)
    return made


_aten = torch.ops.aten
_LOOKS_FIRST: dict[str, Callable[..., Any]] = {
    "aten::binary_cross_entropy_backward": _bce_gradient,
    "aten::embedding_dense_backward": _embedding_gradient,
}


@functools.cache
def positional_arguments(name: str) -> int:
    """How many the overload has: of those left out, torch's functions may have other defaults."""
    schema = schema_of(name)
    return 0 if schema is None else sum(not one.kwarg_only for one in schema.arguments)


@functools.cache
def begins_undefined(name: str) -> bool:
    """Whether torch's kernel leaves memory as it is, or asks what lies behind its operand."""
    base = name.partition("::")[2].partition(".")[0]
    return base.startswith(("empty", "new_empty", "as_strided", "resize", "set_"))


@functools.cache
def may_return_operand(name: str) -> bool:
    """Whether a tensor it returns may be one that it was given, and not a new one."""
    return name != "aten::linear" and bool(has_kernel(name, "CompositeImplicitAutograd"))
