"""How each kind of container is opened, and made again around other parts.

What a class adds of its own, such as its __init__ or its append, is not asked: the parts go back where
they were.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, MutableMapping, MutableSequence, MutableSet
from types import (
    BuiltinFunctionType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy
import torch

from ltc.support.tree import DataWrapper, slots_in_use

Part = tuple[Any, bool]  # an object, and whether a plain tuple stays one there

# A batch refers to them and does not hold what they lead to.
REFERRED = (torch.Tensor, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
_PLAIN = {dict, OrderedDict, defaultdict, list, tuple, deque}  # in them a tuple becomes a list


@dataclasses.dataclass(frozen=True)
class ContainerForm:
    """The parts of one kind of container, and the way back.

    content  its parts, attributes excepted
    fill     puts new parts into an empty one, or into a copy of an object; None for what is built from its parts
    build    makes another one from new parts
    """

    content: Callable[[Any, bool], list[Part]]
    fill: Callable[[Any, list], None] | None = None
    build: Callable[[Any, list], Any] | None = None


def _items(x: Any, keep: bool) -> list[Part]:
    keep = keep or type(x) not in _PLAIN
    pairs = dict.items(x) if isinstance(x, dict) else x.items()
    return [part for key, value in pairs for part in ((key, True), (value, keep))]


def _fill_mapping(shell: Any, parts: list) -> None:
    kind = OrderedDict if isinstance(shell, OrderedDict) else dict
    for key, value in zip(parts[0::2], parts[1::2]):
        kind.__setitem__(shell, key, value)


def _elements(kind: Any) -> Callable[[Any, bool], list[Part]]:
    def elements(x: Any, keep: bool) -> list[Part]:
        keep = keep or type(x) not in _PLAIN
        return [(part, keep) for part in kind.__iter__(x)]

    return elements


def _kept_elements(kind: Any) -> Callable[[Any, bool], list[Part]]:
    return lambda x, keep: [(part, True) for part in kind.__iter__(x)]


def _tuple_like(x: Any, parts: list) -> Any:
    kind = type(x)
    if hasattr(kind, "n_sequence_fields"):  # one of C's, such as torch.return_types
        return kind(parts)
    return tuple.__new__(kind, parts)


def _fill_array(shell: Any, parts: list) -> None:
    line = numpy.empty(len(parts), object)
    for place, part in enumerate(parts):
        line[place] = part  # one by one: NumPy would look for numbers in a tensor
    shell[...] = line.reshape(shell.shape)


_FORMS: tuple[tuple[type, ContainerForm], ...] = (
    (
        DataWrapper,
        ContainerForm(
            lambda x, keep: [(part, False) for part in x.get_tensors()],
            build=lambda x, parts: x.from_tensors(parts),
        ),
    ),
    (dict, ContainerForm(_items, _fill_mapping)),
    (list, ContainerForm(_elements(list), list.extend)),
    (deque, ContainerForm(_elements(deque), deque.extend)),
    (set, ContainerForm(_kept_elements(set), set.update)),
    (frozenset, ContainerForm(_kept_elements(frozenset), build=lambda x, parts: type(x)(parts))),
    (tuple, ContainerForm(_kept_elements(tuple), build=_tuple_like)),
    (
        MappingProxyType,
        ContainerForm(
            _items, build=lambda x, parts: MappingProxyType(dict(zip(parts[0::2], parts[1::2])))
        ),
    ),
)
PLAIN_TUPLE = ContainerForm(_elements(tuple), list.extend)
_OBJECT_ARRAY = ContainerForm(lambda x, keep: [(part, keep) for part in x.ravel()], _fill_array)
OBJECT = ContainerForm(lambda x, keep: [], lambda shell, parts: None)
# An empty one of the same class, without its own methods, which may do more.
_EMPTY: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (OrderedDict, lambda x: OrderedDict.__new__(type(x))),
    (defaultdict, lambda x: _begun(defaultdict.__new__(type(x)), defaultdict, x.default_factory)),
    (dict, lambda x: dict.__new__(type(x))),
    (list, lambda x: list.__new__(type(x))),
    (set, lambda x: set.__new__(type(x))),
    (deque, lambda x: _begun(deque.__new__(type(x)), deque, (), x.maxlen)),
)


def _begun(new: Any, kind: Any, *arguments: Any) -> Any:
    kind.__init__(new, *arguments)
    return new


def form_of(x: Any, keep: bool) -> ContainerForm | None:
    """Return how a container is opened and made again; None for what has no parts."""
    if type(x) is tuple and not keep:
        return PLAIN_TUPLE
    if isinstance(x, REFERRED):
        return None
    for kind, form in _FORMS:
        if issubclass(type(x), kind):  # what stands for another object may lie to isinstance
            return form
    if isinstance(x, numpy.ndarray):
        return _OBJECT_ARRAY if x.dtype == object else None
    if isinstance(x, functools.partial):  # its arguments are no attributes
        return None
    return OBJECT if hasattr(x, "__dict__") or slots_in_use(x) else None


def attributes_of(x: Any) -> list[Any]:
    """Return what lies in an object's slots, then in its __dict__."""
    if isinstance(x, DataWrapper):
        return []
    return [*(slot.__get__(x) for slot in slots_in_use(x)), *getattr(x, "__dict__", {}).values()]


def set_attributes(new: Any, old: Any, values: list) -> None:
    slots = slots_in_use(old)
    for slot, value in zip(slots, values):
        slot.__set__(new, value)  # of a frozen dataclass too
    if hasattr(old, "__dict__"):
        vars(new).update(zip(vars(old), values[len(slots) :], strict=True))


def is_record(x: Any) -> bool:
    """Return True for an object that is there to hold values."""
    return (
        dataclasses.is_dataclass(x)
        or hasattr(type(x), "__attrs_attrs__")
        or isinstance(x, (SimpleNamespace, MutableMapping, MutableSequence, MutableSet))
    )


def empty_like(x: Any, form: ContainerForm) -> Any:
    """Return an empty container of the same class, which is to be filled; None for an object."""
    if form is PLAIN_TUPLE:
        return []
    for kind, empty in _EMPTY:
        if issubclass(type(x), kind):
            return empty(x)
    return None
