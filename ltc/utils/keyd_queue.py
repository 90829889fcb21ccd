"""Bounded queues between threads: one in order, one by key."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable
from typing import Any


class QueueBase:
    """The common base of both queues: a bound, and two ways to end.

    close()        later items are dropped, waiting producers wake; consumers get what is inside,
                   and after that None
    close_write()  consumers get what is inside, and after that None; a late item is still taken
    """

    def __init__(self, maxsize: int = 1024):
        if maxsize < 1:
            raise ValueError(f"A queue of size {maxsize} can pass nothing: give at least 1.")
        self._max_size = maxsize
        self._changed = threading.Condition()
        self._closed = False
        self._write_closed = False

    def max_size(self) -> int:
        """Items that may wait before a producer has to."""
        return self._max_size

    def close(self) -> None:
        """Drop what comes from now on."""
        with self._changed:
            self._closed = self._write_closed = True
            self._changed.notify_all()

    def close_write(self) -> None:
        """Let consumers stop waiting."""
        with self._changed:
            self._write_closed = True
            self._changed.notify_all()

    def _put(self, has_room: Callable[[], bool], add: Callable[[], None]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or has_room())
            if not self._closed:
                add()
                self._changed.notify_all()

    def _take(self, is_there: Callable[[], bool], remove: Callable[[], Any]) -> Any:
        self._changed.wait_for(lambda: self._write_closed or is_there())
        if not is_there():
            return None
        item = remove()
        self._changed.notify_all()
        return item


class KeydQueue(QueueBase):
    """Items found by key; a later item of a key that is still inside replaces the earlier."""

    def __init__(self, maxsize: int = 1024):
        super().__init__(maxsize)
        self._items: dict[Hashable, Any] = {}
        self._wanted: Counter[Hashable] = Counter()

    def put(self, key: Hashable, item: Any) -> None:
        """Add the item; waits while the queue is full, unless a consumer waits for this key."""
        self._put(
            lambda: len(self._items) < self._max_size or self._wanted[key] > 0,
            lambda: self._items.__setitem__(key, item),
        )

    def get(self, key: Hashable) -> Any:
        """Take the key's item out, waiting until it is there; None where the queue ended first."""
        with self._changed:
            self._wanted[key] += 1
            self._changed.notify_all()  # a producer of this key need not wait for room any more
            try:
                return self._take(lambda: key in self._items, lambda: self._items.pop(key))
            finally:
                self._wanted[key] -= 1
                if not self._wanted[key]:
                    del self._wanted[key]


class Queue(QueueBase):
    """Items in the order they came."""

    def __init__(self, maxsize: int = 1024):
        super().__init__(maxsize)
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        """Add the item; waits while the queue is full."""
        self._put(lambda: len(self._items) < self._max_size, lambda: self._items.append(item))

    def get(self) -> Any:
        """Take the first item out, waiting until there is one; None where the queue ended."""
        with self._changed:
            return self._take(lambda: bool(self._items), self._items.popleft)
