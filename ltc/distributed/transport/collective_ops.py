"""What one collective does over a wire: each kind, for CPU tensors of one replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ltc.backends.host_memory import new_copy, new_empty
from ltc.distributed.transport import collective_schedule
from ltc.distributed.transport.exchange import Exchange, Schedule
from ltc.distributed.transport.inter_host_choice import BACKEND
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
    _reduce_across(across, kind, own)
    everyone = collective_schedule.others(local, per_host)
    inside.trade(dict.fromkeys(everyone, own), {p: target[shares[p]] for p in everyone})


def _reduce_across(across: Exchange, kind: str, own: torch.Tensor) -> None:
    """Reduce in place among members on different hosts, by the engine chosen for their group."""
    wire: Any = across.wire  # a HostsWire, which has both engines

    def run(engine: str, flat: torch.Tensor) -> None:
        if engine == BACKEND:
            across.agree()
            wire.sum_by_backend(across.members, flat)
            return
        most = across.elements(flat.dtype)
        steps = collective_schedule.ring_all_reduce(
            across.position, across.size, flat.numel(), most
        )
        across.run(steps, kind, flat, flat)

    def slowest(seconds: list[float]) -> list[float]:
        found = torch.tensor(seconds, dtype=torch.float64, device="cpu")
        reduce(across, "max", found, found)
        return found.tolist()

    choice = wire.inter_host_choice
    run(choice.engine(across.members, not across.position, kind, own, run, slowest), own)


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
