"""Runs collectives of one replica on CPU tensors, and finds out where replicas disagree."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence

import torch

from ltc import config
from ltc.backends.memory import new_copy, new_empty
from ltc.distributed import schedule
from ltc.distributed.board import Board
from ltc.distributed.combine import Fold
from ltc.distributed.crossing import BACKEND
from ltc.distributed.region import PeerFailure
from ltc.distributed.wire import Mismatch, Wire
from ltc.ir.collective import Collective
from ltc.ir.tensor_type import TensorType

GRACE_SECONDS = 0.3  # for the others to reach the collective that they disagree on
PROBE_SECONDS = 1.0  # how long a peer may keep others waiting before its process is looked for
_MOST_PACKED_BYTES = 1 << 20  # tensors of a list are packed together up to this size
_WORD = (1 << 62) - 1
_DIFFERENT = (
    "Replicas do not run the same collectives, of the same types, in the same order."
)


class Communicator:
    """The collectives of one replica over one wire, one at a time, in the same order everywhere.

    Every message carries a word: a running hash of what this group has done so far. Two replicas
    that do not do the same thus notice with the first message between them, whatever it holds.
    """

    def __init__(self, wire: Wire, board: Board) -> None:
        self.wire, self.board = wire, board
        self.replica, self.replicas = wire.replica, wire.replicas
        self.count = board.count()
        self._circle: tuple = (None, 0.0)  # replicas that wait for each other, and since when
        self._running: dict[tuple[int, ...], int] = {}
        self._described: dict[tuple, tuple[bytes, int]] = {}
        wire.late = self._late
        board.begin(self.count, b"nothing yet")
        board.end()

    # --- running

    def run(self, collective: Collective, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results, new tensors. Raises PeerFailure, with one text on all replicas."""
        return self.guarded(
            self.members(collective), self._described_as(collective, operands),
            lambda members, position, word: _RUN[collective.kind](
                _Exchange(self.wire, members, position, word), collective, list(operands)
            ),
        )

    def reduce_in_place(self, reduction: str, tensor: torch.Tensor, groups=(), site="") -> None:
        """all_reduce of one contiguous tensor into itself."""
        collective = Collective("all_reduce", reduction, groups=groups, site=site)
        flat = tensor if tensor.dim() == 1 else tensor.view(-1)
        self.guarded(
            self.members(collective), self._described_as(collective, [tensor]),
            lambda members, position, word: _reduce(
                _Exchange(self.wire, members, position, word), reduction, flat, flat
            ),
        )

    def guarded(self, members: tuple[int, ...], described: tuple[bytes, int], exchange: Callable):
        """`exchange(members, position, word)` as the next collective among `members`."""
        self.board.region.raise_verdict()
        text, name = described
        word = self._running[members] = hash((self._running.get(members, 0), name)) & _WORD
        self.count += 1
        self.board.begin(self.count, text)
        try:
            result = exchange(members, members.index(self.replica), word)
            self.wire.finish()
            return result
        except Mismatch as mismatch:
            self._disagree(mismatch)
            raise
        finally:
            self.board.end()

    def members(self, collective: Collective) -> tuple[int, ...]:
        """The ordinals that exchange with this replica, itself among them."""
        if collective.kind in ("send", "receive"):
            return tuple(sorted(collective.pairs[0]))
        if not collective.groups:
            return tuple(range(self.replicas))
        for group in collective.groups:
            if self.replica in group:
                return tuple(group)
        raise ValueError(
            f"replica {self.replica} is in no group of {collective.groups} at {collective.site}: "
            f"every replica must be in exactly one."
        )

    def _described_as(self, collective: Collective, operands) -> tuple[bytes, int]:
        key = (collective, *[(x.dtype, x.shape) for x in operands])
        described = self._described.get(key)
        if described is None:
            kind = "send" if collective.kind == "receive" else collective.kind
            types = ", ".join(str(TensorType(x.dtype, tuple(x.shape))) for x in operands)
            agreed = f"{kind}{collective.text().removeprefix(collective.kind)} of {types}"
            text = f"{collective.text()} of {types} at {collective.site or 'an unknown line'}"
            described = self._described[key] = (text.encode(), word_of(agreed))
        return described

    # --- finding out

    def _disagree(self, mismatch: Mismatch) -> None:
        time.sleep(GRACE_SECONDS)
        self.board.fail(
            f"{_DIFFERENT} Replica {self.replica} noticed it with a message from replica "
            f"{mismatch.peer}:"
        )
        self.board.region.raise_verdict()

    def _late(self, peer: int, waited_seconds: float) -> None:
        self._look_for_circle()
        board = self.board
        if waited_seconds < PROBE_SECONDS or peer < 0:
            return
        process = board.entry(peer)[2] if board.is_here(peer) else 0
        if process and not _is_running(process):
            board.fail(
                f"Replica {peer} is gone (process {process}) while replica {self.replica} waits "
                f"for it:"
            )
        limit = config.value("LTC_PEER_TIMEOUT")
        if waited_seconds > limit:
            absent = [r for r in board.ordinals() if not board.entry(r)[1]]
            names = ", ".join(map(str, sorted({*absent, peer} if absent == [] else absent)))
            board.fail(
                f"Replica(s) {names} did not come within {limit:g} s (LTC_PEER_TIMEOUT) to the "
                f"collective that replica {self.replica} waits in:"
            )

    def _look_for_circle(self) -> None:
        """Make the verdict where replicas have been waiting for each other, unchanged, for a while.

        Each of them has said so after a long wait, and takes it back as soon as the wait is over.
        """
        board = self.board
        circle, replica = [self.replica], board.waits_for(self.replica)
        while replica is not None and replica not in circle:
            circle.append(replica)
            replica = board.waits_for(replica)
        seen = None if replica is None else [(r, board.entry(r)[0]) for r in circle]
        now = time.monotonic()
        if seen is None or seen != self._circle[0]:
            self._circle = (seen, now)
        elif now - self._circle[1] > GRACE_SECONDS:
            steps = ", ".join(f"{r} waits for {board.waits_for(r)}" for r in circle)
            board.fail(f"{_DIFFERENT} {steps}:")


