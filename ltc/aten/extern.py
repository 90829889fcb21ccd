"""Calls that stay calls: an extern node runs torch's own CPU kernel on contiguous tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ltc.aten.schema import optional_tensors
from ltc.aten.wide_sums import narrow_sum
from ltc.ir import build, ops
from ltc.ir.extern_call import Hole, Template
from ltc.ir.node import Node, is_number, make
from ltc.ir.tensor_type import LOW_PRECISION, TensorType


class _Holes:
    """The operands of one extern node, gathered while its template is made."""

    def __init__(self) -> None:
        self.operands: list[Node] = []

    def template(self, argument: Any, as_tensor: bool = False) -> Any:
        if isinstance(argument, Node):
            if argument not in self.operands:
                self.operands.append(argument)
            return Hole(self.operands.index(argument), is_number(argument) and not as_tensor)
        if isinstance(argument, (list, tuple)):
            return tuple(self.template(a) for a in argument)
        if isinstance(argument, torch.device):
            return "cpu"  # whatever the device of the program, this kernel runs here
        if isinstance(argument, torch.Generator):
            return None  # what it would draw arrives as the seed
        return argument


def extern(
    overload: str,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    results: Sequence[TensorType | None] = (),
    mutated: tuple[int | str, ...] = (),
    returned: bool = True,
    seed: Node | None = None,
) -> tuple[Node | None, ...]:
    """One node for each of `results`, computed by the overload; None where the result is None."""
    if narrow_sum(overload, args, kwargs or {}) is not None:
        wide = [None if t is None else _wide_type(t) for t in results]
        named = {name: _widened(argument) for name, argument in (kwargs or {}).items()}
        made = _extern(overload, _widened(list(args)), named, wide, mutated, returned, seed)
        return tuple(None if m is None else _as(t, m) for t, m in zip(results, made))
    return _extern(overload, args, kwargs, results, mutated, returned, seed)


def _widened(argument: Any) -> Any:
    """The operands of 16 bits in float32."""
    if isinstance(argument, (list, tuple)):
        return [_widened(part) for part in argument]
    is_narrow = isinstance(argument, Node) and argument.dtype in LOW_PRECISION
    return build.cast(argument, torch.float32) if is_narrow else argument


def _as(type: TensorType | None, made: Node) -> Node:
    assert type is not None
    return build.cast(made, type.dtype)


def _wide_type(type: TensorType) -> TensorType:
    return TensorType(torch.float32, type.shape) if type.dtype in LOW_PRECISION else type


def _extern(
    overload: str,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None,
    results: Sequence[TensorType | None],
    mutated: tuple[int | str, ...],
    returned: bool,
    seed: Node | None,
) -> tuple[Node | None, ...]:
    holes = _Holes()
    tensors = optional_tensors(overload)
    filled = tuple(holes.template(a, i in tensors) for i, a in enumerate(args))
    named = tuple((k, holes.template(a, k in tensors)) for k, a in sorted((kwargs or {}).items()))
    seed_operand = None
    if seed is not None:
        seed_operand = holes.template(seed).operand
    present = tuple(type is not None for type in results)
    template = Template(overload, filled, named, tuple(mutated), returned, present, seed_operand)
    types = tuple(type for type in results if type is not None)
    node = make(ops.EXTERN, *holes.operands, template=template, results=types)
    elements = iter([build.get(node, i) for i in range(len(types))])
    return tuple(next(elements) if there else None for there in present)


def made_by_kernel(overload: str, like: Node, *args: Any) -> Node:
    """Return the result of torch's kernel for the arguments, of the type of `like`."""
    (made,) = extern(overload, args, results=[TensorType(like.dtype, like.shape)])
    assert made is not None
    return made
