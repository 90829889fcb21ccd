"""Distributed checkpoints (`torch.distributed.checkpoint`) are written from memory of the host.

The planner gives what is written from there. Beside a GPU torch's writer fetches what lies on that, and
takes no tensor of another device.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ltc.device.recording.tensors import is_lazy
from ltc.integrations.around import around


def install(default_planner: ModuleType) -> None:
    """Put `_on_the_host` around what the default planner makes of each object."""
    around(default_planner.DefaultSavePlanner, "transform_object", _on_the_host)


def _on_the_host(original: Callable[..., Any], *arguments: Any) -> Any:
    made = original(*arguments)
    return made.detach().cpu() if is_lazy(made) else made
