"""One collective as one member takes part in it: its messages, and the steps of a reduction."""

from __future__ import annotations

import torch

from ltc.distributed.transport import collective_schedule
from ltc.distributed.transport.folds import fold
from ltc.distributed.transport.wire import Share, Wire


class Exchange:
    """One collective under way: the wire, who takes part, and the tag of its messages."""

    def __init__(self, wire: Wire, members: tuple[int, ...], position: int, tag: int) -> None:
        self.wire, self.members, self.position, self.tag = wire, members, position, tag
        self.size = len(members)

    def among(self, positions) -> Exchange:
        """The same exchange among some of its members, this one included."""
        chosen = list(positions)
        members = tuple(self.members[p] for p in chosen)
        return Exchange(self.wire, members, chosen.index(self.position), self.tag)

    def send(self, position: int, part: torch.Tensor, share: Share | None = None) -> None:
        self.wire.send(self.members[position], part, self.tag, share)

    def take(self, position: int, like: torch.Tensor) -> torch.Tensor:
        """The next message from there, which is to be given back."""
        return self.wire.take(self.members[position], like, self.tag)

    def give_back(self, position: int) -> None:
        self.wire.give_back(self.members[position])

    def receive(self, position: int, target: torch.Tensor) -> None:
        """`target` becomes the next message from there."""
        target.copy_(self.take(position, target))
        self.give_back(position)

    def elements(self, dtype: torch.dtype) -> int:
        """How many elements fit into one message."""
        return max(self.wire.message_bytes // dtype.itemsize, 1)

    def run(self, steps, kind: str, source: torch.Tensor, target: torch.Tensor) -> None:
        """Follow a schedule that reduces `source` into `target`, both flat; they may be one."""
        Schedule(self, kind, source, target).follow(steps)

    def trade(self, outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor]) -> None:
        """Send a flat tensor to each position of `outgoing`; fill those of `incoming`."""
        tensors = [*outgoing.values(), *incoming.values()]
        longest = max((t.numel() for t in tensors), default=0)
        step = self.elements(tensors[0].dtype) if tensors else 1
        for start in range(0, longest, step):
            stop = start + step
            self._send_to_each({p: x[start:stop] for p, x in _of_those(outgoing, start)})
            for position in collective_schedule.others(self.position, self.size):
                target = incoming.get(position)
                if target is not None and start < target.numel():
                    self.receive(position, target[start:stop])

    def _send_to_each(self, outgoing: dict[int, torch.Tensor]) -> None:
        """What several are sent they all read at one place."""
        shares: dict[int, Share] = {}
        for position in collective_schedule.others(self.position, self.size):
            part = outgoing.get(position)
            if part is not None:
                place = part.data_ptr()
                if place not in shares:
                    shares[place] = self.wire.share(part)
                self.send(position, shares[place].flat, shares[place])
        for share in shares.values():
            share.end()

    def agree(self) -> None:
        """Compare tags with the neighbours, where not every pair exchanges a message anyway."""
        if self.size > 1:
            nothing = torch.empty(0, device="cpu")
            self.send((self.position + 1) % self.size, nothing)
            self.receive((self.position - 1) % self.size, nothing)


def _of_those(tensors: dict[int, torch.Tensor], start: int) -> list[tuple[int, torch.Tensor]]:
    """The tensors that have an element number `start`."""
    return [(position, x) for position, x in tensors.items() if start < x.numel()]


class Schedule:
    """A reduction of `source` into `target` as one member follows its steps."""

    def __init__(self, exchange: Exchange, kind: str, source: torch.Tensor, target: torch.Tensor):
        self.exchange, self.kind, self.source, self.target = exchange, kind, source, target
        self._shares: dict[tuple[int, int], Share] = {}  # by range
        self._reduced: tuple[int, int] | None = None  # the range that is sent as a result

    def follow(self, steps) -> None:
        for action, peer, a, b in steps:
            _DO[action](self, peer, a, b)

    def _share(self, _: int, a: int, b: int) -> None:
        self._shares[a, b] = self.exchange.wire.share(range_of(self.source, a, b), copies=False)

    def _put(self, _: int, a: int, b: int) -> None:
        share = self._shared(a, b)
        if share is not None and share.is_copy:
            self._part(share, a, b).copy_(range_of(self.source, a, b))

    def _unshare(self, _: int, a: int, b: int) -> None:
        self._shares.pop((a, b)).end()

    def _send(self, peer: int, a: int, b: int) -> None:
        is_result = (a, b) == self._reduced
        share = self._shared(a, b)
        if share is None or (is_result and not share.is_copy):
            part = range_of(self.target if is_result else self.source, a, b)
            self.exchange.send(peer, part)
        else:
            self.exchange.send(peer, self._part(share, a, b), share)

    def _shared(self, a: int, b: int) -> Share | None:
        """The share that has these elements."""
        for (start, stop), share in self._shares.items():
            if start <= a and b <= stop:
                return share
        return None

    def _part(self, share: Share, a: int, b: int) -> torch.Tensor:
        """These elements in their share."""
        (start,) = [first for (first, _), one in self._shares.items() if one is share]
        return range_of(share.flat, a - start, b - start)

    def _reduce(self, _: int, a: int, b: int) -> None:
        exchange, own = self.exchange, range_of(self.source, a, b)
        share, targets = self._shared(a, b), [range_of(self.target, a, b)]
        if share is not None and share.is_copy:  # this member alone reads this part of it
            targets.append(self._part(share, a, b))
        everyone = range(exchange.size)
        given = [own if p == exchange.position else exchange.take(p, own) for p in everyone]
        fold(self.kind, given, targets)
        for peer in collective_schedule.others(exchange.position, exchange.size):
            exchange.give_back(peer)
        self._reduced = a, b

    def _copy(self, peer: int, a: int, b: int) -> None:
        self.exchange.receive(peer, self.target[a:b])

    def _join(self, peer: int, a: int, b: int) -> None:
        part = self.target[a:b]
        fold(self.kind, [self.exchange.take(peer, part), part], [part])
        self.exchange.give_back(peer)


_DO = {
    collective_schedule.SHARE: Schedule._share,
    collective_schedule.PUT: Schedule._put,
    collective_schedule.UNSHARE: Schedule._unshare,
    collective_schedule.SEND: Schedule._send,
    collective_schedule.REDUCE: Schedule._reduce,
    collective_schedule.COPY: Schedule._copy,
    collective_schedule.JOIN: Schedule._join,
}


def range_of(flat: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """flat[start:stop], which takes longer than the rest of a small message."""
    return flat if stop - start == flat.numel() else flat[start:stop]
