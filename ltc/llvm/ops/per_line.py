"""Kernels that walk along one dimension: every line of it is one task's work, in order.

A tensor is [outer, extent, inner] around the dimension. Where inner is 1 a line is contiguous;
else neighbouring lines lie side by side, and a vector holds one element of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from ltc.ir.node import Node
from ltc.llvm.emit import memory_ops
from ltc.llvm.emit.builder import LANES, Builder, function_text
from ltc.llvm.emit.index import Index
from ltc.llvm.emit.kernel_code import KernelCode

ELEMENTS_OF_A_TASK = 1 << 14
MOST_TASKS = 64

# (builder, offset of the first element, number of the outer index, of the inner, mask) -> None
Walk = Callable[[Builder, Index, Index, Index, "str | None"], None]


@dataclass(frozen=True)
class Lines:
    """All lines of a tensor along one dimension."""

    outer: int
    extent: int
    inner: int

    @property
    def tasks(self) -> int:
        groups = self.outer * -(-self.inner // LANES)
        work = self.outer * self.extent * self.inner
        return max(1, min(groups, work // ELEMENTS_OF_A_TASK, MOST_TASKS))


def lines_along(node: Node, dim: int) -> Lines:
    shape = node.shape
    return Lines(prod(shape[:dim]), shape[dim], prod(shape[dim + 1 :]))


def along_lines(lines: Lines, nodes: tuple, walk: Walk) -> KernelCode:
    """A kernel that walks all lines; `walk` is given vectors of lines, or one line at a time."""
    b = Builder()
    width = LANES if lines.inner > 1 else 1
    groups = -(-lines.inner // width)
    low, high = b.share(b.number(0))
    size = lines.extent * lines.inner

    def one(group: Index, _) -> None:
        outer, column = group // groups, group % groups * width
        first = outer * size + column
        rest = lines.inner % width
        with b.lanes(width):
            if not rest:
                walk(b, first, outer, column, None)
                return
            is_last = b.value(f"icmp eq i64 {column}, {lines.inner - rest}")
            mask = memory_ops.first_lanes(b, rest)
            whole = b.value(f"xor i1 {is_last}, true")
            b.when(whole, (), lambda: walk(b, first, outer, column, None))
            b.when(is_last, (), lambda: walk(b, first, outer, column, mask))

    b.loop(low, high, 1, (), one)
    text = function_text("kernel", len(nodes), b, numbers=1)
    return KernelCode(text, nodes, lines.tasks, numbers=(lines.outer * groups,))
