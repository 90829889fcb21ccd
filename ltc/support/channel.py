"""A bounded queue between threads that knows how it ended."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any


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

        error  what a consumer that asks all the same gets in place of StopIteration
        """
        with self._changed:
            self._closed, self._error = True, error
            self._traceback = error.__traceback__ if error is not None else None
            left = list(self._items)
            self._items.clear()
            self._changed.notify_all()
            return left

    def is_over(self) -> bool:
        """Whether it has ended and everything inside was taken."""
        with self._changed:
            return self._closed and not self._items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.get()
