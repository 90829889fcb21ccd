"""A loop that nobody marks: where the same optimizer steps again, a step mark would have stood.

Without one its steps would be recorded one behind the other, and compiled as one ever longer program.
"""

from __future__ import annotations

from threading import get_ident
from typing import Any
from weakref import ref

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ltc.debug import metrics
from ltc.device.call_observer import watching
from ltc.device.recording.recorder import Recorder, devices_in_use
from ltc.device.recording.sync import flush
from ltc.profiling import spans

# That one optimizer makes between two marks of a loop that has some: those of a critic, say.
STEPS_BETWEEN_MARKS = 16


def install() -> None:
    """Once per process."""
    register_optimizer_step_post_hook(_note_step)


def _note_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if get_ident() in watching:  # what is replayed is one recording, which ends with the call
        return
    place = _device_of(optimizer)
    for device in devices_in_use():
        recorder = device.recorders.get(get_ident())
        if device.torch_device == place and recorder is not None and not recorder.nothing_pending:
            _mark_where_missing(recorder, optimizer)


def _device_of(optimizer: Optimizer) -> torch.device | None:
    """That of its first parameter."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return next((p.device for p in parameters), None)


def _mark_where_missing(recorder: Recorder, optimizer: Optimizer) -> None:
    steps, key = recorder.optimizer_steps, id(optimizer)
    steps[key] = steps.get(key, 0) + 1
    allowed = STEPS_BETWEEN_MARKS if recorder.has_marks else 1
    marks = recorder.marked_by is not None and recorder.marked_by() is optimizer
    if marks or steps[key] > allowed:
        if not marks:  # from now on at once: a loop's step is one recording
            recorder.marked_by = ref(optimizer)
        metrics.count("ImpliedMark")
        began = spans.now()
        flush(recorder)
        if spans.timeline is not None:
            spans.timeline.end_step(began)
