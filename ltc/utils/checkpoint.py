"""Checkpoints of a training: everything it needs to go on as if it had never stopped."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import operator
import os
import re
import uuid
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from ltc.checkpointing import manifest
from ltc.checkpointing.manifest import is_complete
from ltc.checkpointing.resumable import random_state, restore_random_state
from ltc.checkpointing.safetensors_format import DamagedFile
from ltc.device.recording.sync import ready_buffer
from ltc.device.recording.tensors import host_tensor, is_lazy, state_of, wrap_buffer
from ltc.device.storage_sharing import StoredBytes
from ltc.device.user_line import warn_user
from ltc.distributed import world
from ltc.errors import NowhereToMeet
from ltc.tracebacks import entrance
from ltc.training_loop.closures import AsyncClosureHandler
from ltc.utils import serialization
from ltc.utils.serialization import SavePlan

_NAME = re.compile(r"step-(\d{8,})(\.safetensors)?")
_RESTORING = "ltc.utils.checkpoint.restore_latest"


@dataclass(frozen=True)
class Restored:
    """The state of training that a checkpoint records.

    Attributes:
        step, metric, extra: The arguments of `CheckpointManager.save`.

    Example:
        >>> from ltc.utils.checkpoint import Restored
        >>> Restored(step=7, metric=0.5, extra=None).step
        7
    """

    step: int
    metric: float | None
    extra: Any


class CheckpointManager:
    """The checkpoints of one training, in a folder of their own.

    The random state of Python, NumPy, torch and every device is saved with them: replica 0's, or, if
    `sharded`, every replica's. A replica without a saved random state keeps its present one.
    Everything else must be equal on all replicas. Every replica restores, in any number of them.

    Its methods raise OSError where the folder cannot be written or read, DamagedFile where a file
    was not written by a save.

    Args:
        folder: Made where it is missing.
        keep_last: Number of the latest checkpoints to keep.
        keep_best: Number of checkpoints with the best metric to keep besides.
        higher_is_better: True if a larger metric is the better one.
        sharded: Every replica writes a share of the tensors; otherwise replica 0 writes all.
        parts: Objects with state_dict() and load_state_dict(): model=, optimizer=, scheduler=,
            loader= (see Resumable), scaler=, under names of your own.

    Raises:
        ValueError: If not even the latest would be kept.
        TypeError: For a part without state_dict() and load_state_dict().

    Example:
        >>> from ltc.utils.checkpoint import CheckpointManager
        >>> model = torch.nn.Linear(2, 1).to("ltc")
        >>> manager = CheckpointManager("checkpoints", keep_last=2, model=model)
        >>> manager.save(step=10, metric=0.5)
        >>> manager.restore_latest()
        Restored(step=10, metric=0.5, extra=None)
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        keep_last: int = 3,
        keep_best: int = 0,
        higher_is_better: bool = False,
        sharded: bool = False,
        **parts: Any,
    ):
        if keep_last < 1 or keep_best < 0:
            raise ValueError(
                f"keep_last={keep_last}, keep_best={keep_best}: keep_last must be at least 1, and "
                f"keep_best at least 0."
            )
        for name, part in parts.items():
            if not hasattr(part, "state_dict") or not hasattr(part, "load_state_dict"):
                raise TypeError(
                    f"{name}= is a {type(part).__name__}, which has no state_dict() and "
                    f"load_state_dict(). Pass it to save(extra=...) instead."
                )
        self._folder = Path(folder)
        self._keep_last, self._keep_best, self._higher = keep_last, keep_best, higher_is_better
        self._parts, self._sharded = parts, sharded
        self._metrics: dict[int, float | None] = {}
        self._agreed: str | None = None  # the life of what is saved after `restore_latest`
        self._numbers: dict[int, int] = {}  # of the last save of each step in this life
        self._begun: int | None = None  # the step whose save has not ended, or has failed
        self._writer = AsyncClosureHandler(max_queue_size=1)

    @entrance
    def save(
        self,
        step: int,
        metric: float | None = None,
        extra: Any = None,
        blocking: bool = True,
        barrier: bool = False,
    ) -> None:
        """Save everything as the checkpoint of `step`, then remove those not to be kept.

        Waits for an earlier save that is still writing. Without `barrier` no replica waits for
        another.

        Args:
            metric: By which the best are chosen; NaN is none.
            extra: Whatever else is to come back from `restore_latest`; see xser.save for its kinds.
            blocking: False returns as soon as today's values are held fast, and writes behind the
                training; an error of that is raised by the next `save` or `wait`.
            barrier: Return only when every replica has saved (or, with blocking=False, has begun
                to); every replica must call it then.

        Raises:
            OSError: If the files cannot be written.
            TypeError: For an `extra` that cannot be saved or a `step` that is no integer.
            ValueError: For one below 0.
        """
        step = _number_of_step(step)
        self.wait()
        self._save(step, None if metric is None else float(metric), extra, blocking)
        if barrier:
            world.meet("ltc.utils.checkpoint.save")

    def _save(self, step: int, metric: float | None, extra: Any, blocking: bool) -> None:
        ordinal, count = world.ordinal(), world.world_size()
        plan = serialization.planned(
            {
                "step": step,
                "metric": metric,
                "extra": extra,
                "random": None if self._sharded else random_state(),
                "parts": {name: part.state_dict() for name, part in self._parts.items()},
            }
        )
        if self._sharded:
            own = serialization.planned({"random": random_state()})
            life = world.name_of_run() if self._agreed is None else self._agreed
            write = functools.partial(self._write_share, step, metric, ordinal, count, life)
            plans = [plan.part(ordinal, count), own]
        elif ordinal == 0:
            write, plans = functools.partial(self._write, step, metric), [plan]
        else:
            return
        if blocking:
            write(*plans)
        else:
            self._writer.run(functools.partial(write, *map(_frozen, plans)))

    @entrance
    def wait(self) -> None:
        """Wait until everything is on disk; raises the error of a save that was not blocking."""
        self._writer.wait()

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, in order."""
        return sorted({step for step, path in self._found() if path.is_file() or is_complete(path)})

    @entrance
    def restore_latest(self) -> Restored | None:
        """Go back to the latest checkpoint that is whole; None where there is none.

        One that can not be read is left out with a warning that says why. Nothing is changed before
        it was read and checked to its end.

        Where `sharded`, every replica calls it, and waits for the others: all go back to the same
        step, after the saves that any of them has begun, and it counts only where all could read
        it.

        Raises:
            PeerFailure: If a replica does not come.
        """
        self.wait()
        self._begin_life()
        left_out: set[int] = set()
        while (step := self._latest_but(left_out)) is not None:
            read, problem = None, ""
            try:
                read = self._read(step)
            except (DamagedFile, OSError) as error:
                problem = str(error)
            problem = _problem_of_any(self._told(f"read {step}", problem.encode()))
            if read is not None and not problem:
                return self._apply(*read)
            warn_user(f"The checkpoint of step {step} is skipped: {problem}")
            left_out.add(step)
        return None

    def _begin_life(self) -> None:
        """Agree with all replicas, after their earlier saves have ended, on an id of this run's
        saves.
        """
        agreed = self._told("begin", uuid.uuid4().hex[:12].encode())
        self._agreed = agreed[0].decode() if len(agreed) > 1 else None
        self._numbers, self._begun = {}, None

    def _latest_but(self, left_out: set[int]) -> int | None:
        """Return the latest step outside `left_out`, as replica 0 finds it."""
        latest = max(set(self.steps()) - left_out, default=None)
        said: int | None = json.loads(self._told("choose", json.dumps(latest).encode())[0])
        return said

    def _told(self, what: str, mine: bytes) -> list[bytes]:
        """Return the message of every replica, if each has a share and they can meet; else only
        this one's.
        """
        if self._sharded:
            with contextlib.suppress(NowhereToMeet):  # of many, this process is told to do its part
                return world.meet(f"{_RESTORING}: {what}", mine)
        return [mine]

    @entrance
    def restore(self, step: int) -> Restored:
        """Go back to the checkpoint of one step.

        Raises:
            FileNotFoundError: If there is none.
            DamagedFile: If it is not what a save wrote.
            KeyError: If it lacks a part.
            TypeError, ValueError: For a `step` that is no count, as in `save`.
        """
        step = _number_of_step(step)
        self.wait()
        return self._apply(*self._read(step))

    def _read(self, step: int) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Return a checkpoint's content, and the random state that this replica saved, if there is
        one.
        """
        path = self._existing(step)
        content = serialization.load(path)
        return content, _random_state_of(world.ordinal(), content, path)

    def _apply(self, content: dict[str, Any], random: dict[str, Any] | None) -> Restored:
        missing = self._parts.keys() - content["parts"].keys()
        if missing:
            raise KeyError(
                f"The checkpoint of step {content['step']} has no {', '.join(sorted(missing))}: it "
                f"was saved with {', '.join(content['parts'])}."
            )
        for name, part in self._parts.items():
            part.load_state_dict(content["parts"][name])
        if random is not None:
            restore_random_state(random)
        self._begun = None  # what is saved next is no second try
        return Restored(content["step"], content["metric"], content["extra"])

    # --- files

    def _found(self) -> list[tuple[int, Path]]:
        """(step, path) of everything that is or may become a checkpoint."""
        if not self._folder.is_dir():
            return []
        matches = ((_NAME.fullmatch(path.name), path) for path in self._folder.iterdir())
        return [(int(match[1]), path) for match, path in matches if match]

    def _existing(self, step: int) -> Path:
        """The file of a step, or its folder where the replicas wrote a share each."""
        file = self._file_of(step)
        folder = file.with_suffix("")
        return folder if is_complete(folder) else file

    def _file_of(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}.safetensors"

    def _write(self, step: int, metric: float | None, plan: serialization.SavePlan) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._file_of(step)
        serialization.write(plan, file)
        manifest.remove(file.with_suffix(""))  # shares of an earlier save
        self._tidy(step, metric)

    def _write_share(
        self,
        step: int,
        metric: float | None,
        ordinal: int,
        count: int,
        life: str,
        share: serialization.SavePlan,
        own: serialization.SavePlan,
    ) -> None:
        folder = self._file_of(step).with_suffix("")
        folder.mkdir(parents=True, exist_ok=True)
        save = manifest.SharedSave(count, life, self._number_of_save(step, folder, count, life))
        self._metrics.pop(step, None)  # of an earlier save
        try:
            serialization.write(own, save.state_path(folder, ordinal))
            serialization.write(share, save.part_path(folder, ordinal))
            is_complete_now = manifest.complete(folder, save)
        except OSError as error:
            if error.errno != errno.ENOENT or not self._is_below(step, self.steps()):
                raise
            is_complete_now = False  # another replica has removed it, as this one would have
        if is_complete_now:
            self._file_of(step).unlink(missing_ok=True)  # of an earlier save that one replica made
            self._tidy(step, metric)
        self._begun = None

    def _number_of_save(self, step: int, folder: Path, count: int, life: str) -> int:
        """Return how many saves the step had in this life; a failed save is repeated under its
        number.
        """
        if step != self._begun:
            before = manifest.number_of(folder, count, life)  # a process before may have made
            self._numbers[step] = max(self._numbers.get(step, -1), before) + 1
            self._begun = step
        return self._numbers[step]

    def _tidy(self, step: int, metric: float | None) -> None:
        """Remove what is not to be kept, and what lies below the latest and was never complete."""
        self._metrics[step] = metric
        complete = self.steps()
        kept = self._kept(complete)
        for old, path in self._found():
            if old not in kept and (old in complete or self._is_below(old, complete)):
                manifest.remove(path) if path.is_dir() else path.unlink(True)

    def _is_below(self, step: int, complete: list[int]) -> bool:
        """Return True if the step is older than all of the `keep_last` latest."""
        latest = complete[-self._keep_last :]
        return len(latest) == self._keep_last and step < latest[0]

    def _kept(self, steps: list[int]) -> set[int]:
        kept = set(steps[-self._keep_last :])
        metrics = {step: self._metric(step) for step in steps} if self._keep_best else {}
        rated = [
            (metric, step)
            for step, metric in metrics.items()
            if metric is not None and not math.isnan(metric)  # which is better than nothing
        ]
        rated.sort(key=itemgetter(0), reverse=self._higher)
        return kept | {step for _, step in rated[: self._keep_best]}

    def _metric(self, step: int) -> float | None:
        """The metric of a checkpoint, asked of the file where another process wrote it."""
        if step not in self._metrics:
            try:
                said = serialization.load(self._existing(step), keys=["metric"])
                self._metrics[step] = said["metric"]
            except (DamagedFile, OSError):
                self._metrics[step] = None
        return self._metrics[step]


