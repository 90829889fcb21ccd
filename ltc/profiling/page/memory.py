"""Memory over the steps, and what holds it at the peak."""

from __future__ import annotations

from typing import Any

from ltc.profiling.analysis.steady_steps import SteadySteps
from ltc.profiling.page.charts import area
from ltc.profiling.page.markup import (
    Cell,
    bytes_text,
    milliseconds,
    nothing,
    number,
    percent,
    section,
    table,
    words,
)

_MOST_POINTS, _MOST_HOLDERS = 2000, 60
_KINDS = {"block": "workspace of a program", "other": "not told"}


def memory_section(steady: SteadySteps) -> str:
    """A chart for each device of each process, and a table of its peak."""
    peaks = steady.trace["ltc"]["memory"]
    body = "\n".join(_device(steady, peak) for peak in peaks)
    return section("memory", "Memory", body or nothing("No program was launched."))


def _device(steady: SteadySteps, peak: dict[str, Any]) -> str:
    points = [
        (event["ts"], event["args"]["bytes"])
        for event in steady.trace["traceEvents"]
        if event.get("ph") == "C"
        and event["pid"] == peak["pid"]
        and event["name"].endswith(f" {peak['device']}")
    ]
    ends = [step["end_us"] for step in steady.trace["ltc"]["steps"] if step["pid"] == peak["pid"]]
    rows = [_holder(one, peak["peak_bytes"]) for one in peak["holders"][:_MOST_HOLDERS]]
    left = peak["holders"][_MOST_HOLDERS:]
    if left:
        rest = sum(one["bytes"] for one in left)
        rows.append(_row(f"{len(left)} more", "", "", rest, "", peak["peak_bytes"]))
    heads = ["what", "name", "type", "size", "share", "made at"]
    drawn = area(_thinned(sorted(points)), ends, peak["at_us"]) if points else ""
    return (
        f"<h3>{peak['device']}{_whose(steady, peak)}: {bytes_text(peak['peak_bytes'])} at most, in step "
        f"{peak['step']}, after {milliseconds(peak['at_us'] / 1e6)}</h3>{drawn}"
        + table(heads, rows, "what holds memory at its peak")
    )


def _whose(steady: SteadySteps, peak: dict[str, Any]) -> str:
    processes = steady.trace["ltc"]["processes"]
    if len(processes) == 1:
        return ""
    rank = next((one.get("rank") for one in processes if one["pid"] == peak["pid"]), "?")
    return f" of rank {rank}"


def _holder(one: dict[str, Any], total: int) -> list[Cell]:
    shape = "" if one["shape"] is None else f"{one['dtype']}{one['shape']}"
    place = " ".join(part for part in (one.get("line"), one.get("module")) if part)
    kind = _KINDS.get(one["kind"], one["kind"])
    return _row(kind, one.get("name") or "", shape, one["bytes"], place, total)


def _row(kind: str, name: str, shape: str, size: int, place: str, total: int) -> list[Cell]:
    share = size / total if total else 0.0
    return [
        words(kind), words(name), words(shape), number(bytes_text(size), size),
        number(percent(share), share, share), words(place),
    ]  # fmt: skip


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most so many, the highest of each group of neighbours."""
    size = -(-len(points) // _MOST_POINTS)
    groups = [points[k : k + size] for k in range(0, len(points), size)]
    return [max(group, key=lambda point: point[1]) for group in groups]
