"""The contents of objects: of tables, sequences, functions, classes, modules, optimizers.

Each object is followed to the tables, items and attributes that hold its contents.  Attributes of objects that
are neither modules nor optimizers are followed where code that the call may run names them.
"""

from __future__ import annotations

import dis
import functools
import inspect
import os
import sysconfig
import types
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ltc.device.recording.tensors import is_lazy
from ltc.replay.counters import TRACED
from ltc.replay.guard import PLAIN, Handed, Obstacle, ReplayGuard
from ltc.tracebacks import is_users

SEQUENCES = (list, tuple, deque)
TABLES = (dict, types.MappingProxyType)
_SETS = (set, frozenset)
_LIBRARIES = {"torch", "ltc", "numpy", "builtins", "collections", "itertools", "functools", "math",
              "random", "os"}  # fmt: skip
_INSTALLED = tuple(
    sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")
)
_IMPLICIT = {"__call__", "__getitem__", "__setitem__", "__contains__", "__len__", "__iter__",
             "__next__", "__enter__", "__exit__", "__getattr__", "__getattribute__", "__bool__",
             "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__",
             "__rtruediv__", "__matmul__", "__rmatmul__", "__neg__", "__float__", "__int__",
             "__index__", "__get__", "forward", "backward", "setup_context"}  # fmt: skip
_CONSTRUCTORS = {"__init__", "__new__", "__post_init__"}
_ALL_NAMES = {"vars", "__dict__", "asdict", "astuple"}  # code with these may use every attribute
_LOADS_OF_GLOBALS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_MOST_CODES = 4096  # whose globals are known
_MOST_BYTES = 1 << 16  # of memory that is compared in each call
_PARTS = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOKS_OF_STEP = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def attribute(value: Any, name: str, default: Any = None) -> Any:
    """Return an attribute, or the default also where the object's `__getattr__` raises another error."""
    try:
        return getattr(value, name)
    except Exception:
        return default


def visit_contents(use: ReplayGuard, value: Any, name: str) -> None:
    """Follow the parts of an object that is no tensor."""
    for kinds, visit in _VISITS:
        if issubclass(type(value), kinds):  # a weakref.proxy is none, though isinstance says so
            visit(use, value, name)
            return
    if not _visit_memory(use, value, name):
        _visit_object(use, value, name)


# --- tables, sequences, sets, memory -------------------------------------------------------------


def _visit_table(use: ReplayGuard, table: Any, name: str) -> None:
    use.visit_table(table, name)
    _visit_object(use, table, name)


def _visit_sequence(use: ReplayGuard, values: Any, name: str) -> None:
    use.require(use.same_length(values, name))
    for place, value in enumerate(values):
        use.visit(value, f"{name}[{place}]", f"the object at {place}")
    _visit_object(use, values, name)


def _visit_set(use: ReplayGuard, values: Any, name: str) -> None:
    """Follow the members, and compare them without their order."""
    for value in values:
        use.follow(value)
    use.require(f"sorted(map(id, {name})) == {sorted(map(id, values))}")


def _visit_memory(use: ReplayGuard, value: Any, name: str) -> bool:
    """Compare the numbers of an array or the like; return False if the object has none."""
    try:
        memory = memoryview(value)
    except (TypeError, ValueError, BufferError):
        return False
    if memory.nbytes > _MOST_BYTES:
        kind = type(value)
        raise Obstacle(
            f"it uses a {kind.__module__}.{kind.__name__} of {memory.nbytes} bytes, too many to "
            f"compare in each call: use a tensor"
        )
    use.pin(f"{use.constant(_elements)}({name})", _elements(value))
    return True


def _elements(value: Any) -> str:
    memory = memoryview(value)
    return repr((memory.format, memory.shape, memory.tobytes()))


# --- functions, and the code in them -------------------------------------------------------------


def visit_function(use: ReplayGuard, function: types.FunctionType, name: str) -> None:
    """Follow the values that a function closes over, and the globals that its code loads."""
    code, table, own = function.__code__, function.__globals__, vars(function)
    if function is not use.function and not _is_followed(code):
        use.visit_table(own, f"{name}.__dict__", {"__wrapped__"} & own.keys())
        return
    use.names.update(names_in(code))
    names = globals_in(code)
    if {"print", "input"} & (names - table.keys()) and function.__name__ != "__init__":
        line = f"{code.co_filename}:{code.co_firstlineno}"
        raise Obstacle(f"{function.__name__} ({line}) calls print or input")
    for variable, cell in zip(code.co_freevars, function.__closure__ or ()):
        for contents in _contents(cell):
            use.visit(contents, f"{use.constant(cell)}.cell_contents", variable)
    use.visit_table(table, use.constant(table), sorted(names & table.keys()))
    for part in ("__code__", "__defaults__", "__kwdefaults__"):
        use.visit(getattr(function, part), f"{name}.{part}")
    _visit_named(use, own, f"{name}.__dict__")


