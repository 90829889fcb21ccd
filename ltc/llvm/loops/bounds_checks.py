"""The checks of a kernel before it computes: indices, zero divisors, conditions of rules.

A violation is reported in the kernel's fault word, and a harmless value is used in its place: no
kernel reads outside its buffers or traps, whatever the data are.
"""

from __future__ import annotations

from dataclasses import dataclass

from ltc.errors import OutOfRangeIndexError
from ltc.ir import ops
from ltc.ir.loop_nest import Kernel
from ltc.ir.node import Node
from ltc.llvm.emit.builder import Builder
from ltc.llvm.emit.index import Index
from ltc.llvm.native.kernel_run import Fault

NUMBER_BITS = 8  # of a fault word: which check failed; the rest is a value


@dataclass(frozen=True)
class Report:
    """The place where a kernel reports a fault.

    Attributes:
        word: The register that holds the address of its fault word.
        number: The number of this check, from 1.
    """

    word: str
    number: int


def faults_of(kernel: Kernel) -> tuple[Fault, ...]:
    """Return the fault of each check of a kernel, in order; the first one's word serves all."""
    return tuple(_fault(value.data) for value in kernel.checks())


def _fault(node: Node) -> Fault:
    if node.op is ops.WRAP_INDEX:
        message = node.attr("message").replace("{}", "{value}")
        return Fault(node, OutOfRangeIndexError.__name__, message)
    if node.op is ops.CHECK:
        return Fault(node, "RuntimeError", node.attr("message").replace("{}", "{value}"))
    return Fault(node, "RuntimeError", "ZeroDivisionError")


def wrapped(
    b: Builder, node: Node, index: str, size: Index, used: str | None, report: Report
) -> str:
    """The index from 0 to size - 1 that a WRAP_INDEX node gives, and 0 for one that is outside.

    Args:
        size: Node's attribute, or the argument that has it.
        used: i1 of each lane, true if its index is used; None: all are used.
    """
    inside = index
    if node.attr("lowest"):
        negative = b.compare("slt", "i64", index, b.constant("i64", 0))
        from_end = b.binary("add", "i64", index, b.splat("i64", size))
        inside = b.select(negative, "i64", from_end, index)
    report_where(b, _outside(b, inside, size), used, report, index)
    return inside_of(b, inside, size)


def inside_of(b: Builder, index: str, size: Index) -> str:
    """The index, but 0 for one outside a dimension of that size."""
    outside = _outside(b, index, size)
    return b.select(outside, "i64", b.constant("i64", 0), index)


def _outside(b: Builder, index: str, size: Index) -> str:
    return b.compare("uge", "i64", index, b.splat("i64", size))


def report_where(
    b: Builder, wrong: str, used: str | None, report: Report, value: str | None = None
) -> None:
    """Report the first lane that is used and wrong, and its i64 value if it has one."""
    if used is not None:
        wrong = b.binary("and", "i1", wrong, used)
    b.when(_any_lane(b, wrong), (), lambda: _report(b, wrong, report, value))


def _any_lane(b: Builder, bits: str) -> str:
    if b.width == 1:
        return bits
    number = b.value(f"bitcast {b.of('i1')} {bits} to i{b.width}")
    return b.value(f"icmp ne i{b.width} {number}, 0")


def _report(b: Builder, wrong: str, report: Report, value: str | None) -> None:
    word = str(report.number)
    if value is not None:
        shifted = b.value(f"shl i64 {_first(b, wrong, value)}, {NUMBER_BITS}")
        word = b.value(f"or i64 {shifted}, {word}")
    b.emit(f"store i64 {word}, ptr {report.word}, align 8")


def _first(b: Builder, wrong: str, value: str) -> str:
    """The value of the first lane whose bit is set."""
    if b.width == 1:
        return value
    bits = b.value(f"bitcast {b.of('i1')} {wrong} to i{b.width}")
    b.declare(f"llvm.cttz.i{b.width}", f"i{b.width}", f"i{b.width}", "i1")
    lane = b.value(f"call i{b.width} @llvm.cttz.i{b.width}(i{b.width} {bits}, i1 true)")
    return b.value(f"extractelement {b.of('i64')} {value}, i{b.width} {lane}")
