"""The loss over sequences that are not aligned (CTC), recorded with the lengths as tensors.

torch's call has them as lists of numbers: each batch would be another program, and how much the
call gives depends on them.  Of the lengths only the greatest is part of what is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ltc.device.recording.fast_path import lazily_built
from ltc.device.recording.tensors import is_lazy
from ltc.native.core import KERNEL_KEY

_GIVEN = "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths"
SCHEMAS = {
    "ctc_loss": f"({_GIVEN}, int longest, int blank, bool zero_infinity) -> (Tensor, Tensor)",
    "ctc_loss_gradient": f"(Tensor gradient, {_GIVEN}, Tensor losses, Tensor log_alpha, int blank,"
    " bool zero_infinity) -> Tensor",
}
# overload -> the kernel that records it
_RECORDED = {name: lazily_built(f"ltc::{name}") for name in SCHEMAS}
_FLOATS = frozenset({torch.float32, torch.float64})
_INTEGERS = frozenset({torch.int32, torch.int64})
_of_lists = lazily_built("aten::_ctc_loss")
_gradient_of_lists = lazily_built("aten::_ctc_loss_backward")


def define(library: torch.library.Library) -> None:
    """Define the overloads, each with a kernel that records it."""
    for name, arguments in SCHEMAS.items():
        library.define(name + arguments)
        library.impl(name, _RECORDED[name], KERNEL_KEY)
    library.impl("ctc_loss", _types, "Meta")
    library.impl("ctc_loss", _computed, "CPU")
    library.impl("ctc_loss_gradient", _types_of_gradient, "Meta")
    library.impl("ctc_loss_gradient", torch.ops.aten._ctc_loss_backward.Tensor, "CPU")


def _types(log_probs: torch.Tensor, targets: torch.Tensor, *rest: Any):
    """The loss of each sequence, and the logarithms of what leads to each place of a target."""
    steps, batch, _ = log_probs.shape
    _, _, longest, *_ = rest
    return log_probs.new_empty(batch), log_probs.new_empty((batch, steps, 2 * longest + 1))


def _types_of_gradient(gradient: torch.Tensor, log_probs: torch.Tensor, *rest: Any):
    return torch.empty_like(log_probs)


def _computed(*given: Any):
    *operands, _, blank, zero_infinity = given
    return torch.ops.aten._ctc_loss.Tensor(*operands, blank, zero_infinity)


def loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    blank: int = 0,
    zero_infinity: bool = False,
):
    """aten::_ctc_loss.  Source: Graves et al., ICML 2006."""
    if not _are_right(log_probs, targets, input_lengths, target_lengths, blank):
        return _of_lists(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
    there = [_moved(lengths, log_probs) for lengths in (input_lengths, target_lengths)]
    longest = max(target_lengths)
    return _RECORDED["ctc_loss"](log_probs, targets, *there, longest, blank, zero_infinity)


def gradient(
    grad: torch.Tensor,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    losses: torch.Tensor,
    log_alpha: torch.Tensor,
    blank: int,
    zero_infinity: bool = False,
):
    """aten::_ctc_loss_backward."""
    given = log_probs, targets, input_lengths, target_lengths
    rest = losses, log_alpha, blank, zero_infinity
    if not _are_right(*given, blank) or not (is_lazy(grad) and is_lazy(log_alpha)):
        return _gradient_of_lists(grad, *given, *rest)
    there = [_moved(lengths, log_probs) for lengths in (input_lengths, target_lengths)]
    return _RECORDED["ctc_loss_gradient"](grad, log_probs, targets, *there, *rest)


def _moved(lengths: Sequence[int], beside: torch.Tensor) -> torch.Tensor:
    return torch.tensor(lengths, dtype=torch.int64, device="cpu").to(beside.device)


def _are_right(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    blank: int,
) -> bool:
    """Return True if torch's kernel certainly takes these; its own refusals it has to raise itself."""
    if not (is_lazy(log_probs) and is_lazy(targets)) or log_probs.dim() != 3:
        return False
    steps, batch, labels = log_probs.shape
    if log_probs.dtype not in _FLOATS or targets.dtype not in _INTEGERS or not log_probs.numel():
        return False
    if len(input_lengths) != batch or len(target_lengths) != batch or not 0 <= blank < labels:
        return False
    if not (min(input_lengths) > 0 and max(input_lengths) <= steps and min(target_lengths) >= 0):
        return False
    if targets.dim() == 1:
        return targets.numel() == sum(target_lengths)
    return targets.dim() == 2 and len(targets) == batch and max(target_lengths) <= targets.shape[1]


KERNELS: dict[str, Callable[..., Any]] = {"_ctc_loss": loss, "_ctc_loss_backward": gradient}
