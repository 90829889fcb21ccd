"""One-shot sums over the replicas of a host in symmetric memory: see passes/one_shot_all_reduce.py.

Each replica has a *part* of the memory, and all of them see every part.  Each kind of sum (its groups
and types) has a *slot*, at the same offset of every part: slots are given in the order in which the
kinds are first recorded, which is the same everywhere.  A slot has room for several sums, its *turns*,
which are used one after another: a replica writes the next operand while others still read the last.

Waiting for a free turn cannot deadlock.  A program uses at most half of a slot's turns.  So a turn
that is not yet free is read by an earlier program of another replica.  The replica that waits has
run its own earlier programs, in order, and published all their sums: the other needs no more of it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ltc.backends.interface import OneShotSums
from ltc.distributed.transport.communicator import TAG_MASK, Communicator, tag_of
from ltc.distributed.transport.shm_segment import SymmetricMemory
from ltc.distributed.transport.wire import Mismatch, Waiter
from ltc.ir.one_shot import HEAD_BYTES
from ltc.ir.tensor_type import TensorType

MOST_BYTES = 8 << 20  # of one sum: larger ones leave the caches, and travel better in pieces
SMALL_BYTES = 64 << 10  # of a sum of which programs may have many
FEWEST_TURNS, MOST_TURNS, SLOT_BYTES = 2, 256, 1 << 20
_LINE = 64


class _Slot:
    """The place of one kind of sum.

    Attributes:
        start: The offset of its first byte in every part.
        step: The bytes from one turn to the next.
        used: For each turn, the number of the latest sum there.
    """

    def __init__(self, start: int, step: int, turns: int) -> None:
        self.start, self.step, self.turns = start, step, turns
        self.count = 0
        self.used = [0] * turns
        self.is_reserved = False


class _PreparedSum:
    """The facts of one sum of a program that are the same in every run."""

    __slots__ = ("slot", "members", "counters", "starts", "text", "name", "is_awaited")

    def __init__(self, reducer: OneShotReducer, planned: Any) -> None:
        collective = replace(planned.collective, kind="all_reduce")  # what the user asked for
        communicator, region = reducer.communicator, reducer.region
        self.is_awaited = planned.is_awaited
        self.slot = reducer.slots[collective.place]
        self.members = communicator.members(collective)
        self.counters = [region.address + region.published(m) for m in self.members]
        self.starts = [m * reducer.memory.nbytes for m in self.members]
        self.text, name = communicator.described_as(collective, planned.types)
        self.name = tag_of(f"{name} at {self.slot.start}")


class _RunningSum:
    """One sum of the program that runs: its number, its tag, and where its operands are."""

    __slots__ = ("prepared", "number", "tag", "place")

    def __init__(self, prepared: _PreparedSum, number: int, tag: int, place: int) -> None:
        self.prepared, self.number, self.tag, self.place = prepared, number, tag, place


class OneShotReducer:
    """One replica's one-shot sums with the others of its host."""

    def __init__(self, communicator: Communicator, memory: SymmetricMemory) -> None:
        self.communicator, self.memory = communicator, memory
        self.region, self.replica = communicator.board.region, communicator.replica
        self.slots: list[_Slot] = []
        self._by_kind: dict[tuple, int] = {}
        self._filled = 0  # bytes of each part that slots have
        self._recording: Any = None  # the latest that had a sum
        self._in_recording: Counter[int] = Counter()  # its sums, by slot
        self._prepared: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by PlannedSums
        self._running: list[_RunningSum] = []
        # counters survive in the region, so that one made anew goes on where the old one was
        self.number = self.region.words[self.region.published(self.replica) // 8]
        self._settled = 0  # so many of them are known to have taken place
        self._tag = 0  # of the latest sum
        self._counter = self.region.address + self.region.published(self.replica)
        self._start = self.replica * memory.nbytes  # of this replica's part
        self._waiter = Waiter(self.region, self.replica)
        self._waiter.late = communicator.late

    # --- recording

    def slot_for(
        self, able: OneShotSums | None, groups: tuple, types: Sequence[TensorType], bucket: int
    ) -> int:
        """Return the number of the slot for a sum of these types; -1 if it needs another transport.

        All replicas ask for the same ones in the same order.

        Args:
            able: The sums that the backend can make.
            bucket: The number of a bucket of gradients; -1 of other sums.
        """
        kind = (able, groups, bucket, *types)
        number = self._by_kind.get(kind)
        if number is None:
            members = len(groups[0]) if groups else self.communicator.replicas
            fits = able is not None and _can_add(able, members, types)
            number = self._new_slot(types, bucket >= 0) if fits else -1
            if number >= 0:  # as many as there is memory for; shapes that fit nowhere have no end
                self._by_kind[kind] = number
        return number

    def is_full(self, slot: int, recording: Any) -> bool:
        """Return True if a recording has as many sums of a slot as a program may have."""
        counted = self._in_recording[slot] if recording == self._recording else 0
        return counted >= self.slots[slot].turns // 2

    def count_recorded(self, slot: int, recording: Any) -> None:
        """Count one more sum of that slot in the recording."""
        if recording != self._recording:
            self._recording = recording
            self._in_recording.clear()
        self._in_recording[slot] += 1

    def _new_slot(self, types: Sequence[TensorType], of_gradients: bool) -> int:
        nbytes = sum(_in_lines(t.size * t.dtype.itemsize) for t in types)
        # a program may have many large sums of a kind, but of gradients seldom two of one bucket
        if nbytes > (MOST_BYTES if of_gradients else SMALL_BYTES):
            return -1
        step = nbytes + HEAD_BYTES
        turns = max(FEWEST_TURNS, min(MOST_TURNS, SLOT_BYTES // step))
        if self._filled + turns * step > self.memory.nbytes:
            return -1
        self.slots.append(_Slot(self._filled, step, turns))
        self._filled += turns * step
        return len(self.slots) - 1

    # --- running

    def begin(self, planned: Any) -> list[int]:
        """The frame's words for a program's sums: see llvm/ops/one_shot_sync.py.

        Blocks while another replica still reads memory that this program will write operands to.
        """
        prepared = self._prepared.get(planned)
        if prepared is None:
            prepared = self._prepared[planned] = [_PreparedSum(self, one) for one in planned.all]
        self.region.raise_abort_report()
        self._running, self._settled = [], 0
        words: list[int] = []
        for one in prepared:
            place = self._next_place(one)
            self.number += 1
            self._tag = hash((self._tag, one.name ^ self.communicator.thread_tag)) & TAG_MASK
            address = self.memory.address + place
            words += (self.number, self._tag, self._counter, address + self._start)
            words += one.counters
            words += [address + start for start in one.starts]
            self._running.append(_RunningSum(one, self.number, self._tag, place))
        self.communicator.show(prepared[0].text, len(prepared))
        return words

    def _next_place(self, prepared: _PreparedSum) -> int:
        """Return where the operands of the next turn lie in every part, once the last are read."""
        slot = prepared.slot
        if not slot.is_reserved:
            self.memory.reserve(self._start + slot.start, slot.turns * slot.step)
            slot.is_reserved = True
        turn = slot.count % slot.turns
        slot.count += 1
        before, slot.used[turn] = slot.used[turn], self.number + 1
        for member in prepared.members:
            counter = self.region.released(member)
            if member != self.replica and self.region.load(counter) < before:
                self._waiter.wait_at_least(counter, before, member)
        return slot.start + turn * slot.step + HEAD_BYTES

    def wait_for_members(self, number: int) -> None:
        """Block until all members of a sum of the running program have written their operands."""
        running = self._running[number]
        prepared = running.prepared
        self.communicator.show(prepared.text, 0)
        for member, start in zip(prepared.members, prepared.starts):
            self._waiter.wait_at_least(self.region.published(member), running.number, member)
            found = self.memory.words[(start + running.place - HEAD_BYTES) // 8]
            if found != running.tag:
                self.communicator.disagree(Mismatch(member, found))

    def settle(self) -> None:
        """Block until all members have written theirs, of each sum that this replica has published.

        An exchange of another kind begins after that, so that one in another order shows.
        """
        published = self.region.words[self.region.published(self.replica) // 8]
        while self._settled < len(self._running):
            if self._running[self._settled].number > published:
                break
            self.wait_for_members(self._settled)
            self._settled += 1

    def end(self) -> None:
        """The program has run, and reads nothing of the others' any more.

        Blocks until all members have written their operands of those sums that it did not wait for.
        """
        if self._running:
            for number, running in enumerate(self._running):
                if number >= self._settled and not running.prepared.is_awaited:
                    self.wait_for_members(number)
            self._running = []
            self.region.store(self.region.released(self.replica), self.number)
            self.communicator.board.end()


def _can_add(able: OneShotSums, members: int, types: Sequence[TensorType]) -> bool:
    """Return True if a backend's programs add a sum of these types.

    Of one member nothing is added: its operand, in memory that the next sum writes, would be the
    caller's result.
    """
    fits = all(type.size and type.dtype in able.dtypes for type in types)
    return fits and 1 < members <= able.most_members


def _in_lines(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE
