"""A copy of nested data in which leaves are replaced and every container keeps its kind.

Mappings, sequences, sets, named tuples, records and objects come back as their own class. In plain
containers a plain tuple comes back as a list, as torch_xla's loaders have it; an object, a named
tuple, a subclass, a set or a key keeps it. Shared parts stay shared, cycles end, and depth is bounded
by memory alone.
"""

from __future__ import annotations

import array
import copy
import dataclasses
import functools
import gc
import io
from collections import OrderedDict, defaultdict, deque
from collections.abc import (
    Callable,
    ItemsView,
    Iterator,
    KeysView,
    MutableMapping,
    MutableSequence,
    MutableSet,
    ValuesView,
)
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

from ltc.support.tree import DataWrapper, set_attributes, slots_in_use

Key = tuple[int, bool]  # an object's id, and True for a plain tuple that stays one

_ATOMS = {int, float, complex, bool, str, bytes, type(None)}  # they hold nothing, and never change
_OPAQUE_VIEWS = (KeysView, ValuesView, ItemsView)


def copied(
    value: Any,
    is_leaf: Callable[[Any], bool],
    replace: Callable[[list[Any]], list[Any]],
    with_arrays: bool,
) -> Any:
    """Return a copy of `value` with other leaves; `value` itself is not changed.

    An object that is no container is copied if it holds a leaf, or if it is a record (a dataclass,
    an attrs class, a SimpleNamespace); any other is handed on as it is.

    Args:
        is_leaf: True for the objects that `replace` exchanges; they are not looked into.
        replace: Takes all leaves, each once, and returns as many others in their order.
        with_arrays: True if NumPy arrays and other plain memory are copied as well.

    Raises:
        TypeError: For an object that holds a leaf and cannot be copied, and for an iterator.
    """
    return _Copy(_Survey(value, is_leaf), replace, with_arrays).result()


# --- surveying -------------------------------------------------------------------------------------


class _Node:
    """One object of the data: its form, the keys of its parts, and the keys of its holders."""

    __slots__ = ("value", "keep", "is_leaf", "form", "content", "attributes", "holders")

    def __init__(self, value: Any, keep: bool, is_leaf: bool):
        self.value, self.keep, self.is_leaf = value, keep, is_leaf
        self.form = None if is_leaf else form_of(value, keep)
        self.content: list[Key] = []
        self.attributes: list[Key] = []
        self.holders: list[Key] = []

    def is_container(self) -> bool:
        return self.form is not None and (self.form is not OBJECT or is_record(self.value))


def _key(x: Any, keep: bool) -> Key:
    return id(x), keep and type(x) is tuple


class _Survey:
    """Every object inside some data, each once, in order of appearance."""

    def __init__(self, value: Any, is_leaf: Callable[[Any], bool]):
        self.nodes: dict[Key, _Node] = {}
        self.atoms: dict[Key, Any] = {}
        self.root = _key(value, False)
        self._meet(value, is_leaf)
        for key, node in self.nodes.items():
            for part in (*node.content, *node.attributes):
                if part not in self.atoms:
                    self.nodes[part].holders.append(key)

    def _meet(self, value: Any, is_leaf: Callable[[Any], bool]) -> None:
        stack: list[Part] = [(value, False)]
        while stack:
            x, keep = stack.pop()
            key = _key(x, keep)
            if type(x) in _ATOMS:
                self.atoms[key] = x
            elif key not in self.nodes:
                node = self.nodes[key] = _Node(x, keep, is_leaf(x))
                if node.form is not None:
                    stack.extend(reversed(self._parts(node)))

    def _parts(self, node: _Node) -> list[Part]:
        assert node.form is not None
        content = node.form.content(node.value, node.keep)
        attributes = [(part, True) for part in attributes_of(node.value)]
        node.content = [_key(*part) for part in content]
        node.attributes = [_key(*part) for part in attributes]
        return [*content, *attributes]

    def holders_of_leaves(self) -> set[Key]:
        """Return the keys from which a leaf can be reached."""
        stack = [key for key, node in self.nodes.items() if node.is_leaf]
        found: set[Key] = set(stack)
        while stack:
            for holder in self.nodes[stack.pop()].holders:
                if holder not in found:
                    found.add(holder)
                    stack.append(holder)
        return found


# --- copying ---------------------------------------------------------------------------------------


