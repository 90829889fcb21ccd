"""Watch one call of a thread: recordings that end, uploads, reads, marks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

import torch

from ltc.device.user_line import torchs_line, user_line

watching: dict[int, CallObserver] = {}  # by thread; empty nearly always


class CallObserver:
    """The effects of one call of a user's function besides recording.

    Attributes:
        recorded: (recorder, its last entry, what it came to, the states that live on) of each
            recording that ended with something in it.
        origins: The result of `origin_of` for each bound state of these recordings.
        inputs: Their buffers.
        scalars: Its numbers.
        uploads: (tensor on the CPU, buffer with its elements).
        marks: True if each step mark was to wait.
        obstacle: The first thing that cannot be done again without the function; "" where there is
            none.
    """

    def __init__(self, origin_of: Callable[[Any], Any]) -> None:
        self.origin_of = origin_of
        self.recorded: list[tuple[Any, Any, Any, list[Any]]] = []
        self.origins: list[list[Any]] = []
        self.inputs: list[list[Any]] = []
        self.scalars: list[list[Any]] = []
        self.uploads: list[tuple[torch.Tensor, Any]] = []
        self.marks: list[bool] = []
        self.obstacle = ""

    def __enter__(self) -> CallObserver:
        watching[get_ident()] = self
        return self

    def __exit__(self, *error: Any) -> None:
        watching.pop(get_ident(), None)

    def before_end(self, recorder: Any) -> None:
        """Note the recording; no state is held here, or a dead one would count as alive."""
        self.origins.append([self.origin_of(state) for state in recorder.bound])
        self.inputs.append(list(recorder.inputs))
        self.scalars.append(list(recorder.scalars))

    def after_end(self, recorder: Any, ended: Any, alive: list[Any]) -> None:
        self.recorded.append((recorder, recorder.last, ended, alive))
        if len(self.recorded) > 1:
            self.hinder("it is more than one program, cut where a value was read or a step marked")

    def hinder(self, obstacle: str) -> None:
        self.obstacle = self.obstacle or obstacle


def observer_of(recorder: Any) -> CallObserver | None:
    return watching.get(recorder.thread)


def note_uploads(tensors: Sequence[torch.Tensor], buffers: Sequence[Any]) -> None:
    observer = watching.get(get_ident())
    if observer is not None:
        observer.uploads.extend(zip(tensors, buffers))


def note_obstacle(what: str) -> None:
    """The watched call does `what`, which cannot be done again without it."""
    observer = watching.get(get_ident())
    if observer is not None:
        line, inner = user_line(), torchs_line()
        place = f" at {line}" if line else ""
        observer.hinder(f"it {what}{place}" + (f", inside {inner}" if inner else ""))


def note_mark(wait: bool) -> None:
    observer = watching.get(get_ident())
    if observer is not None:
        observer.marks.append(wait)
