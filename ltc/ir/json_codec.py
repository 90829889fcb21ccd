"""Nodes as data that JSON holds, so that a program can be read again in another process.

Of a node's operands only the types are kept: what computes it is told nothing else about them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ltc.ir import ops
from ltc.ir.extern_call import Hole, Template
from ltc.ir.node import Node, make
from ltc.ir.ops import Op
from ltc.ir.tensor_type import TensorType
from ltc.support.sizes.extent import Extent

_PLAIN = (bool, int, float, str, type(None), Extent)
_OF_TORCH = (torch.dtype, torch.memory_format, torch.layout)
OPS: dict[str, Op] = {op.name: op for op in vars(ops).values() if isinstance(op, Op)}


class Unrecordable(TypeError):
    """The value belongs to this process alone: a collective's replicas, a user's object."""


def record_of(value: Any) -> Any:
    """A static value as lists, numbers and texts.  Raises Unrecordable where it is of no such kind.

    A list names what it stands for first: "tuple", "hole", ...  An Extent stays what it is: JSON of
    it is made by support/sizes/as_json.py.
    """
    if type(value) in _PLAIN:
        return value
    if type(value) is tuple:
        return ["tuple", *map(record_of, value)]
    if isinstance(value, _OF_TORCH):
        return ["torch", str(value).removeprefix("torch.")]
    if isinstance(value, TensorType):
        return ["type", record_of(value.dtype), list(value.shape)]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, Hole):
        return ["hole", value.operand, value.number]
    if isinstance(value, Template):
        parts = (
            value.overload, value.args, tuple(value.kwargs), tuple(value.mutated), value.returned,
            tuple(value.present), value.seed,
        )  # fmt: skip
        return ["template", *map(record_of, parts)]
    if isinstance(value, Node):
        operands = [_operand_record(n) for n in value.inputs]
        return ["node", value.op.name, operands, record_of(value.attrs)]
    raise Unrecordable(f"{type(value).__name__} {value!r}")


def value_of(record: Any) -> Any:
    """The value that `record_of` wrote down."""
    if type(record) is not list:
        return record
    kind, *parts = record
    return _READERS[kind](parts)


def _operand_record(node: Node) -> Any:
    """The type of an operand; one of several results is told by what it is a result of."""
    return record_of(node.type if isinstance(node.type, TensorType) else node)


def _node(parts: list[Any]) -> Node:
    name, operands, attrs = parts
    inputs = [_operand(value_of(o), position) for position, o in enumerate(operands)]
    return make(OPS[name], *inputs, **dict(value_of(attrs)))


def _operand(value: TensorType | Node, position: int) -> Node:
    if isinstance(value, Node):
        return value
    return make(ops.INPUT, index=position, dtype=value.dtype, shape=value.shape)


_READERS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": lambda parts: tuple(map(value_of, parts)),
    "torch": lambda parts: getattr(torch, parts[0]),
    "type": lambda parts: TensorType(value_of(parts[0]), tuple(parts[1])),
    "complex": lambda parts: complex(*parts),
    "hole": lambda parts: Hole(*parts),
    "template": lambda parts: Template(*map(value_of, parts)),
    "node": _node,
}
