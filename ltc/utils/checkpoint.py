"""Checkpoints of a training: everything it needs to go on as if it had never stopped."""

from __future__ import annotations

import functools
import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ltc.distributed import world
from ltc.utils import serialization
from ltc.utils.closures import AsyncClosureHandler
from ltc.utils.resumable import random_state, restore_random_state
from ltc.utils.safetensors_format import DamagedFile
from ltc.utils.snapshot import frozen

_FILE = re.compile(r"step-(\d{8,})\.safetensors")


@dataclass(frozen=True)
class Restored:
    """What a checkpoint says of the training it was taken from."""

    step: int
    metric: float | None
    extra: Any


class CheckpointManager:
    """The checkpoints of one training, in a folder of their own.

    folder       made where it is missing
    keep_last    how many of the latest to keep
    keep_best    how many more, those of the best metric
    higher_is_better  what "best" means
    parts        what has state_dict() and load_state_dict(): model=, optimizer=, scheduler=,
                 loader= (see Resumable), scaler=, under names of your own

    The random state of Python, NumPy, torch and every device is saved with them. Only replica 0
    writes, and every replica restores.
    """

    def __init__(
        self, folder: str | os.PathLike, keep_last: int = 3, keep_best: int = 0,
        higher_is_better: bool = False, **parts: Any,
    ):
        if keep_last < 1 or keep_best < 0:
            raise ValueError(
                f"keep_last={keep_last}, keep_best={keep_best}: at least the latest is kept."
            )
        for name, part in parts.items():
            if not hasattr(part, "state_dict") or not hasattr(part, "load_state_dict"):
                raise TypeError(
                    f"{name}= is a {type(part).__name__}, which has no state_dict() and "
                    f"load_state_dict(). Pass it to save(extra=...) instead."
                )
        self._folder = Path(folder)
        self._keep_last, self._keep_best, self._higher = keep_last, keep_best, higher_is_better
        self._parts = parts
        self._metrics: dict[int, float | None] = {}
        self._writer = AsyncClosureHandler(max_queue_size=1)

    def save(
        self, step: int, metric: float | None = None, extra: Any = None, blocking: bool = True
    ) -> None:
        """Save everything as the checkpoint of `step`, then remove those not to be kept.

        metric    by which the best are chosen
        extra     whatever else is to come back from `restore_latest`; see xser.save for its kinds
        blocking  False returns as soon as today's values are held fast, and writes behind the
                  training; an error of that is raised by the next `save` or `wait`

        Waits for an earlier save that is still writing. No replica waits for another.
        """
        self.wait()
        plan = serialization.planned({
            "step": step,
            "metric": None if metric is None else float(metric),
            "extra": extra,
            "random": random_state(),
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
        })
        if not world.is_master(local=False):
            return
        if blocking:
            self._write(plan, step, metric)
        else:
            self._writer.run(functools.partial(self._write, frozen(plan), step, metric))

    def wait(self) -> None:
        """Wait until everything is on disk; raises the error of a save that was not blocking."""
        self._writer.wait()

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, in order."""
        if not self._folder.is_dir():
            return []
        matches = (_FILE.fullmatch(file.name) for file in self._folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def restore_latest(self) -> Restored | None:
        """Go back to the latest checkpoint that is whole; None where there is none.

        One that can not be read is left out with a warning that says why. Nothing is changed
        before a checkpoint was read and checked to its end.
        """
        self.wait()
        for step in reversed(self.steps()):
            try:
                content = serialization.load(self._path(step))
            except (DamagedFile, OSError) as error:
                warnings.warn(f"The checkpoint of step {step} is left out: {error}", stacklevel=2)
            else:
                return self._apply(content)
        return None

    def restore(self, step: int) -> Restored:
        """Go back to the checkpoint of one step; raises where it is missing or damaged."""
        self.wait()
        return self._apply(serialization.load(self._path(step)))

    def _apply(self, content: dict[str, Any]) -> Restored:
        missing = self._parts.keys() - content["parts"].keys()
        if missing:
            raise KeyError(
                f"The checkpoint of step {content['step']} has no {', '.join(sorted(missing))}: it "
                f"was saved with {', '.join(content['parts'])}."
            )
        for name, part in self._parts.items():
            part.load_state_dict(content["parts"][name])
        restore_random_state(content["random"])
        return Restored(content["step"], content["metric"], content["extra"])

    # --- files

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}.safetensors"

    def _write(self, plan: serialization.Plan, step: int, metric: float | None) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        serialization.write(plan, self._path(step))
        self._metrics[step] = metric
        for old in set(self.steps()) - self._kept():
            self._path(old).unlink(missing_ok=True)

    def _kept(self) -> set[int]:
        steps = self.steps()
        kept = set(steps[-self._keep_last :])
        rated = [step for step in steps if self._keep_best and self._metric(step) is not None]
        rated.sort(key=self._metric, reverse=self._higher)
        return kept | set(rated[: self._keep_best])

    def _metric(self, step: int) -> float | None:
        """The metric of a checkpoint, asked of the file where another process wrote it."""
        if step not in self._metrics:
            try:
                self._metrics[step] = serialization.load(self._path(step), keys=["metric"])["metric"]
            except (DamagedFile, OSError):
                self._metrics[step] = None
        return self._metrics[step]
