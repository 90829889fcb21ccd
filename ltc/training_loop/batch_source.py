"""A source of batches as all its readers know it: one thread is inside it, and no batch is lost.

What was read ahead of a loop that is left goes back to a stream, which is an iterator that has no
second pass.  The next reader of the stream takes it first, in the order of the source.
"""

from __future__ import annotations

import bisect
import os
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from ltc.support.process.fork_safe_lock import renewed_lock

_END = object()  # stands for the end of a source


@dataclass(slots=True)
class ReadBatch:
    """A batch that has left its source.

    Attributes:
        number: Its place among all that were read of the source; None for one dealt a second time.
        device: The device of its tensors.
        content: The batch.
    """

    number: int | None
    device: Any
    content: Any


@dataclass(frozen=True, slots=True)
class _Failure:
    """Stands for a batch that the source could not make."""

    error: BaseException


class BatchSource:
    """The one record of a source, which all its loaders share.

    Attributes:
        is_stream: True for an iterator whose iter() does nothing: its loops share one position.
    """

    def __init__(self, source: Any):
        self._source = _reference(source)
        self.is_stream = is_stream(source)
        self._returned: list[ReadBatch] = []  # in the order of the source
        self._count = 0
        self.renew()

    def renew(self) -> None:
        """Forget the threads of a parent process, and what they hold."""
        self._use = threading.Lock()
        self._books = threading.RLock()  # taken in finalisers too
        self._epochs: weakref.WeakSet[Any] = weakref.WeakSet()

    def __reduce__(self) -> tuple:
        return source_of, (self._source(),)

    def is_of(self, source: Any) -> bool:
        """Return True if this is the record of that object."""
        return self._source() is source

    def is_weak(self) -> bool:
        """Return True if the record keeps its source not alive."""
        return isinstance(self._source, weakref.ref)

    def add(self, epoch: Any) -> None:
        """Note one more reading of it."""
        with self._books:
            self._epochs.add(epoch)

    def epochs(self) -> list:
        """Return its readings that are not collected yet."""
        with self._books:
            return list(self._epochs)

    def used_alone(self) -> AbstractContextManager:
        """While it is open no other thread is inside the source."""
        return self._use

    def take(
        self, iterator: Iterator, device: Any, move: Callable, is_wanted: Callable[[], bool]
    ) -> ReadBatch | None:
        """Return the next batch, moved to the device; None at the end, and where none is wanted.

        The source is asked for no other one before this one was copied: it may use its memory again.
        """
        with self._use:
            if not is_wanted():
                return None
            batch = self._take_returned()
            if batch is None:
                content = next(iterator, _END)
                if content is _END:
                    return None
                batch = ReadBatch(self._next_number(), device, move(content, device))
            elif isinstance(batch.content, _Failure):
                raise batch.content.error
            elif batch.device is not device:
                batch = ReadBatch(batch.number, device, move(batch.content, device))
            return batch

    def _next_number(self) -> int:
        self._count += 1
        return self._count

    def _take_returned(self) -> ReadBatch | None:
        with self._books:
            return self._returned.pop(0) if self._returned else None

    def hand_back_error(self, error: BaseException) -> None:
        """Keep an error of a stream that no loop was given: it is raised where the next one asks."""
        if self.is_stream:
            traceback.clear_frames(error.__traceback__)  # they hold the source, which may end first
            self.hand_back([ReadBatch(self._next_number(), None, _Failure(error))])

    def hand_back(self, batches: Iterable[ReadBatch]) -> None:
        """Keep batches of a stream for its next reader; those of any other source are dropped."""
        if not self.is_stream:
            return
        with self._books:
            for batch in batches:
                if batch.number is not None:
                    bisect.insort(self._returned, batch, key=lambda one: one.number or 0)


def is_stream(source: Any) -> bool:
    """Return True for an iterator that iter() returns unchanged."""
    if not isinstance(source, Iterator):
        return False
    method = type(source).__iter__
    if isinstance(method, FunctionType):
        return method.__code__.co_code == _returns_self.__code__.co_code
    return type(method) in _OF_C


def _returns_self(self):
    return self


_OF_C = (type(list.__iter__), type(str.join))  # slots and methods of classes that are written in C


# --- the records of all sources ------------------------------------------------------------------

_sources: weakref.WeakValueDictionary[int, BatchSource] = weakref.WeakValueDictionary()
_pinned: dict[int, BatchSource] = {}  # records that live as long as their source
_lock = renewed_lock(globals(), "_lock")


def source_of(source: Any) -> BatchSource:
    """Return the record of a source, by its identity.

    Of an object that weak references cannot point to, such as a list, it lives while it is held.
    """
    with _lock:
        record = _sources.get(id(source))
        if record is None or not record.is_of(source):
            record = _sources[id(source)] = BatchSource(source)
            if record.is_weak():
                _pinned[id(source)] = record
                weakref.finalize(source, _unpin, id(source), record).atexit = False
        return record


def _unpin(number: int, record: BatchSource) -> None:
    if _pinned.get(number) is record:  # not that of a newer object at the same place
        del _pinned[number]


def _reference(source: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(source)
    except TypeError:
        return lambda: source


def _renew_all() -> None:
    for record in list(_sources.values()):
        record.renew()


os.register_at_fork(after_in_child=_renew_all)
