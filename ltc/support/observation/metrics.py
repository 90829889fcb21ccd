"""Counters and timers of everything ltc does; the leaf that every other module may import.

A counter is a number that grows. A metric is a series of samples, of which the sum, the count and
the latest LTC_METRICS_SAMPLES are kept. A name comes into being with its first use, and a cleared
one is gone until it is used again.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ltc import config
from ltc.support.process.fork_safe_lock import renewed_lock

__all__ = [
    "Metric",
    "as_dict",
    "before_reading",
    "bytes_text",
    "clear_all",
    "clear_counters",
    "clear_metrics",
    "count",
    "counted",
    "counter_names",
    "counter_value",
    "executed_fallback_ops",
    "growth",
    "metric_data",
    "metric_names",
    "metrics_report",
    "note",
    "note_series",
    "record",
    "reset_metrics",
    "short_metrics_report",
    "time_text",
    "timed",
    "totals",
    "up_to_date",
    "value_text",
]

SHORT_COUNTERS = ("CachedCompile", "MarkStep", "DynamoSyncInputExecuteTime")
SHORT_METRICS = (
    "CompileTime",
    "ExecuteTime",
    "ExecuteReplicatedTime",
    "TransferToDeviceTime",
    "TransferFromDeviceTime",
)

_counts: defaultdict[str, int] = defaultdict(int)
_metrics: dict[str, Metric] = {}
_lock = renewed_lock(globals(), "_lock")
_before_reading: list[Callable[[], None]] = []


def before_reading(note: Callable[[], None]) -> None:
    """Call `note` before each read or clearing of the counters."""
    _before_reading.append(note)


@contextmanager
def up_to_date() -> Iterator[None]:
    """A block before which all that has happened is noted, and in which nothing else is."""
    with _lock:
        for note in _before_reading:
            note()
        yield


# --- recording ---------------------------------------------------------------------------------


def count(name: str, n: int = 1) -> None:
    """Add `n` to the counter."""
    with _lock:
        _counts[name] += n


def record(name: str, value: float, kind: str = "value") -> None:
    """Add a sample to the metric.

    Args:
        kind: "time" (nanoseconds), "bytes" or "value"; that of the first sample counts.
    """
    note((), ((name, value, kind),))


def _new_metric(name: str, kind: str) -> Metric:
    metric = _metrics[name] = Metric(kind)
    return metric


def note(
    counts: Iterable[tuple[str, int]], samples: Collection[tuple[str, float, str]] = ()
) -> None:
    """`count` each of `counts` and `record` each of `samples`, as of one moment."""
    with _lock:
        for name, n in counts:
            _counts[name] += n
        if samples:
            now = time.time()
            for name, value, kind in samples:
                metric = _metrics.get(name) or _new_metric(name, kind)
                metric.total += 1
                metric.sum += value
                metric.samples.append((now, value))


def note_series(
    counts: Iterable[tuple[str, int]],
    series: Iterable[tuple[str, Sequence[float], str]],
    moments: Sequence[float],
) -> None:
    """`note` of several moments at once: of each sample there is a value for every moment."""
    with _lock:
        for name, n in counts:
            _counts[name] += n
        for name, values, kind in series:
            metric = _metrics.get(name) or _new_metric(name, kind)
            metric.total += len(values)
            metric.sum += sum(values)
            metric.samples.extend(zip(moments, values))


class timed:
    """`with timed(name):` records how long the block took, also where it raises."""

    __slots__ = ("_name", "_start")

    def __init__(self, name: str):
        self._name = name

    def __enter__(self) -> None:
        self._start = time.perf_counter_ns()

    def __exit__(self, *error: object) -> None:
        record(self._name, time.perf_counter_ns() - self._start, "time")


class Metric:
    """The samples of one name.

    Attributes:
        total: Number of samples ever added.
        sum: The sum of all their values, in the kind's unit.
        samples: The latest, each (seconds since the epoch, value).
    """

    __slots__ = ("kind", "total", "sum", "samples")

    def __init__(self, kind: str):
        if kind not in _REPRESENTATION:
            kinds = ", ".join(_REPRESENTATION)
            raise ValueError(f"A metric of kind {kind!r}: the kinds are {kinds}.")
        self.kind, self.total, self.sum = kind, 0, 0.0
        self.samples: deque[tuple[float, float]] = deque(maxlen=config.value("LTC_METRICS_SAMPLES"))

    def copy(self) -> Metric:
        """The same, and no longer growing."""
        twin = Metric(self.kind)
        twin.total, twin.sum, twin.samples = self.total, self.sum, self.samples.copy()
        return twin

    def percentiles(self) -> dict[float, float]:
        """fraction -> sample, for each of LTC_METRICS_PERCENTILES, over the samples kept."""
        ordered = sorted(value for _, value in self.samples)
        last = len(ordered) - 1
        fractions = config.value("LTC_METRICS_PERCENTILES")
        return {f: ordered[min(int(f * len(ordered)), last)] for f in fractions}


class counted(Mapping[str, int]):
    """`with counted() as grown:` tells what was counted since the block began, until it ended.

    grown[name]  growth of a counter, or the number of new samples of a metric; 0 for any other name
    iteration    the names that grew

    What is cleared inside the block counts from the clearing on.
    """

    def __enter__(self) -> counted:
        self._before = _totals()
        self._after: dict[str, int] | None = None
        return self

    def __exit__(self, *error: object) -> None:
        self._after = _totals()

    def _grown(self) -> dict[str, int]:
        after = _totals() if self._after is None else self._after
        grown = {}
        for name, total in after.items():
            before = self._before.get(name, 0)
            grown[name] = total - before if total >= before else total
        return {name: growth for name, growth in grown.items() if growth}

    def __getitem__(self, name: str) -> int:
        return self._grown().get(name, 0)

    def __contains__(self, name: object) -> bool:
        return name in self._grown()

    def __iter__(self) -> Iterator[str]:
        return iter(self._grown())

    def __len__(self) -> int:
        return len(self._grown())

    def __repr__(self) -> str:
        return f"counted({self._grown()})"


def _totals() -> dict[str, int]:
    with up_to_date():
        return {name: metric.total for name, metric in _metrics.items()} | dict(_counts)


# --- reading -----------------------------------------------------------------------------------


def counter_names() -> list[str]:
    """The counters that are not zero, in alphabetical order."""
    with up_to_date():
        return sorted(name for name, n in _counts.items() if n)


def counter_value(name: str) -> int | None:
    """The counter's value, or None where it was not used since it was last cleared."""
    with up_to_date():
        return _counts.get(name) or None


