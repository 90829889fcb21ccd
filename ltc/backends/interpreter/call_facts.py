"""The work of one recorded call on PyTorch's own kernel, and its time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from math import prod
from typing import Any

from ltc.aten.call import Call, CallResult, parts_of_kind
from ltc.backends.capabilities import KernelFacts
from ltc.ir.graph import Origin


def operands_of(call: Call) -> list[CallResult]:
    """The values that a call reads."""
    return parts_of_kind(CallResult, [(*call.args, *call.kwargs.values())])


def facts_of_call(call: Call) -> KernelFacts:
    """By its shapes."""
    writes = [value for value in call.results if value is not None]
    place = Origin(call.name, call.line, module=call.module, forward=call.forward)
    return facts_of(call.overload, call.args, call.kwargs, operands_of(call), writes, place)


def facts_of(
    overload: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    reads: Sequence[Any],
    writes: Sequence[Any],
    place: Origin,
) -> KernelFacts:
    """Return the facts of a call; `reads` and `writes` have a shape and a dtype each."""
    name = place.overload
    multiply_adds = _multiply_adds(overload, args, kwargs, [tuple(one.shape) for one in writes])
    module = place.module_path
    shapes = " ".join(str(list(one.shape)) for one in reads)
    return KernelFacts(
        name=f"{name.removeprefix('aten::')} {shapes}".strip(),
        ops=(name,),
        line=place.line,
        forward=place.forward,
        lines=(place.forward or place.line,),
        module=module,
        modules=(module,) if module else (),
        read_bytes=sum(map(_nbytes, dict.fromkeys(reads))),
        written_bytes=sum(map(_nbytes, writes)),
        multiply_adds=multiply_adds,
        operations=0 if multiply_adds else sum(prod(one.shape) for one in writes),
        is_double=any(one.dtype.itemsize == 8 for one in writes),
    )


def _multiply_adds(
    overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: list[tuple[int, ...]]
) -> int:
    """Count multiply-adds as torch.utils.flop_counter does, two operations each; 0 for unknown
    calls.
    """
    products = _OF_LAYERS.get(str(overload))
    if products is not None:
        return products(args)
    count = _flop_registry().get(getattr(overload, "overloadpacket", None))
    if count is None or not made:
        return 0
    keywords = {name: _shape(argument) for name, argument in kwargs.items()}
    out = made[0] if len(made) == 1 else tuple(made)
    try:
        return int(count(*map(_shape, args), **keywords, out_val=out) // 2)
    except (TypeError, ValueError, AssertionError, IndexError, AttributeError):
        return 0  # a form of the call that it does not take


@cache
def _flop_registry() -> dict[Any, Callable[..., Any]]:
    """torch's formulas; with them torch imports triton, where it is installed: not with ltc."""
    registry: dict[Any, Callable[..., Any]] = import_module(
        "torch.utils.flop_counter"
    ).flop_registry
    return registry


# Of layers that torch's counter knows by their parts alone.
_OF_LAYERS: dict[str, Callable[[Sequence[Any]], int]] = {
    "aten.linear.default": lambda args: prod(args[0].shape) * args[1].shape[0],
    "aten.linear_backward.default": lambda args: (
        prod(args[0].shape) * args[2].shape[0] * sum(args[3][:2])
    ),
}


def _shape(argument: Any) -> Any:
    shape = getattr(argument, "shape", None)
    return argument if shape is None else tuple(shape)


def _nbytes(value: Any) -> int:
    return int(prod(value.shape) * value.dtype.itemsize)
