"""The work of one collective over a wire: each kind, for CPU tensors of one replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ltc.backends.host_memory import new_copy, new_empty
from ltc.distributed.transport import collective_schedule
from ltc.distributed.transport.folds import fold
from ltc.distributed.transport.wire import Share, Wire
from ltc.ir.collective import Collective

_MOST_PACKED_BYTES = 1 << 20  # tensors of a list are packed together up to this size


def reduce(exchange: Exchange, kind: str, source: torch.Tensor, target: torch.Tensor) -> None:
    """`target` = the reduction of everyone's `source`; both flat, and may be the same."""
    size, elements = exchange.size, source.numel()
    if size == 1:
        if target is not source:
            target.copy_(source)
        return
    if elements == 0:
        exchange.agree()
        return
    limit = _one_hop_bytes(exchange)
    per_host = getattr(exchange.wire, "per_host", exchange.wire.replicas)
    if source.nbytes > limit and per_host < exchange.wire.replicas == size:
        _reduce_by_hosts(exchange, kind, source, target, per_host)
        return
    if source.nbytes <= limit:
        steps = collective_schedule.all_to_all_reduce(exchange.position, size, elements)
    else:
        most = exchange.elements(source.dtype)
        steps = collective_schedule.direct_all_reduce(exchange.position, size, elements, most)
    exchange.run(steps, kind, source, target)


def _reduce_by_hosts(exchange: Exchange, kind: str, source, target, per_host: int) -> None:
    """Each replica sums a share inside its host, rings it among the hosts, and hands it round."""
    local = exchange.position % per_host
    first = exchange.position - local
    inside = exchange.among(range(first, first + per_host))
    across = exchange.among(range(local, exchange.size, per_host))
    shares = [
        slice(*collective_schedule.part(source.numel(), per_host, i)) for i in range(per_host)
    ]
    _scatter_flat(inside, kind, [source[share] for share in shares], target[shares[local]])
    own = target[shares[local]]
    steps = collective_schedule.ring_all_reduce(
        across.position, across.size, own.numel(), across.elements(own.dtype)
    )
    across.run(steps, kind, own, own)
    everyone = collective_schedule.others(local, per_host)
    inside.trade(dict.fromkeys(everyone, own), {p: target[shares[p]] for p in everyone})


def _scatter_flat(exchange: Exchange, kind: str, parts: list[torch.Tensor], target) -> None:
    """`target` = the reduction of everyone's part for this member; all flat."""
    own = parts[exchange.position]
    if exchange.size == 1:
        if target.data_ptr() != own.data_ptr():
            target.copy_(own)
        return
    step = exchange.elements(own.dtype)
    for start in range(0, max(part.numel() for part in parts), step):
        for position in collective_schedule.others(exchange.position, exchange.size):
            if start < parts[position].numel():
                exchange.send(position, parts[position][start : start + step])
        mine = own[start : start + step]
        if mine.numel():
            steps = [(collective_schedule.REDUCE, exchange.position, 0, mine.numel())]
            exchange.run(steps, kind, mine, target[start : start + step])


def _all_reduce(exchange: Exchange, collective: Collective, operands):
    results: list = [None] * len(operands)
    packs = _packed(operands)
    for indices in packs:
        if len(indices) == 1:
            source = operands[indices[0]].contiguous()
            target = new_empty(source)
            reduce(exchange, collective.reduction, source.view(-1), target.view(-1))
            results[indices[0]] = target
        else:
            flat = torch.cat([operands[i].reshape(-1) for i in indices])
            reduce(exchange, collective.reduction, flat, flat)
            parts = flat.split([operands[i].numel() for i in indices])
            for i, one in zip(indices, parts):
                results[i] = one.view(operands[i].shape)
    return results


def post_reduce(
    exchange: Exchange, collective: Collective, operands: Sequence[torch.Tensor]
) -> tuple[Callable[[], None], Callable[[], list[torch.Tensor]]] | None:
    """An all_reduce that fits one message, in two parts: send this member's, take the others'.

    None for anything else.  The exchange gets its tag before the first part is called.
    """
    if collective.kind != "all_reduce" or len({x.dtype for x in operands}) != 1:
        return None
    nbytes = sum(x.nbytes for x in operands)
    if exchange.size == 1 or not 0 < nbytes <= _one_hop_bytes(exchange):
        return None
    flat = torch.cat([x.reshape(-1) for x in operands])
    *sends, reduction = collective_schedule.all_to_all_reduce(
        exchange.position, exchange.size, flat.numel()
    )
    schedule = Schedule(exchange, collective.reduction, flat, flat)

    def receive() -> list[torch.Tensor]:
        schedule.follow([reduction])
        parts = flat.split([x.numel() for x in operands])
        return [one.view(x.shape) for one, x in zip(parts, operands)]

    return lambda: schedule.follow(sends), receive


def _one_hop_bytes(exchange: Exchange) -> int:
    wire = exchange.wire
    limit = collective_schedule.one_hop_bytes(exchange.size, wire.hop_bytes)
    return min(limit, wire.message_bytes)