def _number_of_step(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        raise TypeError(
            f"step={step!r} is a {type(step).__name__}: the step of a checkpoint must be an integer."
        ) from None
    if number < 0:
        raise ValueError(f"step={number}: the step of a checkpoint must be at least 0.")
    return number


def _problem_of_any(problems: list[bytes]) -> str:
    """Return the problem of the first replica that could not read a checkpoint; "" if all could."""
    for ordinal, problem in enumerate(problems):
        if problem:
            return (
                problem.decode() if len(problems) == 1 else f"replica {ordinal}: {problem.decode()}"
            )
    return ""


def _random_state_of(ordinal: int, content: dict[str, Any], path: Path) -> dict[str, Any] | None:
    """The random state that a replica saved; None where there was no such replica."""
    if content["random"] is not None:
        return content["random"] if ordinal == 0 else None
    own = manifest.own_state_of(str(path), ordinal)
    return None if own is None else serialization.load(own)["random"]


# --- values held fast while a training goes on -------------------------------------------------


def _frozen(plan: SavePlan) -> SavePlan:
    """Return a plan that writes today's values whenever it is carried out.

    A device's memory is not copied: the next step, which would overwrite it, takes new memory.
    """
    return replace(plan, entries=[_frozen_entry(entry) for entry in plan.entries])


def _frozen_entry(entry: StoredBytes) -> StoredBytes:
    kept = _kept(entry)
    return replace(entry, fetch=lambda: kept if kept.device.type == "cpu" else host_tensor(kept))


def _kept(entry: StoredBytes) -> torch.Tensor:
    tensor = entry.tensor
    if tensor is not None and is_lazy(tensor) and state_of(tensor).base is None:
        state = state_of(tensor)
        buffer = ready_buffer(state)
        buffer.shared = True  # then no program may write into it
        return wrap_buffer(buffer, state.device)
    return entry.fetch().clone()
