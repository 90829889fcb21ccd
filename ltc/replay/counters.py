"""Step counts that an optimizer keeps as one small CPU tensor for each parameter."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ltc.replay.traced_float import Tape, traced
from ltc.support.torch_private import plain_functions

TRACED = (torch.float32, torch.float64)  # dtypes of counters
_SUMS, _PRODUCTS = {"add_", "foreach_add_"}, {"mul_", "foreach_mul_"}
_OUTSIDE = {"get__", "dim", "size", "numel", "stride", "is_view", "is_floating_point", "is_complex",
            "is_contiguous", "is_inference", "untyped_storage", "data_ptr", "storage_offset",
            "element_size", "get_device"}  # fmt: skip # which show no element
_homes = WeakIdKeyDictionary()  # counter -> (vector that it is an element of, its place there)


class TracedCounter(torch.Tensor):
    """A counter that notes on a tape all that is computed from it while a call is recorded.

    It shares the memory of the counter, and stands in its place.
    """

    tape: Tape
    operand: Any
    value: float

    @classmethod
    def of(cls, tensor: torch.Tensor, tape: Tape, operand: Any) -> TracedCounter:
        made = tensor.detach().as_subclass(cls)
        made.tape, made.operand, made.value = tape, operand, tensor.item()
        return made

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with plain_functions():
            result = function(*args, **(kwargs or {}))
            name = function.__name__.partition(".")[0].lstrip("_")
            given = [_listed(one) for one in (*args, *(kwargs or {}).values())]
            if name in _SUMS | _PRODUCTS and all(isinstance(one, cls) for one in given[0]):
                amounts = given[1] if len(given[1]) > 1 else given[1] * len(given[0])
                for counter, amount in zip(given[0], amounts):
                    counter._written(amount if name in _PRODUCTS else None)
            elif name == "item":
                return traced(args[0].tape, args[0].operand, result)
            elif name not in _OUTSIDE:
                for counter in [one for part in given for one in part if isinstance(one, cls)]:
                    counter.tape.note("value", (counter.operand,), repr(counter.item()))
        return result

    def _written(self, factor: Any) -> None:
        """Note that a number was added to it, or that it was multiplied by one."""
        before, self.value = self.value, self.item()
        amount = self.value - before if factor is None else getattr(factor, "operand", factor)
        name = "add" if factor is None else {torch.float32: "product"}.get(self.dtype, "mul")
        self.operand = self.tape.note(name, (self.operand, amount), self.value).operand


def _listed(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else [value]


class Counters:
    """Some counters, made elements of one vector, so that reading all is one operation.

    They stay the tensors that they are.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        for dtype in TRACED:
            _bring_together([t for t in tensors if t.dtype is dtype and t not in _homes])
        parts: dict[int, tuple[torch.Tensor, list[int], list[int]]] = {}
        for number, tensor in enumerate(tensors):
            vector, place = _homes[tensor]
            _, numbers, places = parts.setdefault(id(vector), (vector, [], []))
            numbers.append(number)
            places.append(place)
        self._parts, self._count = list(parts.values()), len(tensors)
        first, _, places = self._parts[0]
        self._only = first if places == [*range(first.numel())] and len(parts) == 1 else None

    def values(self) -> list[float]:
        """Return the value of each, in order."""
        if self._only is not None:
            return self._only.tolist()
        found = [0.0] * self._count
        for vector, numbers, places in self._parts:
            elements = vector.tolist()
            for number, place in zip(numbers, places):
                found[number] = elements[place]
        return found

    def give(self, values: list[float]) -> None:
        """Give each a new value."""
        if self._only is not None and values.count(values[0]) == len(values):
            self._only.fill_(values[0])
            return
        for vector, numbers, places in self._parts:
            new = torch.tensor(
                [values[number] for number in numbers], dtype=vector.dtype, device="cpu"
            )
            vector.index_copy_(0, torch.tensor(places, device="cpu"), new)


def _bring_together(tensors: Sequence[torch.Tensor]) -> None:
    if tensors:
        vector = torch.stack([tensor.detach() for tensor in tensors])
        for place, tensor in enumerate(tensors):
            tensor.data = vector[place]
            _homes[tensor] = vector, place


def product(x: float, factor: float) -> float:
    """Return the product of a float32 counter and a number, as the CPU rounds it."""
    return ctypes.c_float(x * ctypes.c_float(factor).value).value
