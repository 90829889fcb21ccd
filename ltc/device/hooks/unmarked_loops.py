"""A loop without marks: where the same optimizer steps again, a step mark would have stood.

Without one its steps would be recorded one behind the other, and compiled as one ever longer program.
Marks of another loop, before or around this one, tell nothing of it. But where the user marks after
equally many steps each time, as with a critic, the next mark is awaited that long.
"""

from __future__ import annotations

from threading import get_ident
from typing import Any
from weakref import ref

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ltc.device.call_observer import watching
from ltc.device.evidence.hints import End, iteration_ended
from ltc.device.evidence.reads_explained import count_optimizer_step
from ltc.device.recording.core_ends import ends_in_core
from ltc.device.recording.exit_liveness import pass_cut
from ltc.device.recording.recorder import OptimizerSteps, Recorder, devices_in_use
from ltc.device.recording.sync import flush
from ltc.support.observation import spans
from ltc.support.observation.often import counting

# Steps of one program share the cost of its launch: 16 leave a sixteenth of it to each, and more than
# that are an epoch with an evaluation that marks.
MAX_STEPS_OF_A_PROGRAM = 16

_count_implied_mark = counting("ImpliedMark")


def install() -> None:
    """Once per process."""
    register_optimizer_step_post_hook(_note_step)


def _note_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    count_optimizer_step()
    if get_ident() in watching:  # what is replayed is one recording, which ends with the call
        return
    place = _device_of(optimizer)
    for device in devices_in_use():
        recorder = device.recorders.get(get_ident())
        if device.torch_device == place and recorder is not None and not recorder.nothing_pending:
            if recorder.immediate is not None:
                recorder.immediate.note_step_made()
            _mark_where_missing(recorder, optimizer)
    iteration_ended(End.OPTIMIZER_STEP)


def _device_of(optimizer: Optimizer) -> torch.device | None:
    """Return the device of the optimizer's first parameter."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            return parameter.device
    return None


def _mark_where_missing(recorder: Recorder, optimizer: Optimizer) -> None:
    """End the recording if it has several steps of the optimizer, and more than the user marks behind."""
    in_recording = _count(recorder.optimizer_steps, optimizer)
    since_mark = _count(recorder.steps_since_mark, optimizer)
    is_marker = recorder.marked_by is not None and recorder.marked_by() is optimizer
    if is_marker or (in_recording > 1 and since_mark > _awaited_steps(recorder, optimizer)):
        recorder.marked_by = ref(optimizer)  # from now on at once: a loop's step is one recording
        _count_implied_mark()
        began = spans.now()
        if not ends_in_core(recorder, is_read=False) and not pass_cut(recorder, is_read=False):
            flush(recorder)
        if spans.timeline is not None:
            spans.timeline.end_step(began)


def _count(steps: OptimizerSteps, optimizer: Optimizer) -> int:
    count = _steps_of(steps, optimizer, 0) + 1
    steps[id(optimizer)] = ref(optimizer), count
    return count


def _steps_of(steps: OptimizerSteps, optimizer: Optimizer, otherwise: int) -> int:
    """Return the steps that this optimizer has made, and not an earlier one with the same id."""
    made_by, count = steps.get(id(optimizer), (None, 0))
    return count if made_by is not None and made_by() is optimizer else otherwise


def _awaited_steps(recorder: Recorder, optimizer: Optimizer) -> int:
    """Return how many steps it makes before the user marks: equally many twice, or else one."""
    last_but_one, last = (_steps_of(x, optimizer, 1) for x in recorder.steps_between_marks)
    return last if last == last_but_one <= MAX_STEPS_OF_A_PROGRAM else 1
