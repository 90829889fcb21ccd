"""`accelerate launch --num_processes 2`: as many processes as asked for, also without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ltc.integrations.around import around
from ltc.integrations.asked_for import asked_for


def install(launch: ModuleType) -> None:
    """Put `_validated` around what `accelerate.commands.launch` makes of its arguments."""
    around(launch, "_validate_launch_command", _validated)


def _validated(original: Callable, options: Any) -> Any:
    """The options; several processes are started by torchrun, as accelerate does it for GPUs."""
    if asked_for() and (options.num_processes or 0) > 1 and not (options.cpu or options.use_fsdp):
        options.multi_gpu = True
    return original(options)
