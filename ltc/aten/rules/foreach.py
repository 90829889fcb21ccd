"""Rules of the overloads on lists of tensors: the rule of one tensor, for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ltc.aten.promote import compute_dtype
from ltc.aten.registry import traces
from ltc.aten.rules import pointwise, reduction
from ltc.ir import build
from ltc.ir.node import Node
from ltc.ir.tensor_type import TensorType


def _each(function: Callable[..., Any]) -> Callable[..., Any]:
    """A rule for lists: every list among the arguments gives its i-th element to the i-th call."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        count = next(len(a) for a in args if isinstance(a, list))
        made = []
        for i in range(count):
            own = [a[i] if isinstance(a, list) else a for a in args]
            named = {k: a[i] if isinstance(a, list) else a for k, a in kwargs.items()}
            made.append(function(*own, **named))
        return NotImplemented if any(m is NotImplemented for m in made) else made

    return rule


TWO_OPERANDS = {
    "add": pointwise.add,
    "sub": pointwise.subtract,
    "mul": pointwise.multiply,
    "div": pointwise.divide,
    "maximum": pointwise.maximum,
    "minimum": pointwise.minimum,
    "clamp_min": pointwise.clamp_min,
    "clamp_max": pointwise.clamp_max,
}
for _name, _function in TWO_OPERANDS.items():
    for _variant in ("Scalar", "ScalarList"):
        traces(f"aten::_foreach_{_name}.{_variant}")(_each(_function))
    _static = pointwise.ALPHA if _name in ("add", "sub") else None
    traces(f"aten::_foreach_{_name}.List", static=_static)(_each(_function))

for _name in ("add", "mul", "div"):
    traces(f"aten::_foreach_{_name}.Tensor")(_each(TWO_OPERANDS[_name]))

ONE_OPERAND = {
    "abs": pointwise.absolute,
    "neg": pointwise.neg,
    "sign": pointwise.sign,
    "reciprocal": pointwise.reciprocal,
    "sigmoid": pointwise.sigmoid,
    "frac": pointwise.frac,
}
for _name, _function in ONE_OPERAND.items():
    traces(f"aten::_foreach_{_name}")(_each(_function))

for _name in (
    "exp", "expm1", "log", "log1p", "log2", "log10", "sqrt", "rsqrt", "sin", "cos", "tan", "asin",
    "acos", "atan", "sinh", "cosh", "tanh", "erf", "erfc", "lgamma",
):  # fmt: skip
    traces(f"aten::_foreach_{_name}")(_each(pointwise.real_function(_name)))

for _name in ("floor", "ceil", "trunc", "round"):
    traces(f"aten::_foreach_{_name}")(_each(pointwise.whole_function(_name)))


def _scalars_of(values: Any, count: int) -> Any:
    """One number for each tensor: a 1-D tensor of them becomes a list."""
    if isinstance(values, Node) and values.shape:
        return [build.select(values, 0, i) for i in range(count)]
    return values


def _with_value(function: Callable[..., Any]) -> Callable[..., Any]:
    def rule(x: Any, a: Any, b: Any, value: Any = 1) -> Any:
        return _each(function)(x, a, b, _scalars_of(value, len(x)))

    return rule


for _name, _function in {"addcmul": pointwise.addcmul, "addcdiv": pointwise.addcdiv}.items():
    for _variant in ("Scalar", "ScalarList", "Tensor"):
        traces(f"aten::_foreach_{_name}.{_variant}")(_with_value(_function))

for _variant in ("List", "Scalar", "ScalarList"):
    traces(f"aten::_foreach_lerp.{_variant}")(_each(pointwise.lerp))

traces("aten::_foreach_pow.List", "aten::_foreach_pow.ScalarAndTensor")(_each(pointwise.power))
traces(
    "aten::_foreach_pow.Scalar",
    "aten::_foreach_pow.ScalarList",
    static={"exponent": pointwise.EXPONENTS},
)(_each(pointwise.power_of_number))


@traces("aten::_foreach_copy", moves=True)
def foreach_copy(x: Sequence[Node], src: Sequence[Node], non_blocking: bool = False) -> Node:
    return _each(pointwise.copy)(x, src)


@traces("aten::_foreach_zero", moves=True)
def foreach_zero(x: Sequence[Node]) -> list[Node]:
    return [build.full_like(t, 0) for t in x]


@traces("aten::_foreach_norm.Scalar", static={"ord": None})
def foreach_norm(
    x: Sequence[Node],
    ord: float = 2,
    dtype: torch.dtype | None = None,
    *,
    results: Sequence[TensorType],
) -> list[Node]:
    if not all(t.size for t in x):
        return NotImplemented
    computed = [build.cast(t, compute_dtype(r.dtype)) for t, r in zip(x, results)]
    return [reduction.vector_norm(t, ord, None, False) for t in computed]


@traces("aten::_foreach_max")
def foreach_max(x: Sequence[Node]) -> Node:
    return _each(reduction.max_all)(x)
