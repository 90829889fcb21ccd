"""Rules of the fused optimizers: the update of one parameter, for each; and of gradient scaling.

Those of torch follow their CPU kernels (ATen/native/cpu/Fused*Kernel.cpp); steps and corrections in
f64.  ltc::adam_ is what torch.optim.Adam does by default, in operations on lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ltc.aten.promote import compute_dtype
from ltc.aten.registry import traces
from ltc.aten.rules import pointwise
from ltc.ir import build, ops
from ltc.ir.build import where
from ltc.ir.node import Node, Operand, constant, like

Nodes = Sequence[Node]
Updated = Sequence[Node | None]  # one list that the overload writes to


def _double(number: Any) -> Node:
    if isinstance(number, Node):
        return build.cast(number, torch.float64)
    return constant(number, torch.float64)


def _unscaled(grad: Node, dtype: torch.dtype, grad_scale: Node | None) -> Node:
    grad = build.cast(grad, dtype)
    return grad if grad_scale is None else grad / build.cast(grad_scale, dtype)


def _unless(found_inf: Node | None, new: Node, old: Node) -> Node:
    """The new value, or the old one of a step in which a gradient overflowed."""
    if found_inf is None:
        return new
    skipped = build.eq(build.reshape(found_inf, ()), 1)
    return where(skipped, old, build.cast(new, old.dtype))


def _adam_step(
    p: Node,
    grad: Node,
    m: Node,
    v: Node,
    v_max: Node | None,
    step: Node,
    lr: Operand,
    beta1: Operand,
    beta2: Operand,
    weight_decay: Operand,
    eps: Operand,
    maximize: bool,
    decoupled: bool,
) -> tuple[Node, Node, Node, Node | None]:
    """(parameter, first moment, second moment, its maximum).  Source: arXiv:1412.6980, algorithm 1;
    the decoupled decay: arXiv:1711.05101, algorithm 2."""
    dtype = p.dtype
    b1, b2, rate, decay = map(_double, (beta1, beta2, lr, weight_decay))
    grad = -grad if maximize else grad
    if decoupled:
        p = p * build.cast(1.0 - rate * decay, dtype)
    else:
        grad = grad + p * build.cast(decay, dtype)
    step = _double(step)
    correction1 = 1.0 - build.power(b1, step)
    correction2 = build.sqrt(1.0 - build.power(b2, step))
    m = _lerp(m, grad, build.cast(1.0 - b1, dtype))
    v = v * build.cast(b2, dtype) + build.cast(1.0 - b2, dtype) * grad * grad
    if v_max is not None:
        v_max = build.maximum(v_max, v)
    root = build.sqrt(v if v_max is None else v_max)
    denominator = root / build.cast(correction2, dtype) + like(eps, p)
    return p - build.cast(rate / correction1, dtype) * (m / denominator), m, v, v_max


def _lerp(x: Node, end: Node, weight: Node) -> Node:
    return where(weight < 0.5, x + weight * (end - x), end - (end - x) * (1.0 - weight))


def _fused_adam(decoupled: bool) -> Callable[..., list[Updated]]:
    def rule(
        params: Nodes, grads: Nodes, exp_avgs: Nodes, exp_avg_sqs: Nodes, max_exp_avg_sqs: Nodes,
        state_steps: Nodes, *, lr: Operand, beta1: Operand, beta2: Operand, weight_decay: Operand,
        eps: Operand, amsgrad: bool, maximize: bool, grad_scale: Node | None = None,
        found_inf: Node | None = None,
    ) -> list[Updated]:  # fmt: skip
        """The lists it writes to, in the order of the overload's arguments."""
        updated = []
        for i, p in enumerate(params):
            dtype = compute_dtype(p.dtype)
            grad = _unscaled(grads[i], dtype, grad_scale)
            maxima = build.cast(max_exp_avg_sqs[i], dtype) if amsgrad else None
            old = [build.cast(x, dtype) for x in (p, exp_avgs[i], exp_avg_sqs[i])]
            new = _adam_step(
                old[0], grad, old[1], old[2], maxima, state_steps[i], lr, beta1, beta2,
                weight_decay, eps, maximize, decoupled,
            )  # fmt: skip
            kept = [_unless(found_inf, n, o) for n, o in zip(new[:3], old)]
            last = None
            if maxima is not None and new[3] is not None:
                last = _unless(found_inf, new[3], maxima)
            updated.append((kept[0], _unless(found_inf, grad, grads[i]), kept[1], kept[2], last))
        moved, unscaled, means, squares, largest = [list(column) for column in zip(*updated)]
        scaled = [] if grad_scale is None else unscaled
        return [moved, scaled, means, squares, largest if amsgrad else max_exp_avg_sqs]

    return rule


traces("aten::_fused_adam_", "aten::_fused_adam_.tensor_lr")(_fused_adam(decoupled=False))
traces("aten::_fused_adamw_", "aten::_fused_adamw_.tensor_lr")(_fused_adam(decoupled=True))


@traces("ltc::adam_")
def adam(
    params: Nodes, grads: Nodes, exp_avgs: Nodes, exp_avg_sqs: Nodes, max_exp_avg_sqs: Nodes,
    decay: Operand | None, weight: Operand, beta2: Operand, rest: Operand, step_size: Operand,
    root: Operand, eps: Operand, amsgrad: bool, maximize: bool, decoupled: bool,
) -> list[Updated]:  # fmt: skip
    """Update as device/ops/adam_overload.py does for lists, one parameter after the other."""
    updated = []
    for i, (p, grad, m, v) in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs)):
        grad = pointwise.neg(grad) if maximize else grad
        if decay is not None and decoupled:
            p = pointwise.multiply(p, decay)
        elif decay is not None:
            grad = pointwise.add(grad, p, alpha=decay)
        m = pointwise.lerp(m, grad, weight)
        v = pointwise.addcmul(pointwise.multiply(v, beta2), grad, grad, rest)
        largest = pointwise.maximum(max_exp_avg_sqs[i], v) if amsgrad else None
        divisor = pointwise.divide(build.sqrt(v if largest is None else largest), root)
        divisor = pointwise.add(divisor, eps)
        updated.append((pointwise.addcdiv(p, m, divisor, step_size), m, v, largest))
    moved, means, squares, maxima = [list(column) for column in zip(*updated)]
    return [moved, means, squares, maxima if amsgrad else max_exp_avg_sqs]


