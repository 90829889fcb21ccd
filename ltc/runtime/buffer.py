"""Device memory that a tensor's value lives in, present or on its way."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch

from ltc.runtime import core_reservation
from ltc.runtime.account import OF_NOTHING, account_of
from ltc.runtime.physical_dtype import physical
from ltc.support.bounded_table import BoundedTable
from ltc.support.observation import spans
from ltc.support.process.fork_safe_lock import renewed_lock
from ltc.tracebacks import another, users_part

_ELEMENT_BYTES: dict[torch.dtype, int] = {}


def byte_size(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a contiguous tensor of `shape`."""
    size = _ELEMENT_BYTES.get(dtype)
    if size is None:
        size = _ELEMENT_BYTES[dtype] = torch.empty(0, dtype=dtype, device="cpu").element_size()
    for extent in shape:
        size *= extent
    return size


BufferKey = tuple[str, tuple[int, ...], torch.dtype, int]
# A path whose input's key is forgotten is recorded again; its program is found by its graph.
_input_keys: BoundedTable[tuple[Any, ...], BufferKey] = BoundedTable("InputTypes", 16_384)


def input_key(shape: tuple[int, ...], dtype: torch.dtype) -> BufferKey:
    """Return the key of an input of this type in recorded paths: one object per type.

    Its last part is how many bytes of memory the input takes.
    """
    key = _input_keys.get((shape, dtype))
    if key is None:
        key = ("ltc::input", shape, dtype, byte_size(shape, physical(dtype)))
        key = _input_keys.keep((shape, dtype), key)
    return key


def under_way(buffers: list[Buffer]) -> tuple[Sequence[Execution | None], list[Execution]]:
    """Return the launch that still decides each buffer's value, and these launches.

    They are not over, or over and have lost the value of the buffer.
    """
    known = {buffer.execution for buffer in buffers}
    needed = [e for e in known if e is not None and (not e.done or e.failure is not None)]
    if not needed:
        return _NO_SOURCES, needed
    if any([e.failure is not None for e in needed]):  # seldom: one buffer may be lost, another not
        sources = [b.execution if b.is_undecided() else None for b in buffers]
        return sources, [e for e in set(sources) if e is not None]
    return [buffer.execution for buffer in buffers], needed


_NO_SOURCES: tuple[Execution | None, ...] = ()


class Failure:
    """An error on its way to a waiting caller, and whether it has been reported."""

    __slots__ = ("error", "_traceback", "_first", "_reported")

    def __init__(self, error: BaseException) -> None:
        self._traceback = users_part(error.__traceback__)
        self.error = another(error, self._traceback)  # the frames of the other may go
        self._first: Failure | None = None
        self._reported = False

    def follows(self, first: Failure) -> None:
        """Report this error with `first`: of several errors of one launch, one is raised."""
        self._first = first

    @property
    def first(self) -> Failure:
        """The one that is raised for its launch."""
        return self if self._first is None else self._first

    @property
    def reported(self) -> bool:
        return self.first._reported

    def note_reported(self) -> None:
        self.first._reported = True

    def raise_it(self) -> NoReturn:
        self.note_reported()
        raise another(self.error, self._traceback)


_begins_to_wait = renewed_lock(globals(), "_begins_to_wait")


class EndsLaunches(Protocol):
    """The launches that a device has begun: see Executor."""

    def end_until(self, execution: Execution) -> None:
        """Block until this launch is over, and call its `finish`; any thread may ask."""


class Execution:
    """One launch: over or not, and with what failure.

    Attributes:
        done: True if it is known to be over.
        failure: The error for its caller, if not all of it went well.
    """

    __slots__ = ("_awaited", "_on_device", "done", "failure", "_lost")

    def __init__(self) -> None:
        self._awaited: Any = None  # a lock that is held till the end; there once somebody waits
        self._on_device: EndsLaunches | None = None
        self.done = False
        self.failure: Failure | None = None
        self._lost: dict[int, Failure] | None = None

    def begun(self, on_device: EndsLaunches) -> None:
        """Note that a device has the launch, which ends when that is asked for; called once at most."""
        self._on_device = on_device
        if self._awaited is not None:  # in this order: see `_await_end`
            self._awaited.release()

    def finish(
        self, failure: Failure | None = None, lost: dict[Buffer, Failure] | None = None
    ) -> None:
        """End the launch; called once, by its runner.

        Args:
            lost: The buffers that it failed to fill, and why; None: all of them, if there is a
                failure.
        """
        # By their ids, since they refer to this: who asks has in hand one that it was to fill,
        # and all of these were there at once.
        if lost is not None:
            self._lost = {id(buffer): why for buffer, why in lost.items()}
        self.failure = failure
        self.done = True
        if self._awaited is not None and self._on_device is None:  # in this order: see `_await_end`
            self._awaited.release()

    def wait(self) -> None:
        """Block until it is over; a failure stays here."""
        if not self.done:
            began = spans.now()
            core_reservation.waits_for(self)
            self._await_end()
            if spans.timeline is not None:
                spans.timeline.add("wait", "wait for values", began, spans.now())

    def _await_end(self) -> None:
        with _begins_to_wait:
            if self._awaited is None:
                awaited = threading.Lock()
                awaited.acquire()
                self._awaited = awaited
        # behind `_awaited`: either this sees that it is over or begun, or they see the lock
        if not self.done and self._on_device is None:
            with self._awaited:  # passed on to the next waiter on leaving
                pass
        if not self.done and self._on_device is not None:
            self._on_device.end_until(self)

    def failure_of(self, buffer: Buffer) -> Failure | None:
        """Return why this launch has not filled a buffer, or replaced its value; None if it has."""
        if self.failure is None or self._lost is None:
            return self.failure
        return self._lost.get(id(buffer))


