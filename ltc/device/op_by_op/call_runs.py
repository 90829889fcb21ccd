"""One `Call` run at once: on PyTorch's own kernel, or as its rule says where that cannot."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ltc.aten.call import Call, CallResult, Numbering, Scalar
from ltc.backends.interpreter.call_kernel import CallKernel, Slots, kernel_of
from ltc.backends.interpreter.expanded_call import ExpandedCall
from ltc.backends.interpreter.interpreted import INPUT
from ltc.backends.plain_dispatch import PlainDispatch
from ltc.runtime.graph_compiler import compiled_call
from ltc.support.bounded_table import BoundedTable

_kernels: BoundedTable[tuple, tuple[CallKernel, Slots, list[int]]] = BoundedTable(
    "OpByOpKernels", 4096
)


def run(call: Call, numbers: Sequence[Any], device: int) -> list[torch.Tensor | None]:
    """What the call's results are; its operands are computed, and are left as they are.

    numbers  the values of its scalars, by their slots
    """
    operands: list[CallResult] = []
    key = _key(call, operands)
    known = _kernels.get(key)
    if known is None:
        known = _kernels.keep(key, _prepared(call, operands, device))
    kernel, slots, places = known
    values = slots.start.copy()
    values[: len(operands)] = [operand.tensor for operand in operands]
    values[slots.scalars] = [numbers[place] for place in places]
    with PlainDispatch():
        kernel.run(values)
    made = iter(values[kernel.first : kernel.first + len(kernel.call.results)])
    return [None if result is None else next(made) for result in kernel.call.results]


def _prepared(
    call: Call, operands: list[CallResult], device: int
) -> tuple[CallKernel, Slots, list[int]]:
    """The kernel of a call like this one, where it reads and writes, and the slots of its scalars."""
    inputs = [_input(position, operand) for position, operand in enumerate(operands)]
    places = iter(inputs)
    args = _with_inputs(call.args, places)
    kwargs = dict(zip(call.kwargs, _with_inputs(tuple(call.kwargs.values()), places)))
    alone = Call(call.overload, args, kwargs, call.mutated, call.returned, call.line, call.seed)
    alone.default = call.default
    alone.results = tuple(
        [
            None if one is None else CallResult(None, alone, one.index, one.shape, one.dtype)
            for one in call.results
        ]
    )
    calls = [*[value.call for value in inputs], alone]
    scalars = sorted(Numbering([alone]).slots)
    slots = Slots(calls, scalars)

    expanded = functools.partial(
        ExpandedCall, compile=functools.partial(compiled_call, device=device)
    )
    return kernel_of(alone, slots, frozenset(), expanded), slots, scalars


def _input(position: int, operand: CallResult) -> CallResult:
    call = Call(INPUT, (position,), {})
    value = CallResult(None, call, 0, operand.shape, operand.dtype)
    call.results = (value,)
    return value


def _with_inputs(arguments: Any, inputs: Any) -> Any:
    """The arguments with the next of `inputs` in place of each value."""
    if isinstance(arguments, (list, tuple)):
        return arguments.__class__([_with_inputs(part, inputs) for part in arguments])
    return next(inputs) if arguments.__class__ is CallResult else arguments


def _key(call: Call, operands: list[CallResult]) -> tuple:
    """What kernels are told apart by; `operands` gets the values that the call reads, in order."""
    args = _typed(call.args, operands)
    kwargs = _typed(tuple(call.kwargs.items()), operands)
    results = tuple([None if one is None else (one.shape, one.dtype) for one in call.results])
    return call.overload, args, kwargs, results, call.default


def _typed(argument: Any, operands: list[CallResult]) -> Any:
    kind = argument.__class__
    if kind is list or kind is tuple:
        return kind, tuple([_typed(part, operands) for part in argument])
    if kind is CallResult:
        operands.append(argument)
        return CallResult, argument.shape, argument.dtype
    if kind is dict:
        return kind, _typed(tuple(argument.items()), operands)
    if kind is float:
        return kind, repr(argument)  # 0.0 and -0.0 are equal
    if kind is Scalar:
        return Scalar, argument.slot, argument.dtype, argument.wrapped, argument.origin
    return kind, argument
