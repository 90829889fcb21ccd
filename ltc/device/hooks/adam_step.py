"""A step of torch.optim.Adam and AdamW by default: one recorded call in place of eight on lists.

torch's own way reads each parameter's count of steps twice, and gives each parameter numbers of its
own.  Where all have made as many steps, these are the same: they are computed once, as torch does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

from ltc.backends.plain_dispatch import is_plain_now
from ltc.device.ops import adam_overload
from ltc.device.recording.tensors import is_lazy
from ltc.native.core import CORE
from ltc.support.torch_private import ADAM_ON_LISTS, is_profiled
from ltc.tracebacks import entrance

Tensors = list[torch.Tensor]
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_TYPES = frozenset({torch.float32, torch.float64})  # of narrow ones torch's way rounds in between
_dtype, _is_cpu = attrgetter("dtype"), attrgetter("is_cpu")
_index = torch.Tensor.get_device  # of a device: quicker than the device


def install() -> None:
    """Once per process."""
    ADAM_ON_LISTS.replace(_or_one_call(ADAM_ON_LISTS.current))


def _or_one_call(original: Callable[..., None]) -> Callable[..., None]:
    @entrance
    @functools.wraps(original)
    def step(
        params: Tensors,
        grads: Tensors,
        exp_avgs: Tensors,
        exp_avg_sqs: Tensors,
        max_exp_avg_sqs: Tensors,
        state_steps: Tensors,
        grad_scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
        **options: Any,
    ) -> None:
        lists = (params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs)
        scaled = grad_scale is not None or found_inf is not None
        if not scaled and _are_plain(options) and _are_alike(lists, options["amsgrad"]):
            count = _common_count(state_steps)
            if count is not None:
                one = torch.tensor(1.0, device="cpu")
                torch.ops.aten._foreach_add_.Tensor(state_steps, one, alpha=1.0)
                _overload()(*lists, *_numbers(count, **options))
                return
        original(*lists, state_steps, grad_scale, found_inf, **options)

    return step


def _overload() -> Callable[..., Any]:
    """ltc::adam_, or its kernel where nothing else sees the call: torch would hand on each tensor."""
    seen = torch.is_grad_enabled() or is_profiled() or CORE is not None
    return torch.ops.ltc.adam_ if seen else adam_overload.recorded


def _are_plain(options: dict[str, Any]) -> bool:
    """Return True if the options are plain numbers, and no mode is active that sees other calls."""
    numbers = (options["lr"], options["beta1"], options["beta2"])
    return (
        all(isinstance(number, (int, float)) for number in numbers)
        and not (options["capturable"] or options["differentiable"] or options["has_complex"])
        and not torch.compiler.is_compiling()
        and is_plain_now()
    )


def _are_alike(lists: tuple[Tensors, ...], has_maxima: bool) -> bool:
    """Return True if all are tensors of one ltc device, of one type, and no subclass of
    torch.Tensor.
    """
    params, grads, averages, squares, maxima = lists
    used = [*params, *grads, *averages, *squares, *(maxima if has_maxima else ())]
    if not params or not _PLAIN.issuperset(map(type, used)) or not is_lazy(params[0]):
        return False
    dtypes = set(map(_dtype, used))
    return len(set(map(_index, params))) == 1 and len(dtypes) == 1 and dtypes <= _TYPES


def _common_count(steps: Tensors) -> float | None:
    """After this step; None where not all on the CPU, or some have made more than others."""
    if not all(map(_is_cpu, steps)) or set(map(_dtype, steps)) != {torch.float32}:
        return None
    before = [step.item() for step in steps]
    return before[0] + 1.0 if before.count(before[0]) == len(before) else None


def _numbers(
    count: float,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    decoupled_weight_decay: bool,
    **others: Any,
) -> tuple[Any, ...]:
    """The overload's arguments behind its lists: see ops/adam_overload.py."""
    correction1, correction2 = 1 - beta1**count, 1 - beta2**count
    decay = None
    if weight_decay != 0:
        decay = 1 - lr * weight_decay if decoupled_weight_decay else weight_decay
    step_size, root = (lr / correction1) * -1, correction2**0.5
    sizes = (decay, 1 - beta1, beta2, 1 - beta2, step_size, root, eps)
    return *map(_as_float, sizes), bool(amsgrad), bool(maximize), bool(decoupled_weight_decay)


def _as_float(number: float | None) -> float | None:
    """Return the number as torch hands it on: floats of other classes become plain ones.

    NumPy's float is of another class, and so is one that replay traces. For replay, `float` would
    be a read of its value, on which what follows depends.
    """
    if isinstance(number, float):
        return float.__pos__(number)
    return None if number is None else float(number)
