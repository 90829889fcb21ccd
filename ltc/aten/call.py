"""What the recorder hands to the rules: one `Call` for each aten call of a step, in order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def name_of_overload(overload: Any) -> str:
    """ "aten::add.Tensor" of an overload of torch's; an ltc:: name is one already."""
    return overload if isinstance(overload, str) else str(overload.name())


class CallResult:
    """One tensor that a recorded call makes.

    recorder  the recorder (one device, one thread) in whose recording the value is pending
    call      the call that makes it
    index     its position in `call.results`
    shape     tuple of ints
    dtype     torch.dtype
    tensor    on the CPU, of any strides, where the call ran when it was made; else not set
    buffer    whose memory that tensor is, where it was there before; else not set
    holder    the user's name for what held it at the end of a recording, "losses[3]"; else not set
    """

    __slots__ = ("recorder", "call", "index", "shape", "dtype", "tensor", "buffer", "holder")
    tensor: torch.Tensor
    buffer: Any
    holder: str

    def __init__(
        self, recorder: Any, call: Call, index: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self.recorder, self.call, self.index = recorder, call, index
        self.shape, self.dtype = shape, dtype

    def without_elements(self) -> CallResult:
        """One like it that says that it is empty."""
        return CallResult(self.recorder, self.call, self.index, (0,), self.dtype)

    def __repr__(self) -> str:
        return f"Value({self.call.name}[{self.index}] {self.dtype} {list(self.shape)})"


class Scalar:
    """A number that may differ from step to step: the program is given it.

    slot      where the recording puts it on its list
    sample    the number at the first recording: right in kind, not to be relied on in value
    dtype     float64, int64, bool or complex128: how the slot is held; for a 0-dim CPU tensor
              operand, that tensor's dtype
    wrapped   True where the user wrote a Python number (it does not raise the result's
              category in type promotion beyond its own), False for a 0-dim CPU tensor
    origin    the argument's name, or "seed"
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

    overload  the torch.ops.aten overload, or one of the names below as a string
    args      positional arguments: Value | Scalar | None | a constant | list of these
    kwargs    keyword arguments, likewise, as a dict
    mutated   positions (int) or names (str) of the arguments that the overload writes to
    returned  whether the overload returns tensors that are not the mutated arguments
    results   the Values it makes: first the new value of every mutated argument in schema order
              (lists flattened), then, where `returned`, every tensor returned (lists flattened;
              an undefined tensor gives None)
    line      "file.py:12 in function": the user's line that recorded it first
    seed      Scalar holding the seed of a random overload, else None
    module    the ModuleName of that in whose forward it was made first; or a name, or ""
    forward   of a call of a backward: the line of the forward's call; else ""
    default   torch's default dtype, where what is computed depends on it; else None

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


def parts_of_kind(kind: type[T], operands: list[Sequence[Any]]) -> list[T]:
    """Whatever is a `kind` in these, and in lists and tuples in them; `operands` is used up."""
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

    What was recorded besides, and nobody needs any more, then leaves no trace in the program.
    inputs  position in the recording -> position among those the program is given
    slots   likewise for its scalars
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
