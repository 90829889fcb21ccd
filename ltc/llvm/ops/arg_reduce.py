"""Where the largest or the smallest element of each line is: the first of equals, NaN before all."""

from __future__ import annotations

import torch

from ltc.ir import ops
from ltc.ir.loop_nest import Product
from ltc.ir.node import Node
from ltc.llvm.emit import memory_ops
from ltc.llvm.emit.builder import LANES, Builder, multiples
from ltc.llvm.emit.conversions import from_memory
from ltc.llvm.emit.dtype import FORMS, Form
from ltc.llvm.emit.index import Index
from ltc.llvm.emit.kernel_code import KernelCode
from ltc.llvm.ops.per_line import along_lines, lines_along

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
        """Whether x goes before the best one though it comes later."""
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
