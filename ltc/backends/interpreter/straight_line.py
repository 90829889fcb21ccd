"""The calls of a program as one function of Python, a line for each.

Who runs them one by one asks of each call how its arguments are put together, and whether its result
is what was recorded.  That is the same every time: what has run so a few times is written down, and
costs little more than PyTorch's kernels from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ltc.backends.interpreter.call_kernel import CallKernel, Values
from ltc.backends.interpreter.line_names import Names
from ltc.errors import InvalidGraph

RUNS_BEFORE = 8  # to write a line down takes as long as it saves in about so many runs

# (values, positions of donated inputs that were written over) -> None
Run = Callable[[Values, list[int]], None]


class Step(NamedTuple):
    """
    dead        slots that nobody reads after it
    overwrites  positions of the donated inputs that it may write over
    """

    kernel: CallKernel
    dead: tuple[int, ...]
    overwrites: tuple[int, ...]


class StraightLine:
    """Made once the calls have run often enough for that to pay."""

    def __init__(self, steps: Iterable[Step], shapes: Mapping[int, int]) -> None:
        """`shapes`: slot of each output -> slot of the shape that it has to have."""
        self._steps, self._shapes = steps, shapes
        self.forget()

    def forget(self) -> None:
        """The calls have not run as before: they are to run one by one again."""
        self._runs = 0
        self._run: Run | None = None

    def found(self) -> Run | None:
        """What runs them all; None as long as they are to run one by one."""
        if self._run is None:
            self._runs += 1
            if self._runs > RUNS_BEFORE:
                self._run = self._made()
        return self._run

    def _made(self) -> Run:
        names, lines = Names(), ["def run(values, overwritten):"]
        for kernel, dead, overwrites in self._steps:
            if overwrites:
                lines.append(f"overwritten += {overwrites!r}")
            lines.append(kernel.source(names))
            if kernel.first in self._shapes:
                made, shape = f"values[{kernel.first}]", f"values[{self._shapes[kernel.first]}]"
                lines.append(f"if {made}.shape != {shape}: raise {names.of(_another_shape)}()")
            if dead:
                lines.append(f"{' = '.join([f'values[{slot}]' for slot in dead])} = None")
        namespace: dict[str, Any] = names.namespace
        exec(compile("\n    ".join([*lines, "return"]), "<ltc calls>", "exec"), namespace)
        made_run: Run = namespace["run"]
        return made_run


def _another_shape() -> InvalidGraph:
    return InvalidGraph("A call gives another shape than was recorded.")
