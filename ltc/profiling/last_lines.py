"""The five lines on stderr that LTC_DEBUG=1 ends a program with, and the page that they lead to.

The whole run is profiled for it: set before ltc is imported.  Of several ranks the first one tells.
Where it is not set nothing of this is begun.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ltc import config
from ltc.profiling.analysis.costs import by_line
from ltc.profiling.analysis.hindrances import hindrances
from ltc.profiling.analysis.steady_steps import main_process
from ltc.profiling.analysis.verdict import verdict
from ltc.profiling.profile import profile
from ltc.support.observation import spans

_COSTLIEST = 3
_MADE = ("recompiles", "cuts", "fallbacks", "tiers", "faults")
_COME_BACK = ("repeated", "paid")  # compiled, and once
_running: list[profile] = []


def begin_lines() -> None:
    """Watch what this process does from now on, where LTC_DEBUG=1 asks for it."""
    is_first = config.value("XRT_SHARD_ORDINAL") == 0
    if config.value("LTC_DEBUG") and is_first and not _running:
        name = f"ltc_{os.getpid()}_{secrets.token_hex(4)}.html"
        _running.append(profile(html=os.path.join(tempfile.gettempdir(), name)).__enter__())


def end_lines() -> None:
    """Print them, and write the page; neither where no program has run: then it is left as it is."""
    timeline = spans.timeline
    while _running:
        run = _running.pop()
        if timeline is not None and (timeline.launches or timeline.calls):
            _tell(run)


@contextlib.contextmanager
def last_lines() -> Iterator[None]:
    """Print the last lines of a process that ends without Python's end."""
    begin_lines()
    try:
        yield
    finally:
        end_lines()


os.register_at_fork(after_in_child=_running.clear)


def _tell(run: profile) -> None:
    try:
        run.__exit__(None, None, None)
        lines = [*summary(run.trace or {}), f"page: {run.html}"]
    except Exception:  # a program has ended as it did: this is no reason to end otherwise
        lines = [f"no summary: {traceback.format_exc()}"]
    for line in lines:
        print(f"ltc {line}", file=sys.stderr)


def summary(trace: dict[str, Any]) -> list[str]:
    """Return four lines: the bound of the run, its costliest lines, repeated events, hindrances."""
    bound = verdict(trace)
    at = f", at {bound.line}" if bound.line else ""
    found = hindrances(trace)
    return [
        f"bound: {bound.sentence}{at}",
        f"costliest lines: {', '.join(_costliest(trace)) or 'no kernel was timed'}",
        f"repeated events: {', '.join(_repeated(trace)) or 'nothing was compiled, cut or run eagerly'}",
        f"suggested fixes: {'; '.join(f'{one} -> {one.cure}' for one in found) or 'nothing that ltc knows of'}",
    ]


def _costliest(trace: dict[str, Any]) -> Iterator[str]:
    """Give the lines whose kernels take longest, with their shares of all kernels."""
    costs = by_line(trace)
    total = sum(cost.seconds for cost in costs) or 1.0
    for cost in costs[:_COSTLIEST]:
        if cost.seconds * 200 >= total:
            yield f"{cost.name} {100 * cost.seconds / total:.0f} %"


def _repeated(trace: dict[str, Any]) -> Iterator[str]:
    """Give the explanations that occurred more than once at a place, the most frequent first."""
    pid = main_process(trace)["pid"]
    told = [one for one in trace["ltc"]["explanations"] if one["pid"] == pid]
    places = Counter(
        (one["kind"], one["line"])
        for one in told
        if one["kind"] in _MADE and one["reason"] not in _COME_BACK
    )
    for (kind, line), times in places.most_common(_COSTLIEST):
        if times > 1:
            yield f"{kind} {times} times at {line}"
