"""Rules of activation functions and of their gradients."""

from __future__ import annotations

import math

import torch

from ltc.aten.promote import promote, promote_float
from ltc.aten.registry import traces
from ltc.aten.rules.pointwise import sigmoid as sigmoid_of
from ltc.ir import build, ops
from ltc.ir.build import where
from ltc.ir.node import Node, Operand, like

SQRT_HALF = math.sqrt(0.5)
SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
CUBIC = 0.044715
ONE_SIXTH = 0.16666667163372040  # 1 / 6 as a float32, which torch's kernel uses for every dtype


@traces("aten::relu")
def relu(x: Node) -> Node:
    return NotImplemented if x.dtype == torch.bool else build.maximum(x, like(0, x))


@traces("aten::threshold")
def threshold(x: Node, threshold: Operand, value: Operand) -> Node:
    """x above the threshold, and where it is NaN; `value` elsewhere."""
    return where(build.le(x, threshold), value, x)


@traces("aten::threshold_backward")
def threshold_backward(grad: Node, x: Node, threshold: Operand) -> Node:
    grad, x = promote(grad, x)
    return where(build.le(x, threshold), 0, grad)


@traces("aten::leaky_relu")
def leaky_relu(x: Node, negative_slope: Operand = 0.01) -> Node:
    (x,) = promote(x)
    return where(x > 0, x, x * negative_slope)


@traces("aten::leaky_relu_backward")
def leaky_relu_backward(grad: Node, x: Node, negative_slope: Operand, self_is_result: bool) -> Node:
    grad, x = promote(grad, x)
    return where(x > 0, grad, grad * negative_slope)


@traces("aten::_prelu_kernel")
def prelu(x: Node, weight: Node) -> Node:
    x, weight = promote(x, weight)
    return where(x > 0, x, weight * x)


@traces("aten::_prelu_kernel_backward")
def prelu_backward(grad: Node, x: Node, weight: Node) -> tuple[Node, Node]:
    grad, x, weight = promote(grad, x, weight)
    return where(x > 0, grad, weight * grad), where(x > 0, 0.0, x * grad)


@traces("aten::elu")
def elu(x: Node, alpha: Operand = 1, scale: Operand = 1, input_scale: Operand = 1) -> Node:
    (x,) = promote(x)
    negative = build.expm1(x * input_scale) * (like(alpha, x) * scale)
    return where(x < 0, negative, x * scale)


@traces("aten::elu_backward")
def elu_backward(
    grad: Node,
    alpha: Operand,
    scale: Operand,
    input_scale: Operand,
    is_result: bool,
    self_or_result: Node,
) -> Node:
    grad, x = promote(grad, self_or_result)
    negative_slope = like(alpha, x) * scale
    if is_result:
        negative = grad * input_scale * (x + negative_slope)
    else:
        negative = grad * (like(input_scale, x) * negative_slope) * build.exp(x * input_scale)
    return where(build.le(x, 0), negative, grad * scale)


def _cubic_argument(x: Node) -> Node:
    """The argument of tanh in the approximation of gelu.  Source: arXiv:1606.08415, section 2."""
    return SQRT_2_OVER_PI * (x + CUBIC * (x * x * x))


@traces("aten::gelu")
def gelu(x: Node, approximate: str = "none") -> Node:
    """x * P(Z <= x) for a standard normal Z.  Source: arXiv:1606.08415, section 2."""
    (x,) = promote(x)
    if approximate == "tanh":
        return 0.5 * x * (1.0 + build.tanh(_cubic_argument(x)))
    return 0.5 * x * (1.0 + build.erf(x * SQRT_HALF))


@traces("aten::gelu_backward")
def gelu_backward(grad: Node, x: Node, approximate: str = "none") -> Node:
    grad, x = promote(grad, x)
    if approximate == "tanh":
        t = build.tanh(_cubic_argument(x))
        inner_slope = SQRT_2_OVER_PI * (1.0 + 3.0 * CUBIC * (x * x))
        return grad * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner_slope)
    cumulative = 0.5 * (1.0 + build.erf(x * SQRT_HALF))
    density = build.exp(-0.5 * (x * x)) * (1.0 / math.sqrt(2.0 * math.pi))
    return grad * (cumulative + x * density)


@traces("aten::sigmoid_backward")
def sigmoid_backward(grad: Node, y: Node) -> Node:
    grad, y = promote(grad, y)
    return grad * (1.0 - y) * y


@traces("aten::tanh_backward")
def tanh_backward(grad: Node, y: Node) -> Node:
    grad, y = promote(grad, y)
    return grad * (1.0 - y * y)


