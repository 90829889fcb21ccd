"""`torch_xla.core.xla_builder` and `xla_op_registry`: operations built by hand, of torch's calls.

In torch_xla a function of Ops is lowered once for each shape.  Here a BuiltOp holds a tensor, or a tuple of
Ops, and each call on it is torch's own call: recorded, differentiated and compiled as any other.  A
conditional computes both branches and selects; a loop reads its condition in every round.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ltc.compat.torch_xla.xla_device import native, shown
from ltc.compat.torch_xla.xla_only import XlaOnly

DTYPES = {
    "f32": torch.float32,
    "f64": torch.float64,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "u8": torch.uint8,
    "s8": torch.int8,
    "s16": torch.int16,
    "s32": torch.int32,
    "s64": torch.int64,
    "c64": torch.complex64,
    "c128": torch.complex128,
    "pred": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Type = type("Type", (), {name.upper(): name for name in DTYPES})  # Type.F32 is "f32"


class BuiltShape:
    """The type of a BuiltOp: `dtype` a name of Type, `sizes` a tuple; of a tuple those of its parts."""

    def __init__(self, dtype: str, sizes: Sequence[int], parts: Sequence[BuiltShape] = ()) -> None:
        self.dtype, self.sizes, self._parts = dtype, tuple(sizes), tuple(parts)

    @classmethod
    def create(cls, dtype: str, sizes: Sequence[int], dynamic_dimensions: Any = None) -> BuiltShape:
        return cls(dtype, sizes)

    @property
    def rank(self) -> int:
        return len(self.sizes)

    def is_tuple(self) -> bool:
        return bool(self._parts)

    def tuple_size(self) -> int:
        return len(self._parts)

    def tuple_shape(self, index: int) -> BuiltShape:
        return self._parts[index]

    def is_dynamic(self) -> bool:
        return False

    def as_scalar(self) -> BuiltShape:
        return BuiltShape(self.dtype, ())


def mkshape(dtype: str, sizes: Sequence[int], dynamic_dimensions: Any = None) -> BuiltShape:
    """The shape of that type and those sizes."""
    return BuiltShape(dtype, sizes)


def tensor_shape(tensor: Any, device: Any = "") -> Any:
    """The shape of a tensor, or a list of those of several."""
    if isinstance(tensor, (list, tuple)):
        return [tensor_shape(one) for one in tensor]
    return BuiltShape(_NAMES[tensor.dtype], tensor.shape)


def create_builder(name: str) -> Any:
    """Return the device on which constants are made: the thread's current one."""
    return shown()


def _applied(function: Callable[..., torch.Tensor]) -> Callable[..., BuiltOp]:
    """A method of BuiltOp that calls the function with what the Ops hold."""

    @functools.wraps(function)
    def method(self: BuiltOp, *others: Any) -> BuiltOp:
        operands = [self.value, *(one.value if isinstance(one, BuiltOp) else one for one in others)]
        return BuiltOp(function(*operands))

    return method


