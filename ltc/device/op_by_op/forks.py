"""When a recording goes on op by op: where its path has already gone on in several other ways.

Recording a call that is new takes several times as long as running a small one, and pays only where
the same comes again.  So the first ways in which a path goes on are recorded; what follows in the
same place is run at once, until one of it has come so often that it may come for ever.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from ltc import config
from ltc.runtime.tiers import begin_interpreted

RECORDED = 2  # ways to go on that are recorded, whatever becomes of them
PASSES = 3  # times that another one is run op by op before it is recorded too
_MOST = 1024  # other ways that one place remembers
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

    __slots__ = ("_times", "_latest", "_expected")

    def __init__(self) -> None:
        self._times: dict[Hashable, int] = {}
        self._latest: Hashable = None
        self._expected: Hashable = None

    def expect(self, key: Hashable) -> None:
        """What goes on with `key` is to be recorded the next time."""
        self._expected = key

    def is_expected(self, key: Hashable) -> bool:
        return self._expected is not None and key == self._expected

    def passes(self, key: Hashable) -> bool:
        """Whether what goes on with `key` is run op by op this time, too.

        What comes twice in succession is taken for a loop's.
        """
        times = self._times.pop(key, 0) + 1
        if times > PASSES or key == self._latest:
            self._latest = None
            return False
        if len(self._times) >= _MOST:
            self._times.clear()
        self._times[key], self._latest = times, key
        return True
