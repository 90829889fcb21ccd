"""Walks nested data: containers, objects, and what is inside, each object once.

An object is known by its identity, so shared parts stay shared and cycles end. Nothing here
recurses: depth is bounded by memory alone.
"""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable
from types import (
    BuiltinFunctionType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch

Select = Callable[[Any], bool] | type | tuple[type, ...]

# They have a __dict__, but are things one refers to rather than data one holds.
_NOT_DATA = (torch.Tensor, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)


class DataWrapper:
    """Base of a container whose insides only it knows; a subclass says what they are."""

    def get_tensors(self) -> list:
        """The values inside, in an order that `from_tensors` takes back."""
        raise NotImplementedError(f"{type(self).__name__} is a DataWrapper without get_tensors().")

    def from_tensors(self, tensors: list) -> Any:
        """A wrapper like this one, around these values."""
        raise NotImplementedError(f"{type(self).__name__} is a DataWrapper without from_tensors().")


def for_each_instance(value: Any, select: Select, fn: Callable[[Any], Any]) -> None:
    """Call `fn` on every selected object inside `value`, in order of appearance, each once.

    Args:
        select: A type, or a function of an object; what is selected is not looked into.
    """
    _walk(value, _chooser(select), fn)


def for_each_instance_rewrite(value: Any, select: Select, fn: Callable[[Any], Any]) -> Any:
    """`value` rebuilt with `fn(x)` in place of every selected x; `value` itself is not changed.

    Tuples, named ones too, become lists, but for those in sets and in dictionary keys; subclasses
    of dict become dict, of set set, of deque deque. Other objects with attributes, in a __dict__ or
    in __slots__, are copied shallowly.
    """
    new: dict[int, Any] = {}  # id of an object -> what stands in its place

    def replace(leaf: Any) -> None:
        new[id(leaf)] = fn(leaf)

    def enter(container: Any) -> None:
        if not isinstance(container, DataWrapper):
            new[id(container)] = _shell(container)  # before its parts, which may lead back to it

    def leave(container: Any, parts: list) -> None:
        new_parts = [_replacement(new, part) for part in parts]
        if isinstance(container, DataWrapper):
            new[id(container)] = container.from_tensors(new_parts)
        else:
            _fill(new[id(container)], container, new_parts)

    _walk(value, _chooser(select), replace, enter, leave)
    return _replacement(new, value)


def _chooser(select: Select) -> Callable[[Any], bool]:
    if isinstance(select, (type, tuple)):
        return lambda x: isinstance(x, select)
    return select


def _walk(
    value: Any,
    select: Callable[[Any], bool],
    visit: Callable[[Any], Any],
    enter: Callable[[Any], None] | None = None,
    leave: Callable[[Any, list], None] | None = None,
) -> None:
    """Meet everything inside `value` once, depth first, and visit what is selected.

    Other containers are entered before their parts, and left, with the parts, after them.
    """
    met: dict[int, Any] = {}  # holds what it met, so that no id is given to another object
    stack: list[tuple[Any, list | None]] = [(value, None)]
    while stack:
        x, parts_done = stack.pop()
        if parts_done is not None and leave is not None:
            leave(x, parts_done)
        elif id(x) not in met:
            met[id(x)] = x
            if select(x):
                visit(x)
            elif (parts := _parts(x)) is not None:
                if enter is not None:
                    enter(x)
                    stack.append((x, parts))
                stack.extend((part, None) for part in reversed(parts))


def _parts(x: Any) -> list | None:
    """Return a container's items, in order; None for anything else."""
    if isinstance(x, dict):
        return [part for item in x.items() for part in item]
    if isinstance(x, (list, tuple, set, deque)):
        return list(x)
    if isinstance(x, DataWrapper):
        return list(x.get_tensors())
    if isinstance(x, _NOT_DATA):
        return None
    slots = [slot.__get__(x) for slot in slots_in_use(x)]
    if hasattr(x, "__dict__"):
        return [*slots, *vars(x).values()]
    return slots or None


def slots_in_use(x: Any) -> list[MemberDescriptorType]:
    """The slots of an object that hold something, those of its class's bases too."""
    kind: Any = type(x)
    return [slot for slot in _slots_of(kind) if _holds(slot, x)]


def set_attributes(new: Any, old: Any, values: list) -> None:
    """Give an object the values of another one's slots, then of its __dict__, in that order."""
    slots = slots_in_use(old)
    for slot, value in zip(slots, values):
        slot.__set__(new, value)  # of a frozen dataclass too
    if hasattr(old, "__dict__"):
        vars(new).update(zip(vars(old), values[len(slots) :], strict=True))


@functools.lru_cache(1024)  # every number and text in a batch asks
def _slots_of(kind: type) -> tuple[MemberDescriptorType, ...]:
    # only classes made in Python name their slots; what C classes have of them is read-only
    naming = [vars(base) for base in reversed(kind.__mro__) if "__slots__" in vars(base)]
    members = [member for names in naming for member in names.values()]
    return tuple(member for member in members if isinstance(member, MemberDescriptorType))


def _holds(slot: MemberDescriptorType, x: Any) -> bool:
    try:
        slot.__get__(x)
    except AttributeError:
        return False
    return True


def _shell(container: Any) -> Any:
    if isinstance(container, dict):
        return {}
    if isinstance(container, (list, tuple)):
        return []
    if isinstance(container, set):
        return set()
    if isinstance(container, deque):
        return deque(maxlen=container.maxlen)
    return copy.copy(container)


def _fill(shell: Any, container: Any, new_parts: list) -> None:
    if isinstance(container, dict):
        shell.update(zip(map(_hashable, new_parts[0::2]), new_parts[1::2], strict=True))
    elif isinstance(container, (list, tuple, deque)):
        shell.extend(new_parts)
    elif isinstance(container, set):
        shell.update(map(_hashable, new_parts))
    elif shell is not container:  # some objects, such as members of an Enum, are their own copy
        set_attributes(shell, container, new_parts)


def _hashable(x: Any) -> Any:
    return tuple(map(_hashable, x)) if isinstance(x, list) else x


def _replacement(new: dict[int, Any], x: Any) -> Any:
    if isinstance(x, DataWrapper) and id(x) not in new:
        raise ValueError(f"A {type(x).__name__} contains itself: it cannot be rebuilt.")
    return new.get(id(x), x)
