"""The places where a recording left every known path: the expected call, and the actual one."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ltc.aten.call import CallResult, name_of_overload
from ltc.explaining.user_stack import user_stack
from ltc.support.torch_private import schema_of_overload

_INPUT, _RUN = "ltc::input", "ltc::run"  # not torch's: a buffer that is given, a call that has run
_NOT_IN_KEYS = ("Device", "Optional[Device]", "Generator", "Optional[Generator]")
_IGNORED = ("pin_memory", "non_blocking")
_SHAPE_ARGUMENTS = ("size", "shape")

CURES = {
    "shape": "pad to one shape or set drop_last=True; or change nothing: a shape that comes back "
    "reuses its program",
    "dtype": "give the data one dtype before the step",
    "number": "keep it constant, or pass it as a tensor on the device (index_select, where)",
    "operation": "use torch.where in place of a Python if; give rare work a step of its own",
    "operand": "use the same tensors in the same order in each step",
    "longer": "mark the step at the same place each time; give rare work a step of its own",
}


class Reason(NamedTuple):
    """reason: a word for the difference; text: the expected and the actual call."""

    reason: str
    text: str


class Fork:
    """The first place where a recording left the known paths.

    Args:
        expected: Key of the call that followed here the last time; None where a recording ended.
        came: Key of the actual call.
        line: The user's line that recorded the expected call.
    """

    __slots__ = ("expected", "came", "line", "stack")

    def __init__(self, expected: Any, came: Any, line: str) -> None:
        self.expected, self.came, self.line = expected, came, line
        self.stack = user_stack()

    @property
    def difference(self) -> Reason:
        if self.expected is None:
            return Reason("longer", f"expected the end of the step, got {_called(self.came)}")
        return _difference(self.expected, self.came, self.line)


def fork_at(last: Any, following: Any, came: Any) -> Fork | None:
    """Return the fork if `came` is new behind the entry `last`; None if no entry was known there.

    Args:
        following: The entry that was expected.
    """
    if following.call is not None:
        return Fork(following.key, came, line_of(following))
    return Fork(None, came, "") if last.bindings else None


def line_of(entry: Any) -> str:
    """Return the user's line of an entry; for an input, the line of the first call after it."""
    while entry.call is not None and not entry.call.line and entry.next.call is not None:
        entry = entry.next
    return entry.call.line if entry.call is not None else ""


# --- two keys -----------------------------------------------------------------------------------


def _difference(expected: Any, came: Any, line: str) -> Reason:
    if expected[0] is not came[0]:
        reason = "dtype" if came[0] is torch.ops.aten._to_copy.default else "operation"
        where = f" at {line}" if line else ""
        return Reason(reason, f"expected {_called(expected)}{where}, got {_called(came)}")
    if expected[0] == _INPUT:
        return _of_inputs(expected, came)
    for position, (before, now) in enumerate(zip(expected[1:], came[1:])):
        if before is not now and before != now:
            return _of_arguments(expected[0], position, before, now)
    return Reason("operation", f"expected {_called(expected)} as before, got another form of it")


def _of_inputs(expected: Any, came: Any) -> Reason:
    (_, shape, dtype, *_), (_, new_shape, new_dtype, *_) = expected, came
    text = f"expected an input {type_text(shape, dtype)}, got {type_text(new_shape, new_dtype)}"
    if dtype is not new_dtype:
        return Reason("dtype", f"{text}: another dtype")
    return Reason("shape", f"{text}: {_dimensions(shape, new_shape)}")


def _dimensions(shape: tuple[int, ...], new: tuple[int, ...]) -> str:
    if len(shape) != len(new):
        return f"{len(new)} dimensions where there were {len(shape)}"
    changes = [
        f"dimension {k} is {n}, was {o}" for k, (o, n) in enumerate(zip(shape, new)) if o != n
    ]
    return ", ".join(changes)


def _of_arguments(overload: Any, position: int, before: Any, now: Any) -> Reason:
    name, called = _argument(overload, position), name_of_overload(overload)
    if isinstance(before, CallResult) and isinstance(now, CallResult):
        return _of_operands(called, name, before, now)
    change = f"expected {called} with {name} {_value(before)}, got {_value(now)}"
    if isinstance(before, CallResult) or isinstance(now, CallResult):
        return Reason("operand", f"{change}: one is a tensor, the other is not")
    if isinstance(before, torch.dtype) and isinstance(now, torch.dtype):
        return Reason("dtype", f"{change}: another dtype")
    if name in _SHAPE_ARGUMENTS:
        return Reason("shape", f"{change}: another shape")
    if isinstance(before, type) and isinstance(now, type):
        return Reason("number", f"{change}: a number of another type")
    return Reason("number", f"{change}: its value is part of what is compiled")


def _of_operands(called: str, name: str, before: CallResult, now: CallResult) -> Reason:
    text = f"expected {called} with {name} {value_text(before)}, got {value_text(now)}"
    if before.dtype is not now.dtype:
        return Reason("dtype", text)
    reason = "shape" if before.shape != now.shape else "operand"
    return Reason(reason, f"{text}: another tensor")


def _argument(overload: Any, position: int) -> str:
    """The name of a part of the key, as the recorder makes keys of arguments."""
    if isinstance(overload, str):
        return f"argument {position}"
    names = [
        argument.name
        for argument in schema_of_overload(overload).arguments
        if str(argument.type) not in _NOT_IN_KEYS and argument.name not in _IGNORED
    ]
    return names[position] if position < len(names) else "arguments"


# --- words --------------------------------------------------------------------------------------


def type_text(shape: tuple[int, ...], dtype: Any) -> str:
    """float32[4, 3]"""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def value_text(value: CallResult) -> str:
    """float32[4, 3] made by aten::cos at file.py:12 in step"""
    return f"{type_text(value.shape, value.dtype)} {_made_by(value)}"


def _made_by(value: CallResult) -> str:
    if value.call.overload == _RUN:
        return "of an immediate call" if value.noted is None else _made_by(value.noted)
    if value.call.overload == _INPUT:
        return "given as an input of the step"
    return f"made by {value.call.name}" + (f" at {value.call.line}" if value.call.line else "")


def _called(key: Any) -> str:
    if key[0] == _INPUT:
        return f"an input {type_text(key[1], key[2])}"
    shapes = [type_text(part.shape, part.dtype) for part in key[1:] if isinstance(part, CallResult)]
    return f"{name_of_overload(key[0])}({', '.join(shapes)})"


def _value(part: Any) -> str:
    """Return a part of a key as the user wrote it: a number, a list, a kind of number."""
    if isinstance(part, CallResult):
        return type_text(part.shape, part.dtype)
    if isinstance(part, type):
        return f"of type {part.__name__}"
    if isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], type):
        return repr(part[1])
    if isinstance(part, list | tuple):
        return f"[{', '.join(map(_value, part))}]"
    return repr(part)
