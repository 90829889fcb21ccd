"""A barrier with payloads: every replica that comes to it gets everyone's, in ordinal order."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from ltc.device.recording import sync
from ltc.device.user_line import user_line
from ltc.distributed import world
from ltc.distributed.transport import session as sessions
from ltc.distributed.transport.collective_schedule import tree_children, tree_parent
from ltc.distributed.transport.communicator import tag_of
from ltc.distributed.transport.wire import Wire
from ltc.tracebacks import entrance


@entrance
def rendezvous(
    tag: str, payload: bytes = b"", replicas: Sequence[int] | None = None
) -> list[bytes]:
    """Wait for the replicas (all where None or empty), and get each one's payload.

    Payloads go up a tree and come down together: O(log n) messages one after another. What is
    pending in the calling thread is started first, since others may wait for it.

    Args:
        tag: The name of the rendezvous: the same on every replica.
        payload: Bytes for the others.
        replicas: The ordinals that meet; None: all.

    Returns:
        The payloads, in the order of the ordinals.

    Raises:
        TypeError: For a payload that is no bytes.
        ValueError: For a list of replicas that names one twice, one that does not exist, or not
            this one.
        PeerFailure: On every replica where they do not meet in the same rendezvous.

    Example:
        >>> ltm.rendezvous("ready", b"zero")
        [b'zero']
    """
    if not isinstance(payload, (bytes, bytearray, memoryview)):
        raise TypeError(
            f"rendezvous({tag!r}) got a payload of type {type(payload).__name__}: pass bytes, such as "
            f"text.encode()."
        )
    sync.start_collectives()
    session = sessions.current()
    if session is None:
        _members(tag, replicas, 1, 0)
        return [bytes(payload)]
    members = _members(tag, replicas, session.replicas, session.ordinal)
    if len(members) == 1:
        return [bytes(payload)]
    described = f"rendezvous {tag!r} of {list(members)}"
    text = f"{described} at {user_line()}".encode()
    with session.at_once() as communicator:
        return communicator.guarded(
            members,
            (text, tag_of(described)),
            lambda members, position, message_tag: gather_payloads(
                communicator.wire, members, position, message_tag, bytes(payload)
            ),
        )


def _members(tag: str, replicas, size: int, ordinal: int) -> tuple[int, ...]:
    members = tuple(sorted(replicas or range(size)))
    for member in members:
        if not 0 <= member < size:
            raise ValueError(f"rendezvous({tag!r}): Invalid ordinal: {member}, of {size} replicas")
    if len(set(members)) != len(members):
        double = next(m for m in members if members.count(m) > 1)
        raise ValueError(f"rendezvous({tag!r}): Duplicate ordinal: {double} in {list(members)}")
    if ordinal not in members:
        raise ValueError(
            f"rendezvous({tag!r}): replica {ordinal} is not among {list(members)}. Only the listed "
            f"replicas may call it."
        )
    return members


def gather_payloads(
    wire: Wire, members: tuple[int, ...], position: int, tag: int, payload: bytes
) -> list[bytes]:
    """The payloads of `members`, of which this replica is number `position`, over a wire."""
    return _Gathering(wire, members, position, tag).run(payload)


class _Gathering:
    """One rendezvous of one member: payloads of its subtree go up, those of all come down."""

    def __init__(self, wire: Wire, members: tuple[int, ...], position: int, tag: int) -> None:
        self.wire, self.members, self.position, self.tag = wire, members, position, tag

    def run(self, payload: bytes) -> list[bytes]:
        gathered = {self.position: payload}
        children = tree_children(self.position, len(self.members))
        for child in children:
            gathered.update(_unpacked(self._receive(child)))
        if self.position:
            parent = tree_parent(self.position)
            self._send(parent, _packed(gathered))
            everything = self._receive(parent)
            gathered = _unpacked(everything)
        else:
            everything = _packed(gathered)
        for child in reversed(children):  # the deepest subtree has the longest way to go
            self._send(child, everything)
        return [gathered[position] for position in range(len(self.members))]

    def _send(self, position: int, content: bytes) -> None:
        member, wire = self.members[position], self.wire
        wire.send(member, torch.tensor([len(content)], device="cpu"), self.tag)
        everything = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        for part in everything.split(wire.message_bytes):
            wire.send(member, part, self.tag)

    def _receive(self, position: int) -> bytes:
        length = torch.empty(1, dtype=torch.int64, device="cpu")
        self._fill(length, position)
        everything = torch.empty(int(length), dtype=torch.uint8, device="cpu")
        for part in everything.split(self.wire.message_bytes):
            self._fill(part, position)
        return everything.numpy().tobytes()

    def _fill(self, part: torch.Tensor, position: int) -> None:
        """With the next message from there."""
        member = self.members[position]
        part.copy_(self.wire.take(member, part, self.tag))
        self.wire.give_back(member)


def _packed(payloads: dict[int, bytes]) -> bytes:
    return b"".join(
        struct.pack("qq", position, len(payload)) + payload
        for position, payload in payloads.items()
    )


def _unpacked(content: bytes) -> dict[int, bytes]:
    found, at = {}, 0
    while at < len(content):
        position, length = struct.unpack_from("qq", content, at)
        at += 16
        found[position] = content[at : at + length]
        at += length
    return found


world.install_rendezvous(rendezvous, sessions.name_of_run)
