"""The calls of a pattern with expressions for sizes: their types as the rules tell them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ltc.aten.call import Call, CallResult
from ltc.aten.result_shapes import result_shapes
from ltc.device.symbolic.pattern import Differs, PatternCall, SizeHole, filled
from ltc.errors import Unsupported
from ltc.support.sizes.choices import tracing
from ltc.support.sizes.extent import SizeTrace

INPUT, WRITE_VIEW = "ltc::input", "ltc::write_view"
_LIKE_THE_FIRST = frozenset({WRITE_VIEW, "ltc::barrier"})  # their results, by type


@dataclass
class Derived:
    """The calls of a path, derived again with Extents where sizes differ.

    Attributes:
        value: Value of the first recording -> value of these calls.
        guards: The conditions under which each call has these types.
    """

    trace: SizeTrace
    calls: list[Call]
    value: dict[CallResult, CallResult]
    guards: list[tuple[str, ...]]


def derived(
    pattern: Sequence[PatternCall], values: Sequence[int], symbolic: bool = True
) -> Derived:
    """The calls at symbols that now have these values; raises Differs where a type is not known.

    Args:
        symbolic: True if sizes are Extents; else they are numbers.
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
            raise Differs(f"the rule of {old.name} gives another number of results")
        result = None if type is None else CallResult(None, call, index, tuple(type[0]), type[1])
        results.append(result)
        if value is not None and result is not None:
            if result.dtype != value.dtype or len(result.shape) != len(value.shape):
                raise Differs(f"{old.name} gives {value}, but its rule gives another type")
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
        raise Differs(f"{call.name} has no rule that gives its sizes as symbols")
    if not one.is_open:
        return [None if pair is None else pair[0] for pair in one.types]
    dtypes = [None if value is None else value.dtype for value in one.call.results]
    try:
        shapes = result_shapes(call, dtypes)
    except Unsupported as error:
        raise Differs(str(error)) from error
    return [None if d is None else (shape, d) for shape, d in zip(shapes, dtypes)]
