"""A small call run on the CPU on stand-in values: whether its kernel accepts it, and what it gives.

torch's Meta kernels let some calls pass that the CPU kernels refuse, and tell some types as CUDA
would have them; those written in Python take a second to import, and each call some hundred
microseconds.  A call with few elements is cheap to ask directly, once per kind of operands.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ltc.aten.call import Call, CallResult, Scalar
from ltc.backends.kernel_call import REFUSALS, kernel_call
from ltc.runtime.buffer import byte_size

_MOST_ELEMENTS = 1 << 18
FEW_BYTES = 1 << 16  # of all operands and results together: some 10 us of work

_SHORT = 16  # bytes, too, that some kernels want rows to be a multiple of


class Refused(Exception):
    """The CPU kernel refused every stand-in; `__cause__` is its error."""


def is_small(operands: list, types: tuple) -> bool:
    """Return True if operands and results together are few enough to run the call."""
    total = sum(byte_size(*t) for t in types if t is not None)
    return total + sum(byte_size(v.shape, v.dtype) for v in _values(operands)) <= FEW_BYTES


def makes_little(operands: list) -> bool:
    """Return True if it has few operands and, whatever it computes, a result of no great size.

    Numbers among the operands may be extents of the result, which then has their product at most.
    """
    if not is_small(operands, ()):
        return False
    most = 1
    for number in numbers(operands):
        if not abs(number) <= _MOST_ELEMENTS:
            return False
        most *= max(int(abs(number)), 1)
    given = sum(math.prod(value.shape) for value in _values(operands))
    return most * (given + 1) <= _MOST_ELEMENTS  # + 1: a call that is given none makes some, too


def numbers(operands: Sequence[Any]) -> list[float]:
    """Return the integers and floats among the operands, also those that a recording hands over."""
    found: list[float] = []
    for operand in operands:
        if operand.__class__ is Scalar:
            operand = operand.sample
        if operand.__class__ is int or operand.__class__ is float:
            found.append(operand)
        elif operand.__class__ is list or operand.__class__ is tuple:
            found.extend(numbers(operand))
    return found


def _values(operands: Sequence[Any]) -> list[CallResult]:
    found = []
    for operand in operands:
        if operand.__class__ is CallResult:
            found.append(operand)
        elif operand.__class__ is list or operand.__class__ is tuple:
            found.extend(_values(operand))
    return found


def shrunk(call: Call) -> Call:
    """Return the call on operands that have _SHORT elements along each dimension at most."""
    return Call(call.overload, *call.filled(_short), call.mutated, call.returned)


def _short(operand: Any) -> Any:
    if not isinstance(operand, CallResult):
        return operand
    shape = tuple([min(extent, _SHORT) for extent in operand.shape])
    return CallResult(None, operand.call, operand.index, shape, operand.dtype)


def run_on_stand_ins(call: Call) -> list[Any]:
    """Return what the call gives on stand-ins, in the order of `Call.results`; raises Refused."""
    try:
        return _run(call, _filled(0))  # a valid index
    except Refused as first:
        for number in (
            1,
            *_last_integer(call.args),
        ):  # a divisor, or in a range that the call names
            with contextlib.suppress(Refused):
                return _run(call, _filled(number))
        # No name of this function may be left that leads to the error: with its traceback it
        # would keep the frames of the user's step, and all tensors in these, until a collection.
        raise first from first.__cause__
    except NotImplementedError:
        return _run(call, _regular)


def _last_integer(args: Sequence[Any]) -> list[int]:
    """Return the last integer of the arguments, in a list, if there is one: most often a limit."""
    return [argument for argument in args if argument.__class__ is int][-1:]


StandIn = Callable[[CallResult], torch.Tensor]


def _run(call: Call, made: StandIn) -> list[Any]:
    """The same on these stand-ins."""
    seed = 0 if torch.Tag.nondeterministic_seeded in call.overload.tags else None
    stand_in = functools.cache(made)

    def given(part: Any) -> Any:
        kind = part.__class__
        return stand_in(part) if kind is CallResult else part.sample if kind is Scalar else part

    args, kwargs = call.filled(given)
    try:
        return kernel_call(call.overload).run(args, kwargs, call.mutated, call.returned, seed=seed)
    except torch.linalg.LinAlgError as singular:
        raise NotImplementedError("no stand-in for a regular matrix") from singular
    except REFUSALS as refusal:
        raise Refused(str(refusal)) from refusal


def _filled(integer: int) -> StandIn:
    """Return a maker of stand-ins filled with that integer, or with the float 1."""

    def made(value: CallResult) -> torch.Tensor:
        whole = not (value.dtype.is_floating_point or value.dtype.is_complex)
        fill = integer if whole and value.dtype is not torch.bool else 1
        return torch.full(value.shape, fill, dtype=value.dtype, device="cpu")

    return made


def _regular(value: CallResult) -> torch.Tensor:
    """Return a stand-in of matrices that have an inverse, if it is of matrices of floats."""
    made = _filled(0)(value)
    if made.ndim < 2 or not (made.is_floating_point() or made.is_complex()):
        return made
    return made.copy_(torch.eye(*made.shape[-2:], dtype=made.dtype))
