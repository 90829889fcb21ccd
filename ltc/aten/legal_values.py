"""The demands of rules on values, as PyTorch's kernels for the CPU make them, in their words."""

from __future__ import annotations

from ltc.ir import build
from ltc.ir.node import Node


def fraction(x: Node, message: str) -> Node:
    """x, each element of which is to lie from 0 to 1; one that is no number does not."""
    return build.check(x, (x >= 0) & (x <= 1), message)
