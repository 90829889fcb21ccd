"""Transports of messages: the interface that a schedule needs, and shared memory's."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Protocol

import torch

from ltc.distributed.transport.collective_schedule import HOP_BYTES
from ltc.distributed.transport.shm_segment import LINE, SLOTS, Region

_MOST_VIEWS = 4096  # a view takes longer to make than a small message to copy, so they are kept
LONG_SECONDS = 0.3  # whoever waits longer says for whom, so that a deadlock shows


class Mismatch(Exception):
    """A message carried another tag than the receiver expected.

    Args:
        peer, found: The sender, and its tag.
    """

    def __init__(self, peer: int, found: int) -> None:
        self.peer, self.found = peer, found


class Share:
    """A flat tensor that other replicas read in place, as messages tell them.

    Attributes:
        flat: The tensor that they read.
        is_copy: True if it is a copy, which only this object writes to.
        read_by: Receiver -> the latest message about it.
        is_open: True if more messages about it may follow.
    """

    __slots__ = ("flat", "is_copy", "read_by", "is_open")

    def __init__(self, flat: torch.Tensor, is_copy: bool) -> None:
        self.flat, self.is_copy, self.is_open = flat, is_copy, True
        self.read_by: dict[int, int] = {}

    def end(self) -> None:
        """End the messages about it: once the sent ones are taken, the memory is reused."""
        self.is_open = False


class Wire(Protocol):
    """One replica's way to all others.  Messages from one to another arrive in order.

    Attributes:
        replica, replicas: Its number, and the number of replicas.
        message_bytes: The largest message; one for each replica may be shared at once, and as many
            again while the others read those.
        hop_bytes: The bytes that it carries in the time that a message takes to arrive.
        late: Called with the replica that it has waited for, and the seconds of the wait.
    """

    replica: int
    replicas: int
    message_bytes: int
    hop_bytes: int
    late: Callable[[int, float], None]

    def share(self, flat: torch.Tensor, copies: bool = True) -> Share:
        """Make a contiguous 1-D tensor readable for other replicas: a copy, or the tensor itself.

        The tensor itself must not change until `finish` returns. A part may change earlier, once its
        receiver has answered with a message made from it.

        Args:
            copies: True if a copy has its values from the beginning.
        """

    def send(self, receiver: int, part: torch.Tensor, tag: int, share: Share | None = None) -> None:
        """Send a contiguous 1-D tensor, which is a part of `share` where that is given."""

    def take(self, sender: int, like: torch.Tensor, tag: int, fills: bool = False) -> torch.Tensor:
        """The next message, a 1-D tensor of `like`'s size and dtype: valid until it is given back.

        It may be `like` itself, which it has filled, if `fills`.

        Raises Mismatch where the message carries another tag.
        """

    def give_back(self, sender: int) -> None:
        """Release the message that was taken from `sender`."""

    def finish(self) -> None:
        """Return when no replica needs the memory of sent messages any more."""


class Waiter:
    """The wait of one replica for a counter of its region; it reports for which replica it waits
    long.
    """

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


class _Part:
    """This replica's part of the symmetric memory: where what it sends lies until it is taken."""

    def __init__(self, region: Region, replica: int, has_taken: Callable[[int, int], bool]) -> None:
        """`has_taken`: whether a receiver needs no message up to that number any more."""
        self.memory, self.has_taken = region.messages, has_taken
        self.start = replica * self.memory.nbytes  # in the whole memory
        self._reserved = 0  # so many of its bytes are there
        self._used: list[tuple[int, int, Share]] = []  # (start, stop, share), the oldest first

    def place(self, nbytes: int, share: Share, wait: Callable[[Share], None]) -> int:
        """Return an offset in the part where the share may lie from now on.

        Args:
            wait: Blocks until a share that is not open has been taken by all.
        """
        nbytes = -(-max(nbytes, 1) // LINE) * LINE
        while True:
            self._used = [one for one in self._used if not self._is_free(one[2])]
            place = self._gap(nbytes)
            if place + nbytes <= self.memory.nbytes:
                break
            wait(next(share for _, _, share in self._used if not share.is_open))
        if place + nbytes > self._reserved:
            self.memory.reserve(self.start + self._reserved, place + nbytes - self._reserved)
            self._reserved = place + nbytes
        self._used.append((place, place + nbytes, share))
        return place

    def _is_free(self, share: Share) -> bool:
        return not share.is_open and all(self.has_taken(*one) for one in share.read_by.items())

    def _gap(self, nbytes: int) -> int:
        """Return the first free place: memory that was used lately is in the caches."""
        place = 0
        for start, stop in sorted(one[:2] for one in self._used):
            if place + nbytes <= start:
                break
            place = stop
        return place


class SharedMemoryWire:
    """Messages for the processes that share a region: they lie in the part of their sender.

    A mailbox only tells where, so that any number of receivers read one copy in place.
    """

    hop_bytes = HOP_BYTES

    def __init__(self, region: Region, replica: int) -> None:
        self.region, self.replica, self.replicas = region, replica, region.replicas
        # At most four pieces are under way at once (see direct_all_reduce): with ten times the memory
        # of one there is a gap for another, wherever those lie.
        piece = region.messages.nbytes // 10 // self.replicas
        self.message_bytes = max(piece // LINE * LINE, LINE)
        self._waiter = Waiter(region, replica)
        self._out = [region.mailbox(replica, peer) for peer in range(self.replicas)]
        self._in = [region.mailbox(peer, replica) for peer in range(self.replicas)]
        # counters survive in the region, so that a wire made anew goes on where the old one was
        self._sent = [region.words[mailbox // 8] for mailbox in self._out]
        self._received = [region.words[(mailbox + LINE) // 8] for mailbox in self._in]
        self._part = _Part(region, replica, self._has_taken)
        self._views: dict[tuple, torch.Tensor] = {}

    @property
    def late(self) -> Callable[[int, float], None]:
        """Return the callback that gets the awaited replica and the seconds waited."""
        return self._waiter.late

    @late.setter
    def late(self, late: Callable[[int, float], None]) -> None:
        self._waiter.late = late

    def share(self, flat: torch.Tensor, copies: bool = True) -> Share:
        share = Share(flat, is_copy=True)
        place = self._part.place(flat.nbytes, share, self._wait_for_readers)
        share.flat = self._view(self._part.start + place, flat)
        if copies:
            share.flat.copy_(flat)
        return share

    def send(self, receiver: int, part: torch.Tensor, tag: int, share: Share | None = None) -> None:
        if share is None:
            share = self.share(part)
            part = share.flat
            share.end()
        number = self._sent[receiver] = self._sent[receiver] + 1
        share.read_by[receiver] = number
        region, mailbox = self.region, self._out[receiver]
        if number > SLOTS:
            self._waiter.wait_at_least(mailbox + LINE, number - SLOTS, receiver)
        place = part.data_ptr() - region.messages.address if part.numel() else 0
        struct.pack_into(
            "qqq", region.memory, region.slot(mailbox, number), tag, part.nbytes, place
        )
        region.store(mailbox, number)

    def take(self, sender: int, like: torch.Tensor, tag: int, fills: bool = False) -> torch.Tensor:
        region, mailbox = self.region, self._in[sender]
        number = self._received[sender] = self._received[sender] + 1
        self._waiter.wait_at_least(mailbox, number, sender)
        slot = region.slot(mailbox, number)
        found, nbytes, place = struct.unpack_from("qqq", region.memory, slot)
        if found != tag or nbytes != like.nbytes:
            raise Mismatch(sender, found)
        return self._view(place, like)

    def has_come(self, sender: int) -> bool:
        """Return True if the next message from there can be taken without waiting."""
        return self.region.load(self._in[sender]) > self._received[sender]

    def give_back(self, sender: int) -> None:
        self.region.store(self._in[sender] + LINE, self._received[sender])

    def finish(self) -> None:
        """Do nothing: every message is a copy."""

    def _has_taken(self, receiver: int, number: int) -> bool:
        return self.region.load(self._out[receiver] + LINE) >= number

    def _wait_for_readers(self, share: Share) -> None:
        for receiver, number in share.read_by.items():
            self._waiter.wait_at_least(self._out[receiver] + LINE, number, receiver)

    def _view(self, place: int, like: torch.Tensor) -> torch.Tensor:
        """The bytes at a place of the whole memory as a tensor of the size and dtype of `like`."""
        key = (place, like.dtype, like.numel())
        view = self._views.get(key)
        if view is None:
            if len(self._views) > _MOST_VIEWS:
                self._views.clear()
            view = self.region.messages.bytes[place : place + like.nbytes].view(like.dtype)
            self._views[key] = view
        return view
