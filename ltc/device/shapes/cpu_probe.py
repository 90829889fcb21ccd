"""A small call run on the CPU on stand-in values: does its kernel accept it, and what does it give?

torch's Meta kernels let some calls pass that the CPU kernels refuse, and tell some types as CUDA
would have them; those written in Python take up to a second to import.  A call with few elements is
cheap to ask directly, once per kind of operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ltc.aten.call import CallResult, Scalar
from ltc.runtime.buffer import byte_size

_MOST_ELEMENTS = 1 << 18
FEW_BYTES = 1 << 16  # of all operands and results together: some 10 us of work


class Refused(Exception):
    """The CPU kernel refused every stand-in; `__cause__` is its error."""


def is_small(operands: list, types: tuple) -> bool:
    """Whether operands and results together are few enough to ask."""
    total = sum(byte_size(*t) for t in types if t is not None)
    return total + sum(byte_size(v.shape, v.dtype) for v in _values(operands)) <= FEW_BYTES


def makes_little(operands: list) -> bool:
    """Whether it has few operands and, whatever it computes, a result of no great size.

    Numbers among the operands may be extents of the result, which then has their product at most.
    """
    if not is_small(operands, ()):
        return False
    most = 1
    for number in _numbers(operands):
        if not abs(number) <= _MOST_ELEMENTS:
            return False
        most *= max(int(abs(number)), 1)
    given = sum(math.prod(value.shape) for value in _values(operands))
    return most * (given + 1) <= _MOST_ELEMENTS  # + 1: a call that is given none makes some, too


def _numbers(operands: Sequence[Any]) -> list[float]:
    found: list[float] = []
    for operand in operands:
        if operand.__class__ is Scalar:
            operand = operand.sample
        if operand.__class__ is int or operand.__class__ is float:
            found.append(operand)
        elif operand.__class__ is list or operand.__class__ is tuple:
            found.extend(_numbers(operand))
    return found


def _values(operands: Sequence[Any]) -> list[CallResult]:
    found = []
    for operand in operands:
        if operand.__class__ is CallResult:
            found.append(operand)
        elif operand.__class__ is list or operand.__class__ is tuple:
            found.extend(_values(operand))
    return found


def run_on_stand_ins(
    overload: Any, args: Sequence[Any], kwargs: dict, mutated: Sequence[int | str]
) -> tuple[Any, list[Any], dict[str, Any]]:
    """(what the call returns, its arguments, its keywords) on stand-ins; raises Refused."""
    try:
        return _run(overload, args, kwargs, _filled(0))  # a valid index
    except Refused as first:
        try:
            return _run(overload, args, kwargs, _filled(1))  # a valid divisor
        except Refused:
            # No name of this function may be left that leads to the error: with its traceback it
            # would keep the frames of the user's step, and all tensors in these, until a collection.
            raise first from first.__cause__
    except NotImplementedError:
        return _run(overload, args, kwargs, _regular)


StandIn = Callable[[CallResult], torch.Tensor]


def _run(
    overload: Any, args: Sequence[Any], kwargs: dict, made: StandIn
) -> tuple[Any, list[Any], dict[str, Any]]:
    """The same on these stand-ins."""
    values: dict[CallResult, torch.Tensor] = {}
    stand_ins = [_stand_in(a, values, made) for a in args]
    keywords = {name: _stand_in(a, values, made) for name, a in kwargs.items()}
    try:
        with torch.no_grad(), _own_randomness(overload):
            return overload(*stand_ins, **keywords), stand_ins, keywords
    except torch.linalg.LinAlgError as singular:
        raise NotImplementedError("no stand-in for a regular matrix") from singular
    except Exception as refusal:
        raise Refused(str(refusal)) from refusal


class _own_randomness:
    """The user's CPU random stream is not touched by a random stand-in call."""

    def __init__(self, overload: Any) -> None:
        self.random = torch.Tag.nondeterministic_seeded in overload.tags

    def __enter__(self) -> None:
        if self.random:
            self.before = torch.default_generator.get_state()

    def __exit__(self, *error: Any) -> None:
        if self.random:
            torch.default_generator.set_state(self.before)


def _stand_in(argument: Any, values: dict, made: StandIn):
    kind = argument.__class__
    if kind is CallResult:
        if argument not in values:
            values[argument] = made(argument)
        return values[argument]
    if kind is Scalar:
        return argument.sample
    if kind is list or kind is tuple:
        return [_stand_in(part, values, made) for part in argument]
    if kind is torch.device:
        return torch.device("cpu")
    return argument


def _filled(integer: int) -> StandIn:
    """Of that integer, or of the float 1."""

    def made(value: CallResult) -> torch.Tensor:
        whole = not (value.dtype.is_floating_point or value.dtype.is_complex)
        fill = integer if whole and value.dtype is not torch.bool else 1
        return torch.full(value.shape, fill, dtype=value.dtype, device="cpu")

    return made


def _regular(value: CallResult) -> torch.Tensor:
    """Of matrices that have an inverse, where it is of matrices of floats."""
    made = _filled(0)(value)
    if made.ndim < 2 or not (made.is_floating_point() or made.is_complex()):
        return made
    return made.copy_(torch.eye(*made.shape[-2:], dtype=made.dtype))
