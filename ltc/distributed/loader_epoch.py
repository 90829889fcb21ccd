"""One reading of a data loader, ahead of its use: the thread that reads, uploads and deals.

It ends with the loops that consume what it prepares, however they end, and passes on every error.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ltc.support import tree
from ltc.support.process.thread_frames import thread_frames
from ltc.support.torch_private import end_workers
from ltc.training_loop.batch_source import BatchSource, ReadBatch
from ltc.training_loop.loader_options import LoaderOptions, uneven_error
from ltc.training_loop.transfer import batch_on_device

STALL_SECONDS = 60.0  # a consumer that waited so long wants to know for what
JOIN_SECONDS = 5.0  # how long to wait for a data set that is in the middle of a sample

_log = logging.getLogger("ltc.distributed.parallel_loader")


def _begun_elsewhere(device: Any) -> RuntimeError:
    return RuntimeError(
        f"A DataLoader with persistent workers has one iterator, and another loop, for other devices "
        f"than {device}, has begun it anew. Give each device a DataLoader of its own, or all of them "
        f"one ParallelLoader."
    )


class Epoch:
    """One reading of the loader: its thread, and the channels between that and the consumers.

    The thread knows the epoch and never the loader, so that dropping that ends it.
    """

    def __init__(
        self, source: BatchSource, loader: Any, devices: Sequence, options: LoaderOptions
    ) -> None:
        self.source, self._key = source, (tuple(devices), options)
        self._process = os.getpid()
        self._ready = {device: Channel(options.read_ahead()) for device in devices}
        self._left: set[Any] = set()  # devices of which no loop will come
        self._takers = dict.fromkeys(devices, 0)  # loops of each device
        self._holders = 1  # loaders that it belongs to
        self._lock = threading.RLock()
        self._first, self._asked = threading.Event(), threading.Event()
        self._reads_ahead = True
        self._iterator: Any = None  # a weak reference to what it reads
        self._successor: Epoch | None = None
        self._error: BaseException | None = None  # of a stream, until a loop is given it
        self._stall_logged = False
        self._number = next(_numbers)
        source.add(self)
        _epochs.add(self)
        reader = _Reader(self, loader, list(devices), options)
        self.thread = threading.Thread(target=reader.run, name="ltc loader: reader", daemon=True)
        self.thread.start()

    # --- of its consumers

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
                "The iteration of this loader began before the process was forked, and the child "
                "lacks its threads. Iterate the loader anew."
            )
        ready = self._ready[device]
        if not self._reads_ahead and not len(ready):
            self._asked.set()
        while not ready.wait(STALL_SECONDS):
            self._log_stall()
        try:
            return ready.get().content
        except StopIteration:
            if self._successor is None:
                raise
        except BaseException:
            self._error = None
            raise
        return self._latest().get(device)

    def _latest(self) -> Epoch:
        """The reading in which this one goes on at last: itself, where its iterator is still its own."""
        epoch = self
        while epoch._successor is not None:
            epoch = epoch._successor
        if epoch is not self:
            self._successor = epoch
        return epoch

    def take_over(self, device, loops: int) -> None:
        """Count `loops` more loops, new ones or of an earlier reading, that take the device's
        batches here.
        """
        with self._lock:
            self._takers[device] += loops

    def join(self, device, devices: Sequence, options: LoaderOptions) -> bool:
        """Have one more loop take the device's batches here, if a loader of these options may."""
        with self._lock:
            if os.getpid() != self._process or self._key != (tuple(devices), options):
                return False
            if self._successor is not None or device in self._left:
                return False
            if self._ready[device].is_over() and self._error is None:
                return False  # its error, if any, was given to a loop
            self._takers[device] += 1
            return True

    def leave(self, device) -> None:
        """A loop wants no more batches; the last one that leaves ends the thread."""
        if os.getpid() != self._process:
            return  # locks copied in the middle of something are better left alone
        epoch = self._latest()
        with epoch._lock:
            if device in epoch._takers:
                epoch._takers[device] -= 1
                if epoch._takers[device] == 0:
                    epoch._end(device, None)

    # --- of its loaders

    def hold(self, loaders: int = 1) -> None:
        """Count `loaders` more loaders that deal from this epoch."""
        with self._lock:
            self._holders += loaders

    def release(self) -> None:
        """Count one loader less; without loaders the epoch stops."""
        if os.getpid() != self._process:
            return  # as in `leave`
        epoch = self._latest()
        with epoch._lock:
            epoch._holders -= 1
            if epoch._holders == 0:
                epoch.stop(None)

    def stop(self, error: BaseException | None) -> None:
        """Stop giving batches to devices: later requests get the error, or the end."""
        if os.getpid() != self._process:
            return
        for device in self._ready:
            self._end(device, error)

    def _end(self, device, error: BaseException | None) -> None:
        self.source.hand_back(self._ready[device].cancel(error))
        self._asked.set()
        with self._lock:
            self._left.add(device)
        self._hand_error_back_if_left()

    def _hand_error_back_if_left(self) -> None:
        """Hand the reader's error back to the source if every device has left: no loop here would
        get it.
        """
        with self._lock:
            if len(self._left) < len(self._ready):
                return
            error, self._error = self._error, None
        if error is not None:
            self.source.hand_back_error(error)

    def is_over(self) -> bool:
        """Return True if no loop takes batches from this epoch, nor from its successor."""
        return not self._latest().is_wanted()

    # --- of its reader

    def begin(self, loader: Any) -> Iterator:
        """Return the iterator over the source, once the threads of left epochs have ended."""
        earlier = [other for other in self.source.epochs() if other._number < self._number]
        for other in earlier:
            if not other.is_wanted():
                other.thread.join()
        with self.source.used_alone():
            iterator = iter(loader)
            for other in earlier:
                if not self.source.is_stream and other.reads(iterator):
                    other.go_on_in(self)
        try:
            self._iterator = weakref.ref(iterator)
        except TypeError:  # such an iterator is nobody else's
            pass
        # What iter() did to an iterator is not known: it may have begun anew, or not.
        self._reads_ahead = iterator is not loader or self.source.is_stream
        if not self._reads_ahead:
            self._first.set()
        return iterator

    def reads(self, iterator: Iterator) -> bool:
        """Return True if this epoch reads from that very iterator."""
        if self._iterator is None or self._successor is not None:
            return False
        return self._iterator() is iterator

    def go_on_in(self, successor: Epoch) -> None:
        """Share the successor's batches: its iterator was begun anew for another loop, as without
        ltc.
        """
        with self._lock:
            successor.hold(self._holders)
            self._successor = successor
            for device, count in self._takers.items():
                if device in successor._ready:
                    successor.take_over(device, count)
                    self._end(device, None)
                else:
                    self._end(device, _begun_elsewhere(device))

    def deal(self, batches: Sequence[ReadBatch]) -> bool:
        """Hand each device its batch, waiting for room; False where no device wants any."""
        taken = [ready.put(batch) for ready, batch in zip(self._ready.values(), batches)]
        self.source.hand_back([batch for batch, is_taken in zip(batches, taken) if not is_taken])
        return any(taken)

    def wait_until_asked(self) -> None:
        """Wait for a consumer, where reading ahead could lose batches."""
        if not self._reads_ahead:
            self._asked.wait()
            self._asked.clear()

    def is_wanted(self) -> bool:
        """Return True if any device takes batches of its own reader."""
        return not all(ready.is_over() for ready in self._ready.values())

    def note_first(self) -> None:
        self._first.set()

    def end(self, error: BaseException | None) -> None:
        """The source has no more batches, or has raised an error."""
        if len(self._ready) > 1:  # a device that is behind the others keeps what it was dealt
            self._iterator = None
        if self.source.is_stream:
            self._error = error
        for ready in self._ready.values():
            ready.fail(error)
        self._hand_error_back_if_left()
        self._first.set()

    def _log_stall(self) -> None:
        with self._lock:
            if self._stall_logged:
                return
            self._stall_logged = True
        frames = thread_frames()
        stacks = [
            f"{thread.name}:\n" + "".join(traceback.format_stack(frames[thread.ident]))
            for thread in [epoch.thread for epoch in self.source.epochs()]
            if thread.ident in frames
        ]
        _log.warning(
            "A device loader has got no batch for %g s. The stacks of its threads:\n%s",
            STALL_SECONDS,
            "\n".join(stacks),
        )