def metric_names() -> list[str]:
    """The metrics that have samples, in alphabetical order."""
    with up_to_date():
        return sorted(_metrics)


def metric_data(name: str) -> tuple[int, float, tuple[tuple[float, float], ...]] | None:
    """(number of samples, their sum, the latest as (seconds since the epoch, value)), or None.

    Times are in nanoseconds.
    """
    with up_to_date():
        metric = _metrics.get(name)
        return None if metric is None else (metric.total, metric.sum, tuple(metric.samples))


def executed_fallback_ops() -> list[str]:
    """The operators that ran eagerly, as aten::name, since counters were last cleared."""
    return [name for name in counter_names() if _is_fallback(name)]


def _is_fallback(name: str) -> bool:
    return name.startswith(("aten::", "torchvision::"))


def as_dict() -> dict[str, dict]:
    """All of it as plain data, fit for JSON.

    "counters"  name -> value
    "metrics"   name -> {"kind", "total_samples", "accumulator", "percentiles": {"50%": value}}
    """
    counters, metrics = _snapshot()
    return {
        "counters": counters,
        "metrics": {
            name: {
                "kind": metric.kind,
                "total_samples": metric.total,
                "accumulator": metric.sum,
                "percentiles": {percent_text(f): v for f, v in metric.percentiles().items()},
            }
            for name, metric in metrics.items()
        },
    }


def totals() -> dict[str, dict]:
    """`as_dict` without the percentiles, which take time: a point to tell `growth` from."""
    with up_to_date():
        return {
            "counters": {name: _counts[name] for name in counter_names()},
            "metrics": {name: _totals_of(_metrics[name]) for name in sorted(_metrics)},
        }


def _totals_of(metric: Metric) -> dict[str, Any]:
    return {"kind": metric.kind, "total_samples": metric.total, "accumulator": metric.sum}


def growth(before: dict[str, dict], after: dict[str, dict] | None = None) -> dict[str, dict]:
    """Return the growth of counts from one point to another, in their form; names that grew alone.

    Names cleared in between count from the clearing on.

    Args:
        before: A result of `totals` or `as_dict`.
        after: The same, from later; None: now.

    Example:
        >>> before = metrics.totals()
        >>> metrics.note([("batches", 3)])
        >>> metrics.growth(before)["counters"]
        {'batches': 3}
    """
    after = totals() if after is None else after
    counters = {
        name: _grown(n, before["counters"].get(name, 0)) for name, n in after["counters"].items()
    }
    return {
        "counters": {name: n for name, n in counters.items() if n},
        "metrics": {
            name: grown
            for name, metric in after["metrics"].items()
            if (grown := _metric_growth(metric, before["metrics"].get(name)))["total_samples"]
        },
    }


