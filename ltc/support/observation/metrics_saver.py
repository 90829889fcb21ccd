"""Appends what was counted to a file, once a step: a report, or a line of JSON."""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

from ltc import config
from ltc.support.observation import metrics

__all__ = [
    "save_metrics",
    "step_as_dict",
]

JSON_LINES = ".jsonl"  # how the name of a file ends that gets JSON


class _StepOfThread(threading.local):
    """step: how many reports this thread has written; before: the totals at its latest line."""

    step = 0
    before: dict[str, dict] | None = None


_thread = _StepOfThread()


def save_metrics(metrics_file: str | None = None) -> None:
    """Append a report headed `[MetricsData; step=N]`; N counts this thread's reports from 0.

    A path that ends in .jsonl gets a line of JSON in place of the report: see `step_as_dict`.

    Args:
        metrics_file: A path, "STDOUT" or "STDERR"; without one, what LTC_METRICS_FILE says, and
            nothing happens where that is not set. With several replicas, `.ordinal` is added to a
            path.
    """
    metrics_file = metrics_file or config.value("LTC_METRICS_FILE")
    if not metrics_file:
        return
    stream = {"STDOUT": sys.stdout, "STDERR": sys.stderr}.get(metrics_file)
    text = _line() if str(metrics_file).endswith(JSON_LINES) else _block()
    if stream is not None:
        stream.write(text)
        return
    with open(f"{metrics_file}{_suffix()}", "a") as file:
        file.write(text)


def step_as_dict() -> dict[str, Any]:
    """Return the counts since this thread's latest report: the content of a line of JSON.

    step      counts this thread's reports from 0
    time      seconds since the epoch
    ordinal   the replica's number
    counters  name -> growth
    metrics   name -> {"kind", "total_samples", "accumulator"}: growth; times in nanoseconds

    So the lines of a file add up to the totals of the process, where one thread marks its steps.
    """
    now = metrics.totals()
    grown = metrics.growth(_thread.before or {"counters": {}, "metrics": {}}, now)
    _thread.before = now
    ordinal = config.value("XRT_SHARD_ORDINAL")
    return {"step": _next_step(), "time": time.time(), "ordinal": ordinal, **grown}


def _line() -> str:
    return json.dumps(step_as_dict()) + "\n"


def _block() -> str:
    return f"[MetricsData; step={_next_step()}]\n{metrics.metrics_report()}\n"


def _next_step() -> int:
    _thread.step += 1
    return _thread.step - 1


def _suffix() -> str:
    if config.value("XRT_SHARD_WORLD_SIZE") == 1:
        return ""
    local_ordinal = config.value("XRT_SHARD_LOCAL_ORDINAL")
    return f".{local_ordinal if local_ordinal >= 0 else config.value('XRT_SHARD_ORDINAL')}"
