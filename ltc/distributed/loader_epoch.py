"""One reading of a data loader, ahead of its use: the threads that read, deal and upload.

They end with whoever consumes what they prepare, however that ends, and pass on every error.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import threading
import time
import traceback
import weakref
from collections.abc import Generator, Iterator
from typing import Any

import torch

from ltc.support import tree
from ltc.support.channel import Channel
from ltc.support.process.thread_frames import thread_frames
from ltc.support.torch_private import end_workers
from ltc.utils.transfer import send_cpu_data_to_device

STALL_SECONDS = 60.0  # a consumer that waited so long wants to know for what
JOIN_SECONDS = 5.0  # how long to wait for a data set that is in the middle of a sample

_log = logging.getLogger("ltc.distributed.parallel_loader")
_end = object()  # stands for the end of the source


def uneven_error(batches: int, devices: int) -> ValueError:
    return ValueError(
        f"ParallelLoader over {devices} devices got a loader of {batches} batches: "
        f"{batches % devices} would reach no device. Pass uneven='drop' to leave them out, or "
        f"uneven='pad' to deal some of them twice."
    )


class Epoch:
    """One reading of the loader: its threads, and the channels between them and the consumers.

    The threads know the epoch's parts and never the loader, so that dropping that ends them.
    """

    def __init__(self, source, devices, prefetch, batchdim: int, fixed: bool, uneven: str):
        on_host, on_device = prefetch
        self._process = os.getpid()
        self._host = {device: Channel(on_host) for device in devices}
        self._ready = {device: Channel(on_device) for device in devices}
        self._first = threading.Event()
        self._lock = threading.Lock()
        self._stall_logged = False
        reader = _Reader(source, list(self._host.values()), self._first, batchdim, fixed, uneven)
        self.threads = [_thread("ltc loader: reader", reader.run)] + [
            _thread(f"ltc loader: to {device}", _upload, device, self._host[device], ready)
            for device, ready in self._ready.items()
        ]
        _epochs.add(self)

    def wait_for_first_batch(self) -> None:
        """Wait until the reader has the first batch, or knows that there is none.

        The order of a shuffled loader is drawn from torch's generator with it, so that nothing
        the caller draws meanwhile gets in between and runs repeat.
        """
        while not self._first.wait(STALL_SECONDS):
            self._log_stall()

    def get(self, device) -> Any:
        """The device's next batch; logs where the threads are, once, when that takes long."""
        if os.getpid() != self._process:
            raise RuntimeError(
                "This loader was begun before the process was forked, and its threads are not "
                "part of the child. Iterate it anew."
            )
        ready = self._ready[device]
        while not ready.wait(STALL_SECONDS):
            self._log_stall()
        return ready.get()

    def leave(self, device) -> None:
        """The device wants no more batches; the last one that leaves ends the threads."""
        if os.getpid() != self._process:
            return  # locks copied in the middle of something are better left alone
        self._host[device].cancel()
        self._ready[device].cancel()

    def stop(self, error: BaseException | None) -> None:
        """No device gets any more batches: those who ask get the error, or the end."""
        if os.getpid() != self._process:
            return
        for ready in self._ready.values():
            ready.cancel(error)
        for host in self._host.values():
            host.cancel()

    def is_over(self) -> bool:
        """Whether nobody can get a batch from it any more."""
        return all(ready.is_over() for ready in self._ready.values())

    def _log_stall(self) -> None:
        with self._lock:
            if self._stall_logged:
                return
            self._stall_logged = True
        frames = thread_frames()
        stacks = [
            f"{thread.name}:\n" + "".join(traceback.format_stack(frames[thread.ident]))
            for thread in self.threads
            if thread.ident in frames
        ]
        _log.warning(
            "A device loader has had no batch for %g s. Its threads are here:\n%s",
            STALL_SECONDS,
            "\n".join(stacks),
        )


def _thread(name: str, run, *arguments) -> threading.Thread:
    thread = threading.Thread(target=run, args=arguments, name=name, daemon=True)
    thread.start()
    return thread


class _Reader:
    """Reads the source in complete rounds and deals them to the devices' host channels."""

    def __init__(self, source, channels, first: threading.Event, batchdim, fixed, uneven):
        self._source, self._channels, self._first = source, channels, first
        self._batchdim, self._fixed, self._uneven = batchdim, fixed, uneven

    def run(self) -> None:
        try:
            self._deal()
        except BaseException as error:  # the consumers get it
            self._end(error)
        else:
            self._end(None)
        finally:
            self._first.set()
            self._source = None

    def _end(self, error: BaseException | None) -> None:
        for channel in self._channels:
            channel.fail(error)

    def _deal(self) -> None:
        with contextlib.closing(self._batches()) as batches:
            self._deal_all(batches)

    def _deal_all(self, batches: Iterator) -> None:
        dealt = 0
        while round_ := list(itertools.islice(batches, len(self._channels))):
            missing = len(self._channels) - len(round_)
            if missing and self._uneven == "error":
                raise uneven_error(dealt + len(round_), len(self._channels))
            if missing and self._uneven == "drop":
                return
            round_ = list(itertools.islice(itertools.cycle(round_), len(self._channels)))
            wanted = [channel.put(batch) for channel, batch in zip(self._channels, round_)]
            if not any(wanted):
                return
            dealt += len(round_)

    def _batches(self) -> Generator[Any, None, None]:
        size = None
        iterator = iter(self._source)
        try:
            while (batch := next(iterator, _end)) is not _end:
                self._first.set()
                if self._fixed:
                    size = _size(batch, self._batchdim) if size is None else size
                    if _size(batch, self._batchdim) != size:
                        return
                yield batch
        finally:
            end_workers(iterator)


def _size(batch: Any, dimension: int) -> int | None:
    """The samples of a batch, by its first tensor."""
    tensors: list[torch.Tensor] = []
    tree.for_each_instance(batch, torch.Tensor, tensors.append)
    return tensors[0].size(dimension) if tensors else None


def _upload(device, waiting: Channel, ready: Channel) -> None:
    try:
        for batch in waiting:
            if not ready.put(send_cpu_data_to_device(batch, device.torch_device)):
                return
    except BaseException as error:  # the consumer gets it
        ready.fail(error)
    else:
        ready.close()
    finally:
        waiting.cancel()  # so that the reader does not wait for room


_epochs: weakref.WeakSet[Epoch] = weakref.WeakSet()


def _stop_all() -> None:
    """At the end of the program: a thread inside torch while Python goes down would crash it."""
    epochs = list(_epochs)
    for epoch in epochs:
        epoch.stop(None)
    join(epochs)


def join(epochs: list[Epoch]) -> None:
    """Wait for the threads; one that stays inside a data set is left to end by itself."""
    deadline = time.monotonic() + JOIN_SECONDS
    for thread in [thread for epoch in epochs for thread in epoch.threads]:
        if thread is not threading.current_thread():
            thread.join(max(deadline - time.monotonic(), 0))


def _forget_all() -> None:
    _epochs.clear()


atexit.register(_stop_all)
os.register_at_fork(after_in_child=_forget_all)
