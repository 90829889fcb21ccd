"""Batches that are on their device before they are asked for.

A thread reads the data loader, uploads each batch before it reads the next, and deals them
round-robin.  It works ahead of the training, and ends with the loop that consumes them, however that
ends.  An error of the data set, the collation or an upload is raised in the consumer as itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ltc.device.recording.tensors import device_of
from ltc.distributed.loader_epoch import Epoch, join
from ltc.support.observation import profiler
from ltc.tracebacks import entrance
from ltc.training_loop import steps
from ltc.training_loop.batch_source import source_of
from ltc.training_loop.loader_options import LoaderOptions, uneven_error

__all__ = ["MpDeviceLoader", "ParallelLoader", "PerDeviceLoader"]


class ParallelLoader:
    """Deal the batches of a loader to devices, batch i to `devices[i % n]`, some ahead of use.

    Each device goes through the epochs at its own pace, at most one ahead of the others. The loops
    over an iterator, which has one pass, share its position. An error of the loader, or of an
    upload, is raised where the batch is asked for.

    Args:
        batches_per_execution: A consumer ends its step at every so many batches.
        loader: Its batches may be nested data; all tensors in them are moved, and containers keep
            their kind (see docs/distributed.md, "Loaders").
        devices: The `ltc` devices to deal to.
        batchdim: The dimension of a tensor that counts its samples.
        loader_prefetch_size: Number of batches per device that are read ahead, together with
            `device_prefetch_size`.
        device_prefetch_size: Number of batches per device that are uploaded ahead; each is uploaded
            before the loader is asked for the next.
        fixed_batch_size: End before the first batch whose size along `batchdim` differs.
        uneven: The treatment of last batches that are fewer than the devices. "drop" leaves them
            out. "pad" deals them again until all devices have one. "error" raises ValueError,
            before the first batch if the loader has a length.

    Raises:
        ValueError: Without devices, for one that comes twice, for another `uneven`, or a number of
            batches below one.
        TypeError: For a number that is no integer.

    Example:
        >>> from ltc.distributed.parallel_loader import ParallelLoader
        >>> loader = ParallelLoader([torch.ones(2), torch.zeros(2)], ["ltc:0"])
        >>> [batch.tolist() for batch in loader.per_device_loader("ltc:0")]
        [[1.0, 1.0], [0.0, 0.0]]
    """

    def __init__(
        self,
        loader: Any,
        devices: Sequence,
        batchdim: int = 0,
        batches_per_execution: int = 1,
        loader_prefetch_size: int = 8,
        device_prefetch_size: int = 4,
        *,
        fixed_batch_size: bool = False,
        uneven: str = "drop",
    ):
        self._options = LoaderOptions(
            batchdim,
            batches_per_execution,
            loader_prefetch_size,
            device_prefetch_size,
            fixed_batch_size,
            uneven,
        )
        self._loader, self._source = loader, source_of(loader)
        self._devices = _distinct(devices)
        self._lock = threading.Lock()
        self._begun = dict.fromkeys(self._devices, 0)  # epochs each device has begun
        self._epochs: dict[int, Epoch] = {}  # those that are not over on every device
        self._added = 0  # epochs ever begun
        self._aborted: BaseException | None = None
        self._default: dict[Any, PerDeviceLoader] = {}

    @property
    def batches_per_execution(self) -> int:
        """Batches a consumer takes before its step is ended."""
        return self._options.batches_per_execution

    def per_device_loader(self, device) -> PerDeviceLoader:
        """The batches of one device; KeyError where this loader does not serve it."""
        return PerDeviceLoader(self, device)

    def per_device_samples(self) -> int:
        """Batches that each device gets in an epoch."""
        batches, devices = len(self._loader), len(self._devices)
        return -(-batches // devices) if self._options.uneven == "pad" else batches // devices

    @entrance
    def next_item(self, device) -> Any:
        """The next batch of a device, and StopIteration after an epoch; it ends no step.

        KeyError where this loader does not serve the device.
        """
        served = self._served(device)
        with self._lock:
            consumer = self._default.setdefault(served, PerDeviceLoader(self, device))
        return consumer._next_item()

    def close(self) -> None:
        """Stop reading and uploading, for good, and wait for the threads."""
        self.abort(RuntimeError("This ParallelLoader is closed: make a new one."))
        join(list(self._epochs.values()))

    def abort(self, error: BaseException) -> None:
        """Stop every epoch; later requests for a batch raise the error."""
        with self._lock:  # no epoch begins after this
            self._aborted = self._aborted or error
            epochs = list(self._epochs.values())
        for epoch in epochs:
            epoch.stop(self._aborted)

    def __del__(self):
        for epoch in list(getattr(self, "_epochs", {}).values()):
            epoch.release()

    def _served(self, device) -> Any:
        served = device_of(device)
        if served not in self._devices:
            raise KeyError(f"{device} is not one of this loader's devices: {list(self._devices)}")
        return served

    def _begin(self, device) -> Epoch:
        """The device's next epoch, begun for all where it is the first to come."""
        self._check_even()
        with self._lock:
            if self._aborted is not None:
                raise self._aborted.with_traceback(None)  # without what earlier raises added
            self._epochs = {n: e for n, e in self._epochs.items() if not e.is_over()}
            epoch = self._joined(device) or self._begun_anew(device)
        try:
            epoch.wait_for_first_batch()
        except BaseException:
            epoch.leave(device)
            raise
        return epoch

    def _joined(self, device) -> Epoch | None:
        """The reading under way that the device has to take part in; None where it needs a new one.

        That is one that another device has begun, or of a stream one that another loop has.
        """
        if self._source.is_stream:
            for epoch in self._source.epochs():
                if epoch.join(device, self._devices, self._options):
                    if epoch not in self._epochs.values():
                        epoch.hold()
                        self._hold(epoch)
                    return epoch
            return None
        for number in sorted(self._epochs):
            epoch = self._epochs[number]
            if number >= self._begun[device] and epoch.join(device, self._devices, self._options):
                self._begun[device] = number + 1
                return epoch
        return None

    def _begun_anew(self, device) -> Epoch:
        epoch = Epoch(self._source, self._loader, self._devices, self._options)
        epoch.take_over(device, 1)
        number = self._hold(epoch)
        self._begun[device] = number + 1
        if not self._source.is_stream and len(self._devices) > 1:
            self._end_before(number - 1)
        return epoch

    def _hold(self, epoch: Epoch) -> int:
        number, self._added = self._added, self._added + 1
        self._epochs[number] = epoch
        return number

    def _end_before(self, number: int) -> None:
        """End the epochs before that one: they must not pile up for a device that never comes."""
        for behind, epoch in self._epochs.items():
            if behind < number:
                epoch.stop(
                    RuntimeError(
                        f"This device is in epoch {behind} of a ParallelLoader while another begins "
                        f"epoch {number + 1}. Consume every device's batches, or make a loader for "
                        f"each."
                    )
                )

    def _check_even(self) -> None:
        if self._options.uneven == "error" and hasattr(self._loader, "__len__"):
            left = len(self._loader) % len(self._devices)
            if left:
                raise uneven_error(len(self._loader), len(self._devices))


