"""Whether reads follow one another after so few calls that programs between them do not pay.

To end a recording, start its program and fetch the result takes as long as some sixteen calls that run
at once, which a read does not cut at all.  So where most programs are as short as that and end at a
read, as with one that acts in an environment, what follows runs op by op; for so long as reads go on to
come, and calls take little time of their own: what is large gains more by being fused.

An optimizer's step is never as short: calls of a backward, and an update, take several times as long
where they run at once.
"""

from __future__ import annotations

import time
from typing import Any

from ltc.device.op_by_op import forks

FEW = 16  # calls of a program that costs no less than they do by themselves
LATE = 32  # calls without a read, after which what follows is recorded
ENOUGH = 8  # short programs, more than there are others, before what follows runs at once
PUT_OFF = 32  # programs that leave it open, after which they are compiled: others outweigh them
_MOST, _LEAST = 16, -64  # that are remembered
_FOLLOWING = 4  # programs behind a read that marks may end and are still of its loop
_LONG = 2  # short programs that one outweighs which is long, or has an optimizer's step
_SLOW = 4  # stretches of calls, one after the other, that take longer than noise explains
CALL_SECONDS = 40e-6  # of a program and between reads, for each call: else it is not short
_OF_A_READ = 4  # calls that a read, and a copy to the device, take as long as

now = time.thread_time


class ShortReads:
    """Of one recorder.

    run_at_once  whether what is about to begin does
    """

    __slots__ = ("_balance", "_slow", "_undecided", "_unread", "run_at_once", "_records")

    def __init__(self) -> None:
        self._balance = self._slow = 0
        self._undecided = 0  # programs in succession that have left it open
        self._unread = 0  # in succession that ended at no read
        self.run_at_once = False
        self._records = False  # whether reads are late: one recording, whatever was before

    def note_program(self, program: Any, ends_at_read: bool, trains: bool) -> None:
        """A recording has ended with that program.

        trains  whether an optimizer has made a step in it
        """
        self._records = False
        self._unread = 0 if ends_at_read else self._unread + 1
        if program.calls > FEW or trains:
            self._add(-_LONG)
            return
        is_slow = program.seconds > CALL_SECONDS * program.calls
        self._add(-1 if is_slow else int(ends_at_read))
        if program.tiers is not None and self.may_need_no_program(program.calls, ends_at_read):
            program.tiers.put_off()

    def may_need_no_program(self, calls: int, ends_at_read: bool) -> bool:
        """Whether so many calls may soon run at once: to compile them now could be for nothing.

        That holds for what a mark ends, too, where reads follow others: it is of the same loop.
        """
        is_undecided = self._is_undecided and self._undecided <= PUT_OFF and forks.may_run()
        is_between_reads = ends_at_read or (self._balance > 0 and self._unread <= _FOLLOWING)
        return is_between_reads and calls <= FEW and is_undecided

    @property
    def _is_undecided(self) -> bool:
        return -ENOUGH < self._balance < ENOUGH

    def note_calls(self, calls: int, seconds: float) -> None:
        """So many have run at once between two reads."""
        if seconds > CALL_SECONDS * (calls + _OF_A_READ):
            self._slow += 1
            self._add(_LEAST - _MOST if self._slow >= _SLOW else 1)
        else:
            self._slow = 0
            if self._balance < _MOST or not self.run_at_once:  # else nothing changes
                self._add(1)

    def note_late(self) -> None:
        """Many have run at once and no read came."""
        self._records = True
        self._add(-_LONG)

    def note_training(self) -> None:
        """An optimizer has made a step in what ran at once."""
        self._add(-_LONG)

    def note_unread(self) -> None:
        """What ran at once has ended, and nothing of it was read meanwhile."""
        self._add(-1)

    def _add(self, programs: int) -> None:
        self._balance = balance = min(_MOST, max(_LEAST, self._balance + programs))
        self._undecided = self._undecided + bool(programs) if self._is_undecided else 0
        begun = self.run_at_once
        if balance < ENOUGH and not begun:
            return
        enough = balance >= (ENOUGH // 2 if begun else ENOUGH)  # else it would swing
        self.run_at_once = enough and not self._records and (begun or forks.may_run())