def _packed(operands) -> list[list[int]]:
    """Positions of the operands, those of one dtype together while they are small."""
    packs: list[list[int]] = []
    open_pack: dict[torch.dtype, tuple[list[int], int]] = {}
    for i, x in enumerate(operands):
        pack, used = open_pack.get(x.dtype, (None, 0))
        if pack is None or used + x.nbytes > _MOST_PACKED_BYTES:
            pack, used = [], 0
            packs.append(pack)
        pack.append(i)
        open_pack[x.dtype] = (pack, used + x.nbytes)
    return packs


def _all_gather(exchange: Exchange, collective: Collective, operands):
    return [_gathered(exchange, x, collective.dim) for x in operands]


def _gathered(exchange: Exchange, x: torch.Tensor, dim: int) -> torch.Tensor:
    parts = [new_empty(x) for _ in exchange.members]
    parts[exchange.position] = x = x.contiguous()
    _require_message(exchange, x)
    flat = [part.view(-1) for part in parts]
    everyone = collective_schedule.others(exchange.position, exchange.size)
    exchange.trade(dict.fromkeys(everyone, flat[exchange.position]), {p: flat[p] for p in everyone})
    return torch.cat(parts, dim)


def _require_message(exchange: Exchange, x: torch.Tensor) -> None:
    """Empty tensors are exchanged without a message: compare tags all the same."""
    if x.numel() == 0:
        exchange.agree()


def _reduce_scatter(exchange: Exchange, collective: Collective, operands):
    return [_scattered(exchange, collective, x) for x in operands]


def _scattered(exchange: Exchange, collective: Collective, x: torch.Tensor) -> torch.Tensor:
    parts = [part.contiguous() for part in x.chunk(exchange.size, collective.dim)]
    own = parts[exchange.position]
    result = torch.empty_like(own)
    _require_message(exchange, own)
    _scatter_flat(
        exchange, collective.reduction, [part.view(-1) for part in parts], result.view(-1)
    )
    return result


def _all_to_all(exchange: Exchange, collective: Collective, operands):
    (x,) = operands
    parts = [part.contiguous() for part in x.chunk(exchange.size, collective.dim)]
    received = [torch.empty_like(parts[exchange.position]) for _ in parts]
    received[exchange.position] = parts[exchange.position]
    _require_message(exchange, x)
    everyone = collective_schedule.others(exchange.position, exchange.size)
    exchange.trade(
        {p: parts[p].view(-1) for p in everyone}, {p: received[p].view(-1) for p in everyone}
    )
    return [torch.cat(received, collective.other_dim)]


def _permute(exchange: Exchange, collective: Collective, operands):
    exchange.agree()
    ordinal = exchange.members[exchange.position]
    results = []
    for x in operands:
        x = x.contiguous()
        result = torch.zeros_like(x)
        outgoing, incoming = {}, {}
        for source, target in collective.pairs:
            if source == target == ordinal:
                result.copy_(x)
            elif source == ordinal:
                outgoing[exchange.members.index(target)] = x.view(-1)
            elif target == ordinal:
                incoming[exchange.members.index(source)] = result.view(-1)
        exchange.trade(outgoing, incoming)
        results.append(result)
    return results


def _broadcast(exchange: Exchange, collective: Collective, operands):
    exchange.agree()
    root = collective.root  # a position; without groups, that is the ordinal
    results = []
    for x in operands:
        if exchange.position == root:
            x = x.contiguous()
            everyone = collective_schedule.others(root, exchange.size)
            exchange.trade({p: x.view(-1) for p in everyone}, {})
            results.append(new_copy(x))
        else:
            result = new_empty(x)
            exchange.trade({}, {root: result.view(-1)})
            results.append(result)
    return results


def _send(exchange: Exchange, collective: Collective, operands):
    target = exchange.members.index(collective.pairs[0][1])
    for x in operands:
        exchange.trade({target: x.contiguous().view(-1)}, {})
    return [x.clone() for x in operands]


def _receive(exchange: Exchange, collective: Collective, operands):
    source = exchange.members.index(collective.pairs[0][0])
    results = [new_empty(x) for x in operands]
    for result in results:
        exchange.trade({}, {source: result.view(-1)})
    return results


RUN = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "permute": _permute,
    "broadcast": _broadcast,
    "send": _send,
    "receive": _receive,
}


# --- one collective as one member takes part in it --------------------------------------------


class Exchange:
    """One collective under way: the wire, its members, and the tag of its messages."""

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

    def take(self, position: int, like: torch.Tensor, fills: bool = False) -> torch.Tensor:
        """The next message from there, which is to be given back; it may have filled `like`."""
        return self.wire.take(self.members[position], like, self.tag, fills)

    def give_back(self, position: int) -> None:
        self.wire.give_back(self.members[position])

    def receive(self, position: int, target: torch.Tensor) -> None:
        """`target` becomes the next message from there."""
        message = self.take(position, target, fills=True)
        if message is not target:
            target.copy_(message)
        self.give_back(position)

    def elements(self, dtype: torch.dtype) -> int:
        """Return the number of elements that fit into one message."""
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
        """Send to several members; a tensor that several receive is shared from one place."""
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
