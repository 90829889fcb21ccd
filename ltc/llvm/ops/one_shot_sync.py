"""The two kernels of a one-shot sum: one says that this replica's operands are there, one waits.

A replica writes its operands into its own part of symmetric memory, with a tag before them that is a
hash of its sums so far, and then the number of the sum into its counter.  Each replica counts its
sums, so all have the same number; a member with another tag is at another sum, which is an error.  What the
kernels need stands in the launch's frame, as words:
- the number of the sum, and the tag
- the addresses of this replica's counter and of its operands
- the addresses of all members' counters, then those of all members' operands
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

from ltc.ir import ops
from ltc.ir.loop_nest import Product
from ltc.ir.node import Node
from ltc.ir.one_shot import HEAD_BYTES
from ltc.llvm.emit.builder import ATTRIBUTES, argument_loads
from ltc.llvm.emit.kernel_code import KernelCode
from ltc.llvm.native import futex
from ltc.llvm.native.kernel_run import Fault
from ltc.llvm.native.system import FUTEX

NUMBER, TAG, COUNTER, OWN, MEMBERS = range(5)  # places among the words
SPINS = 1000  # looks at a counter before the wait goes on in Python: about 15 us


@dataclass(frozen=True)
class Words:
    """The words of a one-shot sum, as kernels are told where they are."""

    start: Node


def word_count(start: Node) -> int:
    return MEMBERS + 2 * start.attr("collective").sharers


_PUBLISH = """
declare i64 @syscall(i64, ...)
define void @kernel(ptr %arguments, i64 %task, i64 %tasks) #0 {
entry:
ARGUMENTS  %number = load i64, ptr %p0
  %a1 = getelementptr i64, ptr %p0, i64 1
  %tag = load i64, ptr %a1
  %a2 = getelementptr i64, ptr %p0, i64 2
  %counter = load ptr, ptr %a2
  %a3 = getelementptr i64, ptr %p0, i64 3
  %own = load ptr, ptr %a3
  %head = getelementptr i8, ptr %own, i64 -HEAD
  store i64 %tag, ptr %head
  store atomic i64 %number, ptr %counter release, align 8
  %woken = call i64 (i64, ...) @syscall(i64 FUTEX, ptr %counter, i64 1, i64 2147483647, ptr null, ptr null, i64 0)
  store i64 %number, ptr %p1
  ret void
}
"""

_WAIT = """
PAUSE_DECLARED
define void @kernel(ptr %arguments, i64 %task, i64 %tasks) #0 {
entry:
ARGUMENTS  %number = load i64, ptr %p0
  %a1 = getelementptr i64, ptr %p0, i64 1
  %tag = load i64, ptr %a1
  %counters = getelementptr i64, ptr %p0, i64 MEMBERS
  %places = getelementptr i64, ptr %counters, i64 %n0
  br label %next
next:
  %member = phi i64 [ 0, %entry ], [ %after, %met ]
  %a2 = getelementptr i64, ptr %counters, i64 %member
  %counter = load ptr, ptr %a2
  br label %look
look:
  %spins = phi i64 [ 0, %next ], [ %spins.more, %again ]
  %seen = load atomic i64, ptr %counter acquire, align 8
  %there = icmp sge i64 %seen, %number
  br i1 %there, label %compare, label %again
again:
  PAUSE
  %spins.more = add i64 %spins, 1
  %tired = icmp ugt i64 %spins.more, SPINS
  br i1 %tired, label %fail, label %look
compare:
  %a3 = getelementptr i64, ptr %places, i64 %member
  %place = load ptr, ptr %a3
  %head = getelementptr i8, ptr %place, i64 -HEAD
  %found = load i64, ptr %head
  %same = icmp eq i64 %found, %tag
  br i1 %same, label %met, label %fail
met:
  %after = add i64 %member, 1
  %more = icmp slt i64 %after, %n0
  br i1 %more, label %next, label %end
fail:
  store i64 1, ptr %p1
  br label %end
end:
  ret void
}
"""


def publish_codes(product: Product) -> list[KernelCode]:
    """Says that this replica's operands lie there; the token becomes the sum's number."""
    text = _filled(
        _PUBLISH,
        ARGUMENTS=argument_loads(2),
        FUTEX=FUTEX[platform.machine()],
        HEAD=HEAD_BYTES,
    )
    return [KernelCode(text, (Words(product.node), product.node), 1)]


def wait_codes(product: Product) -> list[KernelCode]:
    """Returns when the operands of all members lie there; a fault where that takes long."""
    (start,) = product.node.inputs
    assert start.op is ops.COLLECTIVE_START
    declared, pause = futex.pause_text()
    text = _filled(
        _WAIT,
        ARGUMENTS=argument_loads(2, 1),
        PAUSE_DECLARED=declared,
        PAUSE=pause,
        SPINS=SPINS,
        HEAD=HEAD_BYTES,
        MEMBERS=MEMBERS,
    )
    fault = Fault(product.node, "RuntimeError", "other replicas are late")
    return [KernelCode(text, (Words(start), fault), 1, numbers=(start.attr("collective").sharers,))]


def _filled(text: str, **words) -> str:
    return futex.filled(text, words) + ATTRIBUTES
