"""Answers that can be found again, at most so many of them."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import TypeVar

from ltc.support.observation import metrics
from ltc.support.process.fork_safe_lock import renewed_lock

Key = TypeVar("Key", bound=Hashable)
Answer = TypeVar("Answer")
_forgetting = renewed_lock(globals(), "_forgetting")


class BoundedTable(dict[Key, Answer]):
    """A dictionary, of which the oldest half is forgotten when it is full.

    Reading costs as much as for any dictionary. Only `keep` enforces the bound.

    Args:
        name: Counted, as Forgotten.<name>, for every answer that is forgotten.
        most: The most answers that are kept.
    """

    def __init__(self, name: str, most: int) -> None:
        super().__init__()
        self.name, self.most = name, most

    def keep(self, key: Key, answer: Answer) -> Answer:
        """The answer to `key` from now on: that of another thread, if it was faster."""
        if len(self) >= self.most:
            self._forget_oldest()
        return self.setdefault(key, answer)

    def _forget_oldest(self) -> None:
        with _forgetting:
            oldest = list(itertools.islice(self, len(self) - self.most // 2))
            for key in oldest:
                self.pop(key, None)
        metrics.count(f"Forgotten.{self.name}", len(oldest))
