"""The TCP connections of this process, also those of libraries that do not give them out."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterable
from typing import NamedTuple

_DESCRIPTORS = "/dev/fd"
_TCP = {socket.AF_INET, socket.AF_INET6}


class Connection(NamedTuple):
    """A descriptor, and the number of what it stands for: another one's, once it is used again."""

    descriptor: int
    number: int


def connections() -> set[Connection]:
    """Return the connections that are open."""
    found = set()
    for name in os.listdir(_DESCRIPTORS):
        descriptor = int(name)
        with contextlib.suppress(OSError):  # it is closed by now, or is connected to nobody
            status = os.fstat(descriptor)
            if stat.S_ISSOCK(status.st_mode) and _is_connected(descriptor):
                found.add(Connection(descriptor, status.st_ino))
    return found


def end(those: Iterable[Connection]) -> None:
    """Tell both ends of each that nothing comes any more; their owners close them."""
    for descriptor, number in those:
        with contextlib.suppress(OSError):  # it is closed, or the other end was first
            if os.fstat(descriptor).st_ino == number:
                with _socket_of(descriptor) as one:
                    one.shutdown(socket.SHUT_RDWR)


def _is_connected(descriptor: int) -> bool:
    with _socket_of(descriptor) as one:
        return one.family in _TCP and one.type == socket.SOCK_STREAM and bool(one.getpeername())


def _socket_of(descriptor: int) -> socket.socket:
    """The socket of a descriptor that is another's to close."""
    return socket.socket(fileno=os.dup(descriptor))