@traces("aten::logit_backward")
def logit_backward(grad: Node, x: Node, eps: Operand | None = None) -> Node:
    grad, x = promote(grad, x)
    slope = grad / (x * (1.0 - x))
    if eps is None:
        return where(build.lt(x, 0) | build.gt(x, 1), math.nan, slope)
    low = like(eps, x)
    return where(build.lt(x, low) | build.gt(x, 1.0 - low), 0.0, slope)


@traces("aten::silu")
def silu(x: Node) -> Node:
    (x,) = promote_float(x)
    return x / (1.0 + build.exp(-x))


@traces("aten::silu_backward")
def silu_backward(grad: Node, x: Node) -> Node:
    grad, x = promote(grad, x)
    s = sigmoid_of(x)
    return grad * s * (1.0 + x * (1.0 - s))


@traces("aten::mish")
def mish(x: Node) -> Node:
    (x,) = promote(x)
    return x * build.tanh(build.log1p(build.exp(x)))


@traces("aten::softplus")
def softplus(x: Node, beta: Operand = 1, threshold: Operand = 20) -> Node:
    """log(1 + exp(beta x)) / beta, and x where beta x is above the threshold."""
    (x,) = promote(x)
    scaled = x * beta
    return where(build.gt(scaled, threshold), x, build.log1p(build.exp(scaled)) / like(beta, x))


@traces("aten::softplus_backward")
def softplus_backward(grad: Node, x: Node, beta: Operand, threshold: Operand) -> Node:
    grad, x = promote(grad, x)
    scaled = x * beta
    z = build.exp(scaled)
    return where(build.gt(scaled, threshold), grad, grad * z / (z + 1.0))


@traces("aten::log_sigmoid_forward")
def log_sigmoid_forward(x: Node) -> tuple[Node, Node]:
    """(min(x, 0) - log(1 + exp(-|x|)), a buffer for the gradient)."""
    (x,) = promote(x)
    z = build.exp(-build.absolute(x))
    return build.minimum(x, like(0, x)) - build.log1p(z), z


@traces("aten::log_sigmoid_backward", alike=("grad", "x"))
def log_sigmoid_backward(grad: Node, x: Node, buffer: Node) -> Node:
    if buffer.shape not in (x.shape, (0,)):
        return NotImplemented
    grad, x = promote(grad, x)
    z = build.exp(-build.absolute(x))
    ratio = z / (1.0 + z)
    return grad * where(x < 0, 1.0 - ratio, ratio)


@traces("aten::hardtanh")
def hardtanh(x: Node, min_val: Operand = -1, max_val: Operand = 1) -> Node:
    if not x.dtype.is_floating_point:
        return NotImplemented
    return build.minimum(build.maximum(x, like(min_val, x)), like(max_val, x))


@traces("aten::hardtanh_backward")
def hardtanh_backward(grad: Node, x: Node, min_val: Operand, max_val: Operand) -> Node:
    grad, x = promote(grad, x)
    return where(build.le(x, min_val) | build.ge(x, max_val), 0, grad)


@traces("aten::hardsigmoid")
def hardsigmoid(x: Node) -> Node:
    """clamp(x + 3, 0, 6) / 6"""
    (x,) = promote(x)
    return _clamp_to_6(x + 3.0) / 6.0


def _clamp_to_6(x: Node) -> Node:
    return build.minimum(build.maximum(x, like(0, x)), like(6, x))


@traces("aten::hardsigmoid_backward")
def hardsigmoid_backward(grad: Node, x: Node) -> Node:
    grad, x = promote(grad, x)
    return where((x > -3.0) & (x < 3.0), grad * ONE_SIXTH, 0.0)


@traces("aten::hardswish")
def hardswish(x: Node) -> Node:
    """x * clamp(x + 3, 0, 6) / 6"""
    (x,) = promote(x)
    return x * _clamp_to_6(x + 3.0) / 6.0


@traces("aten::hardswish_backward")
def hardswish_backward(grad: Node, x: Node) -> Node:
    grad, x = promote(grad, x)
    inside = grad * (x / 3.0 + 0.5)
    return where(x <= -3.0, 0.0, where(x >= 3.0, grad, inside))


@traces("aten::hardshrink")
def hardshrink(x: Node, lambd: Operand = 0.5) -> Node:
    bound = like(lambd, x)
    return where(build.ge(x, -bound) & build.le(x, bound), 0, x)


@traces("aten::hardshrink_backward")
def hardshrink_backward(grad: Node, x: Node, lambd: Operand) -> Node:
    bound = like(lambd, x)
    return where(build.ge(x, -bound) & build.le(x, bound), 0, grad)


@traces("aten::softshrink")
def softshrink(x: Node, lambd: Operand = 0.5) -> Node:
    (x,) = promote(x)
    bound = like(lambd, x)
    return where(build.gt(x, bound), x - bound, where(build.lt(x, -bound), x + bound, x * 0.0))


