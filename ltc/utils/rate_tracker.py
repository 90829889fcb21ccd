"""How many items a second."""

from __future__ import annotations

import time

from ltc import config


class RateTracker:
    """Counts items and tells their rate, now and since the start.

    smooth_factor  weight of the previous rate in the next one, 0 to 1; None: RATE_TRACKER_SMOOTHING

    >>> tracker = ltm.RateTracker()
    >>> tracker.add(64)  # a batch
    >>> tracker.rate() > 0  # items a second
    True
    """

    def __init__(self, smooth_factor: float | None = None):
        if smooth_factor is None:
            smooth_factor = config.value("RATE_TRACKER_SMOOTHING")
        self._smooth_factor = smooth_factor
        self._start = self._partial_start = time.perf_counter()
        self._count = self._partial_count = 0.0
        self._previous: float | None = None

    def add(self, count: float) -> None:
        """Count that many items."""
        self._count += count
        self._partial_count += count

    def rate(self) -> float:
        """Items a second since the previous call, blended with its answer; 0.0 if no time passed."""
        now = time.perf_counter()
        elapsed = now - self._partial_start
        current = self._partial_count / elapsed if elapsed > 0 else 0.0
        self._partial_start, self._partial_count = now, 0.0
        if self._previous is not None:
            current = (1 - self._smooth_factor) * current + self._smooth_factor * self._previous
        self._previous = current
        return current

    def global_rate(self) -> float:
        """Items a second since this object was made."""
        elapsed = time.perf_counter() - self._start
        return self._count / elapsed if elapsed > 0 else 0.0
