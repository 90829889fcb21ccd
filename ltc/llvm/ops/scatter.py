"""Elements written, or added, where an index says: PUT and SCATTER.

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
from ltc.llvm.emit.kernel_code import KernelCode
from ltc.llvm.ops.copying import copy_code, fill_code
from ltc.llvm.emit.dtype import FORMS, Form
from ltc.llvm.emit.elementwise import ROWS, rounded
from ltc.llvm.emit.conversions import from_memory, to_memory

# Every task reads all indices of its rows: many pay where a row is more than an index.
MOST_PARTS = 16
FEWEST_ELEMENTS_OF_A_TASK = 1 << 13


def can_scatter(node: Node) -> bool:
    """Whether kernels are generated for a PUT or SCATTER."""
    types = [node.type, *[n.type for n in node.inputs]]
    adds_truths = node.attr("mode") == "add" and node.dtype == torch.bool
    return all(t.dtype in FORMS and t.size for t in types) and not adds_truths


def scatter_codes(product: Product) -> list[KernelCode]:
    base, index, new = (one.node for one in product.operands)
    node, (result,) = product.node, product.results
    begin = fill_code if base.op is ops.CONSTANT else copy_code
    first = begin(base, result, node.type.size, node.dtype)
    write = _put if node.op is ops.PUT else _scatter
    return [first, write(node, index, new, result)]


def _put(node: Node, index, new, result) -> KernelCode:
    """Whole rows: new[l, i, :] to result[l, index[i], :]."""
    dim = node.attr("dim")
    lead, rows, width = prod(node.shape[:dim]), node.shape[dim], prod(node.shape[dim + 1 :])
    count = node.inputs[1].type.size
    parts = _parts(lead, rows, count * width, width)
    b, form = Builder(), FORMS[node.dtype]
    move = _mover(b, form, node.attr("mode"))

    with b.lanes(1):
        line, low, size = _range(b)

        def one(i: str, _) -> None:
            row = b.effect(f"load i64, ptr {b.address('%p0', i, 'i64')}, align 8")
            inside = b.value(f"icmp ult i64 {b.value(f'sub i64 {row}, {low}')}, {size}")

            def write() -> None:
                target = b.multiply(b.add(b.multiply(line, "%n1"), row), width)
                source = b.multiply(b.add(b.multiply(line, "%n0"), i), width)
                _row(b, form, width, source, target, move)

            b.when(inside, (), write)

        b.loop("0", "%n0", 1, (), one)
    text = function_text("kernel", 3, b, numbers=3)
    return KernelCode(text, (index, new, result), lead * parts, numbers=(count, rows, parts))


def _row(b: Builder, form: Form, width: int, source: str, target: str, move) -> None:
    """`width` neighbouring elements, in vectors where there are enough."""
    if width < LANES // 2:
        b.loop("0", width, 1, (), lambda k, _: move(b.add(source, k), b.add(target, k), None))
        return
    with b.lanes(LANES):
        whole = width // LANES * LANES
        if whole:
            b.loop(
                "0", whole, LANES, (), lambda k, _: move(b.add(source, k), b.add(target, k), None)
            )
        if width > whole:
            mask = memory_ops.first_lanes(b, width - whole)
            move(b.add(source, whole), b.add(target, whole), mask)


def _mover(b: Builder, form: Form, mode: str):
    """What takes elements of %p1 to %p2, or adds them to what is there."""

    def move(source: str, target: str, mask: str | None) -> None:
        address = b.address("%p2", target, form.stored)
        new = memory_ops.load(b, b.address("%p1", source, form.stored), form, mask)
        if mode == "add":
            old = from_memory(b, form, memory_ops.load(b, address, form, mask))
            total = ROWS[ops.ADD](b, form, old, from_memory(b, form, new))
            new = to_memory(b, form, rounded(b, form, total))
        memory_ops.store(b, new, address, form, mask)

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
        start = _position(b, line, taken[:dim], strides[:dim])

        def one(t: str, i: str) -> None:
            place = b.add(b.multiply(b.add(b.multiply(line, "%n0"), i), trail), t)
            row = b.effect(f"load i64, ptr {b.address('%p0', place, 'i64')}, align 8")
            inside = b.value(f"icmp ult i64 {b.value(f'sub i64 {row}, {low}')}, {size}")

            def write() -> None:
                column = _position(b, t, taken[dim + 1 :], strides[dim + 1 :])
                target = b.add(b.add(start, b.multiply(row, strides[dim])), column)
                move(place, target, None)

            b.when(inside, (), write)

        b.loop(
            "0", "%n0", 1, (),
            lambda i, _: b.loop("0", trail, 1, (), lambda t, _: one(t, i)) and None,
        )  # fmt: skip
    text = function_text("kernel", 3, b, numbers=3)
    numbers = (count, shape[dim], parts)
    return KernelCode(text, (index, new, result), lead * parts, numbers=numbers)


def _parts(lead: int, rows: int, elements: int, width: int) -> int:
    """Into how many ranges the rows of a line are cut."""
    most = MOST_PARTS if width >= LANES else MOST_PARTS // 4
    by_work = lead * elements // FEWEST_ELEMENTS_OF_A_TASK
    return max(1, min(most // min(lead, most), by_work, rows))


def _range(b: Builder) -> tuple[str, str, str]:
    """This task's line, and its first row and how many it has; %n1 rows are cut in %n2 parts."""
    line, part = b.value("udiv i64 %task, %n2"), b.value("urem i64 %task, %n2")
    low = b.value(f"udiv i64 {b.multiply(part, '%n1')}, %n2")
    high = b.value(f"udiv i64 {b.multiply(b.add(part, 1), '%n1')}, %n2")
    return line, low, b.value(f"sub i64 {high}, {low}")


def _position(b: Builder, number: str, extents, strides) -> str:
    """Where the element of that number, of a box of these extents, lies."""
    total = "0"
    for k in reversed(range(len(extents))):
        coordinate = number if k == 0 else b.value(f"urem i64 {number}, {extents[k]}")
        total = b.add(b.multiply(coordinate, strides[k]), total)
        number = b.value(f"udiv i64 {number}, {extents[k]}") if k else number
    return total
