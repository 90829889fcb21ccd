"""Exchanges of programs, run beside them: one after another, waited for by number."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from ltc.backends.collective_runner import ProgramOfReplicas
from ltc.distributed import world
from ltc.distributed.transport import session as sessions
from ltc.distributed.transport.collective_schedule import posted_bytes
from ltc.distributed.transport.communicator import Communicator
from ltc.distributed.transport.symmetric_memory import OneShotReducer
from ltc.distributed.transport.wire import Mismatch
from ltc.ir.collective import Collective
from ltc.support.observation import metrics, spans

_LAUNCH = Collective("all_gather", agreed="of the names of programs")
_COUNT = Collective("all_reduce", "min", agreed="of the numbers of exchanges")
_EXCHANGES = Collective("all_gather", agreed="of the tags of exchanges")
_COMPILED = Collective("all_gather", agreed="of the ends of compilations")
_DIFFERENT = (
    "Replicas launch different programs, so their exchanges go over the host from here on. One replica "
    "may read a value in the midst of a step, or compute with a number of its own: have all do so."
)
_log = logging.getLogger("ltc")
IDLE_SECONDS = 3.0  # how long the thread waits for more before it ends

# How exchanges outside this run's replicas are done: what stands before ":" in a collective's
# channel -> function of what stands behind it, giving an object with `run(collective, operands)`
# and `post(collective, operands)`: see Communicator.
CHANNELS: dict[str, Callable] = {}


class _Exchange:
    """One exchange under way; `over` is held until it has ended.

    Attributes:
        begun: The time of its start, as time.monotonic_ns() counts.
        nbytes: The size of this replica's operands.
    """

    __slots__ = (
        "collective", "operands", "rest", "results", "error", "over", "begun", "nbytes",
    )  # fmt: skip

    def __init__(self, collective: Collective, operands: list[torch.Tensor]) -> None:
        self.collective, self.operands = collective, operands
        self.begun, self.nbytes = spans.now(), sum(x.nbytes for x in operands)
        self.rest: Callable[[], Sequence[torch.Tensor]] | None = None  # of one that is posted
        self.results: Sequence[torch.Tensor] = ()
        self.error: BaseException | None = None
        self.over = threading.Lock()
        self.over.acquire()


def _tell(exchange: _Exchange, number: int, began: int) -> None:
    """Add to an open profile an exchange that a program waited for from `began` on."""
    timeline, collective = spans.timeline, exchange.collective
    if timeline is not None:
        args = {
            "kind": collective.kind, "number": number, "channel": collective.channel,
            "bytes": exchange.nbytes, "line": collective.site, "started_ns": exchange.begun,
        }  # fmt: skip
        timeline.add("collective", f"wait for {collective.kind}", began, spans.now(), args)


class Progress:
    """The exchanges of one replica's programs.

    They run in a thread, so that a program computes meanwhile.  Handing a small one over would take
    longer than the exchange: one that finds the thread idle is posted, that is sent at once, and
    what the others send is taken when the program waits for it.  Replicas are never quite equally
    fast, so waiting for it at once would make every small exchange a barrier.
    """

    def __init__(self, place: world.Rank, thread: str = "") -> None:
        """Set up for one replica's programs; `thread` names their thread, if the replica has
        several.
        """
        self.place, self.thread = place, thread
        self._posted_bytes = posted_bytes(place.replicas)
        self._turn: threading.Lock | None = None  # of the session's, while a program exchanges
        self._queue: queue.SimpleQueue[_Exchange] = queue.SimpleQueue()
        self._begun: dict[int, _Exchange] = {}
        self._count = 0
        self._waiting = 0  # exchanges the thread has not finished
        self._posted: _Exchange | None = None  # the newest one, where the thread has not got it
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._reducer: OneShotReducer | None = None  # of the latest program that has any

    def start(self, collective: Collective, operands: list[torch.Tensor]) -> int:
        """Begin an exchange; its number."""
        if not collective.channel:
            self._take_turn()
        if self._reducer is not None:
            self._reducer.settle()
        exchange = _Exchange(collective, operands)
        self._count += 1
        number = self._count
        self._begun[number] = exchange
        if exchange.nbytes <= self._posted_bytes and not self._waiting:
            self._settle_posted()
            self._begin(exchange)
        else:
            self._hand_over(exchange)
        return number

    def _begin(self, exchange: _Exchange) -> None:
        """Post an exchange, or run it where that cannot be."""
        try:
            channel = self._channel(exchange.collective)
            exchange.rest = channel.post(exchange.collective, exchange.operands)
        except BaseException as error:  # raised to whoever waits
            exchange.error = error
            exchange.over.release()
            return
        if exchange.rest is None:
            self._run(exchange)
        else:
            self._posted = exchange

    def _settle_posted(self) -> None:
        """Finish the posted exchange, which may wait for the other replicas."""
        posted, self._posted = self._posted, None
        if posted is not None:
            self._run(posted)

    def _hand_over(self, exchange: _Exchange) -> None:
        """Have the thread run an exchange, after the one that is posted."""
        posted, self._posted = self._posted, None
        with self._lock:
            for one in (posted, exchange):
                if one is not None:
                    self._waiting += 1
                    self._queue.put(one)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._loop, name="ltc collectives", daemon=True
                )
                self._thread.start()

    def wait(self, number: int) -> Sequence[torch.Tensor]:
        """The results of an exchange; raises its error."""
        exchange, began = self._begun.pop(number), spans.now()
        if exchange is self._posted:
            self._settle_posted()
        with exchange.over:  # free once it has ended
            pass
        if spans.timeline is not None:
            _tell(exchange, number, began)
        if exchange.error is not None:
            raise exchange.error
        return exchange.results

    def begin(self, sums: Any) -> list[int]:
        """The frame's words for the sums of a program that is about to run."""
        self._take_turn()
        self._reducer = reducer = sessions.of(self.place).one_shot_reducer
        assert reducer is not None  # the program was compiled for it
        return reducer.begin(sums)

    def wait_for_members(self, number: int) -> None:
        """Block until all members have written their operands of that sum of the program."""
        assert self._reducer is not None
        began = spans.now()
        self._reducer.wait_for_members(number)
        if spans.timeline is not None:
            args = {"kind": "one_shot_sum"}
            spans.timeline.add("collective", "wait for a sum", began, spans.now(), args)

    def agree(self, program: ProgramOfReplicas) -> bool:
        """Return True if all replicas are about to launch this program, and have compiled it.

        Once they were not, none asks again: programs that differ may exchange more or less often.

        Raises:
            PeerFailure: If their exchanges differ.
        """
        self._take_turn()
        session = sessions.of(self.place)
        if session.programs_agree:
            self._settle_posted()
            for exchange in self._begun.values():
                with exchange.over:  # the communicator is free then
                    pass
            session.programs_agree = _is_everyones(session.programs, program)
            if not session.programs_agree:
                metrics.count("ReplicasOverHost")
                if session.ordinal == 0:
                    _log.warning(_DIFFERENT)
        return session.programs_agree

    def finish(self) -> None:
        """Wait for the exchanges whose results were not taken; raise the first error."""
        for number in sorted(self._begun):
            self.wait(number)
        if self._reducer is not None:
            self._reducer.end()
        self._end_turn()

    def _take_turn(self) -> None:
        """Wait until no program of another thread of this replica exchanges."""
        if self._turn is None:
            session = sessions.of(self.place)
            self._turn = session.turn_of_programs
            self._turn.acquire()
            session.programs.exchange_in(self.thread)

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            turn.release()

    def abort(self, error: BaseException) -> None:
        """Let the other replicas know that this one has failed; forget what has begun."""
        self._begun.clear()
        self._posted = self._reducer = None
        session = sessions.known(self.place)
        if session is not None:
            session.abort_with(error)
        self._end_turn()

    def _loop(self) -> None:
        while True:
            try:
                exchange = self._queue.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._waiting:
                        continue
                    self._thread = None
                    return
            self._run(exchange)
            del exchange  # it holds tensors
            with self._lock:
                self._waiting -= 1

    def _run(self, exchange: _Exchange) -> None:
        try:
            if exchange.rest is not None:
                exchange.results = exchange.rest()
            else:
                channel = self._channel(exchange.collective)
                exchange.results = channel.run(exchange.collective, exchange.operands)
        except BaseException as error:  # raised to whoever waits
            exchange.error = error
        exchange.operands, exchange.rest = [], None
        exchange.over.release()

    def _channel(self, collective: Collective):
        if not collective.channel:
            return sessions.of(self.place).programs
        prefix, _, name = collective.channel.partition(":")
        channel = CHANNELS[prefix](name)
        channel.thread = self.thread
        return channel


