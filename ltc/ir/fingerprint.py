"""A name for what a list of recorded calls computes, equal in every process.

Two lists with one fingerprint run the same program: same overloads in the same order, same wiring,
same static arguments, same types. Left out on purpose: the values of scalars and seeds, the index
of a device, the user's lines, and what sets one barrier apart from another (its position in the
list is enough).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ltc.support.torch_private import OpOverload


def fingerprint(
    calls: Sequence[Any], outputs: Iterable[Any], slots: dict[int, int], storage: str = ""
) -> str:
    """64 hexadecimal digits for these calls (aten/call.py) and the Values that are read of them.

    slots    the scalars they use, numbered: aten/call.py's Numbering
    storage  what tensors are kept as, where that is not what they are reported as
    """
    digest = hashlib.sha256(storage.encode())
    positions: dict[Any, int] = {call: position for position, call in enumerate(calls)}
    positions.update(slots)
    for call in calls:
        digest.update(_call_text(call, positions).encode())
    digest.update(";".join(_text(value, positions) for value in outputs).encode())
    return digest.hexdigest()


def _call_text(call: Any, positions: dict[Any, int]) -> str:
    name, args = call.name, call.args
    if name in _UNIQUE:
        args = args[: _UNIQUE[name]]
    mutated = ",".join(map(repr, call.mutated)) if call.mutated else ""
    types = ",".join(map(_type_text, call.results))
    parts = _text(args, positions), _text(call.kwargs, positions), mutated, types
    default = "" if call.default is None else f"|{call.default}"
    return f"{name}|{'|'.join(parts)}|{_text(call.seed, positions)}{default}\n"


# A barrier's second argument and an input's position are unique to their recording.
_UNIQUE = {"ltc::barrier": 1, "ltc::input": 0}
_PLAIN = frozenset({bool, int, float, str})  # most arguments that are no values


def _type_text(value: Any) -> str:
    return "-" if value is None else f"{value.dtype}{tuple(value.shape)}"


def _text(argument: Any, positions: dict[Any, int]) -> str:
    if argument is None:
        return "-"
    kind = argument.__class__
    if kind in _PLAIN:
        return f"{kind.__name__} {argument!r}"
    if kind is tuple or kind is list:
        return f"[{','.join([_text(a, positions) for a in argument])}]"
    # By attribute, not by class: the recorder's classes are of a layer above this one.
    if hasattr(argument, "slot"):
        return f"scalar {positions[argument.slot]} {argument.dtype} {argument.wrapped}"
    if hasattr(argument, "call"):
        return f"%{positions[argument.call]}.{argument.index}"
    if isinstance(argument, (list, tuple)):  # of a class of its own: torch.Size
        return f"[{','.join([_text(a, positions) for a in argument])}]"
    if isinstance(argument, dict):
        return ",".join(f"{key}={_text(argument[key], positions)}" for key in sorted(argument))
    if isinstance(argument, torch.device):
        return f"device {argument.type}"
    if isinstance(argument, torch.Generator):
        return "generator"  # what it draws reaches the program as a seed
    if isinstance(argument, OpOverload):
        return str(argument.name())
    return f"{type(argument).__name__} {argument!r}"
