"""Runs collectives of one replica on CPU tensors, and finds out where replicas disagree."""

from __future__ import annotations

import hashlib
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from ltc import config
from ltc.distributed.transport.call_log import CallLog
from ltc.distributed.transport.collective_ops import RUN, Exchange, post_reduce, reduce
from ltc.distributed.transport.status_board import StatusBoard
from ltc.distributed.transport.tcp_link import ConnectionLost
from ltc.distributed.transport.wire import Mismatch, Wire
from ltc.errors import PeerFailure
from ltc.ir.collective import Collective
from ltc.ir.tensor_type import TensorType
from ltc.support.process.neighbours import is_running

GRACE_SECONDS = 0.3  # for the others to reach the collective that they disagree on
DEADLOCK_SECONDS = 1.0  # of a cycle of waits: a thread that would end it may have had no processor
PROBE_SECONDS = 1.0  # how long a peer may keep others waiting before its process is looked for
TAG_MASK = (1 << 62) - 1
_DIFFERENT = "Replicas do not run the same collectives, of the same types, in the same order."


class Communicator:
    """The collectives of one replica over one wire, one at a time, in the same order everywhere.

    Every message carries a tag: a running hash of what this group has done so far. Two replicas
    that do not do the same thus notice with the first message between them, whatever it holds.
    """

    def __init__(
        self, wire: Wire, board: StatusBoard, process_of: Callable[[int], int] = lambda peer: 0
    ) -> None:
        """`process_of`: the process of a replica that is not on the board yet; 0: it is unknown."""
        self.process_of = process_of
        self.limit_seconds: float | None = None  # of a wait for a peer; None: LTC_PEER_TIMEOUT
        self.thread, self.thread_tag = "", 0  # of this replica, that exchanges now
        self.calls: CallLog | None = None  # where not all that its members do are messages
        self.numbers: Counter[int] = Counter()  # by lane: of its collectives that the log has
        self.wire, self.board = wire, board
        self.replica, self.replicas = wire.replica, wire.replicas
        self.count = board.count()
        self._cycle: tuple = (None, 0.0)  # replicas that wait for each other, and since when
        self._running: dict[tuple, int] = {}  # by group, and by (sender, receiver) in "pair"
        self._described: dict[tuple, tuple[bytes, int]] = {}
        wire.late = self.late
        board.begin(self.count, b"nothing yet")
        board.end()

    # --- running

    def run(
        self,
        collective: Collective,
        operands: Sequence[torch.Tensor],
        described: tuple[bytes, int] | None = None,
    ) -> list[torch.Tensor]:
        """Run a collective and return its results, new tensors.

        Args:
            described: A description as `described_as` gives it, if the collective alone is not enough.

        Raises:
            PeerFailure: With one text on all replicas.
        """
        described = described or self.described_as(collective, operands)
        operands = _exchanged(collective, operands)
        return self.guarded(
            self.members(collective),
            described,
            lambda members, position, tag: RUN[collective.kind](
                Exchange(self.wire, members, position, tag), collective, list(operands)
            ),
            _order_of(collective),
        )

    def post(
        self, collective: Collective, operands: Sequence[torch.Tensor]
    ) -> Callable[[], list[torch.Tensor]] | None:
        """Send all of a small all_reduce now; what takes the others' part and gives the results.

        It must be called before the next collective begins. None, and nothing done, for an exchange
        that cannot be parted in two: then there is `run`.
        """
        members = self.members(collective)
        exchange = Exchange(self.wire, members, members.index(self.replica), 0)
        posted = post_reduce(exchange, collective, _exchanged(collective, operands))
        if posted is None:
            return None
        send, receive = posted
        exchange.tag = self._begin(_lane(members), self.described_as(collective, operands))
        try:
            send()
        except BaseException as error:
            self.board.end()
            self.lose(error)
            raise
        return lambda: self._ended(receive)

    def reduce_in_place(self, reduction: str, tensor: torch.Tensor, groups=(), site="") -> None:
        """all_reduce of one contiguous tensor into itself."""
        collective = Collective("all_reduce", reduction, groups=groups, site=site)
        flat = tensor if tensor.dim() == 1 else tensor.view(-1)
        self.guarded(
            self.members(collective),
            self.described_as(collective, [tensor]),
            lambda members, position, tag: reduce(
                Exchange(self.wire, members, position, tag), reduction, flat, flat
            ),
        )

    def guarded(
        self,
        members: tuple[int, ...],
        described: tuple[bytes, int],
        exchange: Callable,
        order: tuple = (),
        lane: int = 0,
    ):
        """Run `exchange(members, position, tag)` as the next collective among `members`.

        Args:
            order: The sequence that it continues, if the calls of the members have several orders.
            lane: A lane of the log, if the replica has one: calls of one lane have one order.
        """
        tag = self._begin(order or _lane(members, lane), described, lane)
        return self._ended(lambda: exchange(members, members.index(self.replica), tag))

    def exchange_in(self, thread: str) -> None:
        """Exchange in a thread of that name from now on; "" for the main one.

        Threads of a replica have no order among them: another replica's may come in another one.
        """
        if thread != self.thread:
            self.thread, self.thread_tag = thread, tag_of(thread) if thread else 0

    def announce(self, members: tuple[int, ...], described: tuple[bytes, int], lane: int) -> None:
        """Say that this replica makes a call, the next of a lane, and will wait for it later."""
        try:
            self._begin(_lane(members, lane), described, lane)
        finally:
            self.board.end()

    def _begin(self, order: tuple, described: tuple[bytes, int], lane: int = 0) -> int:
        """The tag of the next collective of an order, which the board shows from now on."""
        self.board.region.raise_abort_report()
        text, name = self._in_thread(described[0]), described[1] ^ self.thread_tag
        tag = self._running[order] = hash((self._running.get(order, 0), name)) & TAG_MASK
        self.count += 1
        self.board.begin(self.count, text)
        if self.calls is not None:
            self._compare(self.calls, lane, tag)
        return tag

    def _in_thread(self, text: bytes) -> bytes:
        """Return the board's text for an exchange, with the name of its thread."""
        return text + f" in thread {self.thread!r}".encode() if self.thread else text

    def _compare(self, calls: CallLog, lane: int, tag: int) -> None:
        self.numbers[lane] += 1
        try:
            calls.compare(lane, self.numbers[lane], tag)
        except Mismatch as mismatch:
            self.disagree(mismatch)
        except RuntimeError as error:
            self.lose(error)
            raise

    def _ended(self, rest: Callable):
        """Return the result of the rest of the collective, which is over then."""
        try:
            result = rest()
            self.wire.finish()
            return result
        except Mismatch as mismatch:
            self.disagree(mismatch)
            raise
        except RuntimeError as error:
            self.lose(error)
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

    def described_as(self, collective: Collective, operands) -> tuple[bytes, int]:
        """The line for the board, and a number that replicas agree on; operands or their types."""
        if collective.checked:
            return self._described_with_bits(collective, operands)
        key = (collective, *[(x.dtype, x.shape) for x in operands])
        described = self._described.get(key)
        if described is None:
            kind = "send" if collective.kind == "receive" else collective.kind
            types = ", ".join(str(TensorType(x.dtype, tuple(x.shape))) for x in operands)
            agreed = f"{kind}{collective.text().removeprefix(collective.kind)} of {types}"
            text = f"{collective.text()} of {types} at {collective.site or 'an unknown line'}"
            described = self._described[key] = (text.encode(), tag_of(agreed))
        return described

    def _described_with_bits(self, collective: Collective, operands) -> tuple[bytes, int]:
        """Describe a collective whose last operands must be the same bits on all replicas."""
        text, name = self.described_as(
            replace(collective, checked=0), _exchanged(collective, operands)
        )
        numbers = [x.tolist() for x in operands[-collective.checked :]]
        return text + f" {numbers}".encode(), tag_of(f"{name} {numbers}")

    def show(self, text: bytes, begun: int) -> None:
        """Write on the board that this replica is in a collective, the first of `begun` new ones."""
        self.count += begun
        self.board.begin(self.count, self._in_thread(text))

    # --- finding out

    def disagree(self, mismatch: Mismatch) -> None:
        """Make the abort report about a message of another collective, and raise it."""
        self.fail(
            f"{_DIFFERENT} Replica {self.board.name(self.replica)} noticed it in a message from "
            f"replica {self.board.name(mismatch.peer)}:"
        )

    def fail(self, reason: str) -> None:
        """Make the abort report, unless there is one already, and raise it."""
        time.sleep(GRACE_SECONDS)
        self.board.fail(reason)
        self.board.region.raise_abort_report()

    def lose(self, error: BaseException) -> None:
        """Raise the abort report, where there is one, in place of an error of the transport.

        Replicas of another host end with the report, maybe before this one has asked for it. Then this
        one first notices that their connections are closed. If there is no report and a connection
        broke, this replica makes the report.
        """
        if not isinstance(error, RuntimeError):
            return
        self.board.ask()
        self.board.region.raise_abort_report()
        if not isinstance(error, PeerFailure) and is_broken_connection(error):
            words = re.sub(r"^\[[^]]*] |\. This is typically.*", "", str(error).splitlines()[0])
            self.board.fail(
                f"{self._gone_of_all()} while replica {self.board.name(self.replica)} exchanges with "
                f"the others ({words}):"
            )
            self.board.region.raise_abort_report()

    def _gone_of_all(self) -> str:
        others = [peer for peer in range(self.replicas) if peer != self.replica]
        deadline = time.monotonic() + PROBE_SECONDS
        # a process that is killed closes its connections some time before it has ended
        while not (gone := [peer for peer in others if self._gone(peer)]):
            if time.monotonic() > deadline:
                break
            self.board.ask()
            self.board.region.raise_abort_report()
            time.sleep(0.02)
        if not gone:
            return "The connection to another replica broke, or the replica has ended,"
        named = ", ".join(f"{self.board.name(peer)} (process {self._gone(peer)})" for peer in gone)
        return f"Replica {named} is gone" if len(gone) == 1 else f"Replicas {named} are gone"

    def _gone(self, peer: int) -> int:
        """Return the process of a replica that has ended; 0 if it runs, or if this cannot be known."""
        here = self.board.is_here(peer)
        process = (self.board.entry(peer)[2] if here else 0) or self.process_of(peer)
        return process if process and not is_running(process) else 0

    def late(self, peer: int, waited_seconds: float) -> None:
        """Make the abort report if this replica waits for one that will not come.

        Called repeatedly while it waits.

        Args:
            peer: The ordinal of that replica; -1 if it is not known.
        """
        self._report_deadlock()
        if waited_seconds >= PROBE_SECONDS:
            for one in range(self.replicas) if peer < 0 else (peer,):
                if one != self.replica:
                    self._report_if_gone(one)
            limit, source = self.limit_seconds, "the timeout of its process group"
            if limit is None:
                limit, source = config.value("LTC_PEER_TIMEOUT"), "LTC_PEER_TIMEOUT"
            if waited_seconds > limit:
                self._report_absent(peer, f"{limit:g} s ({source})")

    def _report_if_gone(self, peer: int) -> None:
        board, me, other = self.board, self.board.name(self.replica), self.board.name(peer)
        here = board.is_here(peer)
        if here and board.has_returned(peer) and board.waits_for(self.replica) is not None:
            board.fail(
                f"The function of replica {other} has returned while replica {me} waits for it:"
            )
        elif process := self._gone(peer):
            before = "" if not here or board.entry(peer)[2] else ", before its first collective,"
            board.fail(
                f"Replica {other} is gone (process {process}){before} while replica {me} waits for it:"
            )

    def _report_absent(self, peer: int, limit: str) -> None:
        """Name the replicas of this host that are in no collective; where all are, `peer`."""
        board = self.board
        absent = [r for r in board.ordinals() if not board.entry(r)[1]] or [peer]
        named = ", ".join(str(board.name(r)) for r in absent if r >= 0)
        board.fail(
            f"{f'Replica(s) {named}' if named else 'A replica'} did not enter within {limit} the "
            f"collective in which replica {board.name(self.replica)} waits:"
        )

    def _report_deadlock(self) -> None:
        """Report where replicas have been waiting for each other, unchanged, for a while.

        Each of them notes its wait on the board after a while, and removes the note at the end.
        """
        board = self.board
        cycle, replica = [self.replica], board.waits_for(self.replica)
        while replica is not None and replica not in cycle:
            cycle.append(replica)
            replica = board.waits_for(replica)
        seen = None if replica is None else [(r, board.entry(r)[0]) for r in cycle]
        now = time.monotonic()
        if seen is None or seen != self._cycle[0]:
            self._cycle = (seen, now)
        elif now - self._cycle[1] > DEADLOCK_SECONDS:
            pairs = [(r, board.waits_for(r)) for r in cycle]
            steps = ", ".join(
                f"{board.name(r)} waits for {board.name(peer)}"
                for r, peer in pairs
                if peer is not None
            )
            board.fail(f"{_DIFFERENT} {steps}:")


def _exchanged(collective: Collective, operands: Sequence) -> Sequence:
    """The operands without those that are only compared."""
    return operands[: len(operands) - collective.checked]


def _order_of(collective: Collective) -> tuple:
    """The order that an exchange of two keeps: of one direction, since both may send first."""
    return ("pair", *collective.pairs[0]) if collective.kind in ("send", "receive") else ()


def _lane(members: tuple[int, ...], lane: int = 0) -> tuple:
    """The order that all other exchanges of these members keep, posted or run."""
    return (*members, "lane", lane)


def tag_of(text: str) -> int:
    """A number for a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") & TAG_MASK


def is_broken_connection(error: BaseException) -> bool:
    """Return True if a process has closed its connection, or is silent, as gloo or a store reports."""
    of_gloo = re.search("gloo/(transport|rendezvous)", str(error)) is not None
    return of_gloo or isinstance(error, (ConnectionLost, dist.DistError))
