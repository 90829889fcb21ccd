"""The end of a step as a user marks it: run it, report it, call what was waiting for it."""

from __future__ import annotations

import sys
import time

from ltc import config
from ltc.device.call_observer import note_mark, watching
from ltc.device.evidence.hints import End, iteration_ended
from ltc.device.recording import sync
from ltc.device.recording.recorder import Device
from ltc.device.recording.tensors import current_device
from ltc.device.user_line import told_of_lack
from ltc.support.observation import metrics_saver, profiler
from ltc.support.observation.often import counting
from ltc.training_loop.closures import AsyncClosureHandler, StepClosures

_asked = config.reader("LTC_EMIT_STEPLOG", "LTC_SYNC_WAIT", "LTC_METRICS_FILE")
_count_mark = counting("MarkStep")
_handler = AsyncClosureHandler()
_closures: dict[int, StepClosures] = {}


def closures_of(device: Device) -> StepClosures:
    """Return the closures that wait for the end of this device's step."""
    return _closures.get(device.index) or _closures.setdefault(device.index, StepClosures(_handler))


def mark(device: Device | None = None, wait: bool = False) -> None:
    """End the step of a device (the thread's current one where None).

    In order: everything pending is started; the metrics file is written; closures run.
    """
    device = device or current_device()
    _count_mark()
    if watching:
        note_mark(wait)
    logs, waits, metrics_file = _asked()
    if logs:
        print(f"ltc step mark on {device} at {time.time():.6f}", file=sys.stderr, flush=True)
    sync.end_step(device)
    iteration_ended(End.MARK)
    if wait or waits:
        sync.wait_device_ops([device])
    if metrics_file:
        with told_of_lack("LTC_METRICS_FILE"):
            metrics_saver.save_metrics()
    closures_of(device).run()


profiler.install(mark)
