"""How the reference calls torch's reductions and scans: over the dimensions that a node names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ltc.ir.node import Node

Compute = Callable[..., Any]


def over_dims(function: Compute) -> Callable[[Node], Compute]:
    def row(node: Node) -> Compute:
        dims, dtype = node.attr("dims"), node.dtype
        if not dims:  # torch would reduce all of them
            return lambda x: x.to(dtype)
        return lambda x: function(x, dims)

    return row


def sum_of_dims(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    return torch.sum(x, dims, dtype=x.dtype)


def product_of_dims(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    for dim in reversed(dims):
        x = torch.prod(x, dim, dtype=x.dtype)
    return x


def along_dim(function: Compute) -> Callable[[Node], Compute]:
    def row(node: Node) -> Compute:
        dim = node.attr("dim")
        return lambda x: function(x, dim)

    return row


def scan(function: Compute) -> Callable[[Node], Compute]:
    def row(node: Node) -> Compute:
        dim, dtype = node.attr("dim"), node.dtype
        return lambda x: function(x, dim, dtype=dtype)

    return row
