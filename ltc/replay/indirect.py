"""What Python's own library stands before: context variables, weak references, getters, views of tables."""

from __future__ import annotations

import collections
import contextvars
import ctypes
import functools
import operator
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ltc.replay.conditions import Conditions, Obstacle
from ltc.replay.containers import visit_container
from ltc.replay.objects import BY_TEXT, identifiers

_UNSET = object()
_referent = weakref.ref.__call__  # of a WeakMethod too, which gives another method at each call
_HELD = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)  # once they are followed


def visit_indirect(use: Conditions, value: Any, name: str) -> bool:
    """Whether it is such a thing; then what it leads to is visited."""
    for kinds, visit in _VISITS:
        if isinstance(value, kinds):
            visit(use, value, name)
            return True
    return False


def _visit_variable(use: Conditions, variable: contextvars.ContextVar, name: str) -> None:
    """Whether it is set decides what its `get` makes of a default; its value may be its own default."""
    unset = use.constant(_UNSET)
    is_unset = variable.get(_UNSET) is _UNSET
    use.require(f"({name}.get({unset}) is {unset}) is {is_unset}")
    if (value := variable.get(_UNSET)) is not _UNSET:
        use.visit(value, f"{name}.get()")
        return
    try:
        default = variable.get()
    except LookupError:
        return
    use.visit(default, f"{name}.get()")


def _visit_context(use: Conditions, context: contextvars.Context, name: str) -> None:
    use.require(f"len({name}) == {len(context)}")
    for variable, value in context.items():
        use.visit(value, f"{name}[{use.constant(variable)}]")


def _visit_reference(use: Conditions, reference: weakref.ref, name: str) -> None:
    use.weak.append((reference, name))


def follow_references(use: Conditions) -> None:
    """Visit what weak references lead to, which is not held: they may tell when it has gone.

    It comes last: what is found in another way has its conditions from there.
    """
    while use.weak:
        reference, name = use.weak.pop()
        value = _referent(reference)
        expression = f"{use.constant(_referent)}({name})"
        use.require(f"id({expression}) == {id(value)}")
        if isinstance(reference, weakref.WeakMethod) and (method := reference()) is not None:
            use.visit(method.__func__, f"{name}().__func__")
        if value is None or not use.is_new(value):
            continue
        if isinstance(value, _HELD):
            raise Obstacle(
                f"it finds a {type(value).__name__} by a weak reference alone: name it otherwise too"
            )
        use.visit_inside(value, expression)


def _refuse_proxy(use: Conditions, value: Any, name: str) -> None:
    raise Obstacle("it uses a weakref.proxy, which hides what it stands for: use weakref.ref")


def _visit_getter(use: Conditions, getter: Any, name: str) -> None:
    """What it asks for is named by its texts; a method's arguments are its own."""
    _, parts = getter.__reduce__()
    for part in parts:
        if isinstance(part, str):
            use.names.update(identifiers(part))
        else:
            use.visit_new(part)


def _visit_bound(use: Conditions, method: Any, name: str) -> None:
    """A method of a built-in type; a function of a module is bound to that, or to a class."""
    owner = method.__self__
    if owner is not None and not isinstance(owner, (types.ModuleType, type)):
        use.visit(owner, f"{name}.__self__")


def _visit_partial(use: Conditions, partial: Any, name: str) -> None:
    for part in ("func", "args", "keywords"):
        use.visit(getattr(partial, part), f"{name}.{part}")
    if isinstance(partial.func, types.BuiltinFunctionType) and partial.func.__name__ in BY_TEXT:
        use.names.update(part for part in partial.args if isinstance(part, str))


def _visit_view(use: Conditions, view: Any, name: str) -> None:
    visit_container(use, view.mapping, f"{name}.mapping")


def _visit_memory(use: Conditions, value: Any, name: str) -> None:
    use.pin(f"bytes({name})", bytes(value))


def _visit_attribute(key: str) -> Callable[[Conditions, Any, str], None]:
    def visit(use: Conditions, value: Any, name: str) -> None:
        use.visit(getattr(value, key), f"{name}.{key}")

    return visit


def _kinds_of_views() -> Iterator[type]:
    tables: tuple[dict[str, Any], ...] = ({}, collections.OrderedDict())
    for table in tables:
        yield from (type(view) for view in (table.keys(), table.values(), table.items()))


# (kinds, what visits one of them), of which the first that fits is taken
_VISITS: tuple[tuple[Any, Callable[[Conditions, Any, str], None]], ...] = (
    (contextvars.ContextVar, _visit_variable),
    (contextvars.Context, _visit_context),
    (weakref.ProxyTypes, _refuse_proxy),
    (weakref.ref, _visit_reference),
    ((operator.attrgetter, operator.methodcaller), _visit_getter),
    ((functools.partial, functools.partialmethod), _visit_partial),
    (functools.singledispatchmethod, _visit_attribute("dispatcher")),
    ((types.BuiltinMethodType, types.MethodWrapperType), _visit_bound),
    (tuple(_kinds_of_views()), _visit_view),
    ((ctypes.c_int.__base__, ctypes.Array, ctypes.Structure, ctypes.Union), _visit_memory),
)
