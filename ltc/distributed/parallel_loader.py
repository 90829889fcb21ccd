"""Batches that are on their device before they are asked for.

One thread reads the data loader and deals its batches round-robin; one thread per device uploads
them.  Both work ahead of the training, and end with the loop that consumes them, however it ends.
An error of the data set, the collation or an upload is raised in the consumer as itself.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ltc.debug import profiler
from ltc.device.tensor import device_of
from ltc.utils import steps, tree
from ltc.utils.channel import Channel
from ltc.utils.transfer import send_cpu_data_to_device

__all__ = ["MpDeviceLoader", "ParallelLoader", "PerDeviceLoader"]

UNEVEN = ("drop", "error", "pad")
STALL_SECONDS = 60.0  # a consumer that waited so long wants to know for what
JOIN_SECONDS = 5.0  # how long to wait for a data set that is in the middle of a sample

_log = logging.getLogger(__name__)
_end = object()  # stands for the end of the source


class ParallelLoader:
    """Deals the batches of a loader to devices, batch i to `devices[i % n]`, some ahead of use.

    loader                its batches may be nested data; their CPU tensors are uploaded, and
                          tuples arrive as lists (see ltm.send_cpu_data_to_device)
    devices               the `ltc` devices to deal to
    batchdim              the dimension of a tensor that counts its samples
    batches_per_execution a consumer ends its step at every so many batches
    loader_prefetch_size  batches per device that wait on the host
    device_prefetch_size  batches per device that wait on the device
    fixed_batch_size      end before the first batch whose size along `batchdim` differs
    uneven                what becomes of last batches that are fewer than the devices: "drop"
                          leaves them out, "pad" deals them again until all devices have one,
                          "error" raises ValueError, before the first batch where len(loader) says

    Each device goes through the epochs at its own pace, at most one ahead of the others.
    """

    def __init__(
        self,
        loader: Iterable,
        devices: Sequence,
        batchdim: int = 0,
        batches_per_execution: int = 1,
        loader_prefetch_size: int = 8,
        device_prefetch_size: int = 4,
        *,
        fixed_batch_size: bool = False,
        uneven: str = "drop",
    ):
        if not devices:
            raise ValueError("ParallelLoader needs at least one device.")
        if uneven not in UNEVEN:
            raise ValueError(f"uneven={uneven!r} is not one of {', '.join(map(repr, UNEVEN))}.")
        if batches_per_execution < 1:
            raise ValueError(f"batches_per_execution={batches_per_execution} must be at least 1.")
        self._loader, self._batchdim = loader, batchdim
        self._devices = tuple(device_of(device) for device in devices)
        self._batches_per_execution = batches_per_execution
        self._prefetch = (loader_prefetch_size, device_prefetch_size)
        self._fixed_batch_size, self._uneven = fixed_batch_size, uneven
        self._lock = threading.Lock()
        self._begun = dict.fromkeys(self._devices, 0)  # epochs each device has begun
        self._epochs: dict[int, _Epoch] = {}  # those that are not over on every device
        self._added = 0  # epochs ever begun
        self._aborted: BaseException | None = None
        self._default: dict[Any, PerDeviceLoader] = {}

    @property
    def batches_per_execution(self) -> int:
        """Batches a consumer takes before its step is ended."""
        return self._batches_per_execution

    def per_device_loader(self, device) -> PerDeviceLoader:
        """The batches of one device; KeyError where this loader does not serve it."""
        return PerDeviceLoader(self, device)

    def per_device_samples(self) -> int:
        """Batches that each device gets in an epoch."""
        batches, devices = len(self._loader), len(self._devices)
        return -(-batches // devices) if self._uneven == "pad" else batches // devices

    def next_item(self, device) -> Any:
        """The next batch of a device, and StopIteration after an epoch; it ends no step."""
        served = self._served(device)
        with self._lock:
            consumer = self._default.setdefault(served, PerDeviceLoader(self, device))
        return consumer._next_item()

    def close(self) -> None:
        """Stop reading and uploading, for good, and wait for the threads."""
        self.abort(RuntimeError("This ParallelLoader is closed: make a new one."))
        _join(list(self._epochs.values()))

    def abort(self, error: BaseException) -> None:
        """Stop every epoch; who asks for a batch from now on gets the error."""
        with self._lock:  # no epoch begins after this
            self._aborted = self._aborted or error
            epochs = list(self._epochs.values())
        for epoch in epochs:
            epoch.stop(self._aborted)

    def __del__(self):
        for epoch in list(getattr(self, "_epochs", {}).values()):
            epoch.stop(None)

    def _served(self, device) -> Any:
        served = device_of(device)
        if served not in self._devices:
            raise KeyError(f"{device} is none of this loader's devices: {list(self._devices)}")
        return served

    def _begin(self, device) -> _Epoch:
        """The device's next epoch, begun for all where it is the first to come."""
        self._check_even()
        with self._lock:
            if self._aborted is not None:
                raise self._aborted
            self._epochs = {n: e for n, e in self._epochs.items() if not e.is_over()}
            joinable = [number for number in self._epochs if number >= self._begun[device]]
            number = min(joinable) if joinable else self._add_epoch()
            self._begun[device] = number + 1
            epoch = self._epochs[number]
        epoch.wait_for_first_batch()
        return epoch

    def _add_epoch(self) -> int:
        """Begin reading anew; its number. Epochs two before it are ended: they must not pile up."""
        number, self._added = self._added, self._added + 1
        for behind, epoch in self._epochs.items():
            if behind < number - 1:
                epoch.stop(RuntimeError(
                    f"This device is in epoch {behind} of a ParallelLoader while another begins "
                    f"epoch {number}. Consume every device's batches, or make a loader for each."
                ))
        self._epochs[number] = _Epoch(
            self._loader, self._devices, self._prefetch, self._batchdim, self._fixed_batch_size,
            self._uneven,
        )
        return number

    def _check_even(self) -> None:
        if self._uneven == "error" and hasattr(self._loader, "__len__"):
            left = len(self._loader) % len(self._devices)
            if left:
                raise _uneven_error(len(self._loader), len(self._devices))