def word_of(text: str) -> int:
    """A number for a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") & _WORD


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not _is_zombie(process)


def _is_zombie(process: int) -> bool:
    """Whether the process has ended and only its parent has not looked yet."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False


# --- the kinds --------------------------------------------------------------------------------

class _Exchange:
    """One collective under way: the wire, who takes part, and the word its messages carry."""

    def __init__(self, wire: Wire, members: tuple[int, ...], position: int, word: int) -> None:
        self.wire, self.members, self.position, self.word = wire, members, position, word
        self.size = len(members)

    def among(self, positions) -> "_Exchange":
        """The same exchange among some of its members, this one included."""
        chosen = list(positions)
        members = tuple(self.members[p] for p in chosen)
        return _Exchange(self.wire, members, chosen.index(self.position), self.word)

    def send(self, position: int, part: torch.Tensor) -> None:
        self.wire.send(self.members[position], part, self.word)

    def receive(self, position: int, like: torch.Tensor, consume) -> None:
        self.wire.receive(self.members[position], like, self.word, consume)

    def elements(self, dtype: torch.dtype) -> int:
        """How many elements fit into one message."""
        return self.wire.message_bytes // dtype.itemsize

    def run(self, steps, kind: str, source: torch.Tensor, target: torch.Tensor) -> None:
        """Follow a schedule that reduces `source` into `target`, both flat; they may be one."""
        fold, folded = None, None
        for action, peer, a, b in steps:
            if action == schedule.SEND:
                # what was reduced is sent from where it is: the share of this member's own
                self.send(peer, _range(target if (a, b) == folded else source, a, b))
            elif action == schedule.COPY:
                part = target[a:b]
                self.receive(peer, part, part.copy_)
            elif action == schedule.FOLD:
                if fold is None:
                    own = _range(source, a, b)
                    fold = Fold(kind, own, _range(target, a, b), self.position)
                if peer == self.position:
                    fold.take_own()
                else:
                    self.receive(peer, own, fold.take)
                if fold.count == self.size:
                    fold.finish()
                    fold, folded = None, (a, b)
            else:
                part = target[a:b]
                join = Fold(kind, part, part, 1)
                self.receive(peer, part, join.take)
                join.take_own()
                join.finish()

    def trade(self, outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor]) -> None:
        """Send a flat tensor to each position of `outgoing`; fill those of `incoming`."""
        tensors = [*outgoing.values(), *incoming.values()]
        longest = max((t.numel() for t in tensors), default=0)
        step = self.elements(tensors[0].dtype) if tensors else 1
        for start in range(0, longest, step):
            for position in schedule.others(self.position, self.size):
                part = outgoing.get(position)
                if part is not None and start < part.numel():
                    self.send(position, part[start : start + step])
            for position in schedule.others(self.position, self.size):
                target = incoming.get(position)
                if target is not None and start < target.numel():
                    part = target[start : start + step]
                    self.receive(position, part, part.copy_)

    def agree(self) -> None:
        """Compare words with the neighbours, where not every pair exchanges a message anyway."""
        if self.size > 1:
            nothing = torch.empty(0, device="cpu")
            self.send((self.position + 1) % self.size, nothing)
            self.receive((self.position - 1) % self.size, nothing, None)