def _is_everyones(communicator: Communicator, program: ProgramOfReplicas) -> bool:
    """Return True if all replicas have come with this program; then all have compiled it."""
    own = torch.tensor([*program.name, program.is_compiled()], dtype=torch.uint8, device="cpu")
    said = communicator.run(_LAUNCH, [own])[0].view(-1, own.numel())
    if not (said[:, :-1] == own[:-1]).all():
        _compare_exchanges(communicator, program)
        return False
    if not said[:, -1].all():
        program.compile()
        communicator.run(_COMPILED, [own])
    return True


def _compare_exchanges(communicator: Communicator, program: ProgramOfReplicas) -> None:
    """Raise PeerFailure if an exchange of a program is not that of the others, as far as all have one."""
    described = [communicator.described_as(*exchange) for exchange in program.exchanges]
    count = torch.tensor([len(described)], device="cpu")
    (least,) = communicator.run(_COUNT, [count])
    tags = torch.tensor([tag for _, tag in described], dtype=torch.int64, device="cpu")[
        : int(least)
    ]
    said = communicator.run(_EXCHANGES, [tags])[0].view(communicator.replicas, tags.numel())
    differing = (said != tags).nonzero().tolist()
    if differing:
        peer, position = min(differing, key=lambda pair: pair[1])

        def mismatch(*_: Any) -> NoReturn:
            raise Mismatch(peer, int(said[peer, position]))

        communicator.guarded(tuple(range(communicator.replicas)), described[position], mismatch)