def _uneven_error(batches: int, devices: int) -> ValueError:
    return ValueError(
        f"ParallelLoader over {devices} devices got a loader of {batches} batches: "
        f"{batches % devices} would reach no device. Pass uneven='drop' to leave them out, or "
        f"uneven='pad' to deal some of them twice."
    )


class PerDeviceLoader:
    """The batches of one device; asking for one ends the step that used the one before.

    Iterating it goes through an epoch, as often as wanted; `next` goes through one epoch and then
    keeps raising StopIteration. Inside an open StepTrace no step is ended.
    """

    def __init__(self, loader: ParallelLoader, device):
        self._loader, self._device = loader, loader._served(device)
        self._current: _Consumer | None = None  # of `next`

    def __len__(self) -> int:
        return self._loader.per_device_samples()

    def __iter__(self) -> Iterator:
        current = self._current
        if current is not None and not current.ended:  # `next` was called first: go on from there
            self._current = None
            return current
        return self._consumer()

    def __next__(self) -> Any:
        return self.next()

    def next(self) -> Any:
        """The next batch, on the device."""
        if self._current is None:
            self._current = self._consumer()
        return next(self._current)

    def _next_item(self) -> Any:
        if self._current is None:
            self._current = self._consumer()
        return self._current.fetch()

    def _consumer(self) -> _Consumer:
        return _Consumer(self._loader, self._device)


class MpDeviceLoader:
    """The batches of a loader on one device, in a new epoch each time it is iterated.

    kwargs  of ParallelLoader
    """

    def __init__(self, loader: Iterable, device, **kwargs: Any):
        self._loader, self._device, self._kwargs = loader, device, kwargs

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator:
        loader = ParallelLoader(self._loader, [self._device], **self._kwargs)
        return iter(loader.per_device_loader(self._device))


class _Consumer:
    """One pass of one device through one epoch; dropping it leaves the epoch."""

    def __init__(self, loader: ParallelLoader, device):
        self._loader, self._device = loader, device
        self._until_mark = loader.batches_per_execution
        self._epoch = loader._begin(device)
        self.ended = False

    def __iter__(self) -> _Consumer:
        return self

    def __next__(self) -> Any:
        if self.ended:
            raise StopIteration
        in_step_trace = profiler.get_tracer_marked_step()
        if not in_step_trace:
            self._end_step_if_due()
        try:
            return self.fetch()
        except StopIteration:
            if not in_step_trace:
                self._end_step()
            raise

    def fetch(self) -> Any:
        """The next batch; no step is ended."""
        try:
            return self._epoch.get(self._device)
        except BaseException:
            # The epoch is done with, and must not keep the error, whose traceback keeps the epoch.
            self.ended = True
            self._epoch.leave(self._device)
            raise

    def _end_step_if_due(self) -> None:
        self._until_mark -= 1
        if self._until_mark == 0:
            self._until_mark = self._loader.batches_per_execution
            self._end_step()

    def _end_step(self) -> None:
        with profiler.Trace("loader.step_end"):
            steps.mark(self._device)

    def __del__(self):
        epoch = getattr(self, "_epoch", None)  # the first batch may have failed to come
        if epoch is not None:
            epoch.leave(self._device)


class _Epoch:
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
        frames = sys._current_frames()
        stacks = [
            f"{thread.name}:\n" + "".join(traceback.format_stack(frames[thread.ident]))
            for thread in self.threads if thread.ident in frames
        ]
        _log.warning(
            "A device loader has had no batch for %g s. Its threads are here:\n%s",
            STALL_SECONDS, "\n".join(stacks),
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
                raise _uneven_error(dealt + len(round_), len(self._channels))
            if missing and self._uneven == "drop":
                return
            round_ = list(itertools.islice(itertools.cycle(round_), len(self._channels)))
            wanted = [channel.put(batch) for channel, batch in zip(self._channels, round_)]
            if not any(wanted):
                return
            dealt += len(round_)

    def _batches(self) -> Iterator:
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
            _end_workers(iterator)


def _end_workers(iterator: Iterator) -> None:
    """End the workers of a DataLoader's iterator, unless they are to stay for the next epoch.

    Its `__del__` would: but where an error keeps it alive that runs in a garbage collection, which
    may have taken its queues first, and then waits 5 s for each worker.
    """
    if not getattr(iterator, "_persistent_workers", True):
        getattr(iterator, "_shutdown_workers", lambda: None)()


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


_epochs: weakref.WeakSet[_Epoch] = weakref.WeakSet()


def _stop_all() -> None:
    """At the end of the program: a thread inside torch while Python goes down would crash it."""
    epochs = list(_epochs)
    for epoch in epochs:
        epoch.stop(None)
    _join(epochs)


def _join(epochs: list[_Epoch]) -> None:
    """Wait for the threads; one that stays inside a data set is left to end by itself."""
    deadline = time.monotonic() + JOIN_SECONDS
    for thread in [thread for epoch in epochs for thread in epoch.threads]:
        if thread is not threading.current_thread():
            thread.join(max(deadline - time.monotonic(), 0))


def _forget_all() -> None:
    _epochs.clear()


atexit.register(_stop_all)
os.register_at_fork(after_in_child=_forget_all)
