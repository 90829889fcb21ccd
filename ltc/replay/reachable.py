"""What a call can use: its arguments, what its function closes over, and what their attributes name.

Each thing that is found has an expression, which finds it again, and conditions, which tell whether
it is as it was.  Attributes of objects that are neither modules nor optimizers are followed where
the code of the function, or of what it calls, names them.
"""

from __future__ import annotations

import enum
import functools
import inspect
import os
import sysconfig
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from ltc.device.recording.state import State
from ltc.device.recording.tensors import is_lazy
from ltc.device.torch_device import storage_of
from ltc.tracebacks import is_users

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device,
          torch.Size, torch.memory_format, range, slice)  # fmt: skip
_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_CONTAINERS = (list, tuple, dict, set, frozenset, OrderedDict)
_TABLES_OF_MODULE = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LIBRARIES = ("torch", "ltc", "numpy", "builtins", "itertools", "functools", "math", "random", "os")
_INSTALLED = tuple(
    sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")
)
_MOST = 100_000  # things that are followed


class FoundTensor(NamedTuple):
    """A tensor, and the expression that finds it.

    is_fixed  whether the conditions hold for this tensor alone: then its expression is its name
    """

    tensor: Any  # a torch.Tensor; None once a call is over that has others in its place
    expression: str
    is_fixed: bool


class Number(NamedTuple):
    """A float that may change without the call being another.

    holder, key, part  where it stands: holder[key], or holder[key][part] where part is not None
    """

    expression: str
    value: float
    holder: Any
    key: Any
    part: int | None


class _Obstacle(Exception):
    pass