def _range(flat: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """flat[start:stop], which takes longer than the rest of a small message."""
    return flat if stop - start == flat.numel() else flat[start:stop]


def reduce_flat(
    wire: Wire, members: tuple[int, ...], position: int, word: int, kind: str, tensor: torch.Tensor
) -> None:
    """Reduce a flat tensor in place among `members`, of which this replica is number `position`."""
    _reduce(_Exchange(wire, members, position, word), kind, tensor, tensor)


def _reduce(exchange: _Exchange, kind: str, source: torch.Tensor, target: torch.Tensor) -> None:
    """`target` = the reduction of everyone's `source`; both flat, and may be the same."""
    size, elements = exchange.size, source.numel()
    if size == 1:
        if target is not source:
            target.copy_(source)
        return
    if elements == 0:
        exchange.agree()
        return
    limit = min(schedule.ONE_CROSSING_BYTES, exchange.wire.message_bytes)
    per_host = getattr(exchange.wire, "per_host", exchange.wire.replicas)
    if source.nbytes > limit and per_host < exchange.wire.replicas == size:
        _reduce_by_hosts(exchange, kind, source, target, per_host)
        return
    if source.nbytes <= limit:
        steps = schedule.all_to_all_reduce(exchange.position, size, elements)
    else:
        most = exchange.elements(source.dtype)
        steps = schedule.direct_all_reduce(exchange.position, size, elements, most)
    exchange.run(steps, kind, source, target)


def _reduce_by_hosts(exchange: _Exchange, kind: str, source, target, per_host: int) -> None:
    """Each replica sums a share inside its host, rings it among the hosts, and hands it round."""
    local = exchange.position % per_host
    first = exchange.position - local
    inside = exchange.among(range(first, first + per_host))
    across = exchange.among(range(local, exchange.size, per_host))
    shares = [slice(*schedule.part(source.numel(), per_host, i)) for i in range(per_host)]
    _scatter_flat(inside, kind, [source[share] for share in shares], target[shares[local]])
    own = target[shares[local]]
    _reduce_across(across, kind, own)
    everyone = schedule.others(local, per_host)
    inside.trade({p: own for p in everyone}, {p: target[shares[p]] for p in everyone})


def _reduce_across(across: _Exchange, kind: str, own: torch.Tensor) -> None:
    """Reduce in place among members on different hosts, in the way chosen for their group."""

    def run(way: str, flat: torch.Tensor) -> None:
        if way == BACKEND:
            across.agree()
            across.wire.sum_by_backend(across.members, flat)
            return
        most = across.elements(flat.dtype)
        steps = schedule.ring_all_reduce(across.position, across.size, flat.numel(), most)
        across.run(steps, kind, flat, flat)

    def slowest(seconds: list[float]) -> list[float]:
        found = torch.tensor(seconds, dtype=torch.float64, device="cpu")
        _reduce(across, "max", found, found)
        return found.tolist()

    crossing = across.wire.crossing
    run(crossing.way(across.members, not across.position, kind, own, run, slowest), own)


def _scatter_flat(exchange: _Exchange, kind: str, parts: list[torch.Tensor], target) -> None:
    """`target` = the reduction of everyone's part for this member; all flat."""
    own = parts[exchange.position]
    if exchange.size == 1:
        if target.data_ptr() != own.data_ptr():
            target.copy_(own)
        return
    step = exchange.elements(own.dtype)
    for start in range(0, max(part.numel() for part in parts), step):
        for position in schedule.others(exchange.position, exchange.size):
            if start < parts[position].numel():
                exchange.send(position, parts[position][start : start + step])
        mine = own[start : start + step]
        if mine.numel():
            steps = [(schedule.FOLD, member, 0, mine.numel()) for member in range(exchange.size)]
            exchange.run(steps, kind, mine, target[start : start + step])


def _all_reduce(exchange: _Exchange, collective: Collective, operands):
    results: list = [None] * len(operands)
    packs = _packed(operands)
    for indices in packs:
        if len(indices) == 1:
            source = operands[indices[0]].contiguous()
            target = new_empty(source)
            _reduce(exchange, collective.reduction, source.view(-1), target.view(-1))
            results[indices[0]] = target
        else:
            flat = torch.cat([operands[i].reshape(-1) for i in indices])
            _reduce(exchange, collective.reduction, flat, flat)
            parts = flat.split([operands[i].numel() for i in indices])
            for i, one in zip(indices, parts):
                results[i] = one.view(operands[i].shape)
    return results


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


def _all_gather(exchange: _Exchange, collective: Collective, operands):
    return [_gathered(exchange, x, collective.dim) for x in operands]


def _gathered(exchange: _Exchange, x: torch.Tensor, dim: int) -> torch.Tensor:
    parts = [new_empty(x) for _ in exchange.members]
    parts[exchange.position] = x = x.contiguous()
    _require_message(exchange, x)
    flat = [part.view(-1) for part in parts]
    everyone = schedule.others(exchange.position, exchange.size)
    exchange.trade({p: flat[exchange.position] for p in everyone}, {p: flat[p] for p in everyone})
    return torch.cat(parts, dim)


def _require_message(exchange: _Exchange, x: torch.Tensor) -> None:
    """Empty tensors are exchanged without a message: compare words all the same."""
    if x.numel() == 0:
        exchange.agree()


def _reduce_scatter(exchange: _Exchange, collective: Collective, operands):
    return [_scattered(exchange, collective, x) for x in operands]


def _scattered(exchange: _Exchange, collective: Collective, x: torch.Tensor) -> torch.Tensor:
    parts = [part.contiguous() for part in x.chunk(exchange.size, collective.dim)]
    own = parts[exchange.position]
    result = torch.empty_like(own)
    _require_message(exchange, own)
    _scatter_flat(
        exchange, collective.reduction, [part.view(-1) for part in parts], result.view(-1)
    )
    return result


def _all_to_all(exchange: _Exchange, collective: Collective, operands):
    (x,) = operands
    parts = [part.contiguous() for part in x.chunk(exchange.size, collective.dim)]
    received = [torch.empty_like(parts[exchange.position]) for _ in parts]
    received[exchange.position] = parts[exchange.position]
    _require_message(exchange, x)
    everyone = schedule.others(exchange.position, exchange.size)
    exchange.trade(
        {p: parts[p].view(-1) for p in everyone}, {p: received[p].view(-1) for p in everyone}
    )
    return [torch.cat(received, collective.other_dim)]


def _permute(exchange: _Exchange, collective: Collective, operands):
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


def _broadcast(exchange: _Exchange, collective: Collective, operands):
    exchange.agree()
    root = collective.root  # a position; without groups, that is the ordinal
    results = []
    for x in operands:
        if exchange.position == root:
            x = x.contiguous()
            everyone = schedule.others(root, exchange.size)
            exchange.trade({p: x.view(-1) for p in everyone}, {})
            results.append(new_copy(x))
        else:
            result = new_empty(x)
            exchange.trade({}, {root: result.view(-1)})
            results.append(result)
    return results


def _send(exchange: _Exchange, collective: Collective, operands):
    target = exchange.members.index(collective.pairs[0][1])
    for x in operands:
        exchange.trade({target: x.contiguous().view(-1)}, {})
    return [x.clone() for x in operands]


def _receive(exchange: _Exchange, collective: Collective, operands):
    source = exchange.members.index(collective.pairs[0][0])
    results = [new_empty(x) for x in operands]
    for result in results:
        exchange.trade({}, {source: result.view(-1)})
    return results


_RUN = {
    "all_reduce": _all_reduce, "all_gather": _all_gather, "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all, "permute": _permute, "broadcast": _broadcast, "send": _send,
    "receive": _receive,
}

__all__ = ["Communicator", "PeerFailure", "reduce_flat", "word_of"]
