"""The primitives that are neither loops nor products, and the kernels of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch

from ltc.ir import ops
from ltc.ir.loop_nest import Product, strides_of
from ltc.ir.node import Node
from ltc.ir.one_shot import is_one_shot
from ltc.ir.ops import Op
from ltc.llvm.emit import memory_ops
from ltc.llvm.emit.builder import LANES, Builder, function_text, multiples
from ltc.llvm.emit.conversions import from_memory, to_memory
from ltc.llvm.emit.dtype import FORMS, Form
from ltc.llvm.emit.elementwise import ROWS, cast, rounded
from ltc.llvm.emit.index import Index
from ltc.llvm.emit.kernel_code import KernelCode
from ltc.llvm.ops.copying import copy_code, fill_code
from ltc.llvm.ops.one_shot_sync import publish_codes, wait_codes
from ltc.llvm.ops.torch_c_abi import call_codes, can_call
from ltc.support.sizes.choices import least, most

# The place of the largest or smallest element of each line: the first of equals, NaN before all.

LONG = 4 * LANES  # from there on a contiguous line is read in vectors


def can_arg_reduce(node: Node) -> bool:
    (x,) = node.inputs
    return x.dtype in FORMS and x.dtype != torch.bool and x.size > 0


def arg_reduce_codes(product: Product) -> list[KernelCode]:
    node, (operand,) = product.node, product.operands
    form, index = FORMS[node.inputs[0].dtype], FORMS[torch.int64]
    lines = lines_along(node.inputs[0], node.attr("dim"))
    search = _Search(form, node.op is ops.ARGMAX)

    def walk(b: Builder, start: Index, outer: Index, column: Index, mask: str | None) -> None:
        if lines.inner == 1 and lines.extent >= LONG:
            with b.lanes(LANES):
                found = search.contiguous(b, start, lines.extent)
        else:
            found = search.strided(b, start, lines.extent, lines.inner, mask)
        place = b.address("%p1", outer * lines.inner + column, "i64")
        memory_ops.store(b, found, place, index.stored, mask)

    return [along_lines(lines, (operand.node, product.results[0]), walk)]


class _Search:
    """Keeps the best element seen and where it was."""

    def __init__(self, form: Form, largest: bool):
        self.form, self.largest = form, largest

    def _load(self, b: Builder, place: Index, mask: str | None) -> str:
        address = b.address("%p0", place, self.form.stored)
        return from_memory(b, self.form, memory_ops.load(b, address, self.form.stored, mask))

    def _is_better(self, b: Builder, x: str, best: str) -> str:
        """Return whether x goes before the best one though it comes later."""
        form, word = self.form, "gt" if self.largest else "lt"
        if not form.is_float:
            sign = "s" if form.kind == "signed" else "u"
            return b.compare(sign + word, form.computed, x, best)
        better = b.compare("o" + word, form.computed, x, best)
        nan = b.compare("uno", form.computed, x, x)
        first_nan = b.binary("and", "i1", nan, b.compare("ord", form.computed, best, best))
        return b.binary("or", "i1", better, first_nan)

    def _kept(self, b: Builder, best: list[str], x: str, at: str, among: str | None) -> list[str]:
        better = self._is_better(b, x, best[0])
        if among is not None:
            better = b.binary("and", "i1", better, among)
        type = self.form.computed
        return [b.select(better, type, x, best[0]), b.select(better, "i64", at, best[1])]

    def strided(self, b: Builder, start: Index, extent: int, step: int, mask: str | None) -> str:
        """The position in each of `b.width` lines that lie side by side."""

        def next_one(i: Index, best: list[str]) -> list[str]:
            x = self._load(b, start + i * step, mask)
            return self._kept(b, best, x, b.splat("i64", i), None)

        begin = [
            (b.of(self.form.computed), self._load(b, start, mask)),
            (b.of("i64"), b.constant("i64", 0)),
        ]
        return b.loop(1, extent, 1, begin, next_one)[1]

    def contiguous(self, b: Builder, start: Index, extent: int) -> str:
        """The position in one line: lanes search for themselves, then the first of the best."""
        numbers = multiples(b.width, 1, "i64")
        whole = extent // b.width * b.width

        def at(i: Index) -> str:
            return b.value(f"add {b.of('i64')} {b.splat('i64', i)}, {numbers}")

        def next_one(i: Index, best: list[str]) -> list[str]:
            return self._kept(b, best, self._load(b, start + i, None), at(i), None)

        begin = [(b.of(self.form.computed), self._load(b, start, None)), (b.of("i64"), numbers)]
        best = b.loop(b.width, whole, b.width, begin, next_one)
        if extent > whole:
            mask = memory_ops.first_lanes(b, extent - whole)
            x = self._load(b, start + whole, mask)
            best = self._kept(b, best, x, at(whole), mask)
        return self._across(b, best)

    def _across(self, b: Builder, best: list[str]) -> str:
        type, vector, words = self.form.computed, b.of(self.form.computed), b.of("i64")
        lanes: list[list[str]] = [
            [
                b.value(f"extractelement {vector} {best[0]}, i64 {k}"),
                b.value(f"extractelement {words} {best[1]}, i64 {k}"),
            ]
            for k in range(b.width)
        ]
        with b.lanes(1):
            chosen = lanes[0]
            for x, at in lanes[1:]:
                better = self._is_better(b, x, chosen[0])
                worse = self._is_better(b, chosen[0], x)
                equal = b.value(f"icmp eq i1 {better}, {worse}")  # neither goes before the other
                earlier = b.binary("and", "i1", equal, b.compare("slt", "i64", at, chosen[1]))
                takes = b.binary("or", "i1", better, earlier)
                chosen = [
                    b.select(takes, type, x, chosen[0]),
                    b.select(takes, "i64", at, chosen[1]),
                ]
        return chosen[1]


# Running sums and products along one dimension, added up one after the other as torch does. Sums
# of float are kept in double, those of f16 and bf16 in float: the bits are torch's.

_STEPS = {ops.CUMSUM: (ops.ADD, 0), ops.CUMPROD: (ops.MUL, 1)}


def can_scan(node: Node) -> bool:
    return node.dtype in FORMS and node.dtype != torch.bool and node.size > 0


def scan_codes(product: Product) -> list[KernelCode]:
    node, (operand,) = product.node, product.operands
    op, first = _STEPS[node.op]
    form = FORMS[node.dtype]
    total = FORMS[torch.float64] if node.dtype == torch.float32 else _unrounded(form)
    lines = lines_along(node, node.attr("dim"))

    def walk(b: Builder, start: Index, outer: Index, column: Index, mask: str | None) -> None:
        def step(i: Index, carried: list[str]) -> list[str]:
            place = start + i * lines.inner
            address = b.address("%p0", place, form.stored)
            x = from_memory(b, form, memory_ops.load(b, address, form.stored, mask))
            sum_ = ROWS[op](b, total, carried[0], cast(b, form, total, x))
            result = to_memory(b, form, cast(b, total, form, sum_))
            memory_ops.store(b, result, b.address("%p1", place, form.stored), form.stored, mask)
            return [sum_]

        begin = [(b.of(total.computed), b.constant(total.computed, first))]
        b.loop(0, lines.extent, 1, begin, step)

    return [along_lines(lines, (operand.node, product.results[0]), walk)]


def _unrounded(form: Form) -> Form:
    """The form that values are computed in, without rounding to fewer bits."""
    return FORMS[torch.float32] if form.is_rounded else form


# --- Writes to where indices say --------------------------------------------------------------

# The result begins as a copy of the base, or filled where the base is one number. Each task owns a
# range of rows of the result and takes what goes there in the order of the indices: sums come out
# the same whatever the number of threads, of equal indices the last one is kept, and a row that no
# index names is not touched again. An index outside its dimension goes nowhere.


# Every task reads all indices of its rows: many pay where a row is more than an index.
MOST_PARTS = 16
FEWEST_ELEMENTS_OF_A_TASK = 1 << 13
_REDUCED_BY = {
    "add": ops.ADD, "multiply": ops.MUL, "maximum": ops.MAXIMUM, "minimum": ops.MINIMUM,
}  # fmt: skip


def can_scatter(node: Node) -> bool:
    """Return True if kernels are generated for a PUT or SCATTER."""
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
    """Return the function that moves elements of %p1 to %p2, or reduces them with those there."""
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
    """Return where the element of that number, of a box of these extents, lies."""
    total: Index = 0
    for k in reversed(range(len(extents))):
        coordinate = number if k == 0 else number % extents[k]
        total = coordinate * strides[k] + total
        number = number // extents[k] if k else number
    return total


@dataclass(frozen=True)
class Row:
    """One primitive.

    Attributes:
        supports: True if there are kernels for a node.
        codes: The kernels of a product without epilogue whose operands are contiguous.
    """

    supports: Callable[[Node], bool]
    codes: Callable[[Product], list[KernelCode]]


PRIMITIVES: dict[Op, Row] = {
    ops.PUT: Row(can_scatter, scatter_codes),
    ops.SCATTER: Row(can_scatter, scatter_codes),
    ops.CUMSUM: Row(can_scan, scan_codes),
    ops.CUMPROD: Row(can_scan, scan_codes),
    ops.ARGMAX: Row(can_arg_reduce, arg_reduce_codes),
    ops.ARGMIN: Row(can_arg_reduce, arg_reduce_codes),
    ops.EXTERN: Row(can_call, call_codes),
    ops.COLLECTIVE_START: Row(is_one_shot, publish_codes),
    ops.COLLECTIVE_WAIT: Row(is_one_shot, wait_codes),
}


# --- Kernels that walk along one dimension: every line of it is one task's work, in order --------

# A tensor is [outer, extent, inner] around the dimension. Where inner is 1 a line is contiguous;
# else neighbouring lines lie side by side, and a vector holds one element of each.

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