@traces("aten::softshrink_backward")
def softshrink_backward(grad: Node, x: Node, lambd: Operand) -> Node:
    bound = like(lambd, x)
    return where(build.ge(x, -bound) & build.le(x, bound), 0, grad)


@traces("aten::glu")
def glu(x: Node, dim: int = -1) -> Node:
    """The first half times the sigmoid of the second."""
    (x,) = promote(x)
    half, rest = divmod(x.shape[build.dim_of(x, dim)], 2)
    if rest:
        return NotImplemented
    first, second = build.slice_dim(x, dim, 0, half), build.slice_dim(x, dim, half, 2 * half)
    return first * sigmoid_of(second)


@traces("aten::glu_backward")
def glu_backward(grad: Node, x: Node, dim: int) -> Node:
    grad, x = promote(grad, x)
    half = x.shape[build.dim_of(x, dim)] // 2
    first, second = build.slice_dim(x, dim, 0, half), build.slice_dim(x, dim, half, 2 * half)
    if grad.shape != first.shape or 2 * half != x.shape[build.dim_of(x, dim)]:
        return NotImplemented
    gate = sigmoid_of(second)
    return build.concat([gate * grad, (1.0 - gate) * gate * grad * first], dim)


# --- softmax -------------------------------------------------------------------------------------


def _shifted(x: Node, dim: int) -> Node:
    """x less its largest element along `dim`, so that no exponential overflows."""
    return x - build.max_of(x, dim, keepdim=True)


def _has_nothing_along(x: Node, dim: int) -> bool:
    return bool(x.shape) and x.shape[build.dim_of(x, dim)] == 0


@traces("aten::_softmax")
def softmax(x: Node, dim: int, half_to_float: bool) -> Node:
    (x,) = promote(x)
    if _has_nothing_along(x, dim):
        return x
    if not x.shape:
        return build.exp(x - x)  # NaN of what is not finite
    z = build.exp(_shifted(x, dim))
    return z / build.sum_of(z, dim, keepdim=True)


@traces("aten::_safe_softmax")
def safe_softmax(x: Node, dim: int, dtype: torch.dtype | None = None) -> Node:
    """Softmax, with 0 where every element along `dim` is -inf."""
    (x,) = promote(x if dtype is None else build.cast(x, dtype))
    if _has_nothing_along(x, dim) or not x.shape:
        return NotImplemented
    masked = build.eq(build.max_of(x, dim, keepdim=True), -math.inf)
    return where(masked, 0.0, softmax(x, dim, False))


@traces("aten::_softmax_backward_data", alike=("grad", "y"))
def softmax_backward(grad: Node, y: Node, dim: int, input_dtype: torch.dtype) -> Node:
    grad, y = promote(grad, y)
    if not y.shape:
        return grad * y - y * (grad * y)
    product = grad * y
    return product - y * build.sum_of(product, dim, keepdim=True)


@traces("aten::_log_softmax")
def log_softmax(x: Node, dim: int, half_to_float: bool) -> Node:
    (x,) = promote(x)
    if _has_nothing_along(x, dim):
        return x
    if not x.shape:
        return x - x
    shifted = _shifted(x, dim)
    return shifted - build.log(build.sum_of(build.exp(shifted), dim, keepdim=True))


@traces("aten::_log_softmax_backward_data", alike=("grad", "y"))
def log_softmax_backward(grad: Node, y: Node, dim: int, input_dtype: torch.dtype) -> Node:
    grad, y = promote(grad, y)
    total = build.sum_of(grad, dim, keepdim=True) if y.shape else grad
    parts = _parts_of_log_softmax(y)
    if parts is not None:
        z, sum_of_z = parts
        return grad - z * (total / sum_of_z)
    return grad - build.exp(y) * total


def _parts_of_log_softmax(y: Node) -> tuple[Node, Node] | None:
    """The exponentials whose share y is the logarithm of, and their sum, where y is made here.

    The forward pass has computed them: their quotient is what exp(y) is, and rounded less.
    """
    if y.op is not ops.SUB or y.dtype not in (torch.float32, torch.float64):
        return None  # what is narrower was rounded between
    shifted, log = y.inputs
    if shifted.op is not ops.SUB or log.op is not ops.LOG:
        return None
    x, largest = shifted.inputs
    z, (sum_of_z,) = build.exp(shifted), log.inputs
    dims = _dims_reduced(ops.SUM, z, sum_of_z)
    return (z, sum_of_z) if dims and dims == _dims_reduced(ops.MAX, x, largest) else None


def _dims_reduced(op: ops.Op, x: Node, result: Node) -> tuple[int, ...]:
    """The dimensions over which the result, where they are kept, is this reduction of x."""
    while result.op is ops.RESHAPE:
        (result,) = result.inputs
    return result.attr("dims") if result.op is op and result.inputs == (x,) else ()
