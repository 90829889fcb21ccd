"""torch.set_default_dtype decides types that no recorded call names: a change of it ends the step.

`torch.zeros(3)` and `integers / 2` are the same calls before and after it.  What is pending was
recorded under the old type and must be lowered and run under it; each type has recorded paths of
its own (Recorder.choose_paths).
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch

from ltc.debug import metrics
from ltc.device.evidence.cuts_explained import default_dtype_changed
from ltc.device.recording.recorder import Recorder, devices
from ltc.device.recording.sync import flush, flush_other_thread, wait_device_ops
from ltc.support.torch_private import DEFAULT_DTYPE_SETTERS


def install() -> None:
    """Let ltc know of every change of the default type.  Once per process."""
    for setter in DEFAULT_DTYPE_SETTERS:
        setter.replace(_announced(setter.current))


def _announced(setter: Callable[[Any], None]):
    def set_default(new: Any) -> None:
        if new is torch.get_default_dtype():
            return
        recorders = [r for device in devices() for r in list(device.recorders.values())]
        for recorder in recorders:
            _end_recording(recorder)
        wait_device_ops()
        setter(new)
        for recorder in recorders:
            _choose_paths(recorder)

    return set_default


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
