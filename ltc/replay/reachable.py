"""What a call can use: its arguments, what its function closes over, and what their attributes name.

Each thing that is found has an expression, which finds it again, and conditions, which tell whether
it is as it was.  Attributes of objects that are neither modules nor optimizers are followed where
the code of the function, or of what it calls, names them.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from ltc.device.recording.tensors import is_lazy
from ltc.replay.aliases import TensorPlaces, same_memory
from ltc.replay.conditions import Conditions, FoundTensor, Number, Obstacle
from ltc.replay.containers import (
    CONTAINERS,
    PLAIN_CONTAINERS,
    is_array,
    items,
    same_places,
    visit_array,
    visit_container,
)
from ltc.replay.indirect import follow_references, visit_indirect
from ltc.replay.modules import visit_hooks_of_tensor, visit_module, visit_optimizer, visit_schedule
from ltc.replay.objects import (
    attribute,
    globals_in,
    is_followed,
    names_in,
    visit_named,
    visit_object,
)

_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_ROOTS = ("args", "kwargs")


class Reachable(Conditions):
    """What one call can use, as it is now.

    obstacle  why calls of the function can never be replayed; "" where nothing is known
    aliases   how the tensors on a device lie in one another's memory
    """

    def __init__(self, function: Callable, args: tuple, kwargs: dict) -> None:
        super().__init__()
        self.obstacle, self.aliases = "", TensorPlaces([])
        self._function = function
        known = -1
        try:
            while known < len(self.names):  # attributes are followed by names found on the way
                known = len(self.names)
                self.forget()
                self._look_at(function, args, kwargs)
        except Obstacle as found:
            self.obstacle = str(found)

    def _look_at(self, function: Callable, args: tuple, kwargs: dict) -> None:
        self.visit_inside(function, self.constant(function))
        self._visit_arguments(args, "args")
        self._visit_arguments(kwargs, "kwargs")
        follow_references(self)
        self.aliases = TensorPlaces([found.tensor for found in self.lazy])
        self._require_same_uploads()
        self._versions = [found.tensor._version for found in self.host]
        self._layouts = self._layouts_now()

    def _layouts_now(self) -> list[dict[str, Any]]:
        return [_layout_of(found.tensor) for found in (*self.lazy, *self.host)]

    def changed_layout(self) -> str:
        """How the call, which is over, has changed a tensor besides its elements; "" where it has not."""
        found = (*self.lazy, *self.host)
        for one, before, now in zip(found, self._layouts, self._layouts_now()):
            for what in before:
                if before[what] != now[what]:
                    thing = self._name_of(one)
                    return f"it changes the {what} of {thing} from {before[what]} to {now[what]}"
        moved = self.aliases.moved([one.tensor for one in self.lazy])
        return "" if moved is None else f"it gives {self.name_at(moved)} other memory"

    def name_at(self, place: int) -> str:
        """Of a tensor on a device, in words."""
        return self._name_of(self.lazy[place])

    def _name_of(self, found: FoundTensor) -> str:
        if found.is_fixed:
            return self._called(found.tensor)
        owner, _, part = found.expression.rpartition(".")
        if part != "grad":
            return found.expression
        named = next(one for one in self.lazy if one.expression == owner)
        return f"the gradient of {self._name_of(named)}"

    def _called(self, tensor: torch.Tensor) -> str:
        """The name of a variable, or the key in a table, that it is found by."""
        for holder in self.constants.values():
            if isinstance(holder, types.FunctionType):
                for name, cell in zip(holder.__code__.co_freevars, holder.__closure__ or ()):
                    if any(contents is tensor for contents in _contents(cell)):
                        return name
            elif isinstance(holder, (dict, list, tuple)):
                for key, part in items(holder):
                    if part is tensor:
                        return f"what is found by {key!r}"
        return "a tensor that it closes over"

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
        aliases = self.aliases.situation()
        return hash((same, types, aliases, tuple(self.conditions), values))

    def let_go(self) -> None:
        """Hold no tensor that another call will have others in place of."""
        self.aliases.let_go()
        for found in (self.lazy, self.host):
            found[:] = [one if one.is_fixed else one._replace(tensor=None) for one in found]

    def _require_same_uploads(self) -> None:
        """Of CPU tensors that are one, also in the next calls: what is moved may be either."""
        self.same_uploads = same_memory([found.tensor for found in self.host])
        for place, first in enumerate(self.same_uploads):
            mine, other = self.host[place], self.host[first]
            if first != place and not (mine.is_fixed and other.is_fixed):
                self.require(
                    *(f"{mine.expression}.{part} == {other.expression}.{part}"
                      for part in ("data_ptr()", "shape", "stride()", "dtype"))
                )  # fmt: skip

    # --- what holds others

    def visit_inside(self, value: Any, name: str) -> None:
        if visit_indirect(self, value, name):  # a weakref.proxy looks like what it stands for
            return
        if isinstance(value, torch.Tensor):
            self._visit_tensor(value, name, is_fixed=True)
        elif isinstance(value, torch.nn.Module):
            visit_module(self, value)
        elif isinstance(value, torch.optim.Optimizer):
            visit_optimizer(self, value)
        elif isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            visit_schedule(self, value)
        elif isinstance(value, CONTAINERS):
            visit_container(self, value, name)
            if type(value) not in PLAIN_CONTAINERS:
                visit_object(self, value, name)
        elif is_array(value):
            visit_array(self, value, name)
        elif isinstance(value, types.FunctionType):
            self.visit_function(value, name)
        elif isinstance(value, types.MethodType):
            self.visit(value.__func__, f"{name}.__func__")
            self.visit(value.__self__, f"{name}.__self__")
        else:
            visit_object(self, value, name)

    def visit_function(self, function: types.FunctionType, name: str) -> None:
        if function is not self._function and not is_followed(function.__code__.co_filename):
            inner = attribute(function, "__wrapped__")  # such as below torch.no_grad()
            if isinstance(inner, types.FunctionType):
                self.visit(inner, f"{name}.__wrapped__")
            of_types = attribute(function, "registry")  # of a singledispatch
            if isinstance(of_types, types.MappingProxyType):
                self.visit(of_types, f"{name}.registry")
            return
        self.names.update(names_in(function.__code__))
        names = globals_in(function.__code__)
        is_constructor = function.__name__ == "__init__"  # its class may be named for other reasons
        for word in ("print", "input"):
            if word in names and word not in function.__globals__ and not is_constructor:
                line = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
                raise Obstacle(f"{function.__name__} ({line}) calls {word}")
        for cell in function.__closure__ or ():
            for contents in _contents(cell):
                self.visit(contents, f"{self.constant(cell)}.cell_contents")
        table = self.constant(function.__globals__)
        for key in sorted(names.intersection(function.__globals__)):
            self.visit(function.__globals__[key], f"{table}[{key!r}]")
        for part in ("__code__", "__defaults__", "__kwdefaults__"):
            self.visit(getattr(function, part), f"{name}.{part}")
        visit_named(self, vars(function), name)

    # --- arguments

    def _visit_arguments(self, value: Any, expression: str) -> None:
        """Of a thing in whose place another of its kind may be."""
        if value.__class__ is float:
            self._visit_float(value, expression)
        elif isinstance(value, torch.Tensor):
            self._visit_tensor(value, expression, is_fixed=False)
        elif isinstance(value, (list, tuple, dict)):
            if expression not in _ROOTS:
                self.require(f"{expression}.__class__ is {self.constant(value.__class__)}")
            self.require(same_places(self, value, expression))
            for key, part in items(value):
                if not isinstance(key, (str, int)):
                    raise Obstacle(f"an argument has the key {key!r}")
                self._visit_arguments(part, f"{expression}[{key!r}]")
        else:
            self.visit(value, expression)

    def _visit_float(self, value: float, expression: str) -> None:
        """Traced where it is an argument itself; part of the guard where it is inside of one."""
        root, _, key = expression.rstrip("]").partition("[")
        if root in _ROOTS and "[" not in key:
            holder = None if root == "args" else "kwargs"
            place = int(key) if root == "args" else key.strip("'\"")
            self.conditions.append(f"{expression}.__class__ is float")
            self.numbers.append(Number(expression, value, holder, place, None))
        else:
            self.pin(expression, value)

    # --- tensors

    def _visit_tensor(self, tensor: torch.Tensor, expression: str, is_fixed: bool) -> None:
        if tensor.__class__ not in _TENSORS:
            raise Obstacle(f"it uses a {tensor.__class__.__name__}, a subclass of Tensor")
        if tensor.layout is not torch.strided and is_lazy(tensor):
            raise Obstacle("it uses a sparse tensor, or makes a sparse gradient")
        if not is_fixed:
            name = self.constant(tensor.__class__)
            self.conditions.append(f"{expression}.__class__ is {name}")
        if not is_lazy(tensor):
            self._visit_host_tensor(tensor, expression, is_fixed)
            return
        self.lazy.append(FoundTensor(tensor, expression, is_fixed))
        self.conditions.append(f"{expression}.requires_grad is {tensor.requires_grad}")
        if not tensor.requires_grad:
            return
        visit_hooks_of_tensor(self, tensor, expression)
        if not is_leaf(tensor):
            self.conditions.append(f"not {self.constant(is_leaf)}({expression})")
            return
        if not is_fixed:
            self.conditions.append(f"{self.constant(is_leaf)}({expression})")
        gradient = tensor.grad
        if gradient is None:
            self.conditions.append(f"{expression}.grad is None")
        else:
            self._visit_tensor(gradient, f"{expression}.grad", is_fixed=False)

    def _visit_host_tensor(self, tensor: torch.Tensor, expression: str, is_fixed: bool) -> None:
        self.host.append(FoundTensor(tensor, expression, is_fixed))
        if tensor.is_inference():
            raise Obstacle("it uses a CPU tensor that was made in inference mode")
        if is_fixed:  # what it holds may have become numbers
            self.conditions.append(f"{expression}._version == {tensor._version}")
            if tensor.layout is torch.strided:  # `tensor.data = other` counts as no write
                self.conditions.append(f"{expression}.data_ptr() == {tensor.data_ptr()}")
        else:
            self.conditions += [
                f"{expression}.shape == {tuple(tensor.shape)}",
                f"{expression}.dtype is {self.constant(tensor.dtype)}",
                f"{expression}.device.type == {tensor.device.type!r}",
                f"{expression}.requires_grad is {tensor.requires_grad}",
            ]


def is_leaf(tensor: torch.Tensor) -> bool:
    """Whether a tensor that requires a gradient has one of its own."""
    try:
        return tensor.is_leaf
    except RuntimeError:  # a view made under no_grad that was written to since: it is neither
        return False


def has_graph(tensor: torch.Tensor) -> bool:
    try:
        return tensor.grad_fn is not None
    except RuntimeError:
        return False


def _contents(cell: types.CellType) -> list[Any]:
    """What a cell holds: nothing before its variable is given a value."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _layout_of(tensor: torch.Tensor) -> dict[str, Any]:
    """What calls such as `t_()` and `requires_grad_()` change."""
    return {
        "shape": tuple(tensor.shape),
        "strides": tensor.stride() if tensor.layout is torch.strided else None,
        "requires_grad": tensor.requires_grad,
    }