@traces("aten::_fused_sgd_", "aten::_fused_sgd_.tensor_lr", static={"momentum": (0,)})
def fused_sgd(
    params: Nodes, grads: Nodes, momentum_buffers: Nodes, *, weight_decay: Operand,
    momentum: Operand, lr: Operand, dampening: Operand, nesterov: bool, maximize: bool,
    is_first_step: bool, grad_scale: Node | None = None, found_inf: Node | None = None,
) -> list[Updated]:  # fmt: skip
    """buffer = momentum * buffer + (1 - dampening) * grad; p -= lr * buffer"""
    updated = []
    for i, p in enumerate(params):
        dtype = compute_dtype(p.dtype)
        old, raw = build.cast(p, dtype), _unscaled(grads[i], dtype, grad_scale)
        grad = (-raw if maximize else raw) + old * build.cast(_double(weight_decay), dtype)
        buffer = momentum_buffers[i] if momentum_buffers else None
        if buffer is not None:
            before = build.cast(buffer, dtype)
            share = build.cast(1.0 - _double(dampening), dtype)
            m = build.cast(_double(momentum), dtype)
            after = grad if is_first_step else m * before + share * grad
            grad = grad + m * after if nesterov else after
            buffer = _unless(found_inf, after, before)
        new = _unless(found_inf, old - build.cast(_double(lr), dtype) * grad, old)
        updated.append((new, _unless(found_inf, raw, grads[i]), buffer))
    moved, unscaled, buffers = ([*column] for column in zip(*updated))
    return [moved, [] if grad_scale is None else unscaled, buffers if momentum_buffers else []]


@traces("aten::_fused_adagrad_")
def fused_adagrad(
    params: Nodes, grads: Nodes, state_sums: Nodes, state_steps: Nodes, *, lr: Operand,
    lr_decay: Operand, weight_decay: Operand, eps: Operand, maximize: bool,
    grad_scale: Node | None = None, found_inf: Node | None = None,
) -> list[Updated]:  # fmt: skip
    """sum += grad ** 2; p -= lr / (1 + (step - 1) * lr_decay) * grad / (sqrt(sum) + eps)"""
    updated = []
    for i, p in enumerate(params):
        dtype = compute_dtype(p.dtype)
        old, before = build.cast(p, dtype), build.cast(state_sums[i], dtype)
        raw = _unscaled(grads[i], dtype, grad_scale)
        grad = (-raw if maximize else raw) + old * build.cast(_double(weight_decay), dtype)
        rate = _double(lr) / (1.0 + (_double(state_steps[i]) - 1.0) * _double(lr_decay))
        total = before + grad * grad
        step = build.cast(rate, dtype) * grad / (build.sqrt(total) + like(eps, grad))
        kept = _unless(found_inf, old - step, old), _unless(found_inf, total, before)
        updated.append((kept[0], _unless(found_inf, raw, grads[i]), kept[1], state_steps[i]))
    moved, unscaled, totals, steps = ([*column] for column in zip(*updated))
    return [moved, [] if grad_scale is None else unscaled, totals, steps]


# --- what torch.amp.GradScaler calls before an update, and after: AmpGradScalerKernels.cpp --------


def _is_finite(x: Node) -> Node:
    return build.absolute(x) < math.inf


@traces("aten::_amp_foreach_non_finite_check_and_unscale_")
def unscale(
    scaled_grads: Sequence[Node], found_inf: Node, inv_scale: Node
) -> tuple[list[Node], Node]:
    """The gradients times the inverse scale, and 1 where one of them was not finite."""
    inverse = build.reshape(inv_scale, ())
    grads, found = [], build.reshape(found_inf, ())
    for grad in scaled_grads:
        dtype = compute_dtype(grad.dtype)
        product = build.cast(grad, dtype) * build.cast(inverse, dtype)
        grads.append(build.cast(product, grad.dtype))
        if grad.size:
            wrong = build.reduce(ops.ANY, ~_is_finite(grad))
            found = where(wrong, 1.0, found)
    return grads, build.reshape(found, found_inf.shape)


@traces("aten::_amp_update_scale_")
def update_scale(
    scale: Node,
    growth_tracker: Node,
    found_inf: Node,
    scale_growth_factor: Operand,
    scale_backoff_factor: Operand,
    growth_interval: int,
) -> tuple[Node, Node]:
    """The next scale, and for how many steps in succession all gradients were finite."""
    has_found = build.ne(build.reshape(found_inf, ()), 0)
    old, finite = build.reshape(scale, ()), build.reshape(growth_tracker, ()) + 1
    wide = _double(old)
    smaller = wide * _double(scale_backoff_factor)
    larger = build.cast(wide * _double(scale_growth_factor), torch.float32)
    grows = build.eq(finite, growth_interval)
    unchanged = where(grows & _is_finite(larger), larger, old)
    count = where(has_found | grows, 0, finite)
    new = where(has_found, build.cast(smaller, torch.float32), unchanged)
    return build.reshape(new, scale.shape), build.reshape(count, growth_tracker.shape)
