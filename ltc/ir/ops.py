"""The closed set of operations a backend must know: one row each, a name and a type rule.

To follow an op, read its row here, its type rule in ir/infer.py, and its meaning in
backends/eager.py (the reference).  `python scripts/code/where.py mul` prints the places.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ltc.ir import infer
from ltc.ir.tensor_type import TensorType, TupleType


@dataclass(frozen=True, eq=False, slots=True)
class Op:
    """One row of the list.

    Attributes:
        name: The name that it prints as.
        infer: Operand types and attributes -> result type, or a tuple of them.
        kind: The family a pass or a vendor may ask for: "elementwise", "reduce", "view", ...
    """

    name: str
    infer: Callable[..., TensorType | TupleType]
    kind: str

    def __repr__(self) -> str:
        return self.name


ALL: dict[str, Op] = {}


def _op(name: str, rule: Callable[..., TensorType | TupleType], kind: str) -> Op:
    assert name not in ALL, f"two ops are called {name}"
    ALL[name] = Op(name, rule, kind)
    return ALL[name]


def _elementwise(name: str, rule: Callable[..., TensorType] = infer.elementwise) -> Op:
    return _op(name, rule, "elementwise")


# Leaves.  A scalar is a number the launch is given; a constant is keyed by its text.
INPUT = _op("input", infer.leaf, "leaf")  # index, dtype, shape
SCALAR = _op("scalar", infer.leaf, "leaf")  # slot, dtype, wrapped: a Python number, not a tensor
CONSTANT = _op("constant", infer.leaf, "leaf")  # literal, dtype
IOTA = _op("iota", infer.iota, "leaf")  # size: 0, 1, ..., size - 1 as i64

# Elementwise, one operand.
NEG = _elementwise("neg")
ABS = _elementwise("abs")
SIGN = _elementwise("sign")
EXP = _elementwise("exp", infer.floating)
EXP2 = _elementwise("exp2", infer.floating)
EXPM1 = _elementwise("expm1", infer.floating)
LOG = _elementwise("log", infer.floating)
LOG1P = _elementwise("log1p", infer.floating)
LOG2 = _elementwise("log2", infer.floating)
LOG10 = _elementwise("log10", infer.floating)
SQRT = _elementwise("sqrt", infer.floating)
RSQRT = _elementwise("rsqrt", infer.floating)
SIN = _elementwise("sin", infer.floating)
COS = _elementwise("cos", infer.floating)
TAN = _elementwise("tan", infer.floating)
ASIN = _elementwise("asin", infer.floating)
ACOS = _elementwise("acos", infer.floating)
ATAN = _elementwise("atan", infer.floating)
SINH = _elementwise("sinh", infer.floating)
COSH = _elementwise("cosh", infer.floating)
TANH = _elementwise("tanh", infer.floating)
ASINH = _elementwise("asinh", infer.floating)
ACOSH = _elementwise("acosh", infer.floating)
ATANH = _elementwise("atanh", infer.floating)
ERF = _elementwise("erf", infer.floating)
ERFC = _elementwise("erfc", infer.floating)
ERFINV = _elementwise("erfinv", infer.floating)
LGAMMA = _elementwise("lgamma", infer.floating)
DIGAMMA = _elementwise("digamma", infer.floating)
FLOOR = _elementwise("floor", infer.floating)
CEIL = _elementwise("ceil", infer.floating)
TRUNC = _elementwise("trunc", infer.floating)
ROUND = _elementwise("round", infer.floating)  # half to even
NOT = _elementwise("not", infer.integral)  # every bit; on bool the logical one

# Elementwise, two operands.  Integers wrap around.
ADD = _elementwise("add")
SUB = _elementwise("sub")
MUL = _elementwise("mul")
DIV = _elementwise("div", infer.floating)
FLOOR_DIVIDE = _elementwise("floor_divide")  # may fail: an integer divided by zero
TRUNC_DIVIDE = _elementwise("trunc_divide")  # may fail
REMAINDER = _elementwise("remainder")  # sign of the divisor; may fail
FMOD = _elementwise("fmod")  # sign of the dividend; may fail
POW = _elementwise("pow")
ATAN2 = _elementwise("atan2", infer.floating)
HYPOT = _elementwise("hypot", infer.floating)
NEXTAFTER = _elementwise("nextafter", infer.floating)
COPYSIGN = _elementwise("copysign", infer.floating)
MAXIMUM = _elementwise("maximum")  # NaN where either is NaN
MINIMUM = _elementwise("minimum")
AND = _elementwise("and", infer.integral)
OR = _elementwise("or", infer.integral)
XOR = _elementwise("xor", infer.integral)
SHIFT_LEFT = _elementwise("shift_left", infer.integral)
SHIFT_RIGHT = _elementwise("shift_right", infer.integral)  # arithmetic on signed integers
EQ = _elementwise("eq", infer.comparison)
NE = _elementwise("ne", infer.comparison)
LT = _elementwise("lt", infer.comparison)
LE = _elementwise("le", infer.comparison)
GT = _elementwise("gt", infer.comparison)
GE = _elementwise("ge", infer.comparison)

# Elementwise, the rest.
WHERE = _elementwise("where", infer.where)
CAST = _elementwise("cast", infer.cast)  # dtype; to bool: x != 0
BITCAST = _elementwise("bitcast", infer.bitcast)  # dtype of the same size
# An index from `lowest` (0, or -size) to size - 1, where -1 is the last.  May fail: an IndexError
# with `message`, the index in place of {}.
WRAP_INDEX = _elementwise("wrap_index", infer.wrapped_index)  # size, lowest, message
# x, where `holds` is True everywhere.  May fail: a RuntimeError with `message`, the first element
# of x for which it is False in place of {}, if those are integers.
CHECK = _elementwise("check", infer.same)  # (x, holds) message

# Reductions over `dims`, which disappear.  Low precision sums in f32 and rounds once.
SUM = _op("sum", infer.reduce, "reduce")
PROD = _op("prod", infer.reduce, "reduce")
MAX = _op("max", infer.reduce, "reduce")  # NaN where any is NaN
MIN = _op("min", infer.reduce, "reduce")
ANY = _op("any", infer.reduce_to_bool, "reduce")
ALL_TRUE = _op("all", infer.reduce_to_bool, "reduce")
ARGMAX = _op("argmax", infer.arg_reduce, "reduce")  # the first of equals; NaN is largest
ARGMIN = _op("argmin", infer.arg_reduce, "reduce")  # the first of equals; NaN is smallest
CUMSUM = _op("cumsum", infer.scan, "scan")
CUMPROD = _op("cumprod", infer.scan, "scan")

# Index maps.
PERMUTE = _op("permute", infer.permute, "view")  # dims
SLICE = _op("slice", infer.slice_, "view")  # starts, limits, steps, one for each dimension
EXPAND = _op("expand", infer.expand, "view")  # shape; new dimensions come first
RESHAPE = _op("reshape", infer.reshape, "view")  # shape
FLIP = _op("flip", infer.flip, "view")  # dims
PAD = _op("pad", infer.pad, "pad")  # (x, value) low, high
CONCAT = _op("concat", infer.concat, "concat")  # dim
INSERT = _op("insert", infer.insert, "insert")  # (base, new) starts, steps: replaces a slice

# Indices that are data.  What an index outside its dimension gives is not defined: it may fail.
# WRAP_INDEX is what makes it an error of the user's.
TAKE = _op("take", infer.take, "gather")  # (x, index) dim: x[:, index] for dim 1
GATHER = _op("gather", infer.gather, "gather")  # (x, index) dim: as torch.gather
# (base, index, new) dim, mode: "set", or "add", "multiply", "maximum", "minimum" with what is there.
PUT = _op("put", infer.put, "scatter")  # undoes take
SCATTER = _op("scatter", infer.scatter, "scatter")  # undoes gather

MATMUL = _op("matmul", infer.matmul, "matmul")
# Convolutions and windows with the attribute channels_last=True take and give [N, *spatial, C];
# weights are [O, C / groups, *kernel] all the same.
CONVOLUTION = _op("convolution", infer.convolution, "convolution")
CONVOLUTION_INPUT_GRADIENT = _op(  # (grad, weight) shape of the input
    "convolution_input_gradient", infer.convolution_gradient, "convolution"
)
CONVOLUTION_WEIGHT_GRADIENT = _op(  # (grad, x) shape of the weight
    "convolution_weight_gradient", infer.convolution_gradient, "convolution"
)
# softmax(query @ key.T * scale + bias) @ value, with dropout between, and the logarithm of the sum
# of exp over each row of scores (-inf where all scores are). Attributes: causal (query i reads keys
# 0 to i), biased and dropped (which operands follow: bias; seed, probability), safe (a row of which
# all scores are -inf has the result 0, not NaN), order (of the result's dimensions in memory).
# Score i is kept where 24 random bits say, as in random_bits of all scores, stream 0. True in a
# bool bias lets a score count.
ATTENTION = _op("attention", infer.attention, "attention")  # (query, key, value, scale, *rest)
ATTENTION_GRADIENT = _op(  # (gradient, query, key, value, result, logarithms, scale, factor, *rest)
    "attention_gradient", infer.attention_gradient, "attention"
)
# The steps of one direction of a recurrent layer. `pre` is what the gates get from the input, a row
# for each step of each sequence, the rows of one step side by side. Attributes: cell ("lstm", "gru",
# "tanh", "relu"), steps, reverse (the last step comes first), packed (the last operand says of each
# step how many sequences it has, i64[steps], never growing; else all have every step).
# lstm: rest is (cell state,); it also gives the last cell state, the gates i, f, g, o [R, 4 * H], and
# the cell states [R, H]. gru: rest is (bias of the new gate's hidden part,), gates are r, z, n, and
# what r multiplies.
RECURRENCE = _op("recurrence", infer.recurrence, "recurrence")  # (pre, weight, hidden, *rest)
# lstm: rest is (gradient of the last cell state, cell state, gates, cell states); it also gives the
# cell state's gradient. gru: rest is (gates,); the gradient of weight @ hidden state follows.
RECURRENCE_GRADIENT = _op(  # (gradient, gradient of the last state, weight, hidden, outputs, *rest)
    "recurrence_gradient", infer.recurrence_gradient, "recurrence"
)
# Windows: kernel, stride, padding, dilation; `shape` is the result's, which holds ceil_mode.
MAX_POOL = _op("max_pool", infer.max_pool, "window")  # (values, flat spatial indices)
MAX_POOL_GRADIENT = _op("max_pool_gradient", infer.max_pool_gradient, "window")  # (grad, indices)
AVERAGE_POOL = _op("average_pool", infer.shaped, "window")  # also: count_padding, divisor or 0
AVERAGE_POOL_GRADIENT = _op("average_pool_gradient", infer.shaped, "window")

# Element i of stream s: Philox4x32-10 keyed by the seed, of the counter that i and s make.
RANDOM_BITS = _op("random_bits", infer.random_bits, "random")  # (seed) shape, bits, stream

# Exchanges among replicas. A start reads what is sent, and the token of the start recorded before it,
# if any: nothing reorders, merges or drops them.  Its own token is what a wait takes the results by.
# The token is the first operand, so that a walk from the last one finds the exchanges in their order,
# each with what it needs and no more before it.
COLLECTIVE_START = _op(  # (token, *operands) collective, count of the operands
    "collective_start", infer.collective_start, "collective"
)
COLLECTIVE_WAIT = _op("collective_wait", infer.collective_wait, "collective")  # results
# The identity, in symmetric memory: what the start of a one-shot sum sends.
TO_SYMMETRIC = _op("to_symmetric", infer.same, "collective")  # number, index: which sum, operand

EXTERN = _op("extern", infer.extern, "extern")  # template, results: torch's own CPU kernel
GET = _op("get", infer.element, "get")  # index: one result of a node that has several
BARRIER = _op("barrier", infer.same, "barrier")  # position: the identity, never looked through

_DIVISIONS = frozenset({FLOOR_DIVIDE, TRUNC_DIVIDE, REMAINDER, FMOD})
_CHECKS = frozenset(
    {
        WRAP_INDEX,
        CHECK,
        TAKE,
        GATHER,
        PUT,
        SCATTER,
        MAX_POOL_GRADIENT,
        EXTERN,
        COLLECTIVE_START,
        COLLECTIVE_WAIT,
    }
)


def may_fail(node: Any) -> bool:
    """Return True if the values in the operands can make this node raise."""
    if node.op in _DIVISIONS:
        return not node.type.dtype.is_floating_point and not _is_never_zero(node.inputs[1])
    return node.op in _CHECKS


def _is_never_zero(node: Any) -> bool:
    while node.op is EXPAND or node.op is RESHAPE:
        node = node.inputs[0]
    return node.op is CONSTANT and node.attr("literal") != "0"
