"""transformers' Trainer on ltc: a step without a read, and random numbers in its checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ltc.checkpointing import checked_archive
from ltc.integrations.around import around
from ltc.support.torch_private import DEVICE_TYPE


def install(trainer_module: ModuleType) -> None:
    """Put what is below around the methods of `transformers.Trainer`."""
    trainer = trainer_module.Trainer
    around(trainer, "_inner_training_loop", _loop)
    around(trainer, "training_step", _step)
    around(trainer, "_save_rng_state", _save_rng_state)
    around(trainer, "_load_rng_state", _load_rng_state)


def _is_ours(trainer: Any) -> bool:
    return trainer.args.device.type == DEVICE_TYPE


def _loop(original: Callable, trainer: Any, *args, **kwargs) -> Any:
    """Training, in which Trainer does not look at each loss: `_step` does, without a read."""
    trainer.filters_losses = _is_ours(trainer) and trainer.args.logging_nan_inf_filter
    if not trainer.filters_losses:
        return original(trainer, *args, **kwargs)
    trainer.args.logging_nan_inf_filter = False
    try:
        return original(trainer, *args, **kwargs)
    finally:
        trainer.args.logging_nan_inf_filter = True


def _step(original: Callable, trainer: Any, *args, **kwargs) -> torch.Tensor:
    """The loss of a step; what is not finite is logged as the mean of the losses before it.

    That is what `logging_nan_inf_filter` means. Trainer asks `if isnan(loss) or isinf(loss)`, which
    would cut each step in two.
    """
    loss = original(trainer, *args, **kwargs)
    if not getattr(trainer, "filters_losses", False):
        return loss
    steps = 1 + trainer.state.global_step - trainer._globalstep_last_logged
    return torch.where(loss.isfinite(), loss, trainer._tr_loss / steps)


def _save_rng_state(original: Callable, trainer: Any, output_dir: str) -> None:
    original(trainer, output_dir)
    if _is_ours(trainer):
        states = torch.get_device_module(DEVICE_TYPE).get_rng_state_all()
        torch.save(states, _file(trainer, output_dir))


def _load_rng_state(original: Callable, trainer: Any, checkpoint: str | None) -> None:
    original(trainer, checkpoint)
    if checkpoint is not None and (file := _file(trainer, checkpoint)).exists():
        torch.get_device_module(DEVICE_TYPE).set_rng_state_all(checked_archive.load(file))


def _file(trainer: Any, folder: str) -> Path:
    """Return where the random numbers of this process lie, beside Trainer's own file of them."""
    return Path(folder) / f"rng_state_{DEVICE_TYPE}_{trainer.args.process_index}.pth"
