"""Running sums and products along one dimension, added up one after the other as torch does.

Sums of float are kept in double, those of f16 and bf16 in float: the bits are torch's.
"""

from __future__ import annotations

import torch

from ltc.ir import ops
from ltc.ir.loop_nest import Product
from ltc.ir.node import Node
from ltc.llvm.emit import memory_ops
from ltc.llvm.emit.builder import Builder
from ltc.llvm.emit.conversions import from_memory, to_memory
from ltc.llvm.emit.dtype import FORMS, Form
from ltc.llvm.emit.elementwise import ROWS, cast
from ltc.llvm.emit.index import Index
from ltc.llvm.emit.kernel_code import KernelCode
from ltc.llvm.ops.per_line import along_lines, lines_along

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
