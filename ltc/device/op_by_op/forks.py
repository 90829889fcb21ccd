"""When a recording goes on op by op: where its path has already gone on in several other ways.

Recording a call that is new takes several times as long as running a small one, and pays only where
the same comes again.  So the first ways in which a path goes on are recorded; what follows in the
same place is run at once, until one of it has come so often that it may come for ever.

Where every choice of a program comes often, but hardly ever the same choices together (a search, a
tree, one word after the other), that would record for ever.  So how much of what was recorded lately
was new decides how often a way has to come.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from ltc import config
from ltc.runtime.tiers import begin_interpreted

RECORDED = 2  # ways to go on that are recorded, whatever becomes of them
PASSES = 3  # times that another one is run op by op before it is recorded too
LOOKS_AGAIN = 8  # times that a place is left op by op before another way is recorded even so
_MOST = 1024  # other ways that one place remembers
# To record a call that is new takes as long as some ten that run at once.
_MUCH, _LITTLE = 1 / 8, 1 / 32  # of the calls of the latest recordings that are new
_JUDGED = 1000  # calls, of one recording or several, that are looked at together
_FIRST = 3  # times that much of them may be new, as when a program begins
_UP = 6  # times with little that is new that make up for one with much
MOST_PATIENCE = 6
_tier = config.reader("LTC_TIER")
_looks_at_programs = config.reader("LTC_VERIFY", "LTC_DEBUG_NANS", "LTC_SAVE_TENSORS_FILE")


def may_run() -> bool:
    """Whether the process's settings allow calls to run at once."""
    return begin_interpreted() and not any(_looks_at_programs()) and not _has_peers()


def is_forced() -> bool:
    """Whether every call is to run at once that may."""
    return _tier() == ("op_by_op",)


def _has_peers() -> bool:
    """Whether other processes train the same model: what they compute is to have the same bits."""
    distributed = torch.distributed
    return bool(distributed.is_available() and distributed.is_initialized())


class PassedBy:
    """What went on from one place of a path and was not recorded."""

    __slots__ = ("_times", "_latest", "_expected", "_repeats", "_all")

    def __init__(self) -> None:
        self._times: dict[Hashable, int] = {}
        self._latest: Hashable = None
        self._expected: Hashable = None
        self._repeats = self._all = 0

    def expect(self, key: Hashable) -> None:
        """What goes on with `key` is to be recorded the next time."""
        self._expected = key

    def is_expected(self, key: Hashable) -> bool:
        return self._expected is not None and key == self._expected

    def passes(self, key: Hashable, patience: int = 0) -> bool:
        """Whether what goes on with `key` is run op by op this time, too.

        What comes twice in succession is taken for a loop's.

        patience  each more doubles how often it has to come
        """
        times = self._times.pop(key, 0) + 1
        self._all += 1
        self._repeats = self._repeats + 1 if key == self._latest else 0
        is_of_loop = self._repeats >= 1 << patience
        is_due = patience > 0 and self._all > LOOKS_AGAIN << patience  # for the sake of symbols
        if times > PASSES << patience or is_of_loop or is_due:
            self._latest, self._repeats, self._all = None, 0, 0
            return False
        if len(self._times) >= _MOST:
            self._times.clear()
        self._times[key], self._latest = times, key
        return True


class Novelty:
    """How much of what a recorder has recorded lately was new.

    patience  0 where little was; else each more doubles how often a way has to come to be recorded
    """

    __slots__ = ("_new", "_calls", "_balance", "patience")

    def __init__(self) -> None:
        self._new = self._calls = self.patience = 0
        self._balance = -_FIRST * _UP

    def note(self, new: int, calls: int) -> None:
        """A recording has ended that has so many calls; so many entries were new."""
        self._new, self._calls = self._new + new, self._calls + calls
        if self._calls < _JUDGED:
            return
        if self._new > self._calls * _MUCH:
            self._balance = min(self._balance + _UP, MOST_PATIENCE * _UP)
        elif self._new < self._calls * _LITTLE:
            self._balance = max(self._balance - 1, -_FIRST * _UP)
        self.patience = max(0, self._balance // _UP)
        self._new = self._calls = 0

    def has_forked(self, ways: int) -> bool:
        """Whether a place that has gone on in so many ways is left op by op in another one."""
        return ways >= (1 if self.patience else RECORDED)