class _Copy:
    """The new objects, by the keys of the old."""

    def __init__(self, survey: _Survey, replace: Callable[[list], list], with_arrays: bool):
        self._survey, self._nodes = survey, survey.nodes
        self._replace, self._with_arrays = replace, with_arrays
        self._holding = survey.holders_of_leaves()
        self._new: dict[Key, Any] = dict(survey.atoms)
        self._opened: list[Key] = []  # containers and objects to make again, holders first
        self._leaves: list[Key] = []

    def result(self) -> Any:
        if self._survey.root in self._nodes:
            self._choose()
        old = [self._nodes[key].value for key in self._leaves]
        self._new.update(zip(self._leaves, self._replace(old) if old else (), strict=True))
        for key in self._opened:
            if self._form(key).fill:
                self._new[key] = self._shell(key)
        shells = [key for key in self._opened if key in self._new and self._is_other(key)]
        for key in self._opened:
            self._build(key)
        for key in shells:  # attributes first: a set finds an object by the hash of what it holds
            self._fill_attributes(key)
        for key in shells:
            fill = self._form(key).fill
            assert fill is not None
            fill(self._new[key], self._values(self._nodes[key].content))
        return self._new[self._survey.root]

    def _choose(self) -> None:
        """Sort the parts of the copy: leaves, containers to make again, and objects that stay as
        they are.
        """
        stack, met = [self._survey.root], {self._survey.root, *self._survey.atoms}
        while stack:
            key = stack.pop()
            node = self._nodes[key]
            if node.is_leaf:
                self._leaves.append(key)
            elif node.form is None or not (key in self._holding or node.is_container()):
                self._new[key] = self._handed_on(node)
            else:
                self._opened.append(key)
                parts = [part for part in (*node.content, *node.attributes) if part not in met]
                met.update(parts)
                stack.extend(reversed(list(dict.fromkeys(parts))))

    def _handed_on(self, node: _Node) -> Any:
        x = node.value
        if self._with_arrays and (copied := _memory_copied(x)) is not None:
            return copied
        if isinstance(x, BaseException) or (node.form is None and not isinstance(x, REFERRED)):
            _refuse_what_hides_tensors(x)
        return x

    def _form(self, key: Key) -> ContainerForm:
        form = self._nodes[key].form
        assert form is not None
        return form

    def _shell(self, key: Key) -> Any:
        """Return a copy to be filled; the object itself if it cannot be copied and holds no leaf."""
        x = self._nodes[key].value
        empty = empty_like(x, self._form(key))
        if empty is not None:
            return empty
        try:
            shell = copy.copy(x)
        except Exception as error:
            if key in self._holding:
                raise _not_copied(x, str(error)) from error
            return x
        if shell is x and key in self._holding:
            raise _not_copied(x, "copy.copy returns the object itself")
        return shell

    def _is_other(self, key: Key) -> bool:
        node = self._nodes.get(key)
        return node is not None and self._new[key] is not node.value

    def _build(self, key: Key) -> None:
        """Make an object of fixed parts, and before it those of its parts that are fixed as well."""
        stack, under_way = [key], set()
        while stack:
            key = stack[-1]
            if key in self._new:
                stack.pop()
                continue
            node = self._nodes[key]
            missing = [k for k in (*node.content, *node.attributes) if k not in self._new]
            if not missing:
                self._new[key] = self._built(node)
            elif key in under_way:
                raise ValueError(
                    f"A {type(node.value).__name__} contains itself: it cannot be rebuilt."
                )
            else:
                under_way.add(key)
                stack.extend(missing)

    def _built(self, node: _Node) -> Any:
        content, attributes = self._values(node.content), self._values(node.attributes)
        if not isinstance(node.value, (DataWrapper, MappingProxyType)) and self._is_unchanged(node):
            return node.value
        assert node.form is not None and node.form.build is not None
        new = node.form.build(node.value, content)
        if attributes:
            set_attributes(new, node.value, attributes)
        return new

    def _is_unchanged(self, node: _Node) -> bool:
        return not any(map(self._is_other, (*node.content, *node.attributes)))

    def _fill_attributes(self, key: Key) -> None:
        node = self._nodes[key]
        if node.attributes:
            set_attributes(self._new[key], node.value, self._values(node.attributes))

    def _values(self, keys: list[Key]) -> list[Any]:
        return [self._new[key] for key in keys]


def _not_copied(x: Any, why: str) -> TypeError:
    return TypeError(
        f"A batch has a {_name(x)} that holds tensors, and it cannot be copied to a device: {why}. "
        f"Give the class a method `to(device)`, or derive it from ltc.utils.utils.DataWrapper."
    )


def _name(x: Any) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")


# --- memory, and what cannot be looked into --------------------------------------------------------


def _memory_copied(x: Any) -> Any:
    """Return a copy of an object that is plain memory; None for any other."""
    if isinstance(x, numpy.ndarray):
        return x.copy("K")
    if isinstance(x, (bytearray, array.array, numpy.void)):
        return copy.copy(x)
    if isinstance(x, memoryview) and not x.readonly and x.c_contiguous:
        plain = memoryview(bytearray(x.tobytes()))
        return plain.cast(x.format, x.shape) if x.format != "B" or x.ndim != 1 else plain  # type: ignore[call-overload]
    return None


def _refuse_what_hides_tensors(x: Any) -> None:
    """Raise TypeError for an iterator or a view, and for a C object that leads to tensors."""
    if isinstance(x, (Iterator, *_OPAQUE_VIEWS)) and not isinstance(x, io.IOBase):
        raise TypeError(
            f"A batch has a {_name(x)}: ltc cannot move its elements without consuming it. Pass a "
            f"list: list(...)."
        )
    if gc.is_tracked(x) and _leads_to_tensors(x):
        raise TypeError(
            f"A batch has a {_name(x)} that holds tensors where ltc cannot exchange them. Pass "
            f"the tensors in a container, or give the class a method `to(device)`."
        )


def _leads_to_tensors(x: Any) -> bool:
    """Return True if a tensor is found behind an object of C's, through plain containers alone."""
    stack, met = [x], {id(x)}
    while stack:
        for part in gc.get_referents(stack.pop()):
            if isinstance(part, torch.Tensor):
                return True
            if type(part) in (list, tuple, dict, set, frozenset) and id(part) not in met:
                met.add(id(part))
                stack.append(part)
    return False


# --- how each kind of container is opened, and made again around other parts ------------------
# A class's own additions, such as its __init__ or its append, are not called: the parts go back where
# they were.

Part = tuple[Any, bool]  # an object, and whether a plain tuple stays one there

# A batch refers to them and does not hold what they lead to.
REFERRED = (torch.Tensor, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
_PLAIN = {dict, OrderedDict, defaultdict, list, tuple, deque}  # in them a tuple becomes a list


@dataclasses.dataclass(frozen=True)
class ContainerForm:
    """The parts of one kind of container, and the way back.

    Attributes:
        content: Its parts, attributes excepted.
        fill: Puts new parts into an empty one, or into a copy of an object; None for what is built
            from its parts.
        build: Makes another one from new parts.
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
