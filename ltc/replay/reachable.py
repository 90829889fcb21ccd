"""Everything that a call can reach: its arguments, and the surroundings of its function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ltc.device.recording.state import State
from ltc.device.recording.tensors import is_lazy, state_of
from ltc.replay.aliases import layout_of, same_memory
from ltc.replay.contents import visit_contents
from ltc.replay.guard import FoundTensor, Handed, Obstacle, ReplayGuard
from ltc.support.torch_private import hooks_of_tensor

_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_ROOTS = ("args", "kwargs")


class Reachable(ReplayGuard):
    """Everything that one call can reach, as it is before the call.

    Attributes:
        obstacle: The reason why calls of the function can never be replayed; "" if none is known.
        layout: The layout of the tensors on a device, the fixed tensors first.
        bases: The numbers of their bases; none once the call is over.
        types: Shape, dtype and number of the device of each.
        base_types: Shape and dtype of each base.
        uploads: For each CPU tensor the place of the first one with the same memory.
    """

    def __init__(self, function: Callable, args: tuple, kwargs: dict) -> None:
        super().__init__(function)
        self.obstacle, known = "", -1
        try:
            while known < len(self.names):  # attributes are followed by names found on the way
                known = len(self.names)
                self.forget()
                self.follow(function)
                self._visit_arguments(args, "args")
                self._visit_arguments(kwargs, "kwargs")
        except Obstacle as found:
            self.obstacle, self.lazy, self.host = str(found), [], []
        self.lazy.sort(key=lambda found: not found.is_fixed)
        tensors = [found.tensor for found in self.lazy]
        self._states: list[State] = [state_of(tensor) for tensor in tensors]
        self.bases, self.layout = layout_of(tensors)
        self.types = [(tuple(one.shape), one.dtype, one.get_device()) for one in tensors]
        self.base_types = [base.type for base in self.bases]
        self.uploads = same_memory([found.tensor for found in self.host])
        self._versions = [found.tensor._version for found in self.host]
        self._outsides = self._outsides_now()

    def situation(self) -> int:
        """Return a number that is equal for calls that differ in handed-over numbers alone."""
        same = tuple(map(id, self.constants.values()))
        return hash((same, repr((self.layout, self.types, self.uploads)), *self.facts()))

    def difference(self, before: Reachable | None) -> str:
        """Return in words the first thing that is not as it was in an earlier call."""
        known = set(before._told()) if before is not None else set()
        return next((self.readable(fact) for fact in self._told() if fact not in known), "modes")

    def _told(self) -> list[str]:
        name, places = self.name_at, range(len(self.lazy))
        types = [
            f"{name(place)} is a tensor of {shape}, {dtype}, on ltc:{device}"
            for place, (shape, dtype, device) in enumerate(self.types)
        ]
        told = [self.layout.told(place, name, self.base_types) for place in places]
        return [*types, *told, *self.facts()]

    def name_at(self, place: int) -> str:
        """Return a tensor on a device, in words."""
        return self.lazy[place].told

    def told_root(self, root: int) -> str:
        """Return a base, in words."""
        return self.layout.told_root(root, self.name_at, self.base_types)

    def state_at(self, place: int) -> State:
        """Return the state of a tensor, as it was before the call."""
        return self._states[place]

    def let_go(self) -> None:
        """Release the tensors that differ from call to call."""
        self.bases, self._states = {}, []
        for found in (self.lazy, self.host):
            found[:] = [one if one.is_fixed else one._replace(tensor=None) for one in found]

    # --- after the call -------------------------------------------------------------------------

    def changed_outside(self) -> str:
        """Return how the call has changed a tensor besides its elements; "" if it has not."""
        found = (*self.lazy, *self.host)
        for one, before, now in zip(found, self._outsides, self._outsides_now()):
            for part in before:
                if before[part] != now[part]:
                    return f"it changes the {part} of {one.told} from {before[part]} to {now[part]}"
        bases = list(self.bases)
        for one, state, root in zip(self.lazy, self._states, self.layout.roots):
            base = state if state.base is None else state.base
            if state_of(one.tensor) is not state or base is not bases[root]:
                return f"it moves {one.told} to other memory"
        return ""

    def _outsides_now(self) -> list[dict[str, Any]]:
        return [_outside_of(found.tensor) for found in (*self.lazy, *self.host)]

    def has_written_to_host(self) -> bool:
        return [found.tensor._version for found in self.host] != self._versions

    # --- arguments, of which each call has others -----------------------------------------------

    def _visit_arguments(self, value: Any, expression: str) -> None:
        if isinstance(value, torch.Tensor):
            self._visit_tensor(value, expression, expression, is_fixed=False)
        elif isinstance(value, (list, tuple, dict)):
            if expression not in _ROOTS:
                self.require(f"{expression}.__class__ is {self.constant(value.__class__)}")
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            same = self.same_keys if isinstance(value, dict) else self.same_length
            self.require(same(value, expression))
            for key, part in entries:
                if not isinstance(key, (str, int)):
                    raise Obstacle(
                        f"an argument has the key {key!r}, which is neither a string nor an integer"
                    )
                if part.__class__ is float and expression in _ROOTS:  # inside of one it is compared
                    self.require(f"{expression}[{key!r}].__class__ is float")
                    place = (f"{expression}[{key!r}]",)
                    self.handed.append(Handed(part, expression, key, place))
                else:
                    self._visit_arguments(part, f"{expression}[{key!r}]")
        else:
            self.visit(value, expression)

    # --- tensors --------------------------------------------------------------------------------

    def visit_inside(self, value: Any, name: str, told: str) -> None:
        if issubclass(type(value), torch.Tensor):
            self._visit_tensor(value, name, told, is_fixed=True)
        else:
            visit_contents(self, value, name)

    def _visit_tensor(self, tensor: Any, expression: str, told: str, is_fixed: bool) -> None:
        if tensor.__class__ not in _TENSORS:
            raise Obstacle(f"it uses a {tensor.__class__.__name__}, a subclass of Tensor")
        conditions = self.gradients if expression.endswith(".grad") else self.conditions
        if not is_fixed:
            conditions.append(f"{expression}.__class__ is {self.constant(tensor.__class__)}")
        found = FoundTensor(tensor, expression, is_fixed, told)
        if not is_lazy(tensor):
            self._visit_host_tensor(found)
            return
        if tensor.layout is not torch.strided:
            raise Obstacle("it uses a sparse tensor, or makes a sparse gradient")
        self.lazy.append(found)
        conditions.append(f"{expression}.requires_grad is {tensor.requires_grad}")
        if not tensor.requires_grad:
            return
        for name in hooks_of_tensor:
            self.visit(getattr(tensor, name), f"{expression}.{name}")
        if not is_leaf(tensor) or not is_fixed:
            conditions.append(f"{self.constant(is_leaf)}({expression}) is {is_leaf(tensor)}")
        if is_leaf(tensor):
            self._visit_gradient(tensor.grad, f"{expression}.grad", f"the gradient of {told}")

    def _visit_gradient(self, gradient: torch.Tensor | None, expression: str, told: str) -> None:
        """Visit a gradient, which may be another tensor in each call."""
        if gradient is None:
            self.gradients.append(f"{expression} is None")
        else:
            self._visit_tensor(gradient, expression, told, is_fixed=False)

    def _visit_host_tensor(self, found: FoundTensor) -> None:
        tensor, expression = found.tensor, found.expression
        self.host.append(found)
        if tensor.is_inference():
            raise Obstacle("it uses a CPU tensor that was made in inference mode")
        if found.is_fixed:  # its elements may have become numbers
            self.require(f"{expression}._version == {tensor._version}")
            if tensor.layout is torch.strided:  # `tensor.data = other` counts as no write
                self.require(f"{expression}.data_ptr() == {tensor.data_ptr()}")
        else:
            self.require(
                f"{expression}.shape == {tuple(tensor.shape)}",
                f"{expression}.dtype is {self.constant(tensor.dtype)}",
                f"{expression}.device.type == {tensor.device.type!r}",
                f"{expression}.requires_grad is {tensor.requires_grad}",
            )


def is_leaf(tensor: torch.Tensor) -> bool:
    """Return True if a tensor that requires a gradient has one of its own."""
    try:
        return tensor.is_leaf
    except RuntimeError:  # a view made under no_grad that was written to since: it is neither
        return False


def has_graph(tensor: torch.Tensor) -> bool:
    try:
        return tensor.grad_fn is not None
    except RuntimeError:
        return False


def _outside_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the parts of a tensor that calls such as `t_()` and `requires_grad_()` change."""
    return {
        "shape": tuple(tensor.shape),
        "strides": tensor.stride() if tensor.layout is torch.strided else None,
        "requires_grad": tensor.requires_grad,
    }