class _Reader:
    """Reads the source in complete rounds, and uploads each batch before it asks for the next."""

    def __init__(self, epoch: Epoch, loader: Any, devices: list, options: LoaderOptions):
        self._epoch, self._source, self._loader = epoch, epoch.source, loader
        self._devices, self._options = devices, options
        self._size: int | None = None  # of the first batch, where all are to have it

    def run(self) -> None:
        try:
            self._read()
        except BaseException as error:  # the consumers get it
            self._epoch.end(error)
        else:
            self._epoch.end(None)
        finally:
            self._loader = None

    def _read(self) -> None:
        iterator = self._epoch.begin(self._loader)
        try:
            self._deal_all(iterator)
        finally:
            with self._source.used_alone():  # its end may close what the next pass opens
                end_workers(iterator)
                del iterator

    def _deal_all(self, iterator: Iterator) -> None:
        dealt = 0
        while True:
            self._epoch.wait_until_asked()
            batches = self._round(iterator)
            missing = len(self._devices) - len(batches)
            if missing and (not batches or not self._epoch.is_wanted()):
                self._source.hand_back(batches)
                return
            if missing and self._options.uneven == "error":
                raise uneven_error(dealt + len(batches), len(self._devices))
            if missing and self._options.uneven == "drop":
                self._source.hand_back(batches)
                return
            if not self._epoch.deal(self._padded(batches)):
                return
            dealt += len(batches)

    def _round(self, iterator: Iterator) -> list[ReadBatch]:
        """The next batch for each device; fewer at the end."""
        batches: list[ReadBatch] = []
        try:
            for device in self._devices:
                batch = self._source.take(iterator, device, _upload, self._epoch.is_wanted)
                if batch is None or self._ends_before(batch):
                    break
                batches.append(batch)
                self._epoch.note_first()
        except BaseException:
            self._source.hand_back(batches)
            raise
        return batches

    def _ends_before(self, batch: ReadBatch) -> bool:
        """Return True if all batches must have one size and this one has another; it stays unread."""
        if not self._options.fixed_batch_size:
            return False
        size = _size(batch.content, self._options.batchdim)
        if self._size is None:
            self._size = size
        if size != self._size:
            self._source.hand_back([batch])
        return size != self._size

    def _padded(self, batches: list[ReadBatch]) -> list[ReadBatch]:
        """A whole round: where batches are missing, the first ones once more."""
        again = zip(self._devices[len(batches) :], itertools.cycle(batches))
        return [
            *batches,
            *(ReadBatch(None, device, _upload(one.content, device)) for device, one in again),
        ]


