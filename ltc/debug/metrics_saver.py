"""Appends a metrics report to a file, once a step."""

from __future__ import annotations

import sys
import threading

from ltc import config
from ltc.debug import metrics


class _StepOfThread(threading.local):
    step = 0


_thread = _StepOfThread()


def save_metrics(metrics_file: str | None = None) -> None:
    """Append a report headed `[MetricsData; step=N]`; N counts this thread's reports from 0.

    metrics_file  a path, "STDOUT" or "STDERR"; without one, what LTC_METRICS_FILE says, and
                  nothing happens where that is not set. With several replicas, `.ordinal` is
                  added to a path.
    """
    metrics_file = metrics_file or config.value("LTC_METRICS_FILE")
    if not metrics_file:
        return
    block = f"[MetricsData; step={_thread.step}]\n{metrics.metrics_report()}\n"
    _thread.step += 1
    stream = {"STDOUT": sys.stdout, "STDERR": sys.stderr}.get(metrics_file)
    if stream is not None:
        stream.write(block)
        return
    with open(f"{metrics_file}{_suffix()}", "a") as file:
        file.write(block)


def _suffix() -> str:
    if config.value("XRT_SHARD_WORLD_SIZE") == 1:
        return ""
    local_ordinal = config.value("XRT_SHARD_LOCAL_ORDINAL")
    return f".{local_ordinal if local_ordinal >= 0 else config.value('XRT_SHARD_ORDINAL')}"
