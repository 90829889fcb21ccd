"""A program as data: the place of every value in memory, and the kernels in their order.

A launch works on values, counted from 0: the inputs it uses, the outputs it makes, its frame, the
constants, nothing (whose address is 0), its block of memory, then what only the reference reads or
makes.  The *frame* is words that native code reads: the addresses of all values, the scalars, the
faults, the kernels' arguments.  The *block* holds the values that are not outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ltc.backends.llvm.scalar_arguments import word_places
from ltc.ir import ops
from ltc.ir.collective import Collective
from ltc.ir.graph import Origin
from ltc.ir.node import Node
from ltc.ir.tensor_type import TensorType
from ltc.passes.memory_planner import ALIGNMENT
from ltc.support.sizes.extent import Extent

ITSELF, OWNED, COPIED, ALIAS = range(4)  # how a value becomes an output
OWN_VALUES = 4  # of a launch: its frame, the constants, nothing, its block
GUARD_BYTES = ALIGNMENT  # before a value, and behind the last cache line that it has a part in
# The reference's result may lie in the memory of the first operand.
MAY_SHARE = frozenset(
    {ops.PERMUTE, ops.SLICE, ops.EXPAND, ops.RESHAPE, ops.BITCAST, ops.BARRIER, ops.CAST, ops.GET}
)


@dataclass(frozen=True)
class InBlock:
    """A value in the launch's block, where the reference needs it as a tensor."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class FailedCheck:
    """The meaning of a fault: see llvm/native/kernel_run.py.

    Attributes:
        operands: The operands of `node`, if the reference is to raise the error: numbers of values,
        or places in the block.
    """

    node: Node
    error: str
    message: str
    origin: Origin | None
    operands: tuple[int | InBlock, ...]


class PlannedCall(NamedTuple):
    """One kernel of a run.

    Attributes:
        kernel: Its name among the program's kernels.
        arguments: For each argument a value, then the number to add to its address. Pairs would be
        thousands of objects for Python's garbage collector.
        check: Number of its fault, or -1.
        overwrites: Positions of the inputs that it writes over.
        awaits: The number of the one-shot sum that it waits for, or -1.
    """

    kernel: str
    arguments: tuple[int, ...]
    tasks: int
    check: int
    overwrites: tuple[int, ...]
    awaits: int = -1


@dataclass(frozen=True)
class ReferenceCall:
    """One node through the reference.

    Attributes:
        operands: The values it takes.
        result: The value it makes.
        address: True if kernels read the result.
        dead: Values that nothing reads afterwards.
    """

    node: Node
    operands: tuple[int, ...]
    result: int
    address: bool
    dead: tuple[int, ...]
    origin: Origin | None

    @property
    def is_counted(self) -> bool:
        """Return True if it computes anything; a view does not."""
        return self.node.op not in MAY_SHARE


PlannedRun = tuple[PlannedCall, ...] | ReferenceCall


@dataclass(frozen=True)
class PlannedSum:
    """One one-shot sum.

    Attributes:
        types: The types of each member's operands.
        words: The number of its words in the frame.
        is_awaited: True if the program waits for it; otherwise its results are not read.
    """

    collective: Collective
    types: tuple[TensorType, ...]
    words: int
    is_awaited: bool


class PlannedSums:
    """All one-shot sums of a program, in the order in which they begin.

    The object itself is the key of what is prepared for them: see OneShotReducer.begin.

    Attributes:
        words: The number of words in the frame of all of them.
    """

    def __init__(self, sums: tuple[PlannedSum, ...] = ()) -> None:
        self.all = sums
        self.words = sum(one.words for one in sums)


@dataclass(frozen=True)
class MemoryChecks:
    """The checks of a program, and the texts of their findings.

    Attributes:
        rows: The rows of all steps, eight words each: see llvm/ops/memory_checks.py.
        names: The names of buffers, by the last word of a row.
        sizes: The words that are expressions of sizes: (number of the word, expression).
    """

    rows: bytes
    names: tuple[str, ...]
    sizes: tuple[tuple[int, Extent], ...] = ()


@dataclass(frozen=True)
class ProgramPlan:
    """One program.

    Attributes:
        positions: Positions of the used inputs in the launch's buffers.
        made: (shape, dtype) of the outputs that get new memory.
        values: Number of values.
        constants: (node, offset) in the memory that all launches share.
        fixed: (value, node): constants that the reference reads.
        cells: (slot, dtype) of the scalars that kernels read, in words of the frame.
        scalars: (value, slot, dtype) of those that the reference reads.
        checks: The faults, one word each.
        arguments: Words of the frame for the arguments of one run.
        frame: Bytes of the frame.
        block: Bytes of the block.
        in_block: (value, where): values in the block that the reference reads.
        runs: Kernels that run without anything else between them, and calls of the reference.
        outputs: (value, how it becomes an output).
        sums: One-shot sums with other replicas.
        memory: The checks of memory, which lie behind the constants; None: none.
        called_products: Number of products that are calls of PyTorch's own kernel.
    """

    positions: tuple[int, ...]
    made: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    values: int
    constants: tuple[tuple[Node, int], ...]
    fixed: tuple[tuple[int, Node], ...]
    cells: tuple[tuple[int, torch.dtype], ...]
    scalars: tuple[tuple[int, int, torch.dtype], ...]
    checks: tuple[FailedCheck, ...]
    arguments: int
    frame: int
    block: int
    in_block: tuple[tuple[int, InBlock], ...]
    runs: tuple[PlannedRun, ...]
    outputs: tuple[tuple[int, int], ...]
    sums: PlannedSums = PlannedSums()
    memory: MemoryChecks | None = None
    called_products: int = 0

    @property
    def guard(self) -> int:
        """Bytes that outputs in new memory have before and behind them."""
        return 0 if self.memory is None else GUARD_BYTES

    @property
    def first_sum(self) -> int:
        """Return where in the frame the words of the sums begin."""
        return word_places([dtype for _, dtype in self.cells], self.values)[-1]

    @property
    def first_check(self) -> int:
        """Return where in the frame the faults begin."""
        return self.first_sum + self.sums.words

    @property
    def places_of_checks(self) -> range:
        return range(self.first_check, self.first_check + len(self.checks))