def _upload(content: Any, device: Any) -> Any:
    return batch_on_device(content, device.torch_device)


def _size(batch: Any, dimension: int) -> int | None:
    """The samples of a batch, by its first tensor."""
    tensors: list[torch.Tensor] = []
    tree.for_each_instance(batch, torch.Tensor, tensors.append)
    return tensors[0].size(dimension) if tensors else None


_epochs: weakref.WeakSet[Epoch] = weakref.WeakSet()
_numbers = itertools.count()


def _stop_all() -> None:
    """At the end of the program: a thread inside torch while Python goes down would crash it."""
    epochs = list(_epochs)
    for epoch in epochs:
        epoch.stop(None)
    join(epochs)


def join(epochs: list[Epoch]) -> None:
    """Wait for the threads; one that stays inside a data set is left to end by itself."""
    deadline = time.monotonic() + JOIN_SECONDS
    for thread in [epoch.thread for epoch in epochs]:
        if thread is not threading.current_thread():
            thread.join(max(deadline - time.monotonic(), 0))


def _forget_all() -> None:
    _epochs.clear()


atexit.register(_stop_all)
os.register_at_fork(after_in_child=_forget_all)


# --- A bounded queue between threads that knows how it ended -------------------------------------


class Channel:
    """Hands items from producer threads to consumer threads, at most `capacity` waiting.

    The producers' side ends it once, with `close()` or `fail(error)`. Consumers then get the
    items already inside, and after those StopIteration or the error itself, with the
    traceback of the thread it was raised in. Consumers that want no more end it with `cancel()`.
    """

    def __init__(self, capacity: int):
        if capacity < 1:
            raise ValueError(f"A Channel of capacity {capacity} can pass nothing: give at least 1.")
        self._capacity = capacity
        self._items: deque[Any] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._error: BaseException | None = None

    def put(self, item: Any) -> bool:
        """Wait for room and hand the item over; False where the channel has ended, so stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._capacity)
            if self._closed:
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    def get(self) -> Any:
        """The next item, as soon as there is one.

        Raises StopIteration, or the producers' error, where the channel ended and is empty.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._closed)
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return item
        if self._error is None:
            raise StopIteration
        # Each consumer adds its own frames to what the producer's thread left.
        raise self._error.with_traceback(self._traceback)

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until `get` has an answer; False where it has none in time."""
        with self._changed:
            return bool(
                self._changed.wait_for(lambda: self._items or self._closed, timeout_seconds)
            )

    def close(self) -> None:
        """End it: no more items follow."""
        self.fail(None)

    def fail(self, error: BaseException | None) -> None:
        """End it with the error that stopped the producer."""
        if isinstance(error, StopIteration):  # it would read as a normal end
            stopped = RuntimeError("A producer was stopped by StopIteration.")
            stopped.__cause__ = error
            error = stopped
        with self._changed:
            if not self._closed:  # the first ending is the one consumers see
                self._closed, self._error = True, error
                self._traceback = error.__traceback__ if error is not None else None
                self._changed.notify_all()

    def cancel(self, error: BaseException | None = None) -> list[Any]:
        """End it from the consumers' side, wake producers, and return the items inside.

        Args:
            error: The error that later consumers get in place of StopIteration.
        """
        with self._changed:
            self._closed, self._error = True, error
            self._traceback = error.__traceback__ if error is not None else None
            left = list(self._items)
            self._items.clear()
            self._changed.notify_all()
            return left

    def is_over(self) -> bool:
        """Return True if it has ended and everything inside was taken."""
        with self._changed:
            return self._closed and not self._items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.get()