def _quotient(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Whole numbers are cut towards zero."""
    whole = not (a.is_floating_point() or a.is_complex())
    return torch.div(a, b, rounding_mode="trunc" if whole else None)


class BuiltOp:
    """The result of an operation.

    Args:
        value: A tensor, or a tuple of Ops.
    """

    __hash__ = object.__hash__

    def __init__(self, value: Any) -> None:
        self.value = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by Python and pickle: no use of it
            raise AttributeError(name)
        raise XlaOnly(
            f"torch_xla.core.xla_builder.Op.{name}: ltc has no such operation. Write the formula in "
            f"torch operations: ltc compiles them."
        )

    def shape(self) -> BuiltShape:
        if isinstance(self.value, tuple):
            return BuiltShape("", (), [part.shape() for part in self.value])
        return tensor_shape(self.value)

    def builder(self) -> Any:
        """Return the device on which constants beside it are made: its own."""
        return self.value[0].builder() if isinstance(self.value, tuple) else self.value.device

    def build(self, name: str) -> Any:
        """Return its results, as tensors."""
        return _tensors(self)

    __add__, __sub__ = _applied(torch.add), _applied(torch.sub)
    __mul__, __truediv__ = _applied(torch.mul), _applied(_quotient)
    __matmul__, __pow__ = _applied(torch.matmul), _applied(torch.pow)
    __mod__, __neg__ = _applied(torch.fmod), _applied(torch.neg)
    __and__, __or__ = _applied(operator.and_), _applied(operator.or_)
    __xor__, __not__ = _applied(operator.xor), _applied(torch.bitwise_not)
    __lshift__, __rshift__ = _applied(operator.lshift), _applied(operator.rshift)
    __eq__, __ne__ = _applied(torch.eq), _applied(torch.ne)  # type: ignore[assignment]
    __le__, __lt__ = _applied(torch.le), _applied(torch.lt)
    __ge__, __gt__ = _applied(torch.ge), _applied(torch.gt)
    acos, asin, atan = _applied(torch.acos), _applied(torch.asin), _applied(torch.atan)
    cos, cosh, sin, sinh = map(_applied, (torch.cos, torch.cosh, torch.sin, torch.sinh))
    tan, tanh, atan2 = _applied(torch.tan), _applied(torch.tanh), _applied(torch.atan2)
    ceil, floor = _applied(torch.ceil), _applied(torch.floor)
    erf, erfc, erfinf = _applied(torch.erf), _applied(torch.erfc), _applied(torch.erfinv)
    exp, expm1, log, log1p = map(_applied, (torch.exp, torch.expm1, torch.log, torch.log1p))
    sqrt, rsqrt = _applied(torch.sqrt), _applied(torch.rsqrt)
    real, imag, conj = _applied(torch.real), _applied(torch.imag), _applied(torch.conj)
    max, min, select = _applied(torch.maximum), _applied(torch.minimum), _applied(torch.where)
    rev, transpose = _applied(torch.flip), _applied(torch.permute)

    def cast(self, to_type: str) -> BuiltOp:
        return BuiltOp(self.value.to(DTYPES[to_type]))

    def clamp(self, min_value: BuiltOp, max_value: BuiltOp) -> BuiltOp:
        return self.max(min_value).min(max_value)

    def reshape(
        self, sizes: Sequence[int], dimensions: Any = None, inferred_dimension: Any = None
    ) -> BuiltOp:
        value = self.value if dimensions is None else self.value.permute(tuple(dimensions))
        return BuiltOp(value.reshape(tuple(sizes)))

    def broadcast(self, sizes: Sequence[int]) -> BuiltOp:
        """With new dimensions in front."""
        return BuiltOp(self.value.expand((*sizes, *self.value.shape)))

    def broadcast_in_dim(self, sizes: Sequence[int], dimensions: Sequence[int]) -> BuiltOp:
        """Make its dimension i the dimension `dimensions[i]` of the result."""
        spread = [1] * len(sizes)
        for dimension, extent in zip(dimensions, self.value.shape, strict=True):
            spread[dimension] = extent
        return BuiltOp(self.value.reshape(spread).expand(tuple(sizes)))

    def slice(
        self,
        start_indices: Sequence[int],
        limit_indices: Sequence[int],
        strides: Sequence[int] | None = None,
    ) -> BuiltOp:
        steps = strides or [1] * len(start_indices)
        bounds = zip(start_indices, limit_indices, steps, strict=True)
        return BuiltOp(self.value[tuple(slice(*three) for three in bounds)])

    def slice_in_dim(
        self, start_index: int, limit_index: int, dimno: int, stride: int = 1
    ) -> BuiltOp:
        places = [slice(None)] * self.value.dim()
        places[dimno] = slice(start_index, limit_index, stride)
        return BuiltOp(self.value[tuple(places)])

    def reduce(
        self, init_value: BuiltOp, computation: Callable, dimensions: Sequence[int]
    ) -> BuiltOp:
        """Folded by halves along the dimensions: `computation` may be applied in any order."""
        kept = [dim for dim in range(self.value.dim()) if dim not in dimensions]
        rest = [self.value.shape[dim] for dim in kept]
        count = math.prod(self.value.shape[dim] for dim in dimensions)
        items = self.value.permute((*dimensions, *kept)).reshape(count, *rest)
        found = init_value.broadcast(rest)
        while len(items):
            half = len(items) // 2
            if len(items) % 2:
                found = computation(found, BuiltOp(items[-1]))
            items = computation(BuiltOp(items[:half]), BuiltOp(items[half : 2 * half])).value
        return found

    def reduce_all(self, init_value: BuiltOp, computation: Callable) -> BuiltOp:
        return self.reduce(init_value, computation, range(self.value.dim()))

    def triangualr_solve(  # torch_xla's own spelling
        self,
        b: BuiltOp,
        left_side: bool = True,
        lower: bool = False,
        unit_diagonal: bool = False,
        transpose_a: bool = False,
    ) -> BuiltOp:
        matrix = self.value.mT if transpose_a else self.value
        upper = bool(lower) == bool(transpose_a)
        return BuiltOp(
            torch.linalg.solve_triangular(
                matrix, b.value, upper=upper, left=bool(left_side), unitriangular=unit_diagonal
            )
        )

    def get_dimension_size(self, dimension: int) -> BuiltOp:
        return BuiltOp.scalar(self.builder(), self.value.shape[dimension], "s32")

    def scalar_like(self, value: Any) -> BuiltOp:
        return BuiltOp(torch.full_like(self.value, value))

    def zeros_like(self) -> BuiltOp:
        return self.scalar_like(0)

    def ones_like(self) -> BuiltOp:
        return self.scalar_like(1)

    # --- tuples, branches and loops

    @classmethod
    def tuple(cls, ops: Sequence[BuiltOp], builder: Any = None) -> BuiltOp:
        return cls(tuple(ops))

    def get_tuple_element(self, index: int) -> BuiltOp:
        return self.value[index]

    def conditional(
        self,
        true_operand: BuiltOp,
        false_operand: BuiltOp,
        true_computation: Any,
        false_computation: Any,
    ) -> BuiltOp:
        chosen = _called(true_computation, true_operand), _called(false_computation, false_operand)
        return _selected(self, *chosen)

    def mkconditional(
        self, ops: Sequence[BuiltOp], true_fn: Any, false_fn: Any, **_: Any
    ) -> BuiltOp:
        operand = BuiltOp.tuple(ops)
        return self.conditional(operand, operand, true_fn, false_fn)

    def while_loop(self, condition_computation: Callable, body_computation: Callable) -> BuiltOp:
        state = self
        while bool(_called(condition_computation, state).value):
            state = _called(body_computation, state)
        return state

    @classmethod
    def mkwhile(cls, ops: Sequence[BuiltOp], condition_fn: Any, body_fn: Any, **_: Any) -> BuiltOp:
        return cls.tuple(ops).while_loop(condition_fn, body_fn)

    @classmethod
    def call(cls, computation: Callable, ops: Sequence[BuiltOp], builder: Any = None) -> BuiltOp:
        return _wrapped(computation(*ops))

    # --- what is made of nothing

    @classmethod
    def concat_in_dim(cls, ops: Sequence[BuiltOp], dimension: int, builder: Any = None) -> BuiltOp:
        return cls(torch.cat([op.value for op in ops], dimension))

    @classmethod
    def constant(cls, builder: Any, value: torch.Tensor) -> BuiltOp:
        return cls(value.to(native(builder)))

    @classmethod
    def scalar(cls, builder: Any, value: Any, dtype: str | None = None) -> BuiltOp:
        return cls(torch.tensor(value, dtype=DTYPES[dtype or "f32"], device=native(builder)))

    @classmethod
    def zero(cls, builder: Any, dtype: str | None = None) -> BuiltOp:
        return cls.scalar(builder, 0, dtype)

    @classmethod
    def one(cls, builder: Any, dtype: str | None = None) -> BuiltOp:
        return cls.scalar(builder, 1, dtype)

    @classmethod
    def iota(cls, builder: Any, shape: BuiltShape, iota_dimension: int) -> BuiltOp:
        count = shape.sizes[iota_dimension]
        numbers = torch.arange(count, dtype=DTYPES[shape.dtype], device=native(builder))
        return cls(numbers).broadcast_in_dim(shape.sizes, [iota_dimension])


def _wrapped(result: Any) -> BuiltOp:
    return BuiltOp.tuple(result) if isinstance(result, (tuple, list)) else result


def _called(computation: Callable, operand: BuiltOp) -> BuiltOp:
    """A tuple's parts are the arguments."""
    parts = operand.value if isinstance(operand.value, tuple) else (operand,)
    return _wrapped(computation(*parts))


def _selected(condition: BuiltOp, first: BuiltOp, second: BuiltOp) -> BuiltOp:
    if isinstance(first.value, tuple):
        pairs = zip(first.value, second.value, strict=True)
        return BuiltOp.tuple([_selected(condition, *pair) for pair in pairs])
    return condition.select(first, second)


def _tensors(op: BuiltOp) -> Any:
    if isinstance(op.value, tuple):
        return tuple(_tensors(part) for part in op.value)
    return op.value


def register(name: str, opfn: Callable) -> Callable:
    """A function of tensors that calls `opfn` with their Ops, and its keyword arguments."""

    def operation(*tensors: torch.Tensor, **kwargs: Any) -> Any:
        return _tensors(_wrapped(opfn(*map(BuiltOp, tensors), **kwargs)))

    operation.__name__ = name
    return operation
