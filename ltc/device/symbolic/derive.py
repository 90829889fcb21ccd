"""The calls of a pattern with expressions for sizes: their types as the formulas derive them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ltc.aten.call import Call, CallResult
from ltc.device.shapes.formulas.table import types_by_formula
from ltc.device.symbolic.pattern import Differs, PatternCall, SizeHole, filled
from ltc.support.sizes.choices import tracing
from ltc.support.sizes.extent import SizeTrace

INPUT, WRITE_VIEW = "ltc::input", "ltc::write_view"
_LIKE_THE_FIRST = frozenset({WRITE_VIEW, "ltc::barrier"})  # their results, by type


@dataclass
class Derived:
    """
    calls    with Extents where sizes differ
    value    of the first recording -> that of these calls
    guards   the conditions under which each call has these types
    """

    trace: SizeTrace
    calls: list[Call]
    value: dict[CallResult, CallResult]
    guards: list[tuple[str, ...]]


def derived(
    pattern: Sequence[PatternCall], values: Sequence[int], symbolic: bool = True
) -> Derived:
    """The calls at symbols that now have these values; raises Differs where a type is not known.

    symbolic  whether sizes are Extents; else they are numbers
    """
    trace = SizeTrace()
    symbols: dict[str, Any] = {f"s{k}": trace.symbol(value) for k, value in enumerate(values)}
    if not symbolic:
        symbols = {f"s{k}": value for k, value in enumerate(values)}
    made = Derived(trace, [], {}, [])

    def fill(part: Any) -> Any:
        if part.__class__ is SizeHole:
            return eval(part.source, {"__builtins__": {}}, symbols)
        return made.value.get(part, part)

    with tracing(trace):
        for one in pattern:
            known = len(trace.guards)
            made.calls.append(_call(one, fill, made.value))
            made.guards.append(tuple(trace.guards)[known:])
    return made


def _call(one: PatternCall, fill: Any, values: dict[CallResult, CallResult]) -> Call:
    old = one.call
    args = old.args if one.args is None else filled(one.args, fill)
    kwargs = filled(one.kwargs, fill)
    call = Call(old.overload, args, kwargs, old.mutated, old.returned, old.line, old.seed)
    call.default = old.default
    types = _types(one, call, fill)
    results = []
    for index, (value, type) in enumerate(zip(old.results, types, strict=True)):
        if (value is None) != (type is None):
            raise Differs(f"{old.name} gives other results by its formula")
        result = None if type is None else CallResult(None, call, index, tuple(type[0]), type[1])
        results.append(result)
        if value is not None and result is not None:
            if result.dtype != value.dtype or len(result.shape) != len(value.shape):
                raise Differs(f"{old.name} gives {value}, by its formula another type")
            values[value] = result
    call.results = tuple(results)
    return call


def _types(one: PatternCall, call: Call, fill: Any) -> Sequence[Any]:
    if one.shape is not None:
        return [(filled(one.shape, fill), one.call.results[0].dtype)]
    if call.overload in _LIKE_THE_FIRST:
        old: Any = call.args[0]
        return [(old.shape, old.dtype)]
    if isinstance(call.overload, str):
        raise Differs(f"{call.name} is not derived")
    if not one.is_open:
        return [None if pair is None else pair[0] for pair in one.types]
    types = types_by_formula(call.overload, call.args, call.kwargs)
    if types is None:
        raise Differs(f"no formula tells what {call.name} gives")
    return types
