"""Messages between two replicas over one TCP connection: a head of two words, and the content behind it.

Nothing here waits: a replica waits for all of its connections at once (inter_host.py).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import weakref
from collections import deque
from typing import NamedTuple

import torch

_HEAD = struct.Struct("=qq")  # the caller's tag, and the bytes of the content
# So much of what nobody has asked for yet is taken off the connection.
_MOST_AHEAD_BYTES = 8 << 20
_MOST_SPARE_BYTES = 4 << 20  # of buffers that are kept for later messages
_AT_ONCE = 16  # pieces that the system is given in one call
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)  # of a connection that is closed


class ConnectionLost(RuntimeError):
    """A connection to a replica on another host is closed."""


class Message(NamedTuple):
    """A message that has come: its content begins the buffer, or has filled the tensor offered for it."""

    tag: int
    nbytes: int
    buffer: bytearray | None

    def read(self, like: torch.Tensor) -> torch.Tensor:
        """Return the content, as a tensor of `like`'s size and dtype, or in `like` itself."""
        if self.buffer is None:
            return like
        return torch.frombuffer(self.buffer, dtype=like.dtype, count=like.numel())


class Link:
    """One replica's end of a connection.

    Attributes:
        peer: The replica at the other end.
        arrived: Messages that have not been taken yet, the oldest first.
        moved_bytes: The bytes that it has sent and taken so far.
        watched: The selector's events that the replica waits for here.
        lost: The reason for which the connection is closed; "" while it is open.
    """

    def __init__(self, peer: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer, self.socket = peer, connection
        self.arrived: deque[Message] = deque()
        self.lost, self.watched, self.moved_bytes = "", 0, 0
        self._leaving: deque[memoryview] = deque()
        self._head = bytearray(_HEAD.size)
        self._coming: Message | None = None  # whose head has come
        self._rest = memoryview(self._head)  # what comes next goes there
        self._spare: list[bytearray] = []
        self._to_fill: tuple[int, torch.Tensor] | None = None  # by the message of that tag
        _links.add(self)

    @property
    def is_leaving(self) -> bool:
        """Return True if some of what was sent has not left yet, and may."""
        return bool(self._leaving) and not self.lost

    @property
    def awaits(self) -> int:
        """Return the events of the selector at which this end has something to do."""
        if self.lost:
            return 0
        reads = selectors.EVENT_READ if self._ahead_bytes() < _MOST_AHEAD_BYTES else 0
        return reads | (selectors.EVENT_WRITE if self._leaving else 0)

    def _ahead_bytes(self) -> int:
        return sum([message.nbytes for message in self.arrived]) if self.arrived else 0

    def require_open(self) -> None:
        """Raises ConnectionLost where the connection is closed."""
        if self.lost:
            raise ConnectionLost(f"connection to replica {self.peer}: {self.lost}")

    def send(self, tag: int, part: torch.Tensor, may_change: bool) -> None:
        """Send a contiguous 1-D tensor behind what leaves already.

        Args:
            may_change: True if its memory may change at once; else not before all has left.
        """
        self._leaving.append(memoryview(_HEAD.pack(tag, part.nbytes)))
        if part.nbytes:
            self._leaving.append(_bytes_of(part))
        self.push()
        if self._leaving and may_change:
            self._leaving[-1] = memoryview(bytes(self._leaving[-1]))

    def push(self) -> None:
        """Hand the system as much as it takes now."""
        while self._leaving and not self.lost:
            pieces = [self._leaving[i] for i in range(min(len(self._leaving), _AT_ONCE))]
            try:
                count = self.socket.sendmsg(pieces, [], _NO_SIGNAL)
            except BlockingIOError:
                return
            except OSError as error:
                self.lose(error.strerror or str(error))
                return
            self.moved_bytes += count
            self._has_left(count)

    def _has_left(self, count: int) -> None:
        while count:
            piece = self._leaving.popleft()
            if count < len(piece):
                self._leaving.appendleft(piece[count:])
                return
            count -= len(piece)

    def offer(self, tag: int, target: torch.Tensor | None) -> None:
        """Have the next message fill a contiguous tensor, if it carries the tag and is of its size."""
        is_plain = target is not None and not (target.is_conj() or target.is_neg())
        self._to_fill = (tag, target) if target is not None and is_plain else None

    def pull(self) -> None:
        """Take what has come, up to the end of a message."""
        known = len(self.arrived)
        while len(self.arrived) == known and self._fill():
            if not self._rest:
                self._is_full()

    def _fill(self) -> bool:
        """Return True if what comes next may go on, after taking what has come of it."""
        if self.lost or not self._rest:
            return not self.lost
        try:
            count = self.socket.recv_into(self._rest)
        except BlockingIOError:
            return False
        except OSError as error:
            self.lose(error.strerror or str(error))
            return False
        if count == 0:
            self.lose("closed by peer")
            return False
        self._rest = self._rest[count:]
        self.moved_bytes += count
        return True

    def _is_full(self) -> None:
        """Go on behind what has come: a head, or the content behind one."""
        if self._coming is None:
            tag, nbytes = _HEAD.unpack(self._head)
            if nbytes:
                self._expect(tag, nbytes)
                return
            self._coming = Message(tag, 0, None)
        self.arrived.append(self._coming)
        self._coming, self._rest = None, memoryview(self._head)

    def _expect(self, tag: int, nbytes: int) -> None:
        """Have room for the content of a message whose head has come."""
        wanted, target = self._to_fill or (None, None)
        if target is not None and wanted == tag and target.nbytes == nbytes:
            self._coming, self._rest = Message(tag, nbytes, None), _bytes_of(target)
        else:
            buffer = self._buffer(nbytes)
            self._coming = Message(tag, nbytes, buffer)
            self._rest = memoryview(buffer)[:nbytes]

    def _buffer(self, nbytes: int) -> bytearray:
        """Return a buffer for so many bytes: memory that is new to the process takes longer to fill."""
        for number, buffer in enumerate(self._spare):
            if len(buffer) >= nbytes:
                return self._spare.pop(number)
        return bytearray(nbytes)

    def give_back(self, message: Message) -> None:
        """Reuse the memory of a message."""
        if message.buffer is not None:
            self._spare.append(message.buffer)
            if sum(map(len, self._spare)) > _MOST_SPARE_BYTES:
                del self._spare[0]

    def lose(self, why: str) -> None:
        """Close the connection: nothing is read from a tensor, or written to one, any more."""
        self.lost = self.lost or why
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.resolve_conj().resolve_neg().view(torch.uint8).numpy().data


_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _close_all() -> None:
    """A forked child is no replica: what it holds of a connection would outlive its parent's end."""
    for link in list(_links):
        link.socket.close()


os.register_at_fork(after_in_child=_close_all)
