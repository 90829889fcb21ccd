"""A backend in NumPy: elementwise, reductions, movement and matmul, and nothing else."""

import math
from statistics import NormalDist

import numpy as np
import torch

from ltc.backends import interface as vendor
from ltc.ir import ops
from ltc.ir.node import constant_value

NAMES = "float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool"
DTYPES = {getattr(torch, name): np.dtype(name) for name in NAMES.split()}


def plain(function):
    """The row of an op without attributes that NumPy has."""
    return lambda node, *operands: function(*operands)


def each(function):
    """The row of an op that only Python has: element by element, in double precision."""
    compute = np.vectorize(function, otypes=[float])
    return lambda node, x: compute(x).astype(DTYPES[node.dtype])


def inverse_erf(x):
    if abs(x) < 1:
        return NormalDist().inv_cdf((x + 1) / 2) / math.sqrt(2)
    return x * math.inf if abs(x) == 1 else math.nan


def digamma(x):
    """Shifted up to where the asymptotic series holds.  Source: Abramowitz and Stegun, 6.3."""
    if x <= 0 and x % 1 == 0:
        return math.nan if x else math.copysign(math.inf, -x)
    if x < 0:
        return digamma(1 - x) - math.pi / math.tan(math.pi * x)
    if x < 8:
        return digamma(x + 1) - 1 / x
    f = 1 / (x * x)
    return math.log(x) - 0.5 / x - f * (1 / 12 - f * (1 / 120 - f * (1 / 252 - f / 240)))


def division(function):
    def row(node, x, y):
        if y.dtype.kind in "iu" and not np.all(y):
            raise RuntimeError("ZeroDivisionError")
        return function(x, y)

    return row


def wrap_index(node, index):
    size = node.attr("size")
    wrong = index[(index < node.attr("lowest")) | (index >= size)]
    if wrong.size:
        raise IndexError(node.attr("message").format(wrong[0]))
    return np.where(index < 0, index + size, index)


def check(node, x, holds):
    if np.all(holds):
        return x
    raise RuntimeError(node.attr("message").format(x[~holds][0]))


def reduction(function):
    return lambda node, x: function(x, axis=node.attr("dims")).astype(DTYPES[node.dtype])


def insert(node, base, new):
    result, pairs = base.copy(), zip(node.attr("starts"), node.attr("steps"), new.shape)
    result[tuple(slice(start, start + step * n, step) for start, step, n in pairs)] = new
    return result


SAME_NAME = """add abs sign exp exp2 expm1 log log1p log2 log10 sqrt sin cos tan sinh cosh tanh
    floor ceil trunc hypot nextafter copysign maximum minimum where matmul"""
OTHER_NAME = """neg:negative asin:arcsin acos:arccos atan:arctan atan2:arctan2 asinh:arcsinh
    acosh:arccosh atanh:arctanh round:rint sub:subtract mul:multiply div:divide pow:power
    shift_left:left_shift shift_right:right_shift eq:equal ne:not_equal lt:less le:less_equal
    gt:greater ge:greater_equal not:invert and:bitwise_and or:bitwise_or xor:bitwise_xor"""
ROWS = {
    **{name: plain(getattr(np, name)) for name in SAME_NAME.split()},
    **{n: plain(getattr(np, theirs)) for n, theirs in (p.split(":") for p in OTHER_NAME.split())},
    "rsqrt": plain(lambda x: np.reciprocal(np.sqrt(x))),
    "erf": each(math.erf), "erfc": each(math.erfc), "erfinv": each(inverse_erf),
    "lgamma": each(lambda x: math.lgamma(x) if x % 1 or x > 0 else math.inf),
    "digamma": each(digamma), "constant": lambda n: np.array(constant_value(n), DTYPES[n.dtype]),
    "floor_divide": division(np.floor_divide), "remainder": division(np.remainder),
    "trunc_divide": division(lambda x, y: (x - np.fmod(x, y)) // y), "fmod": division(np.fmod),
    "cast": lambda node, x: x.astype(DTYPES[node.dtype]),
    "bitcast": lambda node, x: np.ascontiguousarray(x).view(DTYPES[node.dtype]),
    **{name: reduction(getattr(np, name)) for name in ("sum", "prod", "max", "min", "any", "all")},
    "argmax": lambda n, x: x.argmax(n.attr("dim")), "argmin": lambda n, x: x.argmin(n.attr("dim")),
    "permute": lambda node, x: x.transpose(node.attr("dims")),
    "flip": lambda node, x: np.flip(x, node.attr("dims")),
    "reshape": lambda n, x: x.reshape(n.shape), "expand": lambda n, x: np.broadcast_to(x, n.shape),
    "slice": lambda n, x: x[tuple(map(slice, n.attr("starts"), n.attr("limits"), n.attr("steps")))],
    "concat": lambda node, *parts: np.concatenate(parts, node.attr("dim")),
    "pad": lambda n, x, v: np.pad(x, [*zip(n.attr("low"), n.attr("high"))], constant_values=v),
    "iota": lambda node: np.arange(node.attr("size")), "insert": insert, "wrap_index": wrap_index,
    "check": check,
}  # fmt: skip


def accepts(node):
    """Return True if NumPy has the dtypes of the node and its operands."""
    return all(getattr(n.type, "dtype", None) in DTYPES for n in (node, *node.inputs))


class ToyComputation:
    """A graph, interpreted at each launch; a buffer is an array that is never written to again."""

    def __init__(self, graph):
        self.graph = graph

    @staticmethod
    def upload(tensor, device):
        return tensor.numpy().copy() if tensor.dtype in DTYPES else tensor.clone()

    @staticmethod
    def download(buffer):
        return buffer if isinstance(buffer, torch.Tensor) else torch.from_numpy(buffer)

    @staticmethod
    def wait(device):
        """NumPy is done when it returns."""

    def launch(self, buffers, scalars):
        known = {node: buffers[node.attr("index")] for node in self.graph.inputs}
        numbers = [n for n in self.graph.scalars if n.dtype in DTYPES]
        known |= {n: np.array(scalars[n.attr("slot")], DTYPES[n.dtype]) for n in numbers}
        with np.errstate(all="ignore"):
            results = vendor.LoweringContext(ToyBackend.lowering, known).lower(*self.graph.outputs)
        return [x if isinstance(x, torch.Tensor) else np.array(x, order="C") for x in results]


class ToyBackend:
    name, computation = "toy", ToyComputation
    lowering = vendor.NodeLowering({ops.ALL[name]: row for name, row in ROWS.items()}, accepts)

    def devices(self):
        return (vendor.DeviceInfo("CPU", "NumPy"),)

    def compile(self, graph, device, donated):
        return ToyComputation(graph)

    def prepare_to_exit(self):
        """Nothing runs behind the caller."""


vendor.BackendRegistrar.register("toy", ToyBackend)
