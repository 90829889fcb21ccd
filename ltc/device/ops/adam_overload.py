"""The overload of namespace ltc that records a step of Adam on lists of parameters.

Its rule is in aten/nn/optimizer.py; this formula, in torch's operations on lists, is for who calls
it without a recorder.
"""

from __future__ import annotations

from typing import Any

import torch

from ltc.device.recording.fast_path import lazily_built

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
    library.impl("adam_", _nothing_made, "Meta")
    library.impl("adam_", _adam, "CPU")
    library.impl("adam_", recorded, "PrivateUse1")


def _nothing_made(*args: Any) -> None:
    """It makes no tensor."""


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
    """A step of Adam, of AdamW where the decay is decoupled.

    decay      what parameters are multiplied by if it is decoupled; else how much of them is added
               to the gradients; None for neither
    weight     how far the first moments go towards the gradients: 1 - beta1
    rest       the share of the squared gradients in the second moments: 1 - beta2
    step_size  by which the quotients are added to the parameters: negative, with its correction
    root       square root of the second moments' correction
    Source: arXiv:1412.6980, algorithm 1; arXiv:1711.05101, algorithm 2.
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
