"""What raises where a value is not what it has to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ltc.errors import OutOfRangeIndexError
from ltc.ir.node import Node

Compute = Callable[..., Any]


def wrap_index(node: Node) -> Compute:
    size, lowest, message = (node.attr(name) for name in ("size", "lowest", "message"))

    def compute(index: torch.Tensor) -> torch.Tensor:
        wrong = (index < lowest) | (index >= size)
        if wrong.any():
            raise OutOfRangeIndexError(message.format(index[wrong][0].item()))
        return torch.where(index < 0, index + size, index)

    return compute


def check(node: Node) -> Compute:
    message = node.attr("message")

    def compute(x: torch.Tensor, holds: torch.Tensor) -> torch.Tensor:
        if not holds.all():
            raise RuntimeError(message.format(x[~holds][0].item()))
        return x.clone()

    return compute