def _grown(now: float, before: float) -> float:
    return now - before if now >= before else now


def _metric_growth(now: dict[str, Any], before: dict[str, Any] | None) -> dict[str, Any]:
    if before is None or before["total_samples"] > now["total_samples"]:
        before = {"total_samples": 0, "accumulator": 0.0}
    return {
        "kind": now["kind"],
        "total_samples": now["total_samples"] - before["total_samples"],
        "accumulator": now["accumulator"] - before["accumulator"],
    }


def _snapshot() -> tuple[dict[str, int], dict[str, Metric]]:
    """Counters and metrics of one moment, in alphabetical order."""
    with up_to_date():
        counters = {name: _counts[name] for name in counter_names()}
        return counters, {name: _metrics[name].copy() for name in sorted(_metrics)}


# --- clearing ----------------------------------------------------------------------------------


def clear_counters() -> None:
    """Forget every counter."""
    with up_to_date():
        _counts.clear()


def clear_metrics() -> None:
    """Forget every metric."""
    with up_to_date():
        _metrics.clear()


def clear_all() -> None:
    """Forget every counter and every metric."""
    with up_to_date():
        clear_counters()
        clear_metrics()


def reset_metrics() -> None:
    """`clear_all` under the seed's name."""
    clear_all()


# --- the report --------------------------------------------------------------------------------


def metrics_report() -> str:
    """Every metric, then every counter, as text; "" where nothing was counted."""
    counters, metrics = _snapshot()
    return _report(counters, metrics, counters, metrics)


def short_metrics_report(
    counter_names: Iterable[str] | None = None, metric_names: Iterable[str] | None = None
) -> str:
    """The report on the names given, or on the most telling ones; fallbacks are always in it."""
    counters, metrics = _snapshot()
    wanted = list(counter_names or SHORT_COUNTERS)
    wanted += [name for name in counters if _is_fallback(name) and name not in wanted]
    return _report(counters, metrics, wanted, metric_names or SHORT_METRICS)


def _report(
    counters: dict[str, int],
    metrics: dict[str, Metric],
    counter_names: Iterable[str],
    metric_names: Iterable[str],
) -> str:
    blocks = [_metric_block(name, metrics[name]) for name in metric_names if name in metrics]
    blocks += [f"Counter: {n}\n  Value: {counters[n]}\n" for n in counter_names if n in counters]
    return "".join(blocks)


def _metric_block(name: str, metric: Metric) -> str:
    text_of = _REPRESENTATION[metric.kind]
    lines = [
        f"Metric: {name}",
        f"  TotalSamples: {metric.total}",
        f"  Accumulator: {text_of(metric.sum)}",
    ]
    seconds = metric.samples[-1][0] - metric.samples[0][0]
    if seconds > 0:
        kept = sum(value for _, value in metric.samples)
        lines.append(f"  ValueRate: {text_of(kept / seconds)} / second")
        lines.append(f"  Rate: {len(metric.samples) / seconds:g} / second")
    percentiles = (f"{percent_text(f)}={text_of(v)}" for f, v in metric.percentiles().items())
    lines.append(f"  Percentiles: {'; '.join(percentiles)}")
    return "\n".join(lines) + "\n"


# --- durations, sizes and numbers as text ------------------------------------------------------


def time_text(nanoseconds: float) -> str:
    """06m09s401ms746.001us: from the largest part that is not zero down to thousandths of a us."""
    whole = round(nanoseconds)
    text, started = "", False
    for unit, width, size in _TIME_PARTS:
        part, whole = divmod(whole, size)
        started = started or part > 0
        if started:
            text += f"{part:0{width}d}{unit}"
    return f"{text}{whole // 1000:03d}.{whole % 1000:03d}us"


_TIME_PARTS = (  # unit, digits, nanoseconds
    ("d", 2, 86_400_000_000_000),
    ("h", 2, 3_600_000_000_000),
    ("m", 2, 60_000_000_000),
    ("s", 2, 1_000_000_000),
    ("ms", 3, 1_000_000),
)


def bytes_text(n: float) -> str:
    """1.50KB: in the largest unit of which there is at least one, by powers of 1024."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if n < 1024:
            return f"{n:.2f}{unit}"
        n /= 1024
    return f"{n:.2f}PB"


def value_text(number: float) -> str:
    """4.00"""
    return f"{number:.2f}"


def percent_text(fraction: float) -> str:
    """50%"""
    return f"{100 * fraction:g}%"


_REPRESENTATION = {"time": time_text, "bytes": bytes_text, "value": value_text}
