"""One recorded call as a function that reads and fills slots of a list of CPU tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from keyword import iskeyword
from typing import Any

import torch

from ltc.aten.call import Call, CallResult, Scalar
from ltc.backends.interpreter.line_names import Names
from ltc.backends.interpreter.stride_rules import takes_any_strides
from ltc.backends.interpreter.torch_functions import (
    begins_undefined,
    function_in_place_of,
    may_return_operand,
    positional_arguments,
    quick_function,
)
from ltc.backends.interpreter.view_chains import write_through
from ltc.errors import InvalidGraph
from ltc.support.torch_private import (
    bound_function,
    storage_identity,
    storage_use_count,
)

_made_contiguous = bound_function("contiguous")  # the method is ltc's, which asks for views first
ALONE = 2  # a storage's users: its one tensor, and the Python object that asks

_NO_NAMES: dict[str, Any] = {}  # of calls without keyword arguments: never changed

# 0.0 and -0.0 are equal and not the same, and so are (1,) and (True,).
_SAME_WHERE_EQUAL = frozenset({bool, int, str, type(None)})

Values = list[Any]


class NotInterpretable(Exception):
    """What only a compiled program can do: an exchange among replicas, a value that fits nowhere."""


class Slots:
    """Where a launch has its values: the results of calls, its scalars, what is the same each time.

    The results of one call lie side by side.
    """

    def __init__(self, calls: Iterable[Call], scalars: Iterable[int]) -> None:
        """`scalars`: slots of the recording, in the order in which a launch is given them."""
        made = [value for call in calls for value in call.results if value is not None]
        self._results = {value: slot for slot, value in enumerate(made)}
        self._scalars = {place: slot for slot, place in enumerate(scalars, len(made))}
        self.scalars = slice(len(made), len(made) + len(self._scalars))
        self.start: Values = [None] * (len(made) + len(self._scalars))  # of every launch
        self._constants: dict[tuple[type, Any], int] = {}

    def of_value(self, value: CallResult) -> int:
        return self._results[value]

    def of_scalar(self, place: int) -> int:
        return self._scalars[place]

    def of_constant(self, value: Any) -> int:
        key = value.__class__, value if value.__class__ in _SAME_WHERE_EQUAL else id(value)
        known = self._constants.get(key)
        if known is None:
            known = self._constants[key] = len(self.start)
            self.start.append(value)
        return known

    def of_results(self, call: Call) -> int:
        """The slot of the first; of a call without any it does not matter."""
        return next((self._results[value] for value in call.results if value is not None), 0)


Expand = Callable[[Call, Slots], "CallKernel"]


def kernel_of(call: Call, slots: Slots, writable: frozenset[int], expanded: Expand) -> CallKernel:
    """What runs the call.

    writable  slots whose tensors it may write over, if nothing else lies in their memory
    expanded  what runs a call as its rule says, where PyTorch's kernel will not do
    """
    if isinstance(call.overload, str):
        make = _OF_LTC.get(call.overload)
        if make is None:
            raise NotInterpretable(call.overload)
        return make(call, slots, writable)
    if call.seed is not None or begins_undefined(call.name):
        return expanded(call, slots)
    return TorchCall(call, slots, writable, expanded)


class CallKernel:
    """Runs one call.

    first  the slot of its first result; one that is undefined has none
    """

    __slots__ = ("call", "first")

    def __init__(self, call: Call, slots: Slots) -> None:
        self.call, self.first = call, slots.of_results(call)

    def run(self, values: Values) -> None:
        raise NotImplementedError

    def source(self, names: Names) -> str:
        """A line of Python that does the same, where the call has run as it was recorded."""
        return f"{names.of(self)}.run(values)"


class TorchCall(CallKernel):
    """Run by the overload's own kernel; by the call's rule from the first time that fails.

    What the kernel would write to is copied, but for what nobody reads any more.
    """

    __slots__ = (
        "_function", "_args", "_kwargs", "_mutated", "_plain", "_any_strides", "_may_be_operand",
        "_shapes", "_kept_as_it_is", "_slots", "_expand", "_expanded",
    )  # fmt: skip

    def __init__(self, call: Call, slots: Slots, writable: frozenset[int], expand: Expand) -> None:
        super().__init__(call, slots)
        name = call.name
        self._function = function_in_place_of(name, call.overload)
        self._any_strides = takes_any_strides(name)
        self._may_be_operand = may_return_operand(name)
        self._args = tuple([_place(argument, slots) for argument in call.args])
        self._kwargs = _NO_NAMES
        if call.kwargs:
            self._kwargs = {name: _place(value, slots) for name, value in call.kwargs.items()}
        self._mutated = tuple(
            [(place, _writable(_argument(call, place), slots, writable)) for place in call.mutated]
        )
        self._plain = not (self._mutated or self._kwargs) and tuple not in map(type, self._args)
        self._shapes = tuple(
            [None if one is None else slots.of_constant(one.shape) for one in call.results]
        )
        self._kept_as_it_is = self._type_kept_as_it_is()
        self._slots, self._expand = slots, expand
        self._expanded: CallKernel | None = None

    def _type_kept_as_it_is(self) -> tuple[int, torch.dtype] | None:
        """Of a single result that needs nothing but a look: the slot of its shape, and its dtype."""
        results, shape = self.call.results, self._shapes[0] if self._shapes else None
        if len(results) != 1 or results[0] is None or shape is None or self._may_be_operand:
            return None
        dtype = results[0].dtype
        return None if dtype.is_complex else (shape, dtype)

    def run(self, values: Values) -> None:
        if self._expanded is not None:
            self._expanded.run(values)
            return
        try:
            found = self._called(values)
        except Exception as error:
            if self._may_have_written(error):
                raise
            self._run_expanded(values)
            return
        if not self._keep(found, values):
            if self._mutated:
                raise InvalidGraph(f"{self.call.name} gives another shape than was recorded")
            self._run_expanded(values)

    def _may_have_written(self, error: Exception) -> bool:
        """Whether an operand may be half written: then the rule must not read it."""
        is_refused_at_once = isinstance(error, NotImplementedError) and not any(
            isinstance(_argument(self.call, place), list) for place, _ in self._mutated
        )
        return bool(self._mutated) and not is_refused_at_once

    def _run_expanded(self, values: Values) -> None:
        """Its kernel cannot, or gives something else than was recorded: the rule may."""
        expanded = self._expand(self.call, self._slots)
        expanded.run(values)
        self._expanded = expanded

    def _called(self, values: Values) -> Any:
        """The results in the order of `Call.results`; a single one as it is."""
        if self._plain:
            if self._any_strides:
                return self._function(*[values[slot] for slot in self._args])
            return self._function(*[_contiguous(values[slot]) for slot in self._args])
        lay = _as_it_lies if self._any_strides else _contiguous
        args = [_fill(place, values, lay) for place in self._args]
        kwargs = {name: _fill(place, values, lay) for name, place in self._kwargs.items()}
        written: list[Any] = []
        for place, writable in self._mutated:
            holder: Any = args if isinstance(place, int) else kwargs
            holder[place] = _own(holder[place], writable)
            written += _flat(holder[place])
        returned = self._function(*args, **kwargs)
        if not self._mutated:
            return returned
        return [*written, *_flat(returned)] if self.call.returned else written

    def _keep(self, found: Any, values: Values) -> bool:
        """Put the results into their slots; False where they are not of the recorded types."""
        if self._kept_as_it_is is not None and found.__class__ is torch.Tensor:
            shape, dtype = self._kept_as_it_is
            if found.dtype is dtype and found.shape == values[shape]:
                values[self.first] = found
                return True
        self._kept_as_it_is = None
        return self._keep_each(found, values)

    def source(self, names: Names) -> str:
        is_line = self._expanded is None and not self._mutated and self._kept_as_it_is is not None
        if not is_line or any(map(iskeyword, self._kwargs)):  # as `from` is
            return super().source(names)
        shown = [self._source_of(place, names) for place in self._args]
        shown += [f"{name}={self._source_of(place, names)}" for name, place in self._kwargs.items()]
        return f"values[{self.first}] = {names.of(self._quick_function())}({', '.join(shown)})"

    def _quick_function(self) -> Any:
        """What gives the same in less time; an error of it has the calls run one by one again."""
        name = self.call.name
        if len(self._args) < positional_arguments(name) or "device" in self._kwargs:
            return self._function
        return quick_function(name, self.call.overload) or self._function

    def _source_of(self, place: Place, names: Names) -> str:
        """An argument, as `_called` gives it."""
        if place.__class__ is tuple:
            return f"[{', '.join([self._source_of(part, names) for part in place])}]"
        as_it_is = self._any_strides or place >= self._slots.scalars.start  # no result of a call
        return f"values[{place}]" if as_it_is else f"{names.of(_made_contiguous)}(values[{place}])"

    def _keep_each(self, found: Any, values: Values) -> bool:
        results = self.call.results
        tensors = [found] if found.__class__ is torch.Tensor else _flat(found)
        if len(tensors) != len(results):
            return False
        for tensor, shape in zip(tensors, self._shapes):
            if shape is not None and (tensor is None or tensor.shape != values[shape]):
                return False
        slot = self.first
        for tensor, result in zip(tensors, results):
            if result is not None:
                values[slot] = self._as_recorded(tensor, result.dtype)
                slot += 1
        return True

    def _as_recorded(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if tensor.dtype is not dtype:
            tensor = tensor.to(dtype)
        if dtype.is_complex:
            tensor = tensor.resolve_conj()
        # One tensor in two slots would seem to be alone in its memory.
        return torch.ops.aten.alias(tensor) if self._may_be_operand else tensor


# --- operands ------------------------------------------------------------------------------------

Place = Any  # a slot; of a list, a tuple of those of its parts
Lay = Callable[[Any], Any]


def _place(argument: Any, slots: Slots) -> Place:
    kind = argument.__class__
    if kind is CallResult:
        return slots.of_value(argument)
    if kind is Scalar:
        return slots.of_scalar(argument.slot)
    if (kind is list or kind is tuple) and _has_operands(argument):
        return tuple([_place(part, slots) for part in argument])
    return slots.of_constant(argument)


def _has_operands(arguments: Iterable[Any]) -> bool:
    return any(part.__class__ in (CallResult, Scalar, list, tuple) for part in arguments)


def _fill(place: Place, values: Values, lay: Lay) -> Any:
    if place.__class__ is tuple:
        return [_fill(part, values, lay) for part in place]
    return lay(values[place])


def _as_it_lies(x: Any) -> Any:
    return x


def _contiguous(x: Any) -> Any:
    return x.contiguous() if x.__class__ is torch.Tensor and not x.is_contiguous() else x


def _argument(call: Call, place: int | str) -> Any:
    return call.args[place] if isinstance(place, int) else call.kwargs[place]


def _writable(argument: Any, slots: Slots, writable: frozenset[int]) -> bool | list[bool]:
    if isinstance(argument, (list, tuple)):
        return [_is_writable(part, slots, writable) for part in argument]
    return _is_writable(argument, slots, writable)


def _is_writable(argument: Any, slots: Slots, writable: frozenset[int]) -> bool:
    return argument.__class__ is CallResult and slots.of_value(argument) in writable


def _own(argument: Any, writable: bool | list[bool]) -> Any:
    """What the kernel may write to, with the argument's value."""
    if isinstance(argument, list):
        assert isinstance(writable, list)
        return [_own(part, one) for part, one in zip(argument, writable, strict=True)]
    if argument is None or (writable and argument.is_contiguous() and is_alone(argument)):
        return argument
    return argument.clone(memory_format=torch.contiguous_format)


