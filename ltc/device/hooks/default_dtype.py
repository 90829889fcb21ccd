"""torch.set_default_dtype decides types that no recorded call names.

`torch.zeros(3)` and `integers / 2` are the same calls before and after it.  Where one of these is
pending, a change ends the recording: it must run under the type that it was recorded under.  Else the
recording goes on behind an entry of the change, and what follows has paths of its own; a recording
that begins under another type has so too (Recorder.choose_paths).
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch

from ltc.aten.call import Call
from ltc.device.evidence.cuts_explained import default_dtype_changed
from ltc.device.recording.recorder import Recorder, devices
from ltc.device.recording.sync import exclusively, flush, flush_other_thread, wait_device_ops
from ltc.device.user_line import user_line
from ltc.support.observation import metrics
from ltc.support.torch_private import DEFAULT_DTYPE_SETTERS

CHANGED = "ltc::default"


def install() -> None:
    """Let ltc know of every change of the default type.  Once per process."""
    for setter in DEFAULT_DTYPE_SETTERS:
        setter.replace(_announced(setter.current))


def _announced(setter: Callable[[Any], None]):
    def set_default(new: Any) -> None:
        if new is torch.get_default_dtype():
            return
        recorders = [r for device in devices() for r in device.all_recorders()]
        going_on = [r for r in recorders if _may_go_on(r)]
        for recorder in recorders:
            if recorder not in going_on:
                _end_recording(recorder)
        wait_device_ops()
        setter(new)
        for recorder in recorders:
            if recorder in going_on:
                exclusively(recorder, _go_on, recorder)
            else:
                _choose_paths(recorder)

    return set_default


def _may_go_on(recorder: Recorder) -> bool:
    """Return True if no pending call depends on the type; a path of symbols has no such entries."""
    if recorder.nothing_pending or recorder.immediate is not None:
        return False
    last = recorder.last
    return recorder.thread == get_ident() and last.of is None and not last.follows_default


def _go_on(recorder: Recorder) -> None:
    if recorder.immediate is None:
        dtype, line = torch.get_default_dtype(), user_line()
        recorder.advance((CHANGED, dtype), lambda: Call(CHANGED, (dtype,), {}, line=line))


def _end_recording(recorder: Recorder) -> None:
    if recorder.nothing_pending:
        return
    metrics.count("DefaultDtypeFlush")
    default_dtype_changed()
    if recorder.thread == get_ident():
        flush(recorder)
    else:
        flush_other_thread(recorder)


def _choose_paths(recorder: Recorder) -> None:
    with recorder.lock:
        if recorder.nothing_pending:
            recorder.choose_paths()
