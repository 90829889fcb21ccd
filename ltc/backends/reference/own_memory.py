"""Values with memory of their own; where no machine's would do, what refuses to make them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ltc.backends.reference.donation import SHARES_MEMORY
from ltc.ir import ops
from ltc.ir.node import Node
from ltc.ir.tensor_type import TensorType
from ltc.support.process import machine_memory

_PASSES_ON = SHARES_MEMORY | {ops.GET, ops.TO_SYMMETRIC}


def owned(x: torch.Tensor) -> torch.Tensor:
    """`x` contiguous, and alone in its memory."""
    x = x.contiguous()
    return x.clone() if x.untyped_storage().nbytes() > x.nbytes else x


def copied(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def made_by(node: Node, compute: Callable[..., Any]) -> Callable[..., Any]:
    """`compute`, which gives what the node is; or what raises OutOfMemory in its place."""
    return compute if node.op in _PASSES_ON else in_memory(node, compute)


def in_memory(node: Node, compute: Callable[..., Any]) -> Callable[..., Any]:
    """The same of what gives it memory even where it is a view."""
    types = (node.type,) if isinstance(node.type, TensorType) else node.type
    nbytes = sum(type.size * type.dtype.itemsize for type in types)
    if nbytes <= machine_memory.total():
        return compute

    def refuse(*operands: Any) -> None:
        machine_memory.require(nbytes)

    return refuse