def is_alone(x: torch.Tensor) -> bool:
    """Whether no other tensor lies in the same memory."""
    return bool(storage_use_count(storage_identity(x.untyped_storage())) == ALONE)


def _flat(found: Any) -> list[Any]:
    """What a call gives, flat; a number as a 0-dim tensor."""
    if found.__class__ is torch.Tensor:
        return [found]
    if isinstance(found, (list, tuple)):
        return [one for part in found for one in _flat(part)]
    return [found if found is None else torch.tensor(found)]


# --- ltc's own calls -------------------------------------------------------------------------------


class _WriteView(CallKernel):
    """The base with what a chain of views shows replaced."""

    __slots__ = ("_base", "_new", "_chain", "_writable")

    def __init__(self, call: Call, slots: Slots, writable: frozenset[int]) -> None:
        super().__init__(call, slots)
        base, new, chain = call.args
        self._chain = slots.of_constant(chain)
        self._base, self._new = slots.of_value(base), slots.of_value(new)
        self._writable = self._base in writable and self._base != self._new

    def run(self, values: Values) -> None:
        base = _own(values[self._base], self._writable)
        write_through(base, values[self._chain], values[self._new])
        values[self.first] = base


class _PassedOn(CallKernel):
    """The value itself."""

    __slots__ = ("_value",)

    def __init__(self, call: Call, slots: Slots, writable: frozenset[int]) -> None:
        super().__init__(call, slots)
        self._value = slots.of_value(call.args[0])

    def run(self, values: Values) -> None:
        values[self.first] = torch.ops.aten.alias(values[self._value])


_OF_LTC: dict[str, Callable[[Call, Slots, frozenset[int]], CallKernel]] = {
    "ltc::write_view": _WriteView,
    "ltc::barrier": _PassedOn,
}
