"""A call run as its rule says: random numbers then are those of a compiled program.

The reference draws the same bits.  What is computed of them by formulas that it rounds otherwise, as
normal numbers are, a compiled program makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ltc.aten.call import Call, CallResult, Numbering
from ltc.aten.expansion import expand_alone, values_read_by
from ltc.backends.eager import EagerComputation
from ltc.backends.interpreter.call_kernel import CallKernel, Slots, Values
from ltc.backends.interpreter.exact_draws import is_drawn_by_reference
from ltc.backends.interpreter.interpreted import INPUT
from ltc.ir.graph import Graph
from ltc.support.sizes.extent import Extent

Compile = Callable[[Graph], Any]
_MOST_SIZES = 64  # for which a call is kept ready


class ExpandedCall(CallKernel):
    """Of one size."""

    __slots__ = ("_operands", "_scalars", "_computation")

    def __init__(self, call: Call, slots: Slots, compile: Compile) -> None:
        super().__init__(call, slots)
        self._computation, operands, scalars = _expanded(call, compile)
        self._operands = [slots.of_value(value) for value in operands]
        self._scalars = [slots.of_scalar(place) for place in scalars]

    def run(self, values: Values) -> None:
        _run(self, self._computation, self._operands, self._scalars, values)


class ExpandedAtAnySize(CallKernel):
    """Expanded for each size that comes."""

    __slots__ = ("_operands", "_scalars", "_sizes", "_compile", "_ready")

    def __init__(self, call: Call, slots: Slots, compile: Compile) -> None:
        super().__init__(call, slots)
        self._compile, self._ready = compile, dict[tuple[int, ...], Any]()
        self._operands = [slots.of_value(value) for value in values_read_by(call)]
        self._scalars = [slots.of_scalar(place) for place in Numbering([call]).slots]
        self._sizes = slots.of_constant(tuple(_extents_in(_sized_parts(call))))

    def run(self, values: Values) -> None:
        sizes = values[self._sizes]
        computation = self._ready.pop(sizes, None)
        if computation is None:
            computation, _, _ = _expanded(_at_sizes(self.call, sizes), self._compile)
            if len(self._ready) >= _MOST_SIZES:
                del self._ready[next(iter(self._ready))]
        self._ready[sizes] = computation  # the one used last is the last to go
        _run(self, computation, self._operands, self._scalars, values)


def _expanded(call: Call, compile: Compile) -> tuple[Any, list[CallResult], list[int]]:
    """What computes the call's results, of which values and of which scalars."""
    graph, operands, scalars = expand_alone(call)
    has_same_bits = call.seed is None or is_drawn_by_reference(graph)
    computation = EagerComputation(graph, frozenset()) if has_same_bits else compile(graph)
    return computation, operands, scalars


def _run(
    kernel: CallKernel, computation: Any, operands: list[int], scalars: list[int], values: Values
) -> None:
    given = [values[slot].resolve_neg().contiguous() for slot in operands]
    made = computation.launch(given, [values[slot] for slot in scalars])
    values[kernel.first : kernel.first + len(made)] = made


# --- a call of symbols at sizes that are numbers ----------------------------------------------------


def _sized_parts(call: Call) -> tuple[Any, ...]:
    """All that has sizes: shapes of operands, arguments, shapes of results."""
    results = [None if one is None else tuple(one.shape) for one in call.results]
    operands = [tuple(one.shape) for one in values_read_by(call)]
    return operands, tuple(call.args), tuple(call.kwargs.values()), results


def _extents_in(part: Any) -> Iterator[Extent]:
    if isinstance(part, Extent):
        yield part
    elif isinstance(part, (list, tuple)):
        for one in part:
            yield from _extents_in(one)


def _at_sizes(call: Call, sizes: Iterable[int]) -> Call:
    """The call with numbers for its extents, in the order of `_extents_in`, of operands that are inputs."""
    numbers, inputs = iter(sizes), dict[CallResult, CallResult]()

    def filled(part: Any) -> Any:
        if isinstance(part, Extent):
            return next(numbers)
        if isinstance(part, (list, tuple)):
            return type(part)([filled(one) for one in part])
        return inputs.get(part, part) if isinstance(part, CallResult) else part

    shapes, args, kwargs, results = _sized_parts(call)
    for position, (value, shape) in enumerate(zip(values_read_by(call), filled(shapes))):
        given = Call(INPUT, (position,), {})
        inputs[value] = CallResult(None, given, 0, shape, value.dtype)
        given.results = (inputs[value],)
    args, named = filled(args), dict(zip(call.kwargs, filled(kwargs)))
    alone = Call(call.overload, args, named, call.mutated, call.returned, call.line, call.seed)
    alone.default = call.default
    alone.results = tuple(
        [
            None if one is None else CallResult(None, alone, one.index, shape, one.dtype)
            for one, shape in zip(call.results, filled(results))
        ]
    )
    return alone
