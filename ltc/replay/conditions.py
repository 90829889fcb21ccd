"""What has to be as it was, for a call to be like an earlier one: what each kind of thing adds to.

`Reachable` is one of these; the functions of `containers`, `objects` and `modules` each walk through
things of one kind, and write down here what they find.
"""

from __future__ import annotations

import types
from typing import Any, NamedTuple

import torch

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device,
          torch.Size, torch.memory_format, range, slice)  # fmt: skip
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


class Obstacle(Exception):
    """Calls of the function can never be replayed, and why."""


class Conditions:
    """What one call can use, as it is now.

    constants   what the expressions name
    conditions  expressions that are true as long as the call is to be the same
    pinned      (expression, value) of plain values that have to be equal, and of one type
    lazy, host  tensors on a device, and others
    numbers     learning rates and their like, and floats among the arguments
    counters    0-dim tensors on the CPU in an optimizer's state
    names       of attributes that code on the way has
    classes     of users, whose methods are among the conditions
    methods     expressions of others that are
    weak        weak references that are still to be followed, with their expressions
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.forget()

    def forget(self) -> None:
        """All but the names."""
        self.constants: dict[str, Any] = {}
        self.conditions: list[str] = []
        self.pinned: list[tuple[str, Any]] = []
        self.lazy: list[FoundTensor] = []
        self.host: list[FoundTensor] = []
        self.numbers: list[Number] = []
        self.counters: list[FoundTensor] = []
        self.classes: set[type] = set()
        self.methods: set[str] = set()
        self.weak: list[tuple[Any, str]] = []
        self._seen: dict[int, str] = {}

    def is_new(self, value: Any) -> bool:
        return id(value) not in self._seen

    def constant(self, value: Any) -> str:
        """The name of that object in expressions."""
        name = self._seen.get(id(value))
        if name is None:
            if len(self.constants) > _MOST:
                raise Obstacle(f"it closes over more than {_MOST} objects")
            name = self._seen[id(value)] = f"c{len(self.constants)}"
            self.constants[name] = value
        return name

    def require(self, *conditions: str) -> None:
        self.conditions += conditions

    def pin(self, expression: str, value: Any) -> None:
        """A plain value has to be equal: of the same type, and a zero of the same sign."""
        if value is None or value is True or value is False:
            self.require(f"{expression} is {value}")
            return
        self.pinned.append((expression, value))
        if isinstance(value, (float, complex)) and value == 0:
            self.require(f"repr({expression}) == {repr(value)!r}")

    def visit(self, value: Any, expression: str) -> None:
        """Of a thing that has to be the same one."""
        if isinstance(value, PLAIN):
            self.pin(expression, value)
            return
        self.require(f"{expression} is {self._name_of_visited(value)}")

    def visit_new(self, value: Any) -> None:
        """Of a thing that is held to be the same one in another way."""
        if not isinstance(value, PLAIN):
            self._name_of_visited(value)

    def _name_of_visited(self, value: Any) -> str:
        is_new = self.is_new(value)
        name = self.constant(value)
        if is_new:
            self.visit_inside(value, name)
        return name

    def visit_inside(self, value: Any, name: str) -> None:
        """What the thing of that name holds."""
        raise NotImplementedError

    def visit_function(self, function: types.FunctionType, name: str) -> None:
        """What the code of a function names, as far as a user has written it."""
        raise NotImplementedError
