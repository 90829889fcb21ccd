"""How messages travel between replicas: what a schedule needs of a transport, and shared memory's."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Protocol

import torch

from ltc.distributed.region import LINE, SLOTS, Region

Consume = Callable[[torch.Tensor], None]


class Mismatch(Exception):
    """A message carried another word than the receiver expected.

    peer, found  who sent it, and its word
    """

    def __init__(self, peer: int, found: int) -> None:
        self.peer, self.found = peer, found


class Wire(Protocol):
    """One replica's way to all others.  Messages from one to another arrive in order.

    replica, replicas   its number, and how many there are
    message_bytes       the largest message
    """

    replica: int
    replicas: int
    message_bytes: int

    def send(self, receiver: int, part: torch.Tensor, word: int) -> None:
        """Send a contiguous 1-D tensor; returns as soon as it may be overwritten."""

    def receive(self, sender: int, like: torch.Tensor, word: int, consume: Consume | None) -> None:
        """Call `consume`, if any, with the next message: a 1-D tensor of `like`'s size and dtype.

        The tensor may be overwritten once `consume` returns.
        Raises Mismatch where the message carries another word.
        """


class SharedMemoryWire:
    """Messages through the mailboxes of a region, for threads and processes alike."""

    def __init__(self, region: Region, replica: int) -> None:
        self.region, self.replica, self.replicas = region, replica, region.replicas
        self.message_bytes = region.slot_bytes
        self._out = [region.mailbox(replica, peer) for peer in range(self.replicas)]
        self._in = [region.mailbox(peer, replica) for peer in range(self.replicas)]
        # counters survive in the region, so that a wire made anew goes on where the old one was
        self._sent = [region.words[mailbox // 8] for mailbox in self._out]
        self._received = [region.words[(mailbox + LINE) // 8] for mailbox in self._in]
        self._views: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self.late: Callable[[int, float], None] = lambda peer, waited: None

    def send(self, receiver: int, part: torch.Tensor, word: int) -> None:
        region = self.region
        mailbox = self._out[receiver]
        number = self._sent[receiver]
        if number >= SLOTS:
            region.wait_at_least(
                mailbox + LINE, number - SLOTS + 1, lambda waited: self.late(receiver, waited)
            )
        slot = region.slot(mailbox, number)
        struct.pack_into("qq", region.memory, slot, word, part.nbytes)
        if part.numel():
            self._view(slot + LINE, part.dtype)[: part.numel()].copy_(part)
        self._sent[receiver] = number + 1
        region.store(mailbox, number + 1)

    def receive(self, sender: int, like: torch.Tensor, word: int, consume: Consume | None) -> None:
        region = self.region
        mailbox = self._in[sender]
        number = self._received[sender]
        region.wait_at_least(
            mailbox, number + 1, lambda waited: self.late(sender, waited)
        )
        slot = region.slot(mailbox, number)
        found, nbytes = struct.unpack_from("qq", region.memory, slot)
        if found != word or nbytes != like.nbytes:
            raise Mismatch(sender, found)
        if consume is not None:
            consume(self._view(slot + LINE, like.dtype)[: like.numel()])
        self._received[sender] = number + 1
        region.store(mailbox + LINE, number + 1)

    def _view(self, offset: int, dtype: torch.dtype) -> torch.Tensor:
        """The bytes of a slot as elements."""
        view = self._views.get((offset, dtype))
        if view is None:
            size = self.message_bytes // dtype.itemsize * dtype.itemsize
            view = self.region.bytes[offset : offset + size].view(dtype)
            self._views[offset, dtype] = view
        return view
