"""The recorder's calls for the rules: one `Call` for each aten call of a step, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def name_of_overload(overload: Any) -> str:
    """ "aten::add.Tensor" of an overload of torch's; an ltc:: name is one already."""
    return overload if isinstance(overload, str) else str(overload.name())


class CallResult:
    """One tensor that a recorded call makes.

    Attributes:
        recorder: The recorder (one device, one thread) in whose recording the value is pending.
        call: The call that makes it.
        index: Its position in `call.results`.
        shape: Tuple of ints.
        dtype: torch.dtype.
        tensor: On the CPU, of any strides, where the call ran when it was made; else not set.
        buffer: The buffer whose memory that tensor is, where it was there before; else not set.
        noted: The result of the noted call that made a computed value; None: the call was not noted.
        holder: The user's name for what held it at the end of a recording, "losses[3]"; else not
            set.
    """

    __slots__ = ("recorder", "call", "index", "shape", "dtype", "tensor", "buffer", "noted",
                 "holder")  # fmt: skip
    tensor: torch.Tensor
    buffer: Any
    noted: CallResult | None
    holder: str

    def __init__(
        self, recorder: Any, call: Call, index: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self.recorder, self.call, self.index = recorder, call, index
        self.shape, self.dtype = shape, dtype

    def without_elements(self) -> CallResult:
        """Return a copy with shape (0,)."""
        return CallResult(self.recorder, self.call, self.index, (0,), self.dtype)

    def __repr__(self) -> str:
        return f"Value({self.call.name}[{self.index}] {self.dtype} {list(self.shape)})"


class Scalar:
    """A number that may differ from step to step: an argument of the program.

    Args:
        slot: The number's position in the recording's list.
        sample: The number at the first recording: right in kind, not to be relied on in value.
        dtype: float64, int64, bool or complex128: how the slot is held; for a 0-dim CPU tensor
            operand, that tensor's dtype.
        wrapped: True where the user wrote a Python number (it does not raise the result's category
            in type promotion beyond its own), False for a 0-dim CPU tensor.
        origin: The argument's name, or "seed".
    """

    __slots__ = ("slot", "sample", "dtype", "wrapped", "origin")

    def __init__(
        self, slot: int, sample: Any, dtype: torch.dtype, wrapped: bool, origin: str
    ) -> None:
        self.slot, self.sample, self.dtype = slot, sample, dtype
        self.wrapped, self.origin = wrapped, origin

    def __repr__(self) -> str:
        return f"Scalar({self.slot} {self.dtype} {self.origin})"


class Call:
    """One recorded aten call, with producers in place of tensors.

    Besides aten overloads:
    "ltc::input"       args (position,): a buffer that the program is given
    "ltc::write_view"  args (base, new, chain): base with the elements that the views of `chain`
                       select replaced by `new`; chain is a tuple of (view overload, args, kwargs,
                       index of the output or None), outermost last
    "ltc::default"     args (dtype,): torch's default dtype is another one from here on; no result
    "ltc::barrier"     args (value, position): the identity, never merged with anything
    "ltc::collective_start"  args (operands, token or None, collective): the exchange begins; gives
                       its token
    "ltc::collective_wait"   args (token,): the results of the exchange

    Attributes:
        overload: The torch.ops.aten overload, or one of the names below as a string.
        args: Positional arguments: Value | Scalar | None | a constant | list of these.
        kwargs: Keyword arguments, likewise, as a dict.
        mutated: Positions (int) or names (str) of the arguments that the overload writes to.
        returned: True if the overload returns tensors that are not the mutated arguments.
        results: The Values it makes: first the new value of every mutated argument in schema order
            (lists flattened), then, where `returned`, every tensor returned (lists flattened; an
            undefined tensor gives None).
        line: "file.py:12 in function": the user's line that recorded it first.
        seed: Scalar holding the seed of a random overload, else None.
        module: The ModuleName of the module whose forward made the call first; or a name, or "".
        forward: The line of the forward's call, if this is a call of a backward; else "".
        default: torch's default dtype, where the result depends on it; else None.
    """

    __slots__ = (
        "overload", "args", "kwargs", "mutated", "returned", "results", "line", "seed", "module",
        "forward", "default",
    )  # fmt: skip

    def __init__(
        self,
        overload: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        mutated: Sequence[int | str] = (),
        returned: bool = True,
        line: str = "",
        seed: Scalar | None = None,
    ) -> None:
        self.overload, self.args, self.kwargs = overload, args, kwargs
        self.mutated, self.returned, self.line, self.seed = mutated, returned, line, seed
        self.results: tuple[CallResult | None, ...] = ()
        self.module: Any = ""
        self.forward = ""
        self.default: torch.dtype | None = None

    def __repr__(self) -> str:
        return f"Call({self.name} -> {len(self.results)} result(s), at {self.line})"

    @property
    def name(self) -> str:
        """ "aten::add.Tensor", or the ltc:: name."""
        return name_of_overload(self.overload)

    def filled(self, leaf: Callable[[Any], Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments with `leaf(part)` in place of each part that is no list or tuple."""
        named = {name: _filled(argument, leaf) for name, argument in self.kwargs.items()}
        return [_filled(argument, leaf) for argument in self.args], named


def _filled(part: Any, leaf: Callable[[Any], Any]) -> Any:
    kind = part.__class__
    return [_filled(one, leaf) for one in part] if kind is list or kind is tuple else leaf(part)


def in_order(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mutated: Sequence[int | str],
    returned: bool,
    made: Any,
) -> list[Any]:
    """Return the tensors that an overload wrote and returned, in the order of `Call.results`.

    Args:
        args: The positional arguments of the call.
        kwargs: The keyword arguments of the call.
        mutated, returned: The attributes of the `Call`.
        made: The return value of the call.
    """
    written = [args[p] if isinstance(p, int) else kwargs[p] for p in mutated]
    return _flat([*written, made] if returned else written)


def _flat(found: Any) -> list[Any]:
    """The results of a call, without the lists and tuples that hold them."""
    if not isinstance(found, (list, tuple)):
        return [found]
    return [one for part in found for one in _flat(part)]


def parts_of_kind(kind: type[T], operands: list[Sequence[Any]]) -> list[T]:
    """Return the parts of class `kind`, also inside lists and tuples; `operands` is consumed."""
    found: list[T] = []
    while operands:
        for part in operands.pop():
            if part.__class__ is kind:
                found.append(part)
            elif part.__class__ is list or part.__class__ is tuple:
                operands.append(part)
    return found


class Numbering:
    """The inputs and scalars that some calls use, counted from 0 in the order of their first use.

    Recorded inputs and scalars that no call uses any more leave no trace in the program.

    Attributes:
        inputs: Position of an input in the recording -> its position in the program.
        slots: Slot of a scalar in the recording -> its slot in the program.
    """

    def __init__(self, calls: Iterable[Call]) -> None:
        self.inputs: dict[int, int] = {}
        self.slots: dict[int, int] = {}
        for call in calls:
            if call.overload == "ltc::input":
                self.inputs.setdefault(call.args[0], len(self.inputs))
                continue
            if call.seed is not None:
                self._count(call.seed)
            for operand in (*call.args, *call.kwargs.values()):
                self._count(operand)

    def _count(self, operand: Any) -> None:
        kind = operand.__class__
        if kind is Scalar:
            self.slots.setdefault(operand.slot, len(self.slots))
        elif kind is list or kind is tuple:
            for part in operand:
                self._count(part)
