"""The rows of elementwise primitives: operands are broadcast to the result's shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from ltc.backends.xla.numbers import DTYPES, Array, as_numpy, is_low
from ltc.ir import ops
from ltc.ir.node import Node, constant_value
from ltc.ir.ops import Op

Row = Callable[..., Any]


def aligned(shape: tuple[int, ...], operands: tuple[Array, ...]) -> list[Array]:
    rank = len(shape)
    return [
        x
        if x.shape == shape
        else lax.broadcast_in_dim(x, shape, tuple(range(rank - len(x.shape), rank)))
        for x in operands
    ]


def exact(function: Callable[..., Array]) -> Row:
    """The row of an op that rounds at most once, whatever the dtype."""
    return lambda node, *operands: function(*aligned(node.shape, operands))


def rounded(function: Callable[..., Array]) -> Row:
    """The row of an op of several roundings: of narrow floats it is computed in float32."""

    def row(node: Node, *operands: Array) -> Array:
        given = aligned(node.shape, operands)
        if not is_low(given[0]):
            return function(*given)
        return function(*[x.astype(jnp.float32) for x in given]).astype(given[0].dtype)

    return row


def is_bool(x: Array) -> bool:
    return bool(x.dtype == np.bool_)


def is_float(x: Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def is_unsigned(x: Array) -> bool:
    return is_bool(x) or bool(jnp.issubdtype(x.dtype, jnp.unsignedinteger))


def constant_array(node: Node) -> np.ndarray:
    """The number as torch rounds it."""
    return as_numpy(torch.tensor(constant_value(node), dtype=node.dtype, device="cpu"))


# --- one operand ---------------------------------------------------------------------------------


def absolute(x: Array) -> Array:
    return x if is_unsigned(x) else lax.abs(x)


def sign(x: Array) -> Array:
    """-1, 0 or 1; NaN has none, and gives 0."""
    if is_bool(x):
        return x
    zero = lax.full_like(x, 0)
    return (x > zero).astype(x.dtype) - (x < zero).astype(x.dtype)


def trunc(x: Array) -> Array:
    return jnp.where(x < 0, lax.ceil(x), lax.floor(x))


def round_half_even(x: Array) -> Array:
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


def log2(x: Array) -> Array:
    """Exact at powers of two: the exponent, and the logarithm of a number near 1."""
    mantissa, exponent = jnp.frexp(x)  # mantissa from 1/2 to 1
    low = mantissa < np.sqrt(0.5)
    mantissa = jnp.where(low, mantissa * 2, mantissa)
    exponent = jnp.where(low, exponent - 1, exponent).astype(x.dtype)
    finite = exponent + lax.log(mantissa) * np.array(1 / np.log(2), x.dtype)
    return jnp.where(jnp.isfinite(x) & (x > 0), finite, lax.log(x))


def digamma(x: Array) -> Array:
    """An infinity at 0, by its sign."""
    return jnp.where(x == 0, jnp.copysign(np.array(np.inf, x.dtype), -x), lax.digamma(x))


def cast(node: Node, x: Array) -> Array:
    dtype = DTYPES[node.dtype]
    if node.dtype == torch.bool:
        return x != 0
    if is_bool(x):  # XLA makes a choice of a product with a converted mask: NaN times 0 would be 0
        return lax.select(x, jnp.ones(x.shape, dtype), jnp.zeros(x.shape, dtype))
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and not node.dtype.is_complex:
        x = lax.real(x)
    if is_float(x) and np.issubdtype(dtype, np.integer) and dtype.itemsize < 4:
        x = x.astype(jnp.int32)  # of which the low bits are kept, as C compilers do
    return lax.convert_element_type(x, dtype)


# --- two operands --------------------------------------------------------------------------------


def of_bool_or(of_bool: Callable[..., Array], function: Callable[..., Array]) -> Row:
    return exact(lambda x, y: (of_bool if is_bool(x) else function)(x, y))


def divide(x: Array, y: Array) -> Array:
    """Rounded once: XLA would multiply by 1 / y, where y is one number for many of x."""
    return lax.div(x, lax.optimization_barrier(y))


def _power_of_integers(x: Array, y: Array) -> Array:
    """By squares; of a negative exponent the integer part, as torch.pow has it."""

    def square(_: Array, now: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        made, base, rest = now
        made = jnp.where(rest & 1 == 1, made * base, made)
        return made, base * base, lax.shift_right_logical(rest, lax.full_like(rest, 1))

    one = lax.full_like(x, 1)
    made = lax.fori_loop(0, x.dtype.itemsize * 8, square, (one, x, y))[0]
    if is_unsigned(x):
        return made
    of_negative = jnp.where(x == 1, one, jnp.where(x == -1, 1 - 2 * (y & 1), 0))
    return jnp.where(y < 0, of_negative, made)


def power(x: Array, y: Array) -> Array:
    return lax.pow(x, y) if is_float(x) else _power_of_integers(x, y)


def _adjusts(x: Array, y: Array, rest: Array) -> Array:
    """True for a rest that has another sign than its divisor."""
    return (rest != 0) & ((rest < 0) != (y < 0))


def floor_divide(x: Array, y: Array) -> Array:
    if not is_float(x):
        quotient, rest = lax.div(x, y), lax.rem(x, y)
        return quotient - _adjusts(x, y, rest).astype(x.dtype)
    rest = lax.rem(x, y)
    quotient = divide(x - rest, y) - _adjusts(x, y, rest).astype(x.dtype)
    floor = lax.floor(quotient)
    floor = floor + (quotient - floor > 0.5).astype(x.dtype)
    of_zero = jnp.where(quotient == 0, jnp.copysign(lax.full_like(x, 0), divide(x, y)), floor)
    return jnp.where(y == 0, divide(x, y), of_zero)


def remainder(x: Array, y: Array) -> Array:
    rest = lax.rem(x, y)
    return jnp.where(_adjusts(x, y, rest), rest + y, rest)


def trunc_divide(x: Array, y: Array) -> Array:
    return trunc(divide(x, y)) if is_float(x) else lax.div(x, y)


def shift_right(x: Array, y: Array) -> Array:
    return (lax.shift_right_logical if is_unsigned(x) else lax.shift_right_arithmetic)(x, y)


def hypot(x: Array, y: Array) -> Array:
    """Without overflow on the way; an infinity beside NaN counts."""
    x, y = lax.abs(x), lax.abs(y)
    large, small = lax.max(x, y), lax.min(x, y)
    safe = jnp.where(large == 0, lax.full_like(large, 1), large)
    ratio = divide(small, safe)
    finite = large * lax.sqrt(1 + ratio * ratio)
    return jnp.where(jnp.isinf(x) | jnp.isinf(y), np.array(np.inf, x.dtype), finite)


def wrap_index(node: Node, index: Array) -> Array:
    return jnp.where(index < 0, index + node.attr("size"), index)


ROWS: dict[Op, Row] = {
    ops.CONSTANT: lambda node: jnp.asarray(constant_array(node)),
    ops.IOTA: lambda node: lax.iota(jnp.int64, node.attr("size")),
    ops.NEG: exact(lax.neg),
    ops.ABS: exact(absolute),
    ops.SIGN: exact(sign),
    ops.EXP: rounded(lax.exp),
    ops.EXP2: rounded(lax.exp2),
    ops.EXPM1: rounded(lax.expm1),
    ops.LOG: rounded(lax.log),
    ops.LOG1P: rounded(lax.log1p),
    ops.LOG2: rounded(log2),
    ops.LOG10: rounded(jnp.log10),
    ops.SQRT: rounded(lax.sqrt),
    ops.RSQRT: rounded(lax.rsqrt),
    ops.SIN: rounded(lax.sin),
    ops.COS: rounded(lax.cos),
    ops.TAN: rounded(lax.tan),
    ops.ASIN: rounded(lax.asin),
    ops.ACOS: rounded(lax.acos),
    ops.ATAN: rounded(lax.atan),
    ops.SINH: rounded(lax.sinh),
    ops.COSH: rounded(lax.cosh),
    ops.TANH: rounded(lax.tanh),
    ops.ASINH: rounded(lax.asinh),
    ops.ACOSH: rounded(lax.acosh),
    ops.ATANH: rounded(lax.atanh),
    ops.ERF: rounded(lax.erf),
    ops.ERFC: rounded(lax.erfc),
    ops.ERFINV: rounded(lax.erf_inv),
    ops.LGAMMA: rounded(lax.lgamma),
    ops.DIGAMMA: rounded(digamma),
    ops.FLOOR: exact(lax.floor),
    ops.CEIL: exact(lax.ceil),
    ops.TRUNC: exact(trunc),
    ops.ROUND: exact(round_half_even),
    ops.NOT: exact(lax.bitwise_not),
    ops.ADD: of_bool_or(lax.bitwise_or, lax.add),
    ops.SUB: exact(lax.sub),
    ops.MUL: of_bool_or(lax.bitwise_and, lax.mul),
    ops.DIV: exact(divide),
    ops.FLOOR_DIVIDE: rounded(floor_divide),
    ops.TRUNC_DIVIDE: rounded(trunc_divide),
    ops.REMAINDER: rounded(remainder),
    ops.FMOD: rounded(lax.rem),
    ops.POW: rounded(power),
    ops.ATAN2: rounded(lax.atan2),
    ops.HYPOT: rounded(hypot),
    ops.NEXTAFTER: exact(jnp.nextafter),
    ops.COPYSIGN: exact(jnp.copysign),
    ops.MAXIMUM: of_bool_or(lax.bitwise_or, lax.max),
    ops.MINIMUM: of_bool_or(lax.bitwise_and, lax.min),
    ops.AND: exact(lax.bitwise_and),
    ops.OR: exact(lax.bitwise_or),
    ops.XOR: exact(lax.bitwise_xor),
    ops.SHIFT_LEFT: exact(lax.shift_left),
    ops.SHIFT_RIGHT: exact(shift_right),
    ops.EQ: exact(lax.eq),
    ops.NE: exact(lax.ne),
    ops.LT: exact(lax.lt),
    ops.LE: exact(lax.le),
    ops.GT: exact(lax.gt),
    ops.GE: exact(lax.ge),
    ops.WHERE: exact(lax.select),
    ops.CAST: cast,
    ops.BITCAST: lambda node, x: lax.bitcast_convert_type(x, DTYPES[node.dtype]),
    ops.WRAP_INDEX: wrap_index,
    ops.CHECK: lambda node, x, holds: x,
}
