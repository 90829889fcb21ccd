"""The overload of namespace ltc that records a step of Adam on lists of parameters.

Its rule is in aten/nn/optimizer.py; this formula, in torch's operations on lists, is for calls
without a recorder.
"""

from __future__ import annotations

from typing import Any

import torch

from ltc.device.recording.fast_path import lazily_built
from ltc.native.core import KERNEL_KEY

Tensors = list[torch.Tensor]

SCHEMA = (
    "adam_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs,"
    " Tensor(d!)[] max_exp_avg_sqs, float? decay, float weight, float beta2, float rest,"
    " float step_size, float root, float eps, bool amsgrad, bool maximize, bool decoupled) -> ()"
)

recorded = lazily_built("ltc::adam_")  # the kernel that records the overload


def define(library: torch.library.Library) -> None:
    """Define the overload, with a kernel that records it."""
    library.define(SCHEMA)
    library.impl("adam_", _refused_where_shapes_differ, "Meta")
    library.impl("adam_", _adam, "CPU")
    library.impl("adam_", recorded, KERNEL_KEY)


def _refused_where_shapes_differ(params: Tensors, *others: Any) -> None:
    """Make no tensor, and raise torch's own error if a list has another shape."""
    shapes = [tensor.shape for tensor in params]
    lists = [one for one in others if isinstance(one, list) and one]
    if any([tensor.shape for tensor in one] != shapes for one in lists):
        _adam(params, *others)


def _adam(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors,
    decay: float | None,
    weight: float,
    beta2: float,
    rest: float,
    step_size: float,
    root: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    decoupled: bool,
) -> None:
    """Make a step of Adam, or of AdamW if the decay is decoupled.

    Source: arXiv:1412.6980, algorithm 1; arXiv:1711.05101, algorithm 2.

    Args:
        decay: The factor of the parameters if it is decoupled; else the share of them that is added
            to the gradients; None for neither.
        weight: The share of the gradients in the first moments: 1 - beta1.
        rest: The share of the squared gradients in the second moments: 1 - beta2.
        step_size: By which the quotients are added to the parameters: negative, with its
            correction.
        root: Square root of the second moments' correction.
    """
    # Overloads by name: to find one that does not come first, torch writes its operands down.
    aten = torch.ops.aten
    if maximize:
        grads = aten._foreach_neg.default(grads)
    if decay is not None and decoupled:
        aten._foreach_mul_.Scalar(params, decay)
    elif decay is not None:
        grads = aten._foreach_add.List(grads, params, alpha=decay)
    aten._foreach_lerp_.Scalar(exp_avgs, grads, weight)
    aten._foreach_mul_.Scalar(exp_avg_sqs, beta2)
    aten._foreach_addcmul_.Scalar(exp_avg_sqs, grads, grads, rest)
    if amsgrad:
        aten._foreach_maximum_.List(max_exp_avg_sqs, exp_avg_sqs)
    divisors = aten._foreach_sqrt.default(max_exp_avg_sqs if amsgrad else exp_avg_sqs)
    aten._foreach_div_.Scalar(divisors, root)
    aten._foreach_add_.Scalar(divisors, eps)
    aten._foreach_addcdiv_.Scalar(params, exp_avgs, divisors, step_size)