def _distinct(devices: Sequence) -> tuple:
    """The devices; ValueError where there are none, or one comes twice."""
    if isinstance(devices, (str, torch.device)):
        raise TypeError(f"devices={devices!r} is one device: ParallelLoader takes a list of them.")
    if not devices:
        raise ValueError("ParallelLoader needs at least one device.")
    found = tuple(device_of(device) for device in devices)
    for device in found:
        if found.count(device) > 1:
            raise ValueError(
                f"devices={list(devices)} names {device} twice: name each device once."
            )
    return found


class PerDeviceLoader:
    """The batches of one device; asking for one ends the step that used the one before.

    Iterating it goes through an epoch, as often as wanted; `next` goes through one epoch and then
    keeps raising StopIteration. Inside an open StepTrace no step is ended. An error of the loader,
    or of an upload, is raised where the batch is asked for; KeyError where the loader does not serve
    the device.

    Example:
        >>> from ltc.distributed.parallel_loader import ParallelLoader
        >>> batches = ParallelLoader([torch.ones(2)], ["ltc:0"]).per_device_loader("ltc:0")
        >>> len(batches), next(batches).tolist()
        (1, [1.0, 1.0])
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

    @entrance
    def __next__(self) -> Any:
        return self.next()

    @entrance
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

    Each batch but the first ends the step before it, and so does the end of the epoch. A loop that is
    left early leaves the batches of an iterator, such as a generator, to the next loop. An error of
    the loader, or of an upload, is raised where the batch is asked for; ValueError and TypeError for
    arguments that ParallelLoader refuses.

    Args:
        device: The device that gets the batches, ahead of use.
        kwargs: Keyword arguments of ParallelLoader.

    Example:
        >>> from ltc.distributed.parallel_loader import MpDeviceLoader
        >>> loader = MpDeviceLoader([torch.ones(2), torch.zeros(2)], "ltc")
        >>> for batch in loader:
        ...     print(batch.device, batch.tolist())
        ltc:0 [1.0, 1.0]
        ltc:0 [0.0, 0.0]
    """

    def __init__(self, loader: Any, device, **kwargs: Any):
        LoaderOptions(**kwargs)  # a wrong one is an error of this line
        self._loader, self._device, self._kwargs = loader, device, kwargs
        self._source = source_of(loader)  # held: what one loop has read too much is the next one's

    def __len__(self) -> int:
        return len(self._loader)

    @entrance
    def __iter__(self) -> Iterator:
        loader = ParallelLoader(self._loader, [self._device], **self._kwargs)
        return iter(loader.per_device_loader(self._device))


class _Consumer:
    """One pass of one device through one epoch; dropping it leaves the epoch."""

    def __init__(self, loader: ParallelLoader, device):
        self._loader, self._device = loader, device
        self._until_mark = loader.batches_per_execution
        self.ended = False
        self._epoch = loader._begin(device)

    def __iter__(self) -> _Consumer:
        return self

    @entrance
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
            self._leave()
            raise

    def _leave(self) -> None:
        if not self.ended:
            self.ended = True
            self._epoch.leave(self._device)

    def _end_step_if_due(self) -> None:
        self._until_mark -= 1
        if self._until_mark == 0:
            self._until_mark = self._loader.batches_per_execution
            self._end_step()

    def _end_step(self) -> None:
        with profiler.Trace("loader.step_end"):
            steps.mark(self._device)

    def __del__(self):
        if hasattr(self, "_epoch"):  # the first batch may have failed to come
            self._leave()