def _contents(cell: types.CellType) -> list[Any]:
    """Return the contents of a cell; none before its variable has a value."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _is_followed(code: types.CodeType) -> bool:
    """Return True if a user has written it; code of installed packages is not followed."""
    return is_users(code.co_filename) and not code.co_filename.startswith(_INSTALLED)


def names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes, and texts that may be such."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)
        elif isinstance(constant, str):
            yield from constant.split(".")


@functools.lru_cache(maxsize=_MOST_CODES)
def globals_in(code: types.CodeType) -> frozenset[str]:
    """Return the names that code looks up as globals, also in nested code; no names of attributes."""
    found = {each.argval for each in dis.get_instructions(code) if each.opname in _LOADS_OF_GLOBALS}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= globals_in(constant)
        elif isinstance(constant, str) and "globals" in found:
            found.add(constant)
    return frozenset(found)


# --- objects and classes -------------------------------------------------------------------------


def _visit_object(use: ReplayGuard, value: Any, name: str) -> None:
    """Follow the attributes that code names: in its own table, its slots, its classes."""
    inner = attribute(value, "__wrapped__")
    if isinstance(inner, types.FunctionType):
        use.follow(inner)
    if isinstance(value, type):
        _visit_class(use, value, not issubclass(value, torch.nn.Module))
    elif isinstance(value, types.ModuleType):
        if not _is_of_library(value.__name__):
            _visit_named(use, vars(value), f"{name}.__dict__")
    elif not _is_of_library(type(value).__module__):
        use.require(f"{name}.__class__ is {use.constant(type(value))}")
        own = attribute(value, "__dict__")
        if isinstance(own, dict):
            use.require(f"len({name}.__dict__) == {len(own)}")  # a new one may hide its class's
            _visit_named(use, own, f"{name}.__dict__")
        for key in _slots(use, value):
            use.visit(getattr(value, key), f"{name}.{key}")
        _visit_class(use, type(value))


def _visit_named(use: ReplayGuard, table: Any, name: str) -> None:
    """Follow the attributes in a table that code names."""
    keys = {key for key in use.names.intersection(table) if not _is_opaque(table[key])}
    if not use.names.isdisjoint(_ALL_NAMES):
        keys.update(key for key, value in table.items() if isinstance(value, PLAIN))
    use.visit_table(table, name, sorted(keys))


def _slots(use: ReplayGuard, value: Any) -> list[str]:
    found = use.names.intersection(dir(type(value)))
    return sorted(key for key in found if _is_slot(type(value), key) and hasattr(value, key))


def _is_slot(kind: type, key: str) -> bool:
    return isinstance(inspect.getattr_static(kind, key, None), types.MemberDescriptorType)


def _is_opaque(value: Any) -> bool:
    """Return True for a package, or a function of one, which is not compared."""
    if isinstance(value, types.FunctionType):
        return not _is_followed(attribute(inspect.unwrap(value), "__code__", value.__code__))
    return isinstance(value, types.ModuleType)


def _visit_class(use: ReplayGuard, kind: type, is_called: bool = False) -> None:
    """Follow methods and attributes that code names, or Python calls: its own, and its bases'."""
    for base in kind.__mro__:
        if (base, is_called) in use.classes or _is_of_library(base.__module__):
            continue
        use.classes.add((base, is_called))
        names = use.names | _IMPLICIT | (_CONSTRUCTORS if is_called else set())
        keys = [key for key in vars(base) if key in names and not _is_opaque(vars(base)[key])]
        use.visit_table(vars(base), f"{use.constant(base)}.__dict__", keys)


def _visit_method(use: ReplayGuard, kind: type, name: str) -> None:
    """Compare a method that is always called, also of a class of torch's; follow a user's class."""
    if (kind, name) not in use.classes:
        use.classes.add((kind, name))
        use.visit(getattr(kind, name), f"{use.constant(kind)}.{name}")
    _visit_class(use, kind)


def _is_of_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES


# --- modules, optimizers, schedules --------------------------------------------------------------


def _visit_hooks(use: ReplayGuard, tables: Sequence[Any]) -> None:
    """Require that tables without hooks have none, in one condition; follow the others."""
    empty = [use.constant(table) for table in tables if not table]
    if empty:
        use.require(f"not ({' or '.join(empty)})")
    for table in filter(None, tables):
        use.follow(table)


