"""torch's default dtype: which recorded calls it decides anything of, and what it was when they were.

`torch.zeros(3)`, `integers / 2` and `integers > 0.5` name no type to compute in, and a call that reads
a floating tensor does.  The former keep the default dtype that they were recorded under: by the
time they are lowered it may be another one.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ltc.aten.call import Call, CallResult, Scalar
from ltc.aten.schema import schema_of


class _LoweredCall(threading.local):
    """The default dtype of the call that the calling thread lowers; None where it has none."""

    default: torch.dtype | None = None


_lowered = _LoweredCall()


def default_dtype() -> torch.dtype:
    """Return the default dtype of the call being lowered; else torch's present one."""
    return _lowered.default or torch.get_default_dtype()


@contextmanager
def lowering(call: Call) -> Iterator[None]:
    """In here the default dtype is the call's."""
    before = _lowered.default
    _lowered.default = call.default
    try:
        yield
    finally:
        _lowered.default = before


def default_of(call: Call) -> torch.dtype | None:
    """torch's present default dtype where it decides what the call computes; else None.

    Where it is not sure, it is said to decide.
    """
    if isinstance(call.overload, str):
        return None
    name, operands = call.name, list(_operands(call))
    if _names_a_type(call):
        return None
    inexact = [_is_inexact(x.dtype) for x in operands if _is_tensor(x)]
    if inexact and not _is_factory(name):
        is_named = all(inexact) if name.startswith("aten::_foreach") else any(inexact)
        if is_named:
            return None
    made = (v for v in call.results if v is not None)
    if any(_is_inexact(v.dtype) for v in made) or any(map(_is_inexact_number, operands)):
        return torch.get_default_dtype()
    return None


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _is_tensor(operand: Any) -> bool:
    return operand.__class__ is CallResult or (operand.__class__ is Scalar and not operand.wrapped)


def _is_inexact_number(operand: Any) -> bool:
    if operand.__class__ is Scalar:
        return _is_inexact(operand.dtype)
    return isinstance(operand, float | complex)


def _operands(call: Call) -> Iterator[Any]:
    """Give the operands that the call reads, lists flattened: not those it only writes to."""
    outs = _outs(call.name)
    kept = [value for name, value in call.kwargs.items() if name not in outs]
    return _flat((*call.args, *kept))


def _flat(operands: Iterable[Any]) -> Iterator[Any]:
    for operand in operands:
        if isinstance(operand, list | tuple):
            yield from _flat(operand)
        else:
            yield operand


@functools.cache
def _outs(name: str) -> frozenset[str]:
    schema = schema_of(name)
    return (
        frozenset(a.name for a in schema.arguments if a.is_out)
        if schema is not None
        else frozenset()
    )


@functools.cache
def _is_factory(name: str) -> bool:
    """Return True if a type that is not given is the default one, whatever the operands are."""
    schema = schema_of(name)
    named = {a.name for a in schema.arguments} if schema is not None else set()
    base = name.partition("::")[2].partition(".")[0]
    follows_operand = base.endswith("_like") or base.startswith("new_") or base == "_to_copy"
    return {"dtype", "layout", "device"} <= named and not follows_operand


def _names_a_type(call: Call) -> bool:
    if any(isinstance(value, torch.dtype) for value in call.kwargs.values()):
        return True
    return any(isinstance(value, torch.dtype) for value in call.args)