class Aliases:
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


_NO_BUFFERS: list[Buffer] = []  # never changed


class Outputs:
    """The outputs that a program fills at each launch.

    Attributes:
        types: (shape, dtype) of each.
        replaced: Output position -> position of the input that it takes the place of, and whose
            memory the program may write over.
        donated: Positions of these inputs.
    """

    __slots__ = ("types", "replaced", "donated", "_kinds", "_new_bytes", "_new")

    def __init__(self, types: tuple[tuple[Any, ...], ...], replaced: dict[int, int]) -> None:
        self.types, self.replaced = types, replaced
        self.donated = frozenset(replaced.values())
        self._kinds = [(input_key(*type), replaced.get(k)) for k, type in enumerate(types)]
        sizes = [key[3] for key, position in self._kinds if position is None]
        self._new_bytes, self._new = sum(sizes), len(sizes)

    def buffers(
        self,
        device: int,
        inputs: list[Buffer],
        previous: Mapping[int, Buffer],
        execution: Execution,
    ) -> tuple[list[Buffer], list[Buffer]]:
        """Return the buffers that a launch fills: where it may, those of the inputs that it
        replaces.

        Return also those among them that keep the one before until it is certain that nothing
        failed.
        """
        account, new, shared = account_of(device), Buffer.__new__, False
        if self._new:
            account.add(self._new_bytes, self._new)
        outputs: list[Buffer] = []
        for key, position in self._kinds:
            if position is None:  # `Buffer(...)`, counted above: the call takes as long as all else
                buffer = new(Buffer)
                buffer.key, buffer.device = key, device
                buffer.handle = buffer.previous = None
                buffer.execution, buffer.account = execution, account
                buffer.shared = False
            else:
                buffer = inputs[position]
                if buffer.shared:
                    buffer, shared = Buffer(key, device, None, execution, buffer), True
                else:
                    buffer.execution = execution
            outputs.append(buffer)
        if not shared and not previous:
            return outputs, _NO_BUFFERS
        for output, old in previous.items():
            outputs[output].previous = old
        return outputs, [buffer for buffer in outputs if buffer.previous is not None]


class Buffer:
    """The value of one tensor on a device.

    A step that replaces the value of a tensor leaves it in the same buffer, unless that is shared.

    Attributes:
        handle: The backend's own object for the memory; None until a launch has filled it, and once
            a launch that failed has written over it.
        key: Its type, as recorded paths compare it.
        execution: The latest launch that fills it or replaces its value, over or not; None where a
            copy from elsewhere filled it.
        shared: True if anything but one tensor may still read it: then it is not overwritten. Of
            one that lies where another does, their Aliases.
        previous: The buffer this one replaces, kept until it is certain that nothing failed: a
            parameter whose step failed keeps the value it had before.
    """

    __slots__ = ("handle", "key", "device", "execution", "shared", "previous", "account")

    def __init__(
        self,
        key: BufferKey,
        device: int,
        handle: Any = None,
        execution: Execution | None = None,
        previous: Buffer | None = None,
    ) -> None:
        """`key`: what `input_key` gives for its type."""
        self.key, self.device, self.handle = key, device, handle
        self.execution, self.previous = execution, previous
        self.shared: bool | Aliases = False
        self.account = account_of(device)
        self.account.add(key[3])

    def __del__(self) -> None:
        account = self.account  # its `remove`, without the call: most buffers go with their step
        account.in_buffers -= self.key[3]
        account.buffers -= 1
        account.freed += 1
        if self.shared.__class__ is Aliases:
            self.shared.lose_one()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.key[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.key[2]

    @property
    def nbytes(self) -> int:
        """Return the size of its memory."""
        return self.key[3]

    def failure(self) -> Failure | None:
        """Return why its latest launch has left it without its value; None if there is no failure."""
        execution = self.execution
        return None if execution is None else execution.failure_of(self)

    def is_undecided(self) -> bool:
        """Return True if its launch is not over, or has failed and no value has taken its place."""
        execution = self.execution
        return execution is not None and (not execution.done or self.is_lost())

    def is_lost(self) -> bool:
        """Return True if its latest launch failed, and no caller was told that the old value stays."""
        failure = self.failure()
        return failure is not None and (self.handle is None or not failure.reported)

    def settled(self) -> Buffer:
        """This buffer, or the one it was to replace where its launch is told to have failed."""
        buffer = self
        while buffer.previous is not None and (failure := buffer.failure()) and failure.reported:
            buffer = buffer.previous
        return buffer

    def write_off(self) -> None:
        """The launch that was to fill it has failed: no memory is held for it."""
        if self.handle is None:
            self.account.remove(self.key[3])
            self.account = OF_NOTHING
            self.account.add(self.key[3])

    def write_on(self) -> None:
        """Account for the buffer again: it was filled in another way after `write_off`."""
        if self.account is OF_NOTHING:
            self.account.remove(self.key[3])
            self.account = account_of(self.device)
            self.account.add(self.key[3])

    def ready(self) -> Any:
        """Wait for the buffer and return its handle.

        Raises the error of the launch that was to fill it, unless the old value is in its place and
        a caller was told so.
        """
        execution = self.execution
        if execution is not None and (not execution.done or execution.failure is not None):
            execution.wait()
            failure = execution.failure_of(self)
            if failure is not None and (self.handle is None or not failure.reported):
                failure.raise_it()
        return self.handle