def _visit_module(use: ReplayGuard, module: torch.nn.Module, name: str) -> None:
    own = vars(module)
    table = use.constant(own)
    use.require(f"{name}.__class__ is {use.constant(type(module))}")
    use.require(use.same_length(own, table))  # a new attribute may hide its class's
    keys = [key for key in own if key in _PARTS or key in use.names or key[0] != "_"]
    use.visit_table(own, table, keys)
    _visit_hooks(use, [own[key] for key in _HOOKS if key in own])
    _visit_method(use, type(module), "forward")


def _visit_optimizer(use: ReplayGuard, optimizer: torch.optim.Optimizer, name: str) -> None:
    own = vars(optimizer)
    table = use.constant(own)
    use.require(use.same_length(own, table))  # such as another `step`
    keys = ({"step", "param_groups", "state"} | use.names) & own.keys() - {"defaults"}
    for key in sorted(keys - {"param_groups", "state"}):
        use.visit(own[key], f"{table}[{key!r}]")
    _visit_hooks(use, [own[key] for key in _HOOKS_OF_STEP if key in own])
    _visit_method(use, type(optimizer), "step")
    groups, state = use.constant(optimizer.param_groups), use.constant(optimizer.state)
    use.require(f"{name}.param_groups is {groups}", f"{name}.state is {state}")
    use.require(use.same_length(optimizer.param_groups, groups))
    use.require(use.same_keys(optimizer.state, state))
    for place, group in enumerate(optimizer.param_groups):
        use.require(f"{groups}[{place}] is {use.constant(group)}")
        _visit_group(use, group, use.constant(group))
    for entries in optimizer.state.values():
        if not isinstance(entries, dict):
            raise Obstacle(f"{type(optimizer).__name__} keeps no table of values for a parameter")
        _visit_state(use, entries, use.constant(entries))
    tables = [*map(id, optimizer.state.values())]
    use.require(f"[*map(id, {state}.values())] == {tables}")  # finding each would hash tensors


def _visit_group(use: ReplayGuard, group: dict, name: str) -> None:
    """Hand over the floats of a group, such as learning rates; follow its other values."""
    use.require(use.same_keys(group, name))
    for key, value in group.items():
        expression = f"{name}[{key!r}]"
        if value.__class__ is float:
            use.require(f"{expression}.__class__ is float")
            use.handed.append(Handed(value, group, key, (expression,)))
        elif value.__class__ is tuple and all(part.__class__ is float for part in value):
            use.require(f"len({expression}) == {len(value)}")
            parts = tuple(f"{expression}[{index}]" for index in range(len(value)))
            use.handed.append(Handed(value, group, key, parts))
        else:
            use.visit(value, expression)


def _visit_state(use: ReplayGuard, entries: dict, name: str) -> None:
    """Hand over single floats on the CPU, which are step counts; follow the other values."""
    use.require(use.same_keys(entries, name))
    for key, value in entries.items():
        if _is_counter(value):
            use.require(f"{name}[{key!r}] is {use.constant(value)}")
            use.counters.append(Handed(value, entries, key))
        else:
            use.visit(value, f"{name}[{key!r}]", f"the object at {key!r}")


def _is_counter(value: Any) -> bool:
    is_on_cpu = isinstance(value, torch.Tensor) and not is_lazy(value)
    return is_on_cpu and value.dim() == 0 and value.dtype in TRACED


def _visit_schedule(use: ReplayGuard, schedule: LRScheduler, name: str) -> None:
    """Compare the numbers by which it counts its steps; follow the optimizer that it is for."""
    own = vars(schedule)
    kinds = (int, float, list, torch.optim.Optimizer)
    keys = [key for key, value in own.items() if isinstance(value, kinds)]
    use.visit_table(own, use.constant(own), keys)


# --- by kind -------------------------------------------------------------------------------------


def _attributes(*keys: str) -> Callable[[ReplayGuard, Any, str], None]:
    def visit(use: ReplayGuard, value: Any, name: str) -> None:
        for key in keys:
            use.visit(getattr(value, key), f"{name}.{key}")

    return visit


_VISITS: tuple[tuple[Any, Callable[[ReplayGuard, Any, str], None]], ...] = (  # the first that fits
    (torch.nn.Module, _visit_module),
    (torch.optim.Optimizer, _visit_optimizer),
    (LRScheduler, _visit_schedule),
    (TABLES, _visit_table),
    (SEQUENCES, _visit_sequence),
    (_SETS, _visit_set),
    (types.FunctionType, visit_function),
    (types.MethodType, _attributes("__func__", "__self__")),
    (types.BuiltinMethodType, _attributes("__self__")),
    ((functools.partial, functools.partialmethod), _attributes("func", "args", "keywords")),
    ((classmethod, staticmethod), _attributes("__func__")),
    (property, _attributes("fget")),
    (functools.cached_property, _attributes("func")),
    ((UserDict, UserList), _attributes("data")),
    (ChainMap, _attributes("maps")),
)
