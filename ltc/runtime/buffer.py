"""Device memory that a tensor's value lives in, present or on its way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from ltc.runtime import processors
from ltc.runtime.account import OF_NOTHING, account_of
from ltc.runtime.storage import physical

_ELEMENT_BYTES: dict[torch.dtype, int] = {}


def byte_size(shape, dtype: torch.dtype) -> int:
    """Bytes of a contiguous tensor of `shape`."""
    size = _ELEMENT_BYTES.get(dtype)
    if size is None:
        size = _ELEMENT_BYTES[dtype] = torch.empty(0, dtype=dtype).element_size()
    for extent in shape:
        size *= extent
    return size


_input_keys: dict[tuple, tuple] = {}


def input_key(shape, dtype: torch.dtype) -> tuple:
    """What a recorded path calls an input of this type: one object per type, told by identity.

    Its last part is how many bytes of memory the input takes.
    """
    key = _input_keys.get((shape, dtype))
    if key is None:
        key = ("ltc::input", shape, dtype, byte_size(shape, physical(dtype)))
        key = _input_keys.setdefault((shape, dtype), key)
    return key


def under_way(buffers: list[Buffer]) -> list[Execution]:
    """The launches that decide what is in the buffers: not over, or over and nothing is there."""
    executions = {buffer.execution for buffer in buffers}
    return [
        e for e in executions
        if e is not None and (not e.done or e.failure and _left_nothing(e, buffers))
    ]


def _left_nothing(execution: Execution, buffers: list[Buffer]) -> bool:
    return any(b.handle is None for b in buffers if b.execution is execution)


class Failure:
    """An error on its way to whoever waits: raised as it was first, and known to be seen or not."""

    __slots__ = ("error", "traceback", "reported")

    def __init__(self, error: BaseException) -> None:
        self.error, self.traceback, self.reported = error, error.__traceback__, False

    def raise_it(self) -> None:
        self.reported = True
        raise self.error.with_traceback(self.traceback)


class Execution:
    """One launch: over or not, and with what failure.

    Every output of a failed launch raises its error, and so does every launch that reads one.

    done         whether it is known to be over
    come_to_end  where nobody says so unasked: blocks until it is over, or somebody will say so
    """

    __slots__ = ("_running", "done", "failure", "come_to_end")

    def __init__(self) -> None:
        self._running = threading.Lock()
        self._running.acquire()
        self.done = False
        self.come_to_end: Callable[[], None] | None = None
        self.failure: Failure | None = None

    def finish(self, failure: Failure | None = None) -> None:
        """Called once, by whoever ran it."""
        self.failure = failure
        self.done, self.come_to_end = True, None
        self._running.release()

    def wait(self) -> None:
        """Block until it is over; a failure stays here."""
        if self._running.locked():
            processors.use_all()
            if self.come_to_end is not None:
                self.come_to_end()
            with self._running:  # passed on to the next waiter on leaving
                pass

    def raise_failure(self) -> None:
        """Raise the error this launch ended with, if any."""
        if self.failure is not None:
            self.failure.raise_it()


class Twins:
    """Buffers that lie in the same memory: each is shared as long as another one is left."""

    __slots__ = ("_left",)

    def __init__(self, buffers: list[Buffer]) -> None:
        self._left = len(buffers)
        for buffer in buffers:
            buffer.shared = self

    def __bool__(self) -> bool:
        return self._left > 1

    def lose_one(self) -> None:
        # two threads at once may count one: then memory is copied that could have been written to
        self._left -= 1


class Buffer:
    """The value of one tensor on a device.

    A step that replaces the value of a tensor leaves it in the same buffer, unless that is shared.

    handle     what the backend made: memory it understands; None until a launch has filled it, and
               once a launch that failed has written over it
    key        its type, as recorded paths compare it
    execution  the latest launch that fills it or replaces its value, over or not; None where a copy
               from elsewhere filled it
    shared     whether anything but one tensor may still read it: then it is not overwritten. Of one
               that lies where another does, their Twins
    previous   the buffer this one replaces, kept until it is certain that nothing failed:
               a parameter whose step failed keeps the value it had before
    """

    __slots__ = ("handle", "key", "device", "execution", "shared", "previous", "account")

    def __init__(
        self, key: tuple, device: int, handle: Any = None, execution=None, previous=None
    ):
        """`key`: what `input_key` gives for its type."""
        self.key, self.device, self.handle = key, device, handle
        self.execution, self.previous, self.shared = execution, previous, False
        self.account = account_of(device)
        self.account.add(key[3])

    def __del__(self) -> None:
        self.account.remove(self.key[3])
        if self.shared.__class__ is Twins:
            self.shared.lose_one()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.key[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.key[2]

    @property
    def nbytes(self) -> int:
        """Of memory that it takes."""
        return self.key[3]

    def settled(self) -> "Buffer":
        """This buffer, or the one it was to replace where its launch is known to have failed."""
        buffer = self
        while (
            buffer.execution is not None
            and buffer.execution.failure is not None
            and buffer.previous is not None
        ):
            buffer = buffer.previous
        return buffer

    def write_off(self) -> None:
        """The launch that was to fill it has failed: no memory is held for it."""
        if self.handle is None:
            self.account.remove(self.key[3])
            self.account = OF_NOTHING
            self.account.add(self.key[3])

    def ready(self) -> Any:
        """The handle, waited for.

        Raises the error of the launch that was to fill it, or that it was waited for.
        """
        execution = self.execution
        if execution is not None and (self.handle is None or not execution.done):
            execution.wait()
            execution.raise_failure()
        return self.handle
