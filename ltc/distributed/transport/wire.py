"""How messages travel: what a schedule needs of a transport, and shared memory's."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Protocol

import torch

from ltc.distributed.transport.shm_segment import LINE, SLOTS, Region

_MOST_VIEWS = 4096  # a view takes longer to make than a small message to copy, so they are kept
LONG_SECONDS = 0.3  # whoever waits longer says for whom, so that a deadlock shows

Consume = Callable[[torch.Tensor], object]


class Mismatch(Exception):
    """A message carried another tag than the receiver expected.

    peer, found  who sent it, and its tag
    """

    def __init__(self, peer: int, found: int) -> None:
        self.peer, self.found = peer, found


class Wire(Protocol):
    """One replica's way to all others.  Messages from one to another arrive in order.

    replica, replicas   its number, and how many there are
    message_bytes       the largest message
    late                called with whom it has waited for, and how long, in seconds
    """

    replica: int
    replicas: int
    message_bytes: int
    late: Callable[[int, float], None]

    def send(self, receiver: int, part: torch.Tensor, tag: int) -> None:
        """Send a contiguous 1-D tensor.

        It must stay as it is until the receiver has answered with a message made from it, or until
        `finish` returns.
        """

    def finish(self) -> None:
        """Return when nobody needs the memory of what was sent any more."""

    def receive(self, sender: int, like: torch.Tensor, tag: int, consume: Consume | None) -> None:
        """Call `consume`, if any, with the next message: a 1-D tensor of `like`'s size and dtype.

        The tensor may be overwritten once `consume` returns.
        Raises Mismatch where the message carries another tag.
        """


class Waiter:
    """How one replica waits for a counter of its region, and tells whom it has long waited for."""

    def __init__(self, region: Region, replica: int) -> None:
        self.region, self.replica = region, replica
        self.late: Callable[[int, float], None] = lambda peer, waited: None
        self._word = region.waiting_word(replica)

    def wait_at_least(self, offset: int, value: int, peer: int) -> None:
        """Return when the counter at `offset`, which `peer` moves on, has reached `value`."""
        region = self.region

        def who_is_late(waited_seconds: float) -> None:
            if waited_seconds >= LONG_SECONDS:
                region.say_waiting(self.replica, peer, offset, value)
                self.late(peer, waited_seconds)

        region.wait_at_least(offset, value, who_is_late)
        region.words[self._word] = 0


class SharedMemoryWire:
    """Messages through the mailboxes of a region, for the processes that share it."""

    def __init__(self, region: Region, replica: int) -> None:
        self.region, self.replica, self.replicas = region, replica, region.replicas
        self.message_bytes = region.slot_bytes
        self._waiter = Waiter(region, replica)
        self._out = [region.mailbox(replica, peer) for peer in range(self.replicas)]
        self._in = [region.mailbox(peer, replica) for peer in range(self.replicas)]
        for mailbox in (*self._out, *self._in):
            region.reserve_counters(mailbox)
        self._is_reserved = [False] * self.replicas  # by receiver
        # counters survive in the region, so that a wire made anew goes on where the old one was
        self._sent = [region.words[mailbox // 8] for mailbox in self._out]
        self._received = [region.words[(mailbox + LINE) // 8] for mailbox in self._in]
        self._views: dict[tuple, torch.Tensor] = {}

    @property
    def late(self) -> Callable[[int, float], None]:
        """Called with whom this replica waits for, and how long it has."""
        return self._waiter.late

    @late.setter
    def late(self, late: Callable[[int, float], None]) -> None:
        self._waiter.late = late

    def send(self, receiver: int, part: torch.Tensor, tag: int) -> None:
        region = self.region
        mailbox = self._out[receiver]
        if not self._is_reserved[receiver]:
            region.reserve_slots(mailbox)
            self._is_reserved[receiver] = True
        number = self._sent[receiver]
        if number >= SLOTS:
            self._waiter.wait_at_least(mailbox + LINE, number - SLOTS + 1, receiver)
        slot = region.slot(mailbox, number)
        struct.pack_into("qq", region.memory, slot, tag, part.nbytes)
        if part.numel():
            self._view(slot + LINE, part).copy_(part)
        self._sent[receiver] = number + 1
        region.store(mailbox, number + 1)

    def receive(self, sender: int, like: torch.Tensor, tag: int, consume: Consume | None) -> None:
        region = self.region
        mailbox = self._in[sender]
        number = self._received[sender]
        self._waiter.wait_at_least(mailbox, number + 1, sender)
        slot = region.slot(mailbox, number)
        found, nbytes = struct.unpack_from("qq", region.memory, slot)
        if found != tag or nbytes != like.nbytes:
            raise Mismatch(sender, found)
        if consume is not None:
            consume(self._view(slot + LINE, like))
        self._received[sender] = number + 1
        region.store(mailbox + LINE, number + 1)

    def finish(self) -> None:
        """What is sent lies in shared memory at once."""

    def _view(self, offset: int, like: torch.Tensor) -> torch.Tensor:
        """The bytes of a slot as a tensor of the size and dtype of `like`."""
        key = (offset, like.dtype, like.numel())
        view = self._views.get(key)
        if view is None:
            if len(self._views) > _MOST_VIEWS:
                self._views.clear()
            view = self.region.bytes[offset : offset + like.nbytes].view(like.dtype)
            self._views[key] = view
        return view
