"""Objects and classes: attributes that the code names, and the methods that it may call."""

from __future__ import annotations

import dis
import functools
import inspect
import os
import sysconfig
import types
from collections.abc import Iterator
from typing import Any

import torch

from ltc.replay.conditions import PLAIN, Conditions
from ltc.tracebacks import is_users

_LIBRARIES = ("torch", "ltc", "numpy", "builtins", "itertools", "functools", "math", "random", "os")
_INSTALLED = tuple(
    sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")
)
_METHODS_OF_FUNCTOOLS = (functools.partialmethod, functools.singledispatchmethod)
_CONSTRUCTORS = ("__init__", "__new__", "__post_init__")
_NO_OPERATORS = {"__repr__", "__str__", "__del__", "__dir__", "__sizeof__", "__init_subclass__",
                 "__class_getitem__", "__set_name__", "__reduce__", "__reduce_ex__",
                 "__getstate__", "__setstate__", "__copy__", "__deepcopy__"}  # fmt: skip
_OF_A_FUNCTION = {"forward", "backward", "setup_context", "jvp", "vmap"}  # of autograd's
_LOADS_OF_GLOBALS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_MOST_CODES = 4096  # whose globals are known
_WHOLE = {"vars", "__dict__", "asdict", "astuple"}  # code with these may use every field
BY_TEXT = {"getattr", "hasattr", "setattr", "delattr", "vars", "__dict__", "attrgetter",
           "methodcaller"}  # fmt: skip


def attribute(value: Any, name: str, default: Any = None) -> Any:
    """As getattr, also of an object whose own `__getattr__` raises another error."""
    try:
        return getattr(value, name)
    except Exception:
        return default


def is_followed(file: str) -> bool:
    """Whether code there is the user's own: what is installed is looked at from outside alone."""
    return is_users(file) and not file.startswith(_INSTALLED)


def names_in(code: types.CodeType) -> Iterator[str]:
    """Of globals and attributes, also of those that it asks for by their text."""
    yield from code.co_names
    asks_by_text = not BY_TEXT.isdisjoint(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)
        elif asks_by_text and isinstance(constant, str):
            yield from identifiers(constant)


@functools.lru_cache(maxsize=_MOST_CODES)
def globals_in(code: types.CodeType) -> frozenset[str]:
    """The names that it looks up as globals, also inside of what it defines; not its attributes'."""
    found = {each.argval for each in dis.get_instructions(code) if each.opname in _LOADS_OF_GLOBALS}
    by_text = "globals" in found
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= globals_in(constant)
        elif by_text and isinstance(constant, str):
            found.update(identifiers(constant))
    return frozenset(found)


def identifiers(text: str) -> list[str]:
    """Those of a dotted name; none of any other text."""
    parts = text.split(".")
    return parts if all(map(str.isidentifier, parts)) else []


# --- objects ------------------------------------------------------------------------------------


def visit_object(use: Conditions, value: Any, name: str) -> None:
    inner = attribute(value, "__wrapped__")
    if isinstance(inner, types.FunctionType) and use.is_new(inner):
        use.visit_function(inner, use.constant(inner))
    if isinstance(value, types.ModuleType):
        if not _is_of_library(value.__name__):
            visit_named(use, vars(value), name)
    elif isinstance(value, type):
        constructors = () if issubclass(value, torch.nn.Module) else _CONSTRUCTORS
        visit_class(use, value, constructors)
        visit_class(use, type(value))
    elif not _is_of_library(type(value).__module__):
        use.require(f"{name}.__class__ is {use.constant(type(value))}")
        _visit_own(use, value, name)
        visit_class(use, type(value))


