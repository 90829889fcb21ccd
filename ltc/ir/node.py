"""Operations applied to operations: frozen, interned, freed when nothing refers to them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from ltc.errors import InvalidGraph
from ltc.ir import ops
from ltc.ir.ops import Op
from ltc.ir.tensor_type import TensorType, TupleType, dtype_name, type_text
from ltc.support.process.fork_safe_lock import renewed_lock
from ltc.support.sizes.extent import Extent
from ltc.support.sizes.marks import mark_of

Number: TypeAlias = bool | int | float | complex
Operand: TypeAlias = "Node | Number"  # of a formula


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Node:
    """One operation applied to earlier nodes.

    Arithmetic with a Python number reads as the formula: `0.5 * x`.

    Attributes:
        op: The operation.
        inputs: The nodes it reads, in the order the op's type rule takes them.
        attrs: Its static parameters, as sorted (name, value) pairs; every value hashable.
        type: Dtype and shape of the result; derived from the other three, never passed in.
    """

    op: Op
    inputs: tuple[Node, ...]
    attrs: tuple[tuple[str, Any], ...]
    type: TensorType | TupleType = field(repr=False)

    # Of one result: where there are several, `type` is a tuple, and these are AttributeErrors.

    @property
    def dtype(self) -> torch.dtype:
        return self.type.dtype  # type: ignore[union-attr]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape  # type: ignore[union-attr]

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.type.size  # type: ignore[union-attr]

    def attr(self, name: str) -> Any:
        for key, value in self.attrs:
            if key == name:
                return value
        raise InvalidGraph(f"{self.op} has no attribute {name!r}, only {dict(self.attrs)}")

    def __repr__(self) -> str:
        return f"<{self.op} {type_text(self.type)}>"

    def __neg__(self) -> Node:
        return make(ops.NEG, self)

    def __add__(self, other: Operand) -> Node:
        return make(ops.ADD, *paired(self, other))

    def __radd__(self, other: Operand) -> Node:
        return make(ops.ADD, *paired(other, self))

    def __sub__(self, other: Operand) -> Node:
        return make(ops.SUB, *paired(self, other))

    def __rsub__(self, other: Operand) -> Node:
        return make(ops.SUB, *paired(other, self))

    def __mul__(self, other: Operand) -> Node:
        return make(ops.MUL, *paired(self, other))

    def __rmul__(self, other: Operand) -> Node:
        return make(ops.MUL, *paired(other, self))

    def __truediv__(self, other: Operand) -> Node:
        return make(ops.DIV, *paired(self, other))

    def __rtruediv__(self, other: Operand) -> Node:
        return make(ops.DIV, *paired(other, self))

    def __and__(self, other: Operand) -> Node:
        return make(ops.AND, *paired(self, other))

    def __or__(self, other: Operand) -> Node:
        return make(ops.OR, *paired(self, other))

    def __xor__(self, other: Operand) -> Node:
        return make(ops.XOR, *paired(self, other))

    def __invert__(self) -> Node:
        return make(ops.NOT, self)

    def __lt__(self, other: Operand) -> Node:
        return make(ops.LT, *paired(self, other))

    def __le__(self, other: Operand) -> Node:
        return make(ops.LE, *paired(self, other))

    def __gt__(self, other: Operand) -> Node:
        return make(ops.GT, *paired(self, other))

    def __ge__(self, other: Operand) -> Node:
        return make(ops.GE, *paired(self, other))


_interned: weakref.WeakValueDictionary[Any, Node] = weakref.WeakValueDictionary()
_adding = renewed_lock(globals(), "_adding")


def make(op: Op, *inputs: Node, **attrs: Any) -> Node:
    """The node for `op(*inputs, **attrs)`: the existing one where there is one.

    Raises InvalidGraph where the op's type rule rejects these inputs.
    """
    pairs = tuple(sorted(attrs.items()))
    # With the types of the values: 1, 1.0 and True are equal keys but different attributes.
    key = (op, inputs, pairs, tuple([value.__class__ for _, value in pairs]))
    node = _interned.get(key)
    if node is None:
        made = Node(op, inputs, pairs, _infer(op, inputs, attrs))
        with _adding:
            node = _interned.setdefault(key, made)  # another thread may have won the race
    return node


def _infer(op: Op, inputs: tuple[Node, ...], attrs: dict[str, Any]) -> TensorType | TupleType:
    try:
        return op.infer(*[n.type for n in inputs], **attrs)
    except InvalidGraph as error:
        error.add_note(f"while making {op} of {inputs} with {attrs}")
        raise


_OF_SIZES = frozenset({torch.float32, torch.float64, torch.int64})  # dtypes of symbolic constants


def constant(value: float | int | bool | complex, dtype: torch.dtype) -> Node:
    """Return a 0-dim constant, rounded to `dtype` where it is computed."""
    if isinstance(value, Extent) and dtype in _OF_SIZES:
        return make(ops.CONSTANT, literal=str(value), dtype=dtype)
    # Keyed by its text: == joins 0.0 with -0.0 and 1 with True, and parts NaN from itself.
    return make(ops.CONSTANT, literal=repr(_in_kind(value, dtype)), dtype=dtype)


def _in_kind(value: Any, dtype: torch.dtype) -> Any:
    """`value` as what `dtype` holds, so that 1 and 1.0 of one dtype are one node."""
    if dtype.is_complex:
        return complex(value)
    if dtype.is_floating_point:
        return float(value)
    return bool(value) if dtype == torch.bool else int(value)


def constant_value(node: Node) -> Any:
    """The number that a CONSTANT node holds; an Extent where it depends on sizes."""
    text = node.attr("literal")
    if (size := mark_of(text)) is not None:
        return size
    if node.dtype.is_complex:
        return complex(text)
    if node.dtype.is_floating_point:
        return float(text)
    return text == "True" if node.dtype == torch.bool else int(text)


def is_number(operand: Any) -> bool:
    """Return True if the user wrote a number: a Python one, or one that was lifted to a scalar."""
    if isinstance(operand, Node):
        return operand.op is ops.SCALAR and operand.attr("wrapped")
    return isinstance(operand, (bool, int, float, complex))


def like(operand: Any, other: Node) -> Node:
    """`operand` as a node of `other`'s dtype where it is a number; a tensor is left as it is."""
    if isinstance(operand, Node):
        if operand.dtype != other.dtype and is_number(operand):
            return make(ops.CAST, operand, dtype=other.dtype)
        return operand
    return constant(operand, other.dtype)


def paired(x: Any, y: Any) -> tuple[Node, Node]:
    """Two operands of a formula, a number among them in the dtype of the tensor beside it."""
    if isinstance(x, Node) and isinstance(y, Node) and x.dtype == y.dtype:
        return x, y
    anchor = max((n for n in (x, y) if isinstance(n, Node)), key=_fixes_dtype)
    return like(x, anchor), like(y, anchor)


def _fixes_dtype(operand: Node) -> tuple[bool, bool]:
    """A tensor before a number, a float before an integer."""
    return not is_number(operand), operand.dtype.is_floating_point


def is_channels_last(node: Node) -> bool:
    """Return True if a convolution or pooling takes and gives [N, *spatial, C]."""
    return ("channels_last", True) in node.attrs


def attr_text(value: Any) -> str:
    """Return an attribute's form in the text of a graph."""
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, tuple):
        return f"({','.join(map(attr_text, value))})"
    return str(value)
