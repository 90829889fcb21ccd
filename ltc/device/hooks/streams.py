"""Streams and events of a device that runs everything in one order."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.types import Device as DeviceLike

from ltc.device.recording.sync import synchronize
from ltc.device.recording.tensors import device_of
from ltc.support.torch_private import DEVICE_TYPE


class Stream(torch.Stream):
    """The one order in which a device runs; every stream of a device means the same."""

    _device: torch.device

    def __new__(cls, device: DeviceLike = None, *args: Any, **kwargs: Any):
        chosen = device_of(DEVICE_TYPE if device is None else device).torch_device
        stream = super().__new__(cls, device=chosen)
        stream._device = chosen  # in C++ every stream is one of the first device
        return stream

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Nothing but the device matters."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # torch's is an attribute
        return self._device

    def record_event(  # type: ignore[override]  # ltc's events alone
        self, event: Event | None = None
    ) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Run what is pending on the device, and wait."""
        synchronize(device_of(self.device))


class Event(torch.Event):
    """A point in the order of a device.

    No code has to wait for one: a read waits for its own value. An event that keeps time is another
    matter: it is reached when all that was recorded before it has run.
    """

    def __new__(cls, enable_timing: bool = False, *args: Any, **kwargs: Any):
        return super().__new__(cls, device=DEVICE_TYPE, enable_timing=enable_timing)

    def __init__(self, enable_timing: bool = False, *args: Any, **kwargs: Any) -> None:
        self._keeps_time = enable_timing
        self._reached_at: float | None = None

    def record(self, stream: torch.Stream | None = None) -> None:
        if self._keeps_time:
            synchronize(device_of(DEVICE_TYPE if stream is None else stream.device))
            self._reached_at = time.perf_counter()

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Do nothing: later work runs later on the device anyway."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """See the class: there is nothing to wait for."""

    def elapsed_time(self, end_event: Event) -> float:  # type: ignore[override]  # likewise
        """Milliseconds from this event to another; both keep time and have been recorded."""
        if self._reached_at is None or end_event._reached_at is None:
            raise ValueError(
                "elapsed_time needs two recorded events made with Event(enable_timing=True)."
            )
        return (end_event._reached_at - self._reached_at) * 1e3