class ProgressRunner:
    """The runner that programs call: see ltc/backends/collective_runner.py."""

    def __init__(self) -> None:
        self._of_place: dict[tuple[world.Rank, str], Progress] = {}
        os.register_at_fork(after_in_child=self._of_place.clear)

    def current(self) -> Progress:
        key = world.place(), world.thread_name()
        progress = self._of_place.get(key)
        # another thread of the same place may have won the race
        return progress or self._of_place.setdefault(key, Progress(*key))

    def place(self, replica: Progress) -> world.Rank:
        return replica.place

    def agree(self, replica: Progress, program: ProgramOfReplicas) -> bool:
        return replica.agree(program)

    def start(self, replica: Progress, collective: Collective, operands) -> int:
        return replica.start(collective, operands)

    def wait(self, replica: Progress, number: int) -> Sequence[torch.Tensor]:
        return replica.wait(number)

    def begin(self, replica: Progress, sums: Any) -> list[int]:
        return replica.begin(sums)

    def wait_for_members(self, replica: Progress, number: int) -> None:
        replica.wait_for_members(number)

    def finish(self, replica: Progress) -> None:
        replica.finish()

    def lose(self, replica: Progress, error: BaseException) -> None:
        session = sessions.known(replica.place)
        if session is not None:
            session.programs.lose(error)

    def abort(self, replica: Progress | None, error: BaseException) -> None:
        if replica is not None:
            replica.abort(error)
