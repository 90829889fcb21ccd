"""What happens so often that to note it each time would take as long as the thing itself."""

from __future__ import annotations

from time import time

from ltc.debug import metrics

_MOST = 256  # times that are not noted yet


class Often:
    """Counters and metrics that grow together: noted now and then, and before anybody looks.

    happened  adds one time: its moment and the value of each sample
    """

    def __init__(self, counts: tuple[str, ...], samples: tuple[tuple[str, str], ...]) -> None:
        """
        counts   the counters that grow by one each time
        samples  name and kind of the metrics that get a value each time
        """
        self._counts, self._samples = counts, samples
        self._times: list[tuple[float, ...]] = []
        metrics.before_reading(self.note)

    def happened(self, *values: float) -> None:
        times = self._times
        times.append((time(), *values))
        if len(times) > _MOST:
            with metrics.up_to_date():
                pass

    def note(self) -> None:
        """Called by `metrics.up_to_date`: by one thread at a time."""
        known = len(self._times)
        if known:
            moments, *values = zip(*self._times[:known])
            del self._times[:known]  # what another thread has added meanwhile stays
            metrics.note_series(
                [(name, known) for name in self._counts],
                [(name, of_one, kind) for (name, kind), of_one in zip(self._samples, values)],
                moments,
            )
