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
    # A barrier's second argument and an input's position are unique to their recording.
    unique = {"ltc::barrier": call.args[:1], "ltc::input": ()}
    args = unique.get(call.name, call.args)
    parts = [call.name, _text(list(args), positions), _text(call.kwargs, positions)]
    parts.append(",".join(map(repr, call.mutated)))
    parts.append(",".join(map(_type_text, call.results)))
    parts.append(_text(call.seed, positions))
    return "|".join(parts) + "\n"


def _type_text(value: Any) -> str:
    return "-" if value is None else f"{value.dtype}{tuple(value.shape)}"


def _text(argument: Any, positions: dict[Any, int]) -> str:
    if argument is None:
        return "-"
    # By attribute, not by class: the recorder's classes are of a layer above this one.
    if hasattr(argument, "slot"):
        return f"scalar {positions[argument.slot]} {argument.dtype} {argument.wrapped}"
    if hasattr(argument, "call"):
        return f"%{positions[argument.call]}.{argument.index}"
    if isinstance(argument, (list, tuple)):
        return f"[{','.join(_text(a, positions) for a in argument)}]"
    if isinstance(argument, dict):
        return ",".join(f"{key}={_text(argument[key], positions)}" for key in sorted(argument))
    if isinstance(argument, torch.device):
        return f"device {argument.type}"
    if isinstance(argument, torch.Generator):
        return "generator"  # what it draws reaches the program as a seed
    if isinstance(argument, OpOverload):
        return str(argument.name())
    return f"{type(argument).__name__} {argument!r}"
