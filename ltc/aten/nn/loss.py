"""Rules of losses and of their gradients.  Reductions: 0 none, 1 mean, 2 sum."""

from __future__ import annotations

import torch

from ltc.aten.extern import extern, made_by_kernel
from ltc.aten.legal_values import fraction
from ltc.aten.promote import promote
from ltc.aten.registry import traces
from ltc.aten.rules.indexing import checked
from ltc.ir import build, ops
from ltc.ir.build import where
from ltc.ir.node import Node, like, make
from ltc.ir.tensor_type import TensorType

NONE, MEAN, SUM = 0, 1, 2


def _reduced(loss: Node, reduction: int) -> Node:
    if reduction == NONE:
        return loss
    return build.mean_of(loss) if reduction == MEAN else build.sum_of(loss)


def _spread(grad: Node, x: Node, reduction: int) -> Node:
    """The gradient of each element of the loss."""
    return grad / x.size if reduction == MEAN else grad


@traces("aten::mse_loss")
def mse_loss(x: Node, target: Node, reduction: int = MEAN) -> Node:
    x, target = promote(x, target)
    difference = x - target
    return _reduced(difference * difference, reduction)


@traces("aten::mse_loss_backward")
def mse_loss_backward(grad: Node, x: Node, target: Node, reduction: int) -> Node:
    grad, x, target = promote(grad, x, target)
    return _spread(2.0 * (x - target) * grad, x, reduction)


@traces("aten::smooth_l1_loss", static={"beta": None})
def smooth_l1_loss(x: Node, target: Node, reduction: int = MEAN, beta: float = 1.0) -> Node:
    """Quadratic nearer than beta, linear beyond."""
    x, target = promote(x, target)
    z = build.absolute(x - target)
    near = 0.5 * z * z / beta if beta else z
    return _reduced(where(z < beta, near, z - 0.5 * beta), reduction)


@traces("aten::smooth_l1_loss_backward", static={"beta": None})
def smooth_l1_loss_backward(grad: Node, x: Node, target: Node, reduction: int, beta: float) -> Node:
    grad, x, target = promote(grad, x, target)
    d = x - target
    near = d / beta if beta else d
    slope = where(build.le(d, -beta), -1.0, where(build.ge(d, beta), 1.0, near))
    return _spread(slope * grad, x, reduction)


@traces("aten::huber_loss", static={"delta": None})
def huber_loss(x: Node, target: Node, reduction: int = MEAN, delta: float = 1.0) -> Node:
    x, target = promote(x, target)
    z = build.absolute(x - target)
    return _reduced(where(build.le(z, delta), 0.5 * z * z, delta * (z - 0.5 * delta)), reduction)


@traces("aten::huber_loss_backward", static={"delta": None})
def huber_loss_backward(grad: Node, x: Node, target: Node, reduction: int, delta: float) -> Node:
    grad, x, target = promote(grad, x, target)
    d = x - target
    slope = where(build.le(d, -delta), -delta, where(build.ge(d, delta), delta, d))
    return _spread(slope * grad, x, reduction)


# log(0) is taken for this much: binary cross entropy stays finite.
LEAST_LOG = -100.0


_INPUT, _TARGET = (
    f"all elements of {name} should be between 0 and 1" for name in ("input", "target")
)


@traces("aten::binary_cross_entropy", alike=("x", "target"))
def binary_cross_entropy(
    x: Node, target: Node, weight: Node | None = None, reduction: int = MEAN
) -> Node:
    x, target, weight = promote(x, target, weight)
    x, target = fraction(x, _INPUT), fraction(target, _TARGET)
    lowest = like(LEAST_LOG, x)
    log_x = build.maximum(build.log(x), lowest)
    log_rest = build.maximum(build.log1p(-x), lowest)
    loss = (target - 1.0) * log_rest - target * log_x
    return _reduced(loss if weight is None else loss * weight, reduction)


@traces("aten::binary_cross_entropy_backward", alike=("x", "target"))
def binary_cross_entropy_backward(
    grad: Node, x: Node, target: Node, weight: Node | None = None, reduction: int = MEAN
) -> Node:
    """(x - target) / max((1 - x) x, 1e-12)

    It checks again: if the loss is not read, nothing of its formula is left.
    """
    if grad.shape not in ((), x.shape):
        return NotImplemented
    grad, x, target = promote(grad, x, target)
    x, target = fraction(x, _INPUT), fraction(target, _TARGET)
    slope = grad * (x - target) / build.maximum((1.0 - x) * x, like(1e-12, x))
    slope = slope if weight is None else slope * build.cast(weight, slope.dtype)
    return _spread(slope, x, reduction)


