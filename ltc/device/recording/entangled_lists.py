"""Calls that write to each tensor of a list, where a place reads or writes what an earlier one writes.

PyTorch takes one place after the other, so that the later one sees what the earlier one has written:
`torch._foreach_add_([x, x], [a, b])` adds both. A recorded call takes all places at once. So such a call is
recorded as one call for each place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ltc.device.recording.signature import NUMBERS, TENSORS, Signature
from ltc.device.recording.state import State
from ltc.device.torch_device import storage_of
from ltc.support.torch_private import DispatchKey, DispatchKeySet

_FORMULA = DispatchKeySet(DispatchKey.CPU)  # where the formulas of ltc's overloads are registered


def are_entangled(written: Sequence[list[State]], others: Sequence[list[State]]) -> bool:
    """Return True if a place takes the memory that an earlier one of the lists writes to.

    Args:
        written: The states of each list that is written to.
        others: The states of each list that is read.
    """
    seen: set[State] = set()
    for states in written:
        roots = {state.base or state for state in states}
        if len(roots) < len(states) or not seen.isdisjoint(roots):
            return True
        seen |= roots
    if all([seen.isdisjoint([state.base or state for state in states]) for states in others]):
        return False
    written_before: set[State] = set()
    for place in range(max(map(len, written))):
        if any(
            [
                (s.base or s) in written_before
                for states in others
                for s in states[place : place + 1]
            ]
        ):
            return True
        written_before |= {s.base or s for states in written for s in states[place : place + 1]}
    return False


def is_entangled(signature: Signature, values: list) -> bool:
    """Return True of a call whose lists are `are_entangled`."""
    written: list[list[State]] = []
    others: list[list[State]] = []
    for i, argument in enumerate(signature.arguments):
        if argument.kind == TENSORS:
            (written if argument.written else others).append(_states(values[i]))
    return are_entangled(written, others)


def _states(tensors: Sequence[torch.Tensor]) -> list[State]:
    """The states of those that are ltc's; one that has none yet is in no other place."""
    return [
        getattr(storage_of(one), "lazy", None) or State()
        for one in tensors
        if isinstance(one, torch.Tensor)
    ]


def one_by_one(signature: Signature, values: list, record: Callable[[Signature, list], Any]) -> Any:
    """Record the call for each place of its lists alone; return what the whole call returns.

    An overload of ltc's stands for calls on lists: each of these takes all places in turn.
    """
    if signature.name.startswith("ltc::"):
        return signature.overload.redispatch(_FORMULA, *values)
    count = max(len(values[i]) for i in signature.written if isinstance(values[i], (list, tuple)))
    for place in range(count):
        parts = [
            _at(value, place, count) if argument.kind in (TENSORS, NUMBERS) else value
            for argument, value in zip(signature.arguments, values)
        ]
        record(signature, [_row(part, place, count, signature) for part in parts])
    return signature.returned(values)


def _at(value: Any, place: int, count: int) -> Any:
    """The share of one place in a list of so many; another list is the same for all."""
    return value[place : place + 1] if value is not None and len(value) == count else value


def _row(value: Any, place: int, count: int, signature: Signature) -> Any:
    """The same of numbers that lie in a tensor, one for each place."""
    is_of_numbers = signature.name.endswith(".Tensor") and isinstance(value, torch.Tensor)
    return value[place : place + 1] if is_of_numbers and value.dim() == 1 else value
