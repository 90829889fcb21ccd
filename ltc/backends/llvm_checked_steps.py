"""Steps that look at what their kernels do to memory: what LTC_CHECK makes of a program.

Before its kernels run, all that a step may write is filled with a poison (llvm/memory_checks.py),
and so are guards before and behind each value that it touches. The kernels run, what they made is
kept, and they run again over another poison. Results that differ are made of memory that nobody
wrote, or were never written: so it is found in every type, and whatever became of it. A guard that
changed was written to by a kernel that is beside its value. And a value must be what it was when it
was made whenever a step reads it, before and after: else something has been put in its place.

All of it is kernels of the program: threads, queue and disk know nothing of it, and what they find
is an error like an index out of range.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from ltc.backends.llvm_lifetimes import Lifetimes, nbytes_of
from ltc.backends.llvm_steps import Step
from ltc.errors import MemoryFault
from ltc.ir import ops
from ltc.ir.graph import Origin
from ltc.ir.kernel import Product
from ltc.ir.node import Node
from ltc.ir.tensor_type import TensorType
from ltc.llvm.code import KernelCode
from ltc.llvm.memory_checks import (
    POISONS,
    WORD_BYTES,
    compare_code,
    copy_code,
    digest_code,
    fill_code,
    look_code,
    stack_bytes,
    stack_code,
    verify_code,
)  # fmt: skip
from ltc.llvm.products import ScratchBuffer
from ltc.llvm.program import Fault
from ltc.passes.memory import ALIGNMENT, aligned

GUARD_BYTES = ALIGNMENT  # before a value, and behind the last cache line that it has a part in
STACK_FRAMES_BYTES = 4 << 10  # beside what a kernel reserves: where that begins is not known
MOST_DIGESTED_BYTES = 1 << 20  # of a value: larger ones are not watched between steps
# Torch's own kernels, and what others take part in: nothing of it is generated.
_UNCHECKED = frozenset({ops.EXTERN, ops.COLLECTIVE_START, ops.COLLECTIVE_WAIT})
_ADVICE = (
    "This is a fault of ltc, not of the program: please report it. "
    "LTC_BACKEND=eager runs the program without generated kernels."
)


@dataclass(frozen=True)
class Room:
    """Memory of the checks, there for the whole program: digests, then what a step keeps."""

    nbytes: int


class CheckedSteps:
    """Puts the checks among the kernels of a program's steps.

    room  what the steps need besides; its place is the same in all of them
    """

    def __init__(
        self, steps: list[Step], lives: Lifetimes, made: Iterable[Node],
        origins: Mapping[Node, Origin],
    ):  # fmt: skip
        """
        lives  of what lies in the block or in outputs: with guards, as `made` has
        made   outputs that get new memory
        """
        lies_in = {node: target for step in steps for node, target in step.overwrites.items()}
        lies_in.update(lives.over)
        guarded = lives.values.union(made)
        checks = [
            _StepCheck(step, lies_in, guarded, origins)
            for step in steps
            if step.is_native and not _is_unchecked(step)
        ]
        digests = _digests(checks)
        first = aligned(WORD_BYTES * len(digests))
        self.room = Room(first + max((check.kept_bytes for check in checks), default=0))
        known: set[Node] = set()
        for check in checks:
            check.step.codes = tuple(check.codes(self.room, first, digests, known))
            known.update(check.digested)


def _digests(checks: Iterable[_StepCheck]) -> dict[Node, int]:
    """Where in the room the digest of each value lies."""
    nodes = dict.fromkeys(node for check in checks for node in check.digested)
    return {node: WORD_BYTES * number for number, node in enumerate(nodes)}


def _is_unchecked(step: Step) -> bool:
    return isinstance(step.unit, Product) and step.unit.node.op in _UNCHECKED


class _StepCheck:
    """What is to be checked of one step.

    kept_bytes  that it needs of the room
    digested    the values that it reads or makes which must stay as they are
    """

    def __init__(
        self, step: Step, lies_in: Mapping[Node, Node], guarded: Collection[Node],
        origins: Mapping[Node, Origin],
    ):  # fmt: skip
        self.step, self._kernels = step, step.codes
        self._written = written = tuple(dict.fromkeys(step.writes))
        places = {lies_in.get(node, node) for node in written}
        reads = [node for node in dict.fromkeys(step.reads) if isinstance(node.type, TensorType)]
        self._only_read = [node for node in reads if lies_in.get(node, node) not in places]
        self._over = [node for node in written if node in lies_in]
        self._fresh = [node for node in written if node in guarded and node not in lies_in]
        touched = (*written, *self._only_read)
        self._guarded = [node for node in touched if lies_in.get(node, node) in guarded]
        self.digested = [
            node for node in dict.fromkeys((*written, *reads))
            if (node.op is ops.INPUT or node in guarded or node in lies_in)
            and nbytes_of(node.type) <= MOST_DIGESTED_BYTES
        ]
        buffers = dict.fromkeys(n for code in step.codes for n in code.nodes)
        self._scratch = [n for n in buffers if isinstance(n, ScratchBuffer)]
        self._line_of = next((node for node in written if node in origins), written[0])
        self._name = " and ".join(f"{node.op} {node.type}" for node in written)
        self._kept: dict[tuple[str, Node], int] = {}  # where, behind the digests
        self.kept_bytes = 0
        for node in self._over:
            self._keep("operand", node)
        for node in written:
            self._keep("first", node)

    def _keep(self, what: str, node: Node) -> None:
        self._kept[what, node] = self.kept_bytes
        self.kept_bytes += aligned(nbytes_of(node.type))

    def codes(
        self, room: Room, first_kept: int, digests: Mapping[Node, int], known: Collection[Node]
    ) -> Iterator[KernelCode]:
        """The kernels, twice, and what is done before, between and after.

        known  values whose digests are there
        """
        self._room, self._first_kept, self._digests = room, first_kept, digests
        read = [node for node in self.digested if node not in self._written]
        yield from (self._noted(node) for node in read if node not in known)
        yield from (self._verified(n, self._lost(n)) for n in read if n in known)
        yield from (self._saved("operand", node) for node in self._over)
        yield from self._run_over(0)
        yield from (self._saved("first", node) for node in self._written)
        yield from (self._put_back(node) for node in self._over)
        yield from self._run_over(1)
        yield from map(self._compared, self._written)
        yield from self._looks(1)
        yield from (self._verified(n, self._changed(n)) for n in read if n in self._only_read)
        yield from (self._noted(node) for node in self.digested if node in self._written)

    def _run_over(self, which: int) -> Iterator[KernelCode]:
        """The kernels, where all that they find is the one poison or the other."""
        yield from self._fills(which)
        for code in self._kernels:
            if nbytes := stack_bytes(code.text):
                nbytes = nbytes + STACK_FRAMES_BYTES
                yield stack_code(nbytes, code.tasks, POISONS[torch.float32][which])
            yield code

    # --- memory ----------------------------------------------------------------------------------

    def _fills(self, which: int) -> Iterator[KernelCode]:
        for buffer in (*self._guarded, *self._scratch):
            word, nbytes = _poison(buffer, which), _nbytes(buffer)
            is_free = buffer in self._fresh or isinstance(buffer, ScratchBuffer)
            before = GUARD_BYTES + nbytes if is_free else GUARD_BYTES
            yield fill_code(buffer, -GUARD_BYTES, before, word)
            yield fill_code(buffer, nbytes, _guard_behind(nbytes), word)

    def _looks(self, which: int) -> Iterator[KernelCode]:
        for buffer in (*self._guarded, *self._scratch):
            word, nbytes, fault = _poison(buffer, which), _nbytes(buffer), self._beside(buffer)
            yield look_code(buffer, -GUARD_BYTES, GUARD_BYTES, word, fault)
            yield look_code(buffer, nbytes, _guard_behind(nbytes), word, fault)

    def _saved(self, what: str, node: Node) -> KernelCode:
        return copy_code(node, self._room, _nbytes(node), (0, self._place(what, node)))

    def _put_back(self, node: Node) -> KernelCode:
        return copy_code(self._room, node, _nbytes(node), (self._place("operand", node), 0))

    def _compared(self, node: Node) -> KernelCode:
        place, bytes = self._place("first", node), node.dtype.itemsize
        return compare_code(self._room, place, node, _nbytes(node), bytes, self._unwritten(node))

    def _place(self, what: str, node: Node) -> int:
        return self._first_kept + self._kept[what, node]

    def _noted(self, node: Node) -> KernelCode:
        return digest_code(node, _nbytes(node), self._room, self._digests[node])

    def _verified(self, node: Node, fault: Fault) -> KernelCode:
        return verify_code(node, _nbytes(node), self._room, self._digests[node], fault)

    # --- what is said ----------------------------------------------------------------------------

    def _unwritten(self, node: Node) -> Fault:
        return self._fault(
            f"element {{value}} of {_shown(node)} was not written, or was made from memory that "
            f"nobody wrote: run twice over different fillings of that memory, it differs"
        )

    def _beside(self, buffer: Node | ScratchBuffer) -> Fault:
        return self._fault(
            f"it wrote beside {_shown(buffer)}: byte {{value}} changed, counted from the first of "
            f"the {_nbytes(buffer)} that are its own"
        )

    def _changed(self, node: Node) -> Fault:
        return self._fault(f"it wrote into {_shown(node)}, which it only reads")

    def _lost(self, node: Node) -> Fault:
        return self._fault(
            f"{_shown(node)}, which it reads, is not what it was when it was made: it was written "
            f"over, or its memory was given away too early"
        )

    def _fault(self, found: str) -> Fault:
        message = f"LTC_CHECK looked at the kernel of {self._name}: {found}. {_ADVICE}"
        return Fault(self._line_of, MemoryFault.__name__, message)


def _nbytes(buffer: Node | ScratchBuffer) -> int:
    return buffer.nbytes if isinstance(buffer, ScratchBuffer) else nbytes_of(buffer.type)


def _guard_behind(nbytes: int) -> int:
    """Bytes of a guard: as far as the value's last cache line goes, and one more."""
    return aligned(nbytes) - nbytes + GUARD_BYTES


def _poison(buffer: Node | ScratchBuffer, which: int) -> int:
    dtype = torch.float32 if isinstance(buffer, ScratchBuffer) else buffer.dtype
    return POISONS[dtype][which]


def _shown(buffer: Node | ScratchBuffer) -> str:
    if isinstance(buffer, ScratchBuffer):
        return f"its scratch memory {buffer.name!r}"
    return f"the value of {buffer.op} {buffer.type}"
