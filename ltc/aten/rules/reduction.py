"""Rules of the overloads that combine elements along dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ltc.aten.legal_values import fraction
from ltc.aten.promote import compute_dtype
from ltc.aten.registry import traces
from ltc.ir import build, ops
from ltc.ir.build import where
from ltc.ir.node import Node, Operand, like, make
from ltc.ir.tensor_type import TensorType


def _as_result(x: Node, results: Any) -> Node:
    """x in the dtype in which a reduction to the recorded dtype computes."""
    return build.cast(x, compute_dtype(results[0].dtype))


@traces("aten::sum")
def sum_all(x: Node, dtype: torch.dtype | None = None, *, results: Sequence[TensorType]) -> Node:
    return build.sum_of(_as_result(x, results))


@traces("aten::sum.dim_IntList")
def sum_dims(
    x: Node,
    dim: Sequence[int] | None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    *,
    results: Sequence[TensorType],
) -> Node:
    return build.sum_of(_as_result(x, results), dim, keepdim)


@traces("aten::nansum")
def nansum(
    x: Node,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    *,
    results: Sequence[TensorType],
) -> Node:
    x = _as_result(x, results)
    return build.sum_of(where(build.is_nan(x), 0, x), dim, keepdim)


@traces("aten::mean")
def mean_all(x: Node, dtype: torch.dtype | None = None, *, results: Sequence[TensorType]) -> Node:
    return mean_dims(x, None, results=results)


@traces("aten::mean.dim")
def mean_dims(
    x: Node,
    dim: Sequence[int] | None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    *,
    results: Sequence[TensorType],
) -> Node:
    return build.mean_of(_as_result(x, results), dim, keepdim)


@traces("aten::prod")
def prod_all(x: Node, dtype: torch.dtype | None = None, *, results: Sequence[TensorType]) -> Node:
    return build.reduce(ops.PROD, _as_result(x, results))


@traces("aten::prod.dim_int")
def prod_dim(
    x: Node,
    dim: int,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    *,
    results: Sequence[TensorType],
) -> Node:
    return build.reduce(ops.PROD, _as_result(x, results), dim, keepdim)


def _is_empty(x: Node, dim: Any) -> bool:
    return build.count_of(x, dim) == 0


@traces("aten::amax")
def amax(x: Node, dim: Sequence[int] = (), keepdim: bool = False) -> Node:
    return NotImplemented if _is_empty(x, dim) else build.reduce(ops.MAX, x, dim, keepdim)


@traces("aten::amin")
def amin(x: Node, dim: Sequence[int] = (), keepdim: bool = False) -> Node:
    return NotImplemented if _is_empty(x, dim) else build.reduce(ops.MIN, x, dim, keepdim)


@traces("aten::max")
def max_all(x: Node) -> Node:
    return amax(x)


@traces("aten::min")
def min_all(x: Node) -> Node:
    return amin(x)


def _chosen(op: ops.Op, x: Node, dim: int | None, keepdim: bool) -> Node:
    """The position along `dim`, or in the flattened tensor for None."""
    if dim is None:
        index = make(op, build.reshape(x, (-1,)), dim=0) if x.size else NotImplemented
        return build.reshape(index, (1,) * len(x.shape)) if keepdim else index
    if not x.shape:
        return build.full((), 0, torch.int64)
    dim = build.dim_of(x, dim)
    index = make(op, x, dim=dim)
    return build.unsqueeze(index, dim) if keepdim else index


@traces("aten::argmax")
def argmax(x: Node, dim: int | None = None, keepdim: bool = False) -> Node:
    if _is_empty(x, dim) or x.dtype == torch.bool:
        return NotImplemented
    return _chosen(ops.ARGMAX, x, dim, keepdim)


@traces("aten::argmin")
def argmin(x: Node, dim: int | None = None, keepdim: bool = False) -> Node:
    if _is_empty(x, dim) or x.dtype == torch.bool:
        return NotImplemented
    return _chosen(ops.ARGMIN, x, dim, keepdim)


@traces("aten::max.dim")
def max_dim(x: Node, dim: int, keepdim: bool = False) -> tuple[Node, Node]:
    if _is_empty(x, dim) or x.dtype == torch.bool:
        return NotImplemented
    return amax(x, dim, keepdim), _chosen(ops.ARGMAX, x, dim, keepdim)


@traces("aten::min.dim")
def min_dim(x: Node, dim: int, keepdim: bool = False) -> tuple[Node, Node]:
    if _is_empty(x, dim) or x.dtype == torch.bool:
        return NotImplemented
    return amin(x, dim, keepdim), _chosen(ops.ARGMIN, x, dim, keepdim)


@traces("aten::aminmax")
def aminmax(x: Node, dim: int | None = None, keepdim: bool = False) -> tuple[Node, Node]:
    return NotImplemented if _is_empty(x, dim) else (amin(x, dim, keepdim), amax(x, dim, keepdim))


@traces("aten::any", "aten::any.dim", "aten::any.dims")
def any_of(x: Node, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Node:
    if dim is not None and not isinstance(dim, int) and not tuple(dim):
        return NotImplemented  # an empty list of dimensions is torch's own special case
    return build.reduce(ops.ANY, build.cast(x, torch.bool), dim, keepdim)


@traces("aten::all", "aten::all.dim", "aten::all.dims")
def all_of(x: Node, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Node:
    if dim is not None and not isinstance(dim, int) and not tuple(dim):
        return NotImplemented
    return build.reduce(ops.ALL_TRUE, build.cast(x, torch.bool), dim, keepdim)


@traces("aten::count_nonzero", "aten::count_nonzero.dim_IntList")
def count_nonzero(x: Node, dim: int | Sequence[int] | None = None) -> Node:
    nonzero = build.cast(build.cast(x, torch.bool), torch.int64)
    return build.sum_of(nonzero, dim)


@traces("aten::cumsum")
def cumsum(
    x: Node, dim: int, dtype: torch.dtype | None = None, *, results: Sequence[TensorType]
) -> Node:
    x = _as_result(x, results)
    return make(ops.CUMSUM, x, dim=build.dim_of(x, dim)) if x.shape else x


@traces("aten::cumprod")
def cumprod(
    x: Node, dim: int, dtype: torch.dtype | None = None, *, results: Sequence[TensorType]
) -> Node:
    x = _as_result(x, results)
    return make(ops.CUMPROD, x, dim=build.dim_of(x, dim)) if x.shape else x


# --- moments -------------------------------------------------------------------------------------


def _moments(x: Node, dim: Any, correction: Any, keepdim: bool) -> tuple[Node, Node]:
    """(variance, mean): squared distances from the mean, over their number less `correction`.

    The mean is rounded, so the distances' own mean is taken off them: equal numbers vary by 0.
    """
    x = build.cast(x, compute_dtype(x.dtype))
    mean = build.mean_of(x, dim, keepdim=True)
    distance = x - mean
    distance = distance - build.mean_of(distance, dim, keepdim=True)
    freedom = max(build.count_of(x, dim) - (1 if correction is None else correction), 0)
    variance = build.sum_of(distance * distance, dim, keepdim) / freedom
    if not keepdim:
        mean = build.reshape(mean, variance.shape)
    return variance, mean


def _moments_rule(has_root: bool, has_mean: bool) -> Callable[..., Any]:
    def rule(
        x: Node,
        dim: Sequence[int] | None = None,
        correction: Operand | None = None,
        keepdim: bool = False,
    ) -> Any:
        variance, mean = _moments(x, dim, correction, keepdim)
        spread = build.sqrt(variance) if has_root else variance
        return (spread, mean) if has_mean else spread

    return rule


for _name in ("var", "std", "var_mean", "std_mean"):
    _rule = _moments_rule(_name.startswith("std"), _name.endswith("mean"))
    traces(f"aten::{_name}.correction", static={"correction": None})(_rule)


@traces("aten::logsumexp")
def logsumexp(x: Node, dim: Sequence[int], keepdim: bool = False) -> Node:
    """log of the sum of exponentials, taken from the largest; an infinite largest is not taken."""
    if _is_empty(x, dim) or not x.dtype.is_floating_point:
        return NotImplemented
    x = build.cast(x, compute_dtype(x.dtype))
    high = build.max_of(x, dim, keepdim=True)
    high = where(build.eq(build.absolute(high), math.inf), 0.0, high)
    total = build.log(build.sum_of(build.exp(x - high), dim, keepdim=True)) + high
    return total if keepdim else build.reshape(total, build.sum_of(x, dim).shape)


@traces("ltc::quantile_fractions")
def quantile_fractions(q: Node) -> Node:
    return fraction(q, "quantile() q values must be in the range [0, 1]")


# --- norms ---------------------------------------------------------------------------------------


def vector_norm(x: Node, order: float, dim: Any, keepdim: bool) -> Node:
    """(sum |x| ** order) ** (1 / order), and its limits for 0 and +- infinity."""
    if order == math.inf:
        return build.reduce(ops.MAX, build.absolute(x), dim, keepdim)
    if order == -math.inf:
        return build.reduce(ops.MIN, build.absolute(x), dim, keepdim)
    if order == 0:
        return build.sum_of(build.cast(build.ne(x, 0), x.dtype), dim, keepdim)
    if order == 1:
        return build.sum_of(build.absolute(x), dim, keepdim)
    if order == 2:
        return build.sqrt(build.sum_of(x * x, dim, keepdim))
    powers = build.power(build.absolute(x), like(order, x))
    return build.power(build.sum_of(powers, dim, keepdim), 1.0 / order)


@traces("aten::linalg_vector_norm", static={"ord": None})
def linalg_vector_norm(
    x: Node,
    ord: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    *,
    results: Sequence[TensorType],
) -> Node:
    if _is_empty(x, dim):
        return NotImplemented
    return vector_norm(_as_result(x, results), ord, dim, keepdim)


@traces(
    "aten::norm.ScalarOpt_dim",
    "aten::norm.ScalarOpt_dim_dtype",
    "aten::norm.ScalarOpt_dtype",
    static={"p": None},
)
def norm(
    x: Node,
    p: float | None = None,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    *,
    results: Sequence[TensorType],
) -> Node:
    if _is_empty(x, dim):
        return NotImplemented
    return vector_norm(_as_result(x, results), 2 if p is None else p, dim, keepdim)


@traces("aten::norm.Scalar", static={"p": None})
def norm_all(x: Node, p: float = 2, *, results: Sequence[TensorType]) -> Node:
    return norm(x, p, results=results)
