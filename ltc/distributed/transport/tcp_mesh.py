"""Connects the replicas of several hosts, by what each leaves in the run's store: an `Invitation`.

Of two replicas the one with the larger number connects. Both show that they know the other's secret,
which only readers of the store can: a port may belong to another program by now, or to a stranger.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import hmac
import json
import math
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from ltc import config
from ltc.distributed.transport.shm_segment import NAP_SECONDS
from ltc.errors import LtcError

_NONCE_BYTES, _PROOF_BYTES = 16, 32
_HELLO = struct.Struct(f"=q{_NONCE_BYTES}s{_PROOF_BYTES}s")
_CONNECT_SECONDS = 3.0  # for an address that does not answer
_HELLO_SECONDS = 3.0  # for one that has connected and does not say who it is
_ANSWER_SECONDS = 20.0  # for a replica that connects with others meanwhile
_SIOCGIFADDR = 0x8915  # Linux's question for the IPv4 address of an interface
_NAME_BYTES = 15  # of an interface


class Invitation(NamedTuple):
    """The addresses of a replica, its port, the secret that a connection needs, and its largest message."""

    addresses: list[str]
    port: int
    secret: str
    message_bytes: int

    def text(self) -> str:
        return json.dumps(self)

    @classmethod
    def of_text(cls, text: str | bytes) -> Invitation:
        """Raises LtcError for what no replica has written."""
        try:
            addresses, port, secret, message_bytes = json.loads(text)
            return cls([str(one) for one in addresses], int(port), str(secret), int(message_bytes))
        except (ValueError, TypeError) as error:
            raise LtcError(
                f"{text[:80]!r} in the run's store is no address of a replica"
            ) from error


class Listener:
    """A replica's port, open until all that connect to it have come."""

    def __init__(self, message_bytes: int) -> None:
        named = config.value("GLOO_SOCKET_IFNAME")
        if named:
            addresses = [a for name in named.split(",") for a in addresses_of_interface(name)]
        else:
            addresses = list(_addresses_of_host())
        both = socket.has_dualstack_ipv6()
        self._socket = socket.create_server(
            ("", 0),
            family=socket.AF_INET6 if both else socket.AF_INET,
            dualstack_ipv6=both,
            backlog=1024,
        )
        port = self._socket.getsockname()[1]
        self.invitation = Invitation(addresses, port, secrets.token_hex(16), message_bytes)

    def close(self) -> None:
        self._socket.close()

    def accept(
        self, wanted: Iterable[int], found: dict[int, socket.socket], check: Callable[[], None]
    ) -> None:
        """Add to `found` a connection with each wanted replica, by its number.

        Args:
            check: Called while this waits; what it raises ends the wait.
        """
        missing = set(wanted)
        self._socket.settimeout(NAP_SECONDS)
        while missing:
            check()
            with _unless_files_are_out():  # nobody has come
                connection, _ = self._socket.accept()
                replica = self._greeted(connection, missing, check)
                if replica is not None:
                    found[replica] = connection
                    missing.remove(replica)

    def _greeted(self, connection, missing: set[int], check: Callable[[], None]) -> int | None:
        """Return the number of the replica that has connected; None for a stranger, which is left."""
        with contextlib.ExitStack() as unless_wanted:
            unless_wanted.callback(connection.close)
            hello = _read(connection, _HELLO.size, _HELLO_SECONDS, check)
            replica, nonce, proof = _HELLO.unpack(hello)
            secret = self.invitation.secret
            if not hmac.compare_digest(proof, _proof(secret, b"hello", replica, nonce)):
                return None
            connection.sendall(_proof(secret, b"welcome", replica, nonce))
            _read(connection, 1, math.inf, check)  # it has not given up meanwhile
            if replica not in missing:
                return None
            unless_wanted.pop_all()
            return replica


def connected(
    invitation: Invitation, replica: int, check: Callable[[], None], likely: int = 0
) -> tuple[socket.socket, int]:
    """Return a connection of this replica with the one that invites, and the position of its address.

    Args:
        check: Called while this waits; what it raises ends the wait.
        likely: The position of the address to try first: hosts of one run mostly are alike.
    """
    positions = sorted(range(len(invitation.addresses)), key=lambda position: position != likely)
    while True:
        for position in positions:
            check()
            with _unless_files_are_out():  # the next address, or the same again
                address = invitation.addresses[position]
                return _introduced(address, invitation, replica, check), position
        time.sleep(NAP_SECONDS)


