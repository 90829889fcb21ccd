"""Steps that look at what their kernels do to memory: what LTC_CHECK makes of a program.

Before its kernels run, all that a step may write is filled with a poison (llvm/ops/memory_checks.py),
and so are guards before and behind each value that it touches. The kernels run, their results are
kept, and they run again over another poison. Results that differ depend on memory that was never
written, or were not written themselves: this holds for every dtype. A guard that changed shows a
kernel that wrote beside its value. Whenever a step reads a value, it must be what it was when it was
made, before and after the step: else another value has taken its memory.

Kernels of the program do all of this, by rows of a table. Threads need no change, and a finding is an
error like an index out of range.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ltc.backends.llvm.liveness import Lifetimes, nbytes_of
from ltc.backends.llvm.program_plan import GUARD_BYTES, MemoryChecks
from ltc.backends.llvm.schedule import ProgramStep
from ltc.errors import MemoryFault
from ltc.ir import ops
from ltc.ir.graph import Origin
from ltc.ir.loop_nest import Product
from ltc.ir.node import Node
from ltc.ir.tensor_type import TensorType
from ltc.llvm.emit.kernel_code import KernelCode
from ltc.llvm.native.kernel_run import Fault
from ltc.llvm.ops.dispatch import ScratchBuffer
from ltc.llvm.ops.memory_checks import (
    COMPARE,
    COPY,
    DIGEST,
    FILL,
    FRAME,
    LOOK,
    POISONS,
    ROW_WORDS,
    VERIFY,
    WORD_BYTES,
    CheckRow,
    CheckRows,
    finding,
    rows_code,
    stack_bytes,
    stack_code,
)  # fmt: skip
from ltc.passes.memory_planner import aligned
from ltc.support.sizes.extent import Extent

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


_TOLD = {
    COMPARE: "element {place} of {name} was not written, or was made from unwritten memory: two runs "
    "over different fillings of that memory give different values",
    LOOK: "it wrote beside {name}: byte {place} changed, counted from the first of its own",
    VERIFY: "{name}, which it reads, has changed since it was made: it was written over, by this "
    "kernel or before, or its memory was reused too early",
}


def told(checks: MemoryChecks, code: int) -> str:
    """Return the text of a finding, by a fault word without its number."""
    number, place = finding(code)
    words = np.frombuffer(checks.rows, np.int64).reshape(-1, ROW_WORDS)[number].tolist()
    row = CheckRow(*words)
    return _TOLD[row.action].format(name=checks.names[row.name], place=place)


class CheckedSteps:
    """Put the checks among the kernels of a program's steps.

    Attributes:
        room: The memory that checks need; its place is the same in all steps.
        parts: The parts of the table of rows, as kernels read them.
    """

    def __init__(
        self, steps: list[ProgramStep], lives: Lifetimes, made: Iterable[Node],
        origins: Mapping[Node, Origin],
    ) -> None:  # fmt: skip
        """Prepare the checks.

        Args:
            lives: Values in the block or in outputs: with guards, as `made` has.
            made: Outputs that get new memory.
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
        first_kept = aligned(WORD_BYTES * len(digests))
        self.room = Room(first_kept + max((check.kept_bytes for check in checks), default=0))
        self._rows: list[CheckRow] = []
        self._names: dict[str, int] = {}
        known: set[Node] = set()
        for check in checks:
            check.begin(self.room, first_kept, digests, self._names)
            check.step.codes = tuple(check.codes(self._rows, known))
            known.update(check.digested)
        nodes = (node for check in checks for code in check.step.codes for node in code.nodes)
        self.parts = [node for node in nodes if isinstance(node, CheckRows)]

    def table(self, places: Mapping[Any, tuple[int, int]]) -> MemoryChecks:
        """`places`: of every buffer (word of the frame that has its address, bytes to add)."""
        words: list[Any] = []
        for action, buffer, shift, other, behind, nbytes, number, name in self._rows:
            (place, offset), (there, further) = places[buffer], places[other]
            words += action, place, offset + shift, there, further + behind, nbytes, number, name
        sizes = tuple((k, word) for k, word in enumerate(words) if isinstance(word, Extent))
        for k, size in sizes:
            words[k] = size.value  # filled in again where it is another
        rows = np.array(words, dtype=np.int64).tobytes()
        return MemoryChecks(rows, tuple(self._names), sizes)


