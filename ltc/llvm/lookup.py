"""Indices that are data: checked, and read through.

An index outside its dimension is reported in the kernel's fault word, and 0 is used in its place:
no kernel reads outside its buffers, whatever the data are.
"""

from __future__ import annotations

from dataclasses import dataclass

from ltc.ir.kernel import Kernel
from ltc.ir.node import Node
from ltc.llvm.builder import Builder
from ltc.llvm.program import Fault

NUMBER_BITS = 8  # of a fault word: which check failed; the rest is the index
MOST_CHECKS = (1 << NUMBER_BITS) - 1  # of one kernel


@dataclass(frozen=True)
class Report:
    """Where a kernel says which index was wrong.

    word    the register that holds the address of its fault word
    number  of this check, from 1
    """

    word: str
    number: int


def faults_of(kernel: Kernel) -> tuple[Fault, ...]:
    """What each check of a kernel says; the first one's word serves all."""
    nodes = [value.data for value in kernel.checks()]
    return tuple(Fault(node, "IndexError", node.attr("message").replace("{}", "{value}")) for node in nodes)


def checked(b: Builder, node: Node, index: str, used: str | None, report: Report) -> str:
    """The index from 0 to size - 1 that a WRAP_INDEX node gives, and 0 for one that is outside.

    used  i1 of each lane: whether anybody wants its index; None where all are wanted
    """
    size = b.constant("i64", node.attr("size"))
    wrapped = index
    if node.attr("lowest"):
        negative = b.compare("slt", "i64", index, b.constant("i64", 0))
        wrapped = b.select(negative, "i64", b.binary("add", "i64", index, size), index)
    outside = b.compare("uge", "i64", wrapped, size)
    wrong = outside if used is None else b.binary("and", "i1", outside, used)
    b.when(any_lane(b, wrong), (), lambda: _tell(b, index, wrong, report))
    return b.select(outside, "i64", b.constant("i64", 0), wrapped)


def any_lane(b: Builder, bits: str) -> str:
    """Whether the bit of any lane is set."""
    if b.width == 1:
        return bits
    number = b.value(f"bitcast {b.of('i1')} {bits} to i{b.width}")
    return b.value(f"icmp ne i{b.width} {number}, 0")


def _tell(b: Builder, index: str, wrong: str, report: Report) -> None:
    """Store the first wrong index and the number of the check."""
    if b.width > 1:
        bits = b.value(f"bitcast {b.of('i1')} {wrong} to i{b.width}")
        b.declare(f"llvm.cttz.i{b.width}", f"i{b.width}", f"i{b.width}", "i1")
        lane = b.value(f"call i{b.width} @llvm.cttz.i{b.width}(i{b.width} {bits}, i1 true)")
        index = b.value(f"extractelement {b.of('i64')} {index}, i{b.width} {lane}")
    shifted = b.value(f"shl i64 {index}, {NUMBER_BITS}")
    word = b.value(f"or i64 {shifted}, {report.number}")
    b.emit(f"store i64 {word}, ptr {report.word}, align 8")
