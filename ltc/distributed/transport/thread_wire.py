"""Messages between threads of one process: the receiver reads the sender's own memory."""

from __future__ import annotations

from collections import deque

import torch

from ltc.distributed.transport.collective_schedule import HOP_BYTES, one_hop_bytes
from ltc.distributed.transport.shm_segment import LINE, Region
from ltc.distributed.transport.wire import Mismatch, Share, Waiter

# Of a message that is copied: whatever takes one hop, as its result may be written where it lies.
SMALL_BYTES = one_hop_bytes(2, HOP_BYTES)
_ANY_BYTES = 1 << 40  # a message is never cut: nothing is copied on its way


class ThreadsWire:
    """A wire among the threads that share a region, which counts what they have sent and taken.

    A small message is copied, so that its sender need not wait until it is taken.
    """

    hop_bytes = HOP_BYTES

    def __init__(self, region: Region, replica: int) -> None:
        self.region, self.replica, self.replicas = region, replica, region.replicas
        self.message_bytes = _ANY_BYTES
        self._waiter = Waiter(region, replica)
        self._out = [region.mailbox(replica, peer) for peer in range(self.replicas)]
        self._in = [region.mailbox(peer, replica) for peer in range(self.replicas)]
        # counters and messages survive in the region: a wire made anew goes on where the old one was
        self._sent = [region.words[mailbox // 8] for mailbox in self._out]
        self._received = [region.words[(mailbox + LINE) // 8] for mailbox in self._in]
        self._to_be_read: set[int] = set()  # receivers that may still read memory of this replica

    @property
    def late(self):
        return self._waiter.late

    @late.setter
    def late(self, late) -> None:
        self._waiter.late = late

    def share(self, flat: torch.Tensor, copies: bool = True) -> Share:
        is_small = flat.nbytes <= SMALL_BYTES
        return Share(flat.clone() if is_small else flat, is_copy=is_small)

    def send(self, receiver: int, part: torch.Tensor, tag: int, share: Share | None = None) -> None:
        mailbox = self._out[receiver]
        if share is None or not share.is_copy:
            if part.nbytes <= SMALL_BYTES:
                part = part.clone()
            else:
                self._to_be_read.add(receiver)
        self._messages(mailbox).append((tag, part))
        self._sent[receiver] += 1
        self.region.store(mailbox, self._sent[receiver])

    def take(self, sender: int, like: torch.Tensor, tag: int) -> torch.Tensor:
        mailbox = self._in[sender]
        self._received[sender] += 1
        self._waiter.wait_at_least(mailbox, self._received[sender], sender)
        found, part = self._messages(mailbox).popleft()
        if found != tag or part.nbytes != like.nbytes:
            raise Mismatch(sender, found)
        return part.view(like.dtype)

    def give_back(self, sender: int) -> None:
        self.region.store(self._in[sender] + LINE, self._received[sender])

    def finish(self) -> None:
        for receiver in self._to_be_read:
            taken = self._out[receiver] + LINE
            self._waiter.wait_at_least(taken, self._sent[receiver], receiver)
        self._to_be_read.clear()

    def _messages(self, mailbox: int) -> deque:
        return self.region.thread_messages.setdefault(mailbox, deque())