@contextlib.contextmanager
def _unless_files_are_out() -> Iterator[None]:
    """Pass over errors of one connection; raise where this process has too many open files."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise LtcError(
                f"{error.strerror}: a replica has two connections with each replica of other hosts. "
                f"Allow more: ulimit -n"
            ) from error


def _introduced(address: str, invitation: Invitation, replica: int, check) -> socket.socket:
    connection = socket.create_connection((address, invitation.port), _CONNECT_SECONDS)
    with contextlib.ExitStack() as if_this_fails:
        if_this_fails.callback(connection.close)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        proof = _proof(invitation.secret, b"hello", replica, nonce)
        connection.sendall(_HELLO.pack(replica, nonce, proof))
        answer = _read(connection, _PROOF_BYTES, _ANSWER_SECONDS, check)
        if not hmac.compare_digest(answer, _proof(invitation.secret, b"welcome", replica, nonce)):
            raise ConnectionError(f"{address}:{invitation.port} is another program's")
        connection.sendall(b"\1")
        if_this_fails.pop_all()
    return connection


def _proof(secret: str, word: bytes, replica: int, nonce: bytes) -> bytes:
    return hmac.digest(secret.encode(), word + struct.pack("=q", replica) + nonce, hashlib.sha256)


def _read(connection: socket.socket, nbytes: int, seconds: float, check: Callable) -> bytes:
    """Return so many bytes; raises OSError where they do not come in time."""
    found, deadline = b"", time.monotonic() + seconds
    connection.settimeout(NAP_SECONDS)
    while len(found) < nbytes:
        check()
        try:
            piece = connection.recv(nbytes - len(found))
        except TimeoutError:
            if time.monotonic() > deadline:
                raise
            continue
        if not piece:
            raise ConnectionError("closed")
        found += piece
    return found


def _addresses_of_host() -> Iterable[str]:
    """Addresses of this host, those that another one reaches first."""
    found: dict[str, None] = {}  # in order
    for family, place in _places_of(config.value("MASTER_ADDR"), 9):
        # nothing is sent: it says which interface leads to where all meet
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as way:
            way.connect(place)
            found[way.getsockname()[0]] = None
    for _, place in _places_of(socket.gethostname(), None):
        found[str(place[0])] = None
    for _, name in socket.if_nameindex():
        found |= dict.fromkeys([*_ipv4_of_interface(name), *_ipv6_of_interface(name)])
    found["127.0.0.1"] = None
    return sorted(found, key=lambda address: address.startswith("127.") or address == "::1")


def _places_of(name: str, port: int | None) -> list[tuple[int, Any]]:
    """Return (family, address) of a host; none where its name is not known."""
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [(family, place) for family, _, _, _, place in found]


def addresses_of_interface(name: str) -> list[str]:
    """The addresses of a network interface of this machine.

    Raises:
        LtcError: If it has none.
    """
    found = [*_ipv4_of_interface(name), *_ipv6_of_interface(name)]
    if not found:
        known = ", ".join(name for _, name in socket.if_nameindex())
        raise LtcError(
            f"GLOO_SOCKET_IFNAME={config.value('GLOO_SOCKET_IFNAME')}: no address of {name!r} is known "
            f"here. This machine has {known}."
        )
    return found


def _ipv4_of_interface(name: str) -> Iterable[str]:
    with (
        contextlib.suppress(OSError),
        socket.socket(type=socket.SOCK_DGRAM) as any_one,
    ):
        asked = struct.pack("256s", os.fsencode(name)[:_NAME_BYTES])
        yield socket.inet_ntoa(fcntl.ioctl(any_one, _SIOCGIFADDR, asked)[20:24])


def _ipv6_of_interface(name: str) -> Iterable[str]:
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:
        for line in file:
            address, _, _, scope, _, interface = line.split()
            if interface == name and scope == "00":  # one that others can reach
                yield socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))