class Reachable:
    """What one call can use, as it is now.

    constants   what the expressions name
    conditions  expressions that are true as long as the call is to be the same
    pinned      (expression, value) of plain values that have to be equal
    lazy, host  tensors on a device, and others
    numbers     learning rates and their like, and floats among the arguments
    counters    0-dim tensors on the CPU in an optimizer's state
    obstacle    why calls of the function can never be replayed; "" where nothing is known
    """

    def __init__(self, function: Callable, args: tuple, kwargs: dict) -> None:
        self.obstacle = ""
        self._function = function
        self._names: set[str] = set()
        known = -1
        try:
            while known < len(
                self._names
            ):  # attributes are followed by names that are found on the way
                known = len(self._names)
                self._forget()
                self._look_at(function, args, kwargs)
        except _Obstacle as found:
            self.obstacle = str(found)

    def _forget(self) -> None:
        self.constants: dict[str, Any] = {}
        self.conditions: list[str] = []
        self.pinned: list[tuple[str, Any]] = []
        self.lazy: list[FoundTensor] = []
        self.host: list[FoundTensor] = []
        self.numbers: list[Number] = []
        self.counters: list[FoundTensor] = []
        self._seen: dict[int, str] = {}

    def _look_at(self, function: Callable, args: tuple, kwargs: dict) -> None:
        self._visit_inside(function, self._constant(function))
        self._visit_arguments(args, "args")
        self._visit_arguments(kwargs, "kwargs")
        self._versions = [found.tensor._version for found in self.host]

    def has_written_to_host(self) -> bool:
        """Whether the call, which is over, has changed a CPU tensor that it could reach."""
        return [found.tensor._version for found in self.host] != self._versions

    def situation(self) -> int:
        """Equal for calls that nothing tells apart but numbers."""
        values = tuple(
            (expression, value.__class__, repr(value)) for expression, value in self.pinned
        )
        same = tuple(map(id, self.constants.values()))
        types = tuple((one.tensor.shape, one.tensor.dtype, one.tensor.device) for one in self.lazy)
        return hash((same, types, tuple(self.conditions), values))

    def let_go(self) -> None:
        """Hold no tensor that another call will have others in place of."""
        for found in (self.lazy, self.host):
            found[:] = [one if one.is_fixed else one._replace(tensor=None) for one in found]

    # --- helpers

    def _constant(self, value: Any) -> str:
        name = self._seen.get(id(value))
        if name is None:
            if len(self.constants) > _MOST:
                raise _Obstacle(f"it closes over more than {_MOST} objects")
            name = self._seen[id(value)] = f"c{len(self.constants)}"
            self.constants[name] = value
        return name

    def _visit(self, value: Any, expression: str) -> None:
        """Of a thing that has to be the same one."""
        if isinstance(value, (*_PLAIN, enum.Enum)):
            self.pinned.append((expression, value))
            return
        is_new = id(value) not in self._seen
        name = self._constant(value)
        self.conditions.append(f"{expression} is {name}")
        if is_new:
            self._visit_inside(value, name)

    def _visit_inside(self, value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor):
            self._visit_tensor(value, name, is_fixed=True)
        elif isinstance(value, torch.nn.Module):
            self._visit_module(value)
        elif isinstance(value, torch.optim.Optimizer):
            self._visit_optimizer(value)
        elif isinstance(value, _CONTAINERS):
            self._visit_container(value, name)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value, name)
        elif isinstance(value, types.MethodType):
            self._visit(value.__func__, f"{name}.__func__")
            self._visit(value.__self__, f"{name}.__self__")
        elif isinstance(value, functools.partial):
            for part in ("func", "args", "keywords"):
                self._visit(getattr(value, part), f"{name}.{part}")
        else:
            self._visit_object(value, name)

    # --- arguments

    def _visit_arguments(self, value: Any, expression: str) -> None:
        """Of a thing in whose place another of its kind may be."""
        if value.__class__ is float:
            self._visit_float(value, expression)
        elif isinstance(value, torch.Tensor):
            self._visit_tensor(value, expression, is_fixed=False)
        elif isinstance(value, (list, tuple, dict)):
            name = self._constant(value.__class__)
            self.conditions += [
                f"{expression}.__class__ is {name}",
                f"len({expression}) == {len(value)}",
            ]
            for key, part in _items(value):
                if not isinstance(key, (str, int)):
                    raise _Obstacle(f"an argument has the key {key!r}")
                self._visit_arguments(part, f"{expression}[{key!r}]")
        else:
            self._visit(value, expression)
            if isinstance(value, _PLAIN):
                self.conditions.append(
                    f"{expression}.__class__ is {self._constant(value.__class__)}"
                )

    def _visit_float(self, value: float, expression: str) -> None:
        """Traced where it is an argument itself; part of the guard where it is inside of one."""
        root, _, key = expression.rstrip("]").partition("[")
        if root in ("args", "kwargs") and "[" not in key:
            holder = None if root == "args" else "kwargs"
            place = int(key) if root == "args" else key.strip("'\"")
            self.conditions.append(f"{expression}.__class__ is float")
            self.numbers.append(Number(expression, value, holder, place, None))
        else:
            self.pinned.append((expression, value))

    # --- tensors

    def _visit_tensor(self, tensor: torch.Tensor, expression: str, is_fixed: bool) -> None:
        if tensor.__class__ not in _TENSORS:
            raise _Obstacle(f"it uses a {tensor.__class__.__name__}, a subclass of Tensor")
        if not is_fixed:
            name = self._constant(tensor.__class__)
            self.conditions.append(f"{expression}.__class__ is {name}")
        if not is_lazy(tensor):
            self._visit_host_tensor(tensor, expression, is_fixed)
            return
        self.lazy.append(FoundTensor(tensor, expression, is_fixed))
        self.conditions.append(f"{expression}.requires_grad is {tensor.requires_grad}")
        if not tensor.requires_grad:
            return
        if not tensor.is_leaf:
            self.conditions.append(f"not {expression}.is_leaf")
            return
        gradient = tensor.grad
        if gradient is None:
            self.conditions.append(f"{expression}.grad is None")
        else:
            self._visit_tensor(gradient, f"{expression}.grad", is_fixed=False)

    def _visit_host_tensor(self, tensor: torch.Tensor, expression: str, is_fixed: bool) -> None:
        self.host.append(FoundTensor(tensor, expression, is_fixed))
        if tensor.is_inference():
            raise _Obstacle("it uses a CPU tensor that was made in inference mode")
        if is_fixed:  # what it holds may have become numbers
            self.conditions.append(f"{expression}._version == {tensor._version}")
        else:
            self.conditions += [
                f"{expression}.shape == {tuple(tensor.shape)}",
                f"{expression}.dtype is {self._constant(tensor.dtype)}",
                f"{expression}.device.type == {tensor.device.type!r}",
                f"{expression}.requires_grad is {tensor.requires_grad}",
            ]

    # --- what holds others

    def _visit_container(self, value: Any, name: str) -> None:
        self.conditions.append(f"len({name}) == {len(value)}")
        if isinstance(value, (set, frozenset)):
            return
        for key, part in _items(value):
            place = repr(key) if isinstance(key, (str, int)) else self._constant(key)
            self._visit(part, f"{name}[{place}]")

    def _visit_module(self, module: torch.nn.Module) -> None:
        attributes = vars(module)
        table = self._constant(attributes)
        for key, value in attributes.items():
            if key in _TABLES_OF_MODULE:
                self._visit(value, f"{table}[{key!r}]")
            elif key in _HOOKS:
                self._visit_container(value, self._constant(value))
            elif not key.startswith("_") or key in self._names:
                self._visit(value, f"{table}[{key!r}]")
        self._visit_methods(module, {"forward"} | self._names)

    def _visit_object(self, value: Any, name: str) -> None:
        kind = value if isinstance(value, (type, types.ModuleType)) else type(value)
        home = kind.__name__ if isinstance(value, types.ModuleType) else kind.__module__
        inner = getattr(value, "__wrapped__", None)
        if isinstance(inner, types.FunctionType) and id(inner) not in self._seen:
            self._visit_function(inner, self._constant(inner))
        if home.partition(".")[0] in _LIBRARIES:
            return
        for key in sorted(self._names.intersection(dir(value))):
            part = inspect.getattr_static(value, key, None)
            if isinstance(part, types.FunctionType):
                if id(part) not in self._seen:
                    self._visit_function(part, self._constant(part))
            elif not isinstance(part, types.ModuleType) and not hasattr(type(part), "__get__"):
                self._visit(part, f"{name}.{key}")
        self._visit_methods(value, self._names)

    def _visit_methods(self, value: Any, names: set[str]) -> None:
        """What the code of an object's class reads, as far as a user has written it."""
        kind = type(value)
        if kind.__module__.partition(".")[0] in _LIBRARIES:
            return
        for key in sorted(names):
            found = getattr(kind, key, None)
            if isinstance(found, property):
                found = found.fget
            if isinstance(found, types.FunctionType) and id(found) not in self._seen:
                self._visit_function(found, self._constant(found))

    def _visit_function(self, function: types.FunctionType, name: str) -> None:
        if function is not self._function and not _is_followed(function.__code__.co_filename):
            return
        names = set(_names_in(function.__code__))
        self._names |= names
        for word in ("print", "input"):
            if word in names and word not in function.__globals__:
                line = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
                raise _Obstacle(f"{function.__name__} ({line}) calls {word}")
        for cell in function.__closure__ or ():
            for contents in _contents(cell):
                self._visit(contents, f"{self._constant(cell)}.cell_contents")
        table = self._constant(function.__globals__)
        for key in sorted(names.intersection(function.__globals__)):
            self._visit(function.__globals__[key], f"{table}[{key!r}]")
        for part in ("__defaults__", "__kwdefaults__"):
            self._visit(getattr(function, part), f"{name}.{part}")

    # --- optimizers

    def _visit_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        name = self._constant(optimizer)
        self._visit_methods(optimizer, {"step"} | self._names)
        groups = self._constant(optimizer.param_groups)
        self.conditions += [
            f"{name}.param_groups is {groups}",
            f"len({groups}) == {len(optimizer.param_groups)}",
        ]
        for place, group in enumerate(optimizer.param_groups):
            self.conditions.append(f"{groups}[{place}] is {self._constant(group)}")
            self._visit_group(group, self._constant(group))
        self._visit_state(optimizer, name)

    def _visit_group(self, group: dict, name: str) -> None:
        self.conditions.append(f"len({name}) == {len(group)}")
        for key, value in group.items():
            expression = f"{name}[{key!r}]"
            if key == "params":
                self.conditions.append(f"list(map(id, {expression})) == {list(map(id, value))}")
                for parameter in value:
                    if id(parameter) not in self._seen:
                        self._visit_inside(parameter, self._constant(parameter))
            elif value.__class__ is float:
                self.numbers.append(Number(expression, value, group, key, None))
            elif value.__class__ is tuple and all(part.__class__ is float for part in value):
                self.conditions.append(f"len({expression}) == {len(value)}")
                for index, part in enumerate(value):
                    self.numbers.append(Number(f"{expression}[{index}]", part, group, key, index))
            else:
                self._visit(value, expression)

    def _visit_state(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        state = self._constant(optimizer.state)
        self.conditions += [f"{name}.state is {state}", f"len({state}) == {len(optimizer.state)}"]
        for parameter, entries in optimizer.state.items():
            if not isinstance(entries, dict):
                raise _Obstacle(f"{type(optimizer).__name__} keeps what is no table of a parameter")
            table = self._constant(entries)
            self.conditions.append(f"{state}[{self._constant(parameter)}] is {table}")
            self.conditions.append(f"len({table}) == {len(entries)}")
            for key, value in entries.items():
                if isinstance(value, torch.Tensor) and not is_lazy(value):
                    counter = self._constant(value)
                    self.conditions.append(f"{table}[{key!r}] is {counter}")
                    self.counters.append(FoundTensor(value, counter, True))
                else:
                    self._visit(value, f"{table}[{key!r}]")


def _is_followed(file: str) -> bool:
    """Whether code there is the user's own: what is installed is looked at from outside alone."""
    return is_users(file) and not file.startswith(_INSTALLED)


def _contents(cell: types.CellType) -> list[Any]:
    """What a cell holds: nothing before its variable is given a value."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    return iter(value.items()) if isinstance(value, dict) else enumerate(value)


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def state_if_any(tensor: torch.Tensor) -> State | None:
    """The state of a tensor on a device; None of one that nothing was ever asked of."""
    state: State | None = getattr(storage_of(tensor), "lazy", None)
    return state