def _digests(checks: Iterable[_StepCheck]) -> dict[Node, int]:
    """Return where in the room the digest of each value lies."""
    nodes = dict.fromkeys(node for check in checks for node in check.digested)
    return {node: WORD_BYTES * number for number, node in enumerate(nodes)}


def _is_unchecked(step: ProgramStep) -> bool:
    return isinstance(step.unit, Product) and step.unit.node.op in _UNCHECKED


class _StepCheck:
    """The checks of one step.

    Attributes:
        kept_bytes: The bytes that it needs of the room.
        digested: The values that it reads or makes which must stay as they are.
    """

    def __init__(
        self, step: ProgramStep, lies_in: Mapping[Node, Node], guarded: Collection[Node],
        origins: Mapping[Node, Origin],
    ) -> None:  # fmt: skip
        self.step, self._kernels = step, step.codes
        self._written = written = tuple(dict.fromkeys(step.writes))
        places = {lies_in.get(node, node) for node in written}
        reads = [node for node in dict.fromkeys(step.reads) if isinstance(node.type, TensorType)]
        self._only_read = [node for node in reads if lies_in.get(node, node) not in places]
        self._over = [node for node in written if node in lies_in]
        touched = (*written, *self._only_read)
        self._guarded = [node for node in touched if lies_in.get(node, node) in guarded]
        self.digested = [
            node
            for node in dict.fromkeys((*written, *reads))
            if (node.op is ops.INPUT or node in guarded or node in lies_in)
            and nbytes_of(node) <= MOST_DIGESTED_BYTES
        ]
        buffers = dict.fromkeys(n for code in step.codes for n in code.nodes)
        self._scratch = [n for n in buffers if isinstance(n, ScratchBuffer)]
        fresh = [node for node in written if node in guarded and node not in lies_in]
        self._buffers: list[Node | ScratchBuffer] = [*self._guarded, *self._scratch]
        self._free = {*fresh, *self._scratch}  # nothing of it is anybody's before the step
        node = next((node for node in written if node in origins), written[0])
        name = " and ".join(f"{node.op} {node.type}" for node in written)
        message = f"LTC_CHECK looked at the kernel of {name}: {{value}}. {_ADVICE}"
        self._fault = Fault(node, MemoryFault.__name__, message)
        self._kept: dict[tuple[str, Node], int] = {}  # where, behind the digests
        self.kept_bytes = 0
        for node in self._over:
            self._keep("operand", node)
        for node in written:
            self._keep("first", node)

    def _keep(self, what: str, node: Node) -> None:
        self._kept[what, node] = self.kept_bytes
        self.kept_bytes += aligned(nbytes_of(node))

    def begin(
        self, room: Room, first_kept: int, digests: Mapping[Node, int], names: dict[str, int]
    ) -> None:
        """Set the facts that all steps share; `names` is added to."""
        self._room, self._first_kept = room, first_kept
        self._digests, self._names = digests, names

    def codes(self, rows: list[CheckRow], known: Collection[Node]) -> Iterator[KernelCode]:
        """The kernels, twice, and what is done before, between and after; adds to the rows.

        Args:
            known: Values whose digests are there.
        """
        read = [node for node in self.digested if node not in self._written]
        yield self._doing(rows, [
            *[self._verified(n) if n in known else self._noted(n) for n in read],
            *[self._saved("operand", node) for node in self._over],
            *self._fills(0),
        ])  # fmt: skip
        yield from self._run_over(0)
        yield self._doing(rows, [
            *[self._saved("first", node) for node in self._written],
            *[self._put_back(node) for node in self._over],
            *self._fills(1),
        ])  # fmt: skip
        yield from self._run_over(1)
        yield self._doing(rows, [
            *map(self._compared, self._written),
            *self._looks(1),
            *[self._verified(node) for node in read if node in self._only_read],
            *[self._noted(node) for node in self.digested if node in self._written],
        ])  # fmt: skip

    def _doing(self, rows: list[CheckRow], more: list[CheckRow]) -> KernelCode:
        first = len(rows)
        rows += more
        return rows_code(CheckRows(first, len(more)), self._fault)

    def _run_over(self, which: int) -> Iterator[KernelCode]:
        """The kernels, where what they find on the stack is the one poison or the other."""
        for code in self._kernels:
            if nbytes := stack_bytes(code.text):
                nbytes += STACK_FRAMES_BYTES
                yield stack_code(nbytes, code.tasks, POISONS[torch.float32][which])
            yield code

    # --- rows ------------------------------------------------------------------------------------

    def _fills(self, which: int) -> Iterator[CheckRow]:
        for buffer in self._buffers:
            word, nbytes = _poison(buffer, which), _nbytes(buffer)
            before = GUARD_BYTES + nbytes if buffer in self._free else GUARD_BYTES
            yield CheckRow(FILL, buffer, -GUARD_BYTES, FRAME, 0, before, word)
            yield CheckRow(FILL, buffer, nbytes, FRAME, 0, _guard_behind(nbytes), word)

    def _looks(self, which: int) -> Iterator[CheckRow]:
        for buffer in self._buffers:
            word, nbytes, name = _poison(buffer, which), _nbytes(buffer), self._name(buffer)
            before, behind = -GUARD_BYTES, _guard_behind(nbytes)
            yield CheckRow(LOOK, buffer, before, FRAME, before, GUARD_BYTES, word, name)
            yield CheckRow(LOOK, buffer, nbytes, FRAME, nbytes, behind, word, name)

    def _saved(self, what: str, node: Node) -> CheckRow:
        return CheckRow(COPY, node, 0, self._room, self._place(what, node), _nbytes(node))

    def _put_back(self, node: Node) -> CheckRow:
        return CheckRow(COPY, self._room, self._place("operand", node), node, 0, _nbytes(node))

    def _compared(self, node: Node) -> CheckRow:
        place, bytes = self._place("first", node), node.dtype.itemsize
        return CheckRow(COMPARE, self._room, place, node, 0, _nbytes(node), bytes, self._name(node))

    def _place(self, what: str, node: Node) -> int:
        return self._first_kept + self._kept[what, node]

    def _noted(self, node: Node) -> CheckRow:
        return CheckRow(DIGEST, node, 0, self._room, self._digests[node], _nbytes(node))

    def _verified(self, node: Node) -> CheckRow:
        place, name = self._digests[node], self._name(node)
        return CheckRow(VERIFY, node, 0, self._room, place, _nbytes(node), 0, name)

    def _name(self, buffer: Node | ScratchBuffer) -> int:
        """The number of what the buffer is called."""
        name = _shown(buffer)
        return self._names.setdefault(name, len(self._names))


def _nbytes(buffer: Node | ScratchBuffer) -> int:
    return buffer.nbytes if isinstance(buffer, ScratchBuffer) else nbytes_of(buffer)


def _guard_behind(nbytes: int) -> int:
    """Bytes of a guard: as far as the value's last cache line goes, and one more."""
    return aligned(nbytes) - nbytes + GUARD_BYTES


def _poison(buffer: Node | ScratchBuffer, which: int) -> int:
    dtype = torch.float32 if isinstance(buffer, ScratchBuffer) else buffer.dtype
    return POISONS[dtype][which]


def _shown(buffer: Node | ScratchBuffer) -> str:
    if isinstance(buffer, ScratchBuffer):
        return f"its scratch memory {buffer.name!r}, {buffer.nbytes} bytes"
    return f"the value of {buffer.op} {buffer.type}"
