"""Which numbers of a plan are expressions, and what they are at given sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ltc.backends.llvm.plan import InBlock, PlannedCall, PlannedRun, ProgramPlan, ReferenceCall
from ltc.backends.reference.torch_call import at_sizes, sizes_made
from ltc.errors import Unsupported
from ltc.ir import ops
from ltc.ir.node import Node, make
from ltc.support.sizes.extent import Extent, Size, SizeTrace, number_now
from ltc.support.sizes.marks import is_symbolic, settled


@dataclass
class Numbers:
    """The expressions of a plan, each once; what holds them refers to them by number."""

    trace: SizeTrace
    _known: dict[str, int] = field(default_factory=dict)

    def number(self, size: Extent) -> int:
        return self._known.setdefault(size.source, len(self._known))

    def function(self) -> Callable[..., tuple[int, ...]]:
        """All of them, as a function of the symbols."""
        made: Callable[..., tuple[int, ...]] = self.trace.function(
            f"({', '.join([*self._known, ''])})"
        )
        return made

    def places_of(self, sizes: Sequence[Size]) -> tuple[int, ...]:
        """Of each expression its number; of a number that stays, -1 less it: see `sizes_at`."""
        return tuple(self.number(size) if isinstance(size, Extent) else -1 - size for size in sizes)

    def of_run(self, run: PlannedRun) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Which arguments of a run of kernels are expressions, which kernels' tasks, their numbers.

        Of a call of PyTorch's kernel: which sizes of what it makes are expressions.
        """
        if isinstance(run, ReferenceCall):
            sizes, found = self.of_results(run.node)
            return sizes, np.array((), dtype=np.int64), found
        places: list[int] = []
        added: list[int] = []
        calls: list[int] = []
        tasks: list[int] = []
        place = 0
        for position, call in enumerate(run):
            for size in call.arguments[1::2]:
                if isinstance(size, Extent):
                    places.append(place)
                    added.append(self.number(size))
                place += 1
            if isinstance(call.tasks, Extent):
                calls.append(position)
                tasks.append(self.number(call.tasks))
        return (
            np.array(places, dtype=np.int64),
            np.array(calls, dtype=np.int64),
            np.array(added + tasks, dtype=np.int64),
        )

    def of_results(self, node: Node) -> tuple[np.ndarray, np.ndarray]:
        """Which of the `sizes_made` are expressions, and their numbers."""
        found = [(k, n) for k, n in enumerate(sizes_made(node)) if isinstance(n, Extent)]
        return (
            np.array([k for k, _ in found], dtype=np.int64),
            np.array([self.number(n) for _, n in found], dtype=np.int64),
        )


def sizes_at(places: Sequence[int], found: Sequence[int]) -> tuple[int, ...]:
    """The sizes of `Numbers.places_of`, where the expressions are `found`."""
    return tuple([found[place] if place >= 0 else -1 - place for place in places])


def as_now(plan: ProgramPlan) -> ProgramPlan:
    """The plan at the sizes that its symbols have now; raises Unsupported where that is not all.

    Called under the plan's trace: constants in memory are what they are, which guards say.
    """
    runs: list[PlannedRun] = []
    for run in plan.runs:
        if isinstance(run, ReferenceCall):
            runs.append(replace(run, node=_node_now(run.node)))
        else:
            runs.append(tuple(map(_call_now, run)))
    if plan.sums.all:
        raise Unsupported("it exchanges with replicas")
    for check in plan.checks:
        if not check.error:
            _node_now(check.node)
    return replace(
        plan,
        made=tuple((tuple(map(number_now, shape)), dtype) for shape, dtype in plan.made),
        constants=tuple((_settled(node), place) for node, place in plan.constants),
        fixed=tuple((value, _settled(node)) for value, node in plan.fixed),
        in_block=tuple((value, _there_now(where)) for value, where in plan.in_block),
        block=number_now(plan.block),
        runs=tuple(runs),
    )


# What the reference computes of operands of any size: PyTorch's own kernel and what that gave, and
# what is complex, where its attributes say how.
_OF_ANY_SIZE = frozenset(
    {ops.EXTERN, ops.GET, ops.PERMUTE}
    | {op for op in ops.ALL.values() if op.kind == "elementwise" and op is not ops.WRAP_INDEX}
)


def _node_now(node: Node) -> Node:
    settings = [value for name, value in node.attrs if name not in ("template", "results")]
    if node.op not in _OF_ANY_SIZE or is_symbolic(settings):
        raise Unsupported(f"{node.op} has no kernel, and its sizes change")
    if node.op is ops.EXTERN and is_symbolic(node.attr("template").text):
        raise Unsupported(f"{node.attr('template').overload} is given sizes that change")
    sizes = sizes_made(node)
    return at_sizes(node, range(len(sizes)), list(map(number_now, sizes)))


def _there_now(where: InBlock) -> InBlock:
    return InBlock(number_now(where.offset), where.dtype, tuple(map(number_now, where.shape)))


def _call_now(call: Any) -> PlannedCall:
    arguments = tuple(map(number_now, call.arguments))
    made: PlannedCall = call._replace(arguments=arguments, tasks=number_now(call.tasks))
    return made


def _settled(node: Node) -> Node:
    literal = node.attr("literal")
    if node.op is not ops.CONSTANT or not is_symbolic(literal):
        return node
    number = float(settled(literal)) if node.dtype.is_floating_point else int(settled(literal))
    return make(ops.CONSTANT, literal=repr(number), dtype=node.dtype)