@traces("aten::binary_cross_entropy_with_logits")
def binary_cross_entropy_with_logits(
    x: Node,
    target: Node,
    weight: Node | None = None,
    pos_weight: Node | None = None,
    reduction: int = MEAN,
) -> Node:
    """(1 - target) x - (1 + (pos_weight - 1) target) log(sigmoid(x))"""
    dtype = promote(x, target)[0].dtype
    x, target = build.cast(x, dtype), build.cast(target, dtype)
    log_sigmoid = build.minimum(x, like(0, x)) - build.log1p(build.exp(-build.absolute(x)))
    if pos_weight is None:
        loss = (1.0 - target) * x - log_sigmoid
    else:
        log_weight = (build.cast(pos_weight, dtype) - 1.0) * target + 1.0
        loss = (1.0 - target) * x - log_weight * log_sigmoid
    return _reduced(loss if weight is None else loss * build.cast(weight, dtype), reduction)


# --- negative log likelihood ---------------------------------------------------------------------


def _class_dim(x: Node) -> int:
    """[N, C] and [N, C, H, W] hold the classes in their second dimension, [C] in its only one."""
    return 0 if len(x.shape) == 1 else 1


def _class_weights(
    x: Node, target: Node, weight: Node | None, ignore_index: int
) -> tuple[Node, Node]:
    """(targets with a class for the ignored, the weight of each target: 0 for the ignored)."""
    target = build.cast(target, torch.int64)
    ignored = build.eq(target, ignore_index)
    classes = x.shape[_class_dim(x)]
    text = f"Target {{}} is out of bounds.\nA target names one of {classes} classes, from 0."
    safe = checked(where(ignored, 0, target), classes, text)
    if weight is None:
        return safe, where(ignored, 0.0, build.full(target.shape, 1.0, x.dtype))
    chosen = build.take(build.cast(weight, x.dtype), safe, 0)
    return safe, where(ignored, 0.0, chosen)


@traces("aten::nll_loss_forward", "aten::nll_loss2d_forward")
def nll_loss_forward(
    x: Node, target: Node, weight: Node | None, reduction: int, ignore_index: int
) -> tuple[Node, Node]:
    """(loss, total weight): -x at the target class, times its weight."""
    if not x.size or not target.size:
        return NotImplemented
    (x,) = promote(x)
    dim = _class_dim(x)
    safe, weights = _class_weights(x, target, weight, ignore_index)
    chosen = build.sum_of(where(_is_class(x, safe, dim), x, 0.0), (dim,))
    loss = -chosen * weights
    # Adding a zero for the ignored keeps their -inf, which times 0 is NaN, out of the sum.
    loss = where(build.eq(build.cast(target, torch.int64), ignore_index), 0.0, loss)
    total = build.sum_of(weights)
    if reduction == NONE:
        return loss, build.full((), 0.0, x.dtype)
    loss = build.sum_of(loss)
    return (loss / total if reduction == MEAN else loss), total


@traces("aten::nll_loss_backward", "aten::nll_loss2d_backward")
def nll_loss_backward(
    grad: Node,
    x: Node,
    target: Node,
    weight: Node | None,
    reduction: int,
    ignore_index: int,
    total_weight: Node,
) -> Node:
    if not x.size or not target.size or total_weight.shape:
        return NotImplemented
    if grad.shape not in ((), target.shape):
        return NotImplemented
    grad, x = promote(grad, x)
    dim = _class_dim(x)
    safe, weights = _class_weights(x, target, weight, ignore_index)
    share = -weights * grad
    if reduction == MEAN:
        share = share / build.cast(total_weight, share.dtype)
        share = where(build.eq(weights, 0), 0.0, share)  # all ignored: 0 / 0 is no gradient
    return where(_is_class(x, safe, dim), build.unsqueeze(share, dim), 0.0)


def _is_class(x: Node, target: Node, dim: int) -> Node:
    """Return a mask of the target's class in dimension `dim` of x.

    A comparison for each class fuses with what comes before and after; a lookup would not.
    """
    behind = (1,) * (len(x.shape) - dim - 1)
    classes = build.reshape(make(ops.IOTA, size=x.shape[dim]), (x.shape[dim], *behind))
    return build.eq(classes, build.unsqueeze(target, dim))


@traces("ltc::ctc_loss")
def ctc_loss(
    log_probs: Node,
    targets: Node,
    input_lengths: Node,
    target_lengths: Node,
    longest: int,
    blank: int,
    zero_infinity: bool,
) -> tuple[Node | None, ...]:
    """torch's own kernel, which reads the lengths; `longest` is the greatest of the targets'."""
    (steps, batch, _), dtype = log_probs.shape, log_probs.dtype
    made = TensorType(dtype, (batch,)), TensorType(dtype, (batch, steps, 2 * longest + 1))
    given = log_probs, targets, input_lengths, target_lengths, blank, zero_infinity
    return extern("aten::_ctc_loss.Tensor", given, results=made)


@traces("ltc::ctc_loss_gradient")
def ctc_loss_gradient(gradient: Node, log_probs: Node, *given: Node | int) -> Node:
    arguments = gradient, log_probs, *given
    return made_by_kernel("aten::_ctc_loss_backward.Tensor", log_probs, *arguments)
