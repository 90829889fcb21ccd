"""Which numbers of a plan are expressions, and what they are at given sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ltc.backends.llvm.plan import PlannedCall, ProgramPlan, ReferenceCall
from ltc.errors import Unsupported
from ltc.ir import ops
from ltc.ir.node import Node, make
from ltc.support.sizes.extent import Extent, SizeTrace, number_now
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

    def of_run(self, run: Sequence[PlannedCall]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Which arguments of a run of kernels are expressions, which kernels' tasks, their numbers."""
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


def as_now(plan: ProgramPlan) -> ProgramPlan:
    """The plan at the sizes that its symbols have now; raises Unsupported where that is not all.

    Called under the plan's trace: constants in memory are what they are, which guards say.
    """
    runs = []
    for run in plan.runs:
        if isinstance(run, ReferenceCall):
            raise Unsupported(f"{run.node.op} has no kernel, and its sizes change")
        runs.append(tuple(map(_call_now, run)))
    if plan.in_block or plan.scalars or plan.fixed or plan.sums.all:
        raise Unsupported("the reference takes part in it")
    for check in plan.checks:
        if not check.error:
            raise Unsupported(f"{check.node.op} asks the reference what is wrong")
    return replace(
        plan,
        made=tuple((tuple(map(number_now, shape)), dtype) for shape, dtype in plan.made),
        constants=tuple((_settled(node), place) for node, place in plan.constants),
        block=number_now(plan.block),
        runs=tuple(runs),
    )


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
