"""How a path of symbols ends, traced with expressions in place of sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ltc.aten.call import Call, CallResult, Numbering
from ltc.aten.expansion import expand
from ltc.ir.graph import Graph, Origin
from ltc.passes import pipeline
from ltc.passes.narrow_dtypes import narrow
from ltc.runtime import physical_dtype
from ltc.runtime.buffer import Outputs
from ltc.runtime.compile import ProgramBinding, binding_of, input_roles, live_calls
from ltc.runtime.program import Program
from ltc.support.sizes.choices import tracing
from ltc.support.sizes.extent import Extent, SizeTrace
from ltc.support.sizes.marks import is_symbolic

# (values of the symbols, whether sizes are to be Extents) -> the trace of these, the calls, the outputs
Derive = Callable[[Sequence[int], bool], tuple[SizeTrace, list[Call], tuple[CallResult, ...]]]


class TracedEnd:
    """
    trace      of the sizes, as they are now
    calls      that the outputs need
    outputs    in the program's order
    numbering  of the calls
    binding    what the program is given of the recording
    """

    def __init__(self, derive: Derive, values: Sequence[int], replaced: dict[int, int]) -> None:
        """
        derive    gives the path's calls and outputs at given sizes
        replaced  output position -> position in the recording of the input whose place it takes
        """
        self._derive = derive
        self.trace, calls, made = derive(values, True)
        with tracing(self.trace):
            self.calls = live_calls(calls, made)
            self.binding = binding_of(
                self.calls, made, replaced, lambda order, numbering: id(self), None
            )  # fmt: skip
        self.outputs = _in_order(self.binding, made)
        self.numbering = Numbering(self.calls)
        self._replaced = dict(self.binding.key[2])
        self._roles = functools.partial(input_roles, self.numbering, self._replaced, self.calls)
        self._shapes = self.trace.function(_text_of_shapes(self.outputs))
        self._fixed: Outputs | None = None  # where no size of theirs changes
        if not is_symbolic([value.shape for value in self.outputs]):
            self._fixed = self._outputs_at(values)

    @property
    def donated(self) -> frozenset[int]:
        """Positions of the inputs that the program may write over."""
        return frozenset(self._replaced.values())

    def origin_of(self, position: int) -> Origin:
        """Where the call at a position comes from."""
        call = self.calls[position]
        return Origin(call.name, call.line, position)

    def graph(self) -> Graph:
        """As traced: no pass has run. Called under the trace."""
        return _traced(self.calls, self.outputs)

    def traced_at(self, values: Sequence[int]) -> Graph:
        """Likewise at these sizes, with numbers."""
        _, calls, outputs = self._derive(values, False)
        return _traced(live_calls(calls, outputs), _in_order(self.binding, outputs))

    def graph_at(self, values: Sequence[int]) -> Graph:
        """What the passes make of it: for what runs it again where it has failed."""
        return pipeline.run(self.traced_at(values))

    def program(self, computation: Any, values: Sequence[int]) -> Program:
        """What is run by a computation of these values of the symbols."""
        return Program(
            computation,
            self._fixed or self._outputs_at(values),
            self._roles,
            functools.partial(self.graph_at, tuple(values)),
            len(self.calls),
        )

    def _outputs_at(self, values: Sequence[int]) -> Outputs:
        dtypes = [value.dtype for value in self.outputs]
        return Outputs(tuple(zip(self._shapes(*values), dtypes)), self._replaced)


def _text_of_shapes(outputs: Sequence[CallResult]) -> str:
    texts = [[s.source if isinstance(s, Extent) else str(s) for s in v.shape] for v in outputs]
    shapes = [f"({', '.join([*sizes, ''])})" if sizes else "()" for sizes in texts]
    return f"({', '.join([*shapes, ''])})" if shapes else "()"


def _in_order(binding: ProgramBinding, outputs: Sequence[CallResult]) -> tuple[CallResult, ...]:
    by_place = sorted(zip(binding.outputs, outputs), key=lambda pair: pair[0])
    return tuple(value for _, value in by_place)


def _traced(calls: list[Call], outputs: Sequence[CallResult]) -> Graph:
    return narrow(expand(calls, outputs, Numbering(calls)), physical_dtype.kept_as())
