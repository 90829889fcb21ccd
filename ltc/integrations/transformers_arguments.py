"""`TrainingArguments(bf16=True)`: transformers asks for a GPU that can, or for the CPU by name."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from ltc.integrations.around import around
from ltc.integrations.asked_for import asked_for


def install(training_args: ModuleType) -> None:
    """Answer for this device where `transformers.training_args` asks about bfloat16."""
    around(training_args, "is_torch_bf16_gpu_available", _has_bfloat16)


def _has_bfloat16(original: Callable[[], bool]) -> bool:
    return asked_for() or original()
