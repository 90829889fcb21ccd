"""Elements written, or reduced with what is there, where an index says: PUT and SCATTER.

The result begins as a copy of the base, or filled where the base is one number. Each task owns a
range of rows of the result and takes what goes there in the order of the indices: sums come out
the same whatever the number of threads, of equal indices the last one is kept, and a row that no
index names is not touched again. An index outside its dimension goes nowhere.
"""

from __future__ import annotations

from math import prod

import torch

from ltc.ir import ops
from ltc.ir.loop_nest import Product, strides_of
from ltc.ir.node import Node
from ltc.llvm.emit import memory_ops
from ltc.llvm.emit.builder import LANES, Builder, function_text
from ltc.llvm.emit.conversions import from_memory, to_memory
from ltc.llvm.emit.dtype import FORMS, Form
from ltc.llvm.emit.elementwise import ROWS, rounded
from ltc.llvm.emit.index import Index
from ltc.llvm.emit.kernel_code import KernelCode
from ltc.llvm.ops.copying import copy_code, fill_code
from ltc.support.sizes.choices import least, most

# Every task reads all indices of its rows: many pay where a row is more than an index.
MOST_PARTS = 16
FEWEST_ELEMENTS_OF_A_TASK = 1 << 13
_REDUCED_BY = {
    "add": ops.ADD, "multiply": ops.MUL, "maximum": ops.MAXIMUM, "minimum": ops.MINIMUM,
}  # fmt: skip


def can_scatter(node: Node) -> bool:
    """Whether kernels are generated for a PUT or SCATTER."""
    reduces_truths = node.attr("mode") != "set" and node.dtype == torch.bool
    return all(n.dtype in FORMS and n.size for n in (node, *node.inputs)) and not reduces_truths


def scatter_codes(product: Product) -> list[KernelCode]:
    base, index, new = (one.node for one in product.operands)
    node, (result,) = product.node, product.results
    begin = fill_code if base.op is ops.CONSTANT else copy_code
    first = begin(base, result, node.size, node.dtype)
    write = _put if node.op is ops.PUT else _scatter
    return [first, write(node, index, new, result)]


def _put(node: Node, index, new, result) -> KernelCode:
    """Whole rows: new[l, i, :] to result[l, index[i], :]."""
    dim = node.attr("dim")
    lead, rows = prod(node.shape[:dim]), node.shape[dim]
    width = prod(node.shape[dim + 1 :])
    count = node.inputs[1].size
    parts = _parts(lead, rows, count * width, width)
    b, form = Builder(), FORMS[node.dtype]
    move = _mover(b, form, node.attr("mode"))

    with b.lanes(1):
        line, low, size = _range(b)
        taken, rows_of_line = b.number(0), b.number(1)

        def one(i: Index, _) -> None:
            row = b.index(b.effect(f"load i64, ptr {b.address('%p0', i, 'i64')}, align 8"))
            inside = b.value(f"icmp ult i64 {row - low}, {size}")

            def write() -> None:
                target = (line * rows_of_line + row) * width
                source = (line * taken + i) * width
                _row(b, form, width, source, target, move)

            b.when(inside, (), write)

        b.loop(0, taken, 1, (), one)
    text = function_text("kernel", 3, b, numbers=3)
    return KernelCode(text, (index, new, result), lead * parts, numbers=(count, rows, parts))


def _row(b: Builder, form: Form, width: int, source: Index, target: Index, move) -> None:
    """`width` neighbouring elements, in vectors where there are enough."""
    if width < LANES // 2:
        b.loop(0, width, 1, (), lambda k, _: move(source + k, target + k, None))
        return
    with b.lanes(LANES):
        whole = width // LANES * LANES
        if whole:
            b.loop(0, whole, LANES, (), lambda k, _: move(source + k, target + k, None))
        if width > whole:
            mask = memory_ops.first_lanes(b, width - whole)
            move(source + whole, target + whole, mask)


def _mover(b: Builder, form: Form, mode: str):
    """What takes elements of %p1 to %p2, or reduces them with what is there."""
    reduced_by = _REDUCED_BY.get(mode)

    def move(source: Index, target: Index, mask: str | None) -> None:
        address = b.address("%p2", target, form.stored)
        new = memory_ops.load(b, b.address("%p1", source, form.stored), form.stored, mask)
        if reduced_by is not None:
            old = from_memory(b, form, memory_ops.load(b, address, form.stored, mask))
            both = ROWS[reduced_by](b, form, old, from_memory(b, form, new))
            new = to_memory(b, form, rounded(b, form, both))
        memory_ops.store(b, new, address, form.stored, mask)

    return move


def _scatter(node: Node, index, new, result) -> KernelCode:
    """Single elements: new[l, i, t] to result[l, index[l, i, t], t]."""
    dim, shape, taken = node.attr("dim"), node.shape, node.inputs[1].shape
    lead, count, trail = prod(taken[:dim]), taken[dim], prod(taken[dim + 1 :])
    parts = _parts(lead, shape[dim], count * trail, 1)
    strides = strides_of(shape)
    b, form = Builder(), FORMS[node.dtype]
    move = _mover(b, form, node.attr("mode"))
    with b.lanes(1):
        line, low, size = _range(b)
        start = _position(line, taken[:dim], strides[:dim])

        def one(i: Index, t: Index, _) -> None:
            place = (line * b.number(0) + i) * trail + t
            row = b.index(b.effect(f"load i64, ptr {b.address('%p0', place, 'i64')}, align 8"))
            inside = b.value(f"icmp ult i64 {row - low}, {size}")

            def write() -> None:
                column = _position(t, taken[dim + 1 :], strides[dim + 1 :])
                target = start + row * strides[dim] + column
                move(place, target, None)

            b.when(inside, (), write)

        b.nest((b.number(0), trail), (), one)
    text = function_text("kernel", 3, b, numbers=3)
    numbers = (count, shape[dim], parts)
    return KernelCode(text, (index, new, result), lead * parts, numbers=numbers)


def _parts(lead: int, rows: int, elements: int, width: int) -> int:
    """Into how many ranges the rows of a line are cut."""
    parts = MOST_PARTS if width >= LANES else MOST_PARTS // 4
    by_work = lead * elements // FEWEST_ELEMENTS_OF_A_TASK
    return most(1, least(parts // least(lead, parts), by_work, rows))


def _range(b: Builder) -> tuple[Index, Index, Index]:
    """This task's line, and its first row and how many it has; %n1 rows are cut in %n2 parts."""
    task, rows, parts = b.index("%task"), b.number(1), b.number(2)
    line, part = task // parts, task % parts
    low, high = part * rows // parts, (part + 1) * rows // parts
    return line, low, high - low


def _position(number: Index, extents, strides) -> Index:
    """Where the element of that number, of a box of these extents, lies."""
    total: Index = 0
    for k in reversed(range(len(extents))):
        coordinate = number if k == 0 else number % extents[k]
        total = coordinate * strides[k] + total
        number = number // extents[k] if k else number
    return total
