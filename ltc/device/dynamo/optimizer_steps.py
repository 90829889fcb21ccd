"""torch.compile leaves the step of an optimizer on ltc to Python, where it is recorded as it is.

Traced, it would be another formula: steps are counted by tensors, of which a bias correction for each
parameter is computed, and a new learning rate is traced anew.  As Python it is recorded into the same
program as without torch.compile, and takes no longer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.optim import Optimizer

from ltc.device.recording.tensors import is_lazy
from ltc.support.torch_private import left_to_python_now, optimizer_step_code, traced_frames


def install() -> None:
    """Once Dynamo is imported, once per process."""
    asked = traced_frames()
    asked.replace(_but_no_step_on_ltc(asked.current))


def _but_no_step_on_ltc(original: Callable[..., Any]) -> Callable[..., Any]:
    step = optimizer_step_code()

    @functools.wraps(original)
    def traced(self: Any, frame: FrameType, *rest: Any) -> Any:
        if frame.f_code is step and _is_on_ltc(*frame.f_locals["args"][:1]):
            return left_to_python_now()
        return original(self, frame, *rest)

    return traced


def _is_on_ltc(optimizer: Optimizer) -> bool:
    return any(is_lazy(p) for group in optimizer.param_groups for p in group["params"])
