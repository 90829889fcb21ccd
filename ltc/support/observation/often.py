"""Events so frequent that noting each one would take as long as the event itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from time import time

from ltc.support.observation import metrics

_MOST = 256  # times that are not noted yet


def counting(name: str) -> Callable[[], object]:
    """Return a function that adds one to the counter; its calls are noted before any reading."""
    numbers, noted = itertools.count(), 0

    def note() -> None:
        nonlocal noted
        following = int(repr(numbers)[len("count(") : -1])  # without taking it
        if following > noted:
            metrics.note(((name, following - noted),))
            noted = following

    metrics.before_reading(note)
    return numbers.__next__


class Often:
    """Counters and metrics that grow together: noted at intervals, and before each read.

    Attributes:
        happened: Adds one time: its moment and the value of each sample.
        elsewhere: Gives the times that were counted elsewhere since the last call.
    """

    def __init__(
        self,
        counts: tuple[str, ...],
        samples: tuple[tuple[str, str], ...],
        sums: tuple[str, ...] = (),
    ) -> None:
        """Prepare the counters.

        Args:
            counts: The counters that grow by one each time.
            samples: Name and kind of the metrics that get a value each time.
            sums: The counters that grow by a value each time: those behind the samples'.
        """
        self._counts, self._samples, self._sums = counts, samples, sums
        self._times: list[tuple[float, ...]] = []
        self.elsewhere: Callable[[], list[tuple[float, ...]]] = list
        metrics.before_reading(self.note)

    def happened(self, *values: float) -> None:
        times = self._times
        times.append((time(), *values))
        if len(times) > _MOST:
            with metrics.up_to_date():
                pass

    def note(self) -> None:
        """Called by `metrics.up_to_date`: by one thread at a time."""
        self._times += self.elsewhere()
        known = len(self._times)
        if known:
            moments, *values = zip(*self._times[:known])
            del self._times[:known]  # what another thread has added meanwhile stays
            counts = [(name, known) for name in self._counts]
            summed = values[len(self._samples) :]
            counts += [(name, int(sum(of_one))) for name, of_one in zip(self._sums, summed)]
            metrics.note_series(
                counts,
                [(name, of_one, kind) for (name, kind), of_one in zip(self._samples, values)],
                moments,
            )
