"""The facts of an overload that the recorder needs, read off its schema once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ltc.aten.registry import static_arguments
from ltc.support.torch_private import schema_of_overload

TENSOR, OPTIONAL_TENSOR, TENSORS, OPTIONAL_TENSORS = "tensor", "tensor?", "tensor[]", "tensor?[]"
NUMBER, NUMBERS, ATTRIBUTE = "number", "number[]", "attribute"
DEVICE, GENERATOR, IGNORED = "device", "generator", "ignored"

_KINDS = {
    "Tensor": TENSOR,
    "Optional[Tensor]": OPTIONAL_TENSOR,
    "List[Tensor]": TENSORS,
    "List[Optional[Tensor]]": OPTIONAL_TENSORS,
    "number": NUMBER,
    "Optional[number]": NUMBER,
    "float": NUMBER,
    "Optional[float]": NUMBER,
    "List[number]": NUMBERS,
    "List[float]": NUMBERS,
    "Device": DEVICE,
    "Optional[Device]": DEVICE,
    "Generator": GENERATOR,
    "Optional[Generator]": GENERATOR,
}
# Names, since their types are plain ints and bools in a schema.
_IGNORED = frozenset({"pin_memory", "non_blocking"})


# Random fills refuse numbers that are out of range; the numbers are no part of what is recorded.
# In place, where a mask or an index says.  The CPU takes views that show an element several times, and
# says itself which it does not.
_WRITES_SOME = frozenset(
    f"aten::{name}_"
    for name in (
        "fill", "zero", "masked_fill", "masked_scatter", "index_fill", "index_put",
        "_index_put_impl", "index_add", "index_copy", "index_reduce", "put", "scatter",
        "scatter_add", "scatter_reduce", "tril", "triu", "fill_diagonal",
    )
)  # fmt: skip
_CHECKS_VALUES = frozenset(
    {
        "aten::uniform_",
        "aten::random_",
        "aten::normal_",
        "aten::bernoulli_",
        "aten::exponential_",
        "aten::geometric_",
        "aten::cauchy_",
        "aten::log_normal_",
    }
)


# Their numbers give the count of what is made, which may come out otherwise than was meant.
_SHAPES_THAT_ARE_COUNTED = frozenset({"aten::arange.out", "aten::arange.start_out"})

# Numbers that the kernel converts to the result's dtype, and refuses where they do not fit.
_CONVERTED = {
    "fill": ("value",),
    "full": ("fill_value",),
    "full_like": ("fill_value",),
    "new_full": ("fill_value",),
    "scalar_tensor": ("s",),
    "masked_fill": ("value",),
    "index_fill": ("value",),
    "scatter": ("value",),
    "constant_pad_nd": ("value",),
    "clamp": ("min", "max"),
    "clamp_min": ("min",),
    "clamp_max": ("max",),
    "hardtanh": ("min_val", "max_val"),
    "threshold": ("value",),
}


# The fused optimizers say that they write to gradients, which they do to divide them by a scale.
_WRITTEN_WITH = {"grads": "grad_scale"}


_ON_LISTS = ("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_", "ltc::adam_")


@dataclass(frozen=True)
class Argument:
    """One argument of an overload.

    Attributes:
        kind: The way the recorder treats it: one of the words above.
        static: The values of a NUMBER that are part of the formula; None for all, () for none.
        written_with: The argument without which a written one is left as it is, or None.
    """

    name: str
    kind: str
    keyword_only: bool
    has_default: bool
    default: Any
    written: bool
    static: frozenset | tuple | None = ()
    written_with: str | None = None


class Signature:
    """An overload's arguments and what it does to them."""

    def __init__(self, overload: Any) -> None:
        self.overload = overload
        self.name = overload.name()
        self.op = self.name.partition(".")[0]
        static = static_arguments(self.name)
        self.arguments = tuple(
            _argument(self.op, a, static) for a in schema_of_overload(overload).arguments
        )
        self.returns = tuple(str(r.type) for r in schema_of_overload(overload).returns)
        self.random = torch.Tag.nondeterministic_seeded in overload.tags

    @cached_property
    def written(self) -> tuple[int, ...]:
        """Positions, in schema order, of the arguments that are written to."""
        return tuple(i for i, a in enumerate(self.arguments) if a.written)

    @cached_property
    def tensors(self) -> tuple[tuple[int, Argument], ...]:
        """The arguments that take tensors, each with its position in schema order."""
        kinds = (TENSOR, OPTIONAL_TENSOR, TENSORS, OPTIONAL_TENSORS)
        return tuple((i, a) for i, a in enumerate(self.arguments) if a.kind in kinds)

    @cached_property
    def device(self) -> int | None:
        """The position of the argument that names a device."""
        return next((i for i, a in enumerate(self.arguments) if a.kind == DEVICE), None)

    @cached_property
    def may_resize(self) -> bool:
        """Return True if the tensors it writes to may have another shape: `out=` arguments."""
        return bool(self.written) and not self.name.partition(".")[0].endswith("_")

    @cached_property
    def outs(self) -> tuple[str, ...]:
        """The names of its `out=` arguments."""
        return tuple(a.name for a in self.arguments if a.written and a.keyword_only)

    @cached_property
    def resizes_silently(self) -> bool:
        """Return True if PyTorch warns of no `out=` tensor of another shape: where a shape is
        given.
        """
        reads = any(not argument.written for _, argument in self.tensors)
        return not reads and self.name not in _SHAPES_THAT_ARE_COUNTED

    @cached_property
    def is_view(self) -> bool:
        """Return True if a result shares the memory of an argument without being it."""
        returns = schema_of_overload(self.overload).returns
        return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)

    @cached_property
    def returns_written(self) -> bool:
        """Return True if it returns the arguments it wrote to (or nothing)."""
        returns = schema_of_overload(self.overload).returns
        return bool(self.written) and all(r.alias_info is not None for r in returns)

    @cached_property
    def makes_one_tensor(self) -> bool:
        """Return True if all it does is to make a new tensor, never an undefined one."""
        return self.returns == ("Tensor",) and not self.written and not self.is_view

    @cached_property
    def has_no_result(self) -> bool:
        """Return True if it exists only for the error it may raise."""
        return not self.returns and not self.written

    @cached_property
    def checks_values(self) -> bool:
        """Return True if its numbers have to be checked in each call."""
        return self.op in _CHECKS_VALUES and not any(a.kind == TENSOR for a in self.arguments[1:])

    @cached_property
    def writes_some(self) -> bool:
        """Return True if it writes to some elements of its first argument, or the same to all of
        them.
        """
        return self.op in _WRITES_SOME and self.written == (0,)

    @cached_property
    def writes_lists(self) -> bool:
        """Return True if it writes to each tensor of a list, with what lies at its place of others."""
        return self.op.startswith(_ON_LISTS) and any(
            self.arguments[i].kind == TENSORS for i in self.written
        )

    @cached_property
    def converted(self) -> tuple[int, ...]:
        """Positions of the numbers that it refuses where the result's dtype cannot hold them."""
        names = _CONVERTED.get(self.op.removeprefix("aten::").removesuffix("_"), ())
        return tuple(
            i for i, a in enumerate(self.arguments) if a.kind == NUMBER and a.name in names
        )

    @cached_property
    def returns_tensors(self) -> bool:
        return all(r in ("Tensor", "Optional[Tensor]", "List[Tensor]") for r in self.returns)

    def returned(self, values: list):
        """Return the arguments it wrote to, if the overload returns them; `values` in schema order."""
        if not self.returns:
            return None
        written = [values[i] for i in self.written if values[i] is not None]
        return written[0] if len(self.returns) == 1 else tuple(written)

    def written_by(self, values: list) -> list[int]:
        """Return those of `written` to which a call with these values, in schema order, does write."""
        if not self.written:
            return []
        given = {a.name for a, value in zip(self.arguments, values) if value is not None}
        conditions = [self.arguments[i].written_with for i in self.written]
        return [
            i
            for i, condition in zip(self.written, conditions)
            if values[i] is not None and (condition is None or condition in given)
        ]

    def in_schema_order(self, args: tuple, kwargs: dict) -> list:
        """Every argument's value, defaults filled in: boxed calls leave them out."""
        missing = self.arguments[len(args) :]
        return [*args, *[kwargs.get(a.name, a.default) for a in missing]]


def _argument(op: str, schema: Any, static: dict) -> Argument:
    kind = IGNORED if schema.name in _IGNORED else _KINDS.get(str(schema.type), ATTRIBUTE)
    alias = schema.alias_info
    return Argument(
        schema.name,
        kind,
        schema.kwarg_only,
        schema.has_default_value(),
        schema.default_value if schema.has_default_value() else None,
        alias is not None and alias.is_write,
        static.get(schema.name, ()) if kind == NUMBER else (),
        _WRITTEN_WITH.get(schema.name) if op.startswith("aten::_fused_") else None,
    )
