"""What one recorded call does on PyTorch's own kernel, and how long it takes."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from math import prod
from typing import Any

from ltc.aten.call import Call, CallResult, parts_of_kind
from ltc.backends.capabilities import KernelFacts
from ltc.backends.interpreter.call_kernel import CallKernel, Values
from ltc.ir.graph import Origin


class TimedCall(CallKernel):
    """A call that notes when it is over."""

    __slots__ = ("_kernel", "_times")

    def __init__(self, kernel: CallKernel, times: array[int]) -> None:
        self.call, self.first = kernel.call, kernel.first
        self._kernel, self._times = kernel, times

    def run(self, values: Values) -> None:
        self._kernel.run(values)
        self._times.append(time.monotonic_ns())


def operands_of(call: Call) -> list[CallResult]:
    """The values that a call reads."""
    return parts_of_kind(CallResult, [(*call.args, *call.kwargs.values())])


def as_recorded(x: Any) -> Any:
    """What is known of an argument or a result where sizes are numbers: itself."""
    return x


def facts_of_call(call: Call, known: Callable[[Any], Any] = as_recorded) -> KernelFacts:
    """By its shapes; `known`: gives an argument or a result as it is at the sizes of the launch."""
    reads = list(map(known, operands_of(call)))
    writes = [known(value) for value in call.results if value is not None]
    kwargs = {name: known(value) for name, value in call.kwargs.items()}
    place = Origin(call.name, call.line, module=call.module, forward=call.forward)
    return facts_of(call.overload, known(call.args), kwargs, reads, writes, place)


def facts_of(
    overload: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    reads: Sequence[Any],
    writes: Sequence[Any],
    place: Origin,
) -> KernelFacts:
    """Of a call of that overload; `reads` and `writes`: whatever has a shape and a dtype."""
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
    """As torch.utils.flop_counter counts them, two operations for each; 0 of what it does not know."""
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