def _visit_own(use: Conditions, value: Any, name: str) -> None:
    """What stands in the object itself: in its table, and in its slots."""
    own = attribute(value, "__dict__")
    if isinstance(own, dict):
        use.require(f"len({name}.__dict__) == {len(own)}")  # a new one may hide its class's
        visit_named(use, own, name)
        if not use.names.isdisjoint(_WHOLE):
            for key, part in own.items():
                if isinstance(part, PLAIN) and key not in use.names:
                    use.visit(part, f"{name}.__dict__[{key!r}]")
    for key in sorted(use.names.intersection(dir(type(value)))):
        if isinstance(inspect.getattr_static(type(value), key, None), types.MemberDescriptorType):
            if hasattr(value, key):
                use.visit(getattr(value, key), f"{name}.{key}")
            else:
                use.require(f"not hasattr({name}, {key!r})")


def visit_named(use: Conditions, attributes: dict[str, Any], name: str) -> None:
    for key in sorted(use.names.intersection(attributes)):
        if not isinstance(attributes[key], types.ModuleType):
            use.visit(attributes[key], f"{name}.{key}")


# --- classes ------------------------------------------------------------------------------------


def visit_class(use: Conditions, kind: type, others: tuple[str, ...] = ()) -> None:
    """The methods and attributes that code names, that operators call, and some `others`.

    Those of each class that it inherits from too: `super()` finds what another one hides.
    """
    for base in kind.__mro__:
        if base not in use.classes and not _is_of_library(base.__module__):
            use.classes.add(base)
            _visit_parts_of(use, base, others)


def _visit_parts_of(use: Conditions, kind: type, others: tuple[str, ...]) -> None:
    names = use.names | set(_operators(kind)) | set(others)
    if issubclass(kind, torch.autograd.Function):
        names |= _OF_A_FUNCTION
    name = use.constant(kind)
    for key in sorted(names.intersection(dir(kind))):
        part = inspect.getattr_static(kind, key, None)
        if _is_descriptor(part):
            owner = next(base for base in kind.__mro__ if key in vars(base))
            use.visit(part, f"{use.constant(owner)}.__dict__[{key!r}]")
        else:
            _visit_part(use, part, f"{name}.{key}")


def _is_descriptor(part: Any) -> bool:
    """Whether a user's class, or one of functools', says what the attribute is."""
    kind = type(part)
    is_own = kind in _METHODS_OF_FUNCTOOLS or not _is_of_library(kind.__module__)
    return is_own and hasattr(kind, "__get__")


def _operators(kind: type) -> Iterator[str]:
    """The methods of a user's own classes that Python calls without their name."""
    for base in kind.__mro__:
        if not _is_of_library(base.__module__):
            for key, part in vars(base).items():
                if key[:2] == key[-2:] == "__" and key not in {*_NO_OPERATORS, *_CONSTRUCTORS}:
                    if isinstance(part, types.FunctionType) and not _is_generated(base, part):
                        yield key


def _is_generated(kind: type, method: types.FunctionType) -> bool:
    """Whether `dataclass` has written it, from all fields, whichever the code names."""
    return "__dataclass_fields__" in vars(kind) and method.__code__.co_filename == "<string>"


def _visit_part(use: Conditions, part: Any, expression: str) -> None:
    """What a class has: a function, also one behind a decorator of Python's, or a plain attribute."""
    if isinstance(part, classmethod):
        part, expression = part.__func__, f"{expression}.__func__"
    elif isinstance(part, staticmethod):
        part = part.__func__
    if isinstance(part, (property, functools.cached_property)):
        getter = part.fget if isinstance(part, property) else part.func
        use.require(f"{expression} is {use.constant(part)}")
        if isinstance(getter, types.FunctionType) and use.is_new(getter):
            use.visit_function(getter, use.constant(getter))
    elif isinstance(part, types.FunctionType):
        code = attribute(inspect.unwrap(part), "__code__", part.__code__)
        if is_followed(code.co_filename):
            use.visit(part, expression)
    elif not isinstance(part, types.ModuleType) and not hasattr(type(part), "__get__"):
        use.visit(part, expression)


def _is_of_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES
