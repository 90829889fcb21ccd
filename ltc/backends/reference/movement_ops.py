"""What the reference computes for ops that move elements: views, joins, and lookups by index."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ltc.ir.node import Node

Compute = Callable[..., Any]


def permute(node: Node) -> Compute:
    dims = node.attr("dims")
    return lambda x: x.permute(dims)


def _slices(node: Node) -> tuple[slice, ...]:
    return tuple(map(slice, node.attr("starts"), node.attr("limits"), node.attr("steps")))


def slice_of(node: Node) -> Compute:
    slices = _slices(node)
    return lambda x: x[slices]


def expand(node: Node) -> Compute:
    shape = node.shape
    return lambda x: x.expand(shape)


def reshape(node: Node) -> Compute:
    shape = node.shape
    return lambda x: x.reshape(shape)


def flip(node: Node) -> Compute:
    dims = node.attr("dims")
    return lambda x: torch.flip(x, dims)


def pad(node: Node) -> Compute:
    inner = tuple(slice(a, a + n) for a, n in zip(node.attr("low"), node.inputs[0].shape))
    shape = node.shape

    def compute(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        result = torch.empty(shape, dtype=x.dtype)
        result.copy_(value)
        result[inner] = x
        return result

    return compute


def concat(node: Node) -> Compute:
    dim = node.attr("dim")
    return lambda *parts: torch.cat(parts, dim)


def insert(node: Node) -> Compute:
    starts, steps, extents = node.attr("starts"), node.attr("steps"), node.inputs[1].shape
    region = tuple(
        slice(start, start + max((n - 1) * step + 1, 0) if n else start, step)
        for start, step, n in zip(starts, steps, extents)
    )

    def compute(base: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        result = base.clone(memory_format=torch.contiguous_format)
        result[region] = new
        return result

    return compute


def take(node: Node) -> Compute:
    dim, shape = node.attr("dim"), node.shape
    return lambda x, index: torch.index_select(x, dim, index.reshape(-1)).reshape(shape)


_REDUCTIONS = {"multiply": "prod", "maximum": "amax", "minimum": "amin"}


def put(node: Node) -> Compute:
    dim, base_shape, mode = node.attr("dim"), node.shape, node.attr("mode")
    lead, trail = base_shape[:dim], base_shape[dim + 1 :]
    count = node.inputs[1].size
    if mode in _REDUCTIONS:
        function, of_rows = _scattered(mode), (count, *(1,) * len(trail))
    else:
        function, of_rows = {"set": torch.index_copy, "add": torch.index_add}[mode], (count,)

    def compute(base: torch.Tensor, index: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        rows, index = new.reshape(*lead, count, *trail), index.reshape(of_rows)
        index = index.expand_as(rows) if mode in _REDUCTIONS else index
        made: torch.Tensor = function(base, dim, index, rows)
        return made

    return compute


def _scattered(mode: str) -> Compute:
    """(base, dim, index, new) by elements."""
    if mode in _REDUCTIONS:
        return functools.partial(torch.scatter_reduce, reduce=_REDUCTIONS[mode])
    return {"set": torch.scatter, "add": torch.scatter_add}[mode]


def gather(node: Node) -> Compute:
    dim = node.attr("dim")
    return lambda x, index: torch.gather(x, dim, index)


def scatter(node: Node) -> Compute:
    dim, function = node.attr("dim"), _scattered(node.attr("mode"))
    return lambda base, index, new: function(base, dim, index, new)
