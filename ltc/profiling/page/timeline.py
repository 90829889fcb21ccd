"""What page.js draws the timeline of: lanes, names and spans, as small as JSON gets them."""

from __future__ import annotations

import json
from bisect import bisect_right
from typing import Any

from ltc.profiling.analysis.steady_steps import SteadySteps, duration

MOST_SPANS = 24_000  # in one page: about a megabyte
CATEGORIES = (
    "record", "mark", "cut", "compile", "launch", "kernel", "upload", "download", "wait", "collective",
    "fallback", "closure", "user", "gc",
)  # fmt: skip
_PLACE = {name: number for number, name in enumerate(CATEGORIES)}


def shown_steps(steady: SteadySteps, steps: list[dict[str, Any]]) -> list[int]:
    """Of each step, its place among those that the page can draw; -1 where it cannot."""
    spans = [e for e in steady.trace["traceEvents"] if e.get("cat") in _PLACE and "dur" in e]
    each = len(spans) / max(len(steps), 1)
    most = max(1, min(len(steps), int(MOST_SPANS / max(each, 1))))
    chosen = {round(k * (len(steps) - 1) / max(most - 1, 1)) for k in range(most)}
    if steps:
        chosen.add(typical(steps))
    places = {number: place for place, number in enumerate(sorted(chosen))}
    return [places.get(number, -1) for number in range(len(steps))]


def typical(steps: list[dict[str, Any]]) -> int:
    """The place of the step in the middle by its duration, of the later half."""
    later = range(len(steps) // 2, len(steps))
    ordered = sorted(later, key=lambda number: duration(steps[number]))
    return ordered[len(ordered) // 2]


def timeline_data(trace: dict[str, Any], steps: list[dict[str, Any]], shown: list[int]) -> str:
    """A JSON object: `lanes` (process, name), `names`, `categories`, and `steps` that are drawn.

    Each of these: number, begin and end (microseconds), and `spans`, flat: lane, category, name, line,
    begin (from the step's), duration, six numbers each.
    """
    drawn = [step for step, place in zip(steps, shown) if place >= 0]
    windows = [(step["begin_us"], step["end_us"]) for step in drawn] or [_whole(trace)]
    names, lanes = _Numbers(), _lanes(trace)
    rows = [
        [number for event in events for number in _span(event, begin, lanes, names)]
        for events, (begin, _) in zip(_events_of(trace, windows), windows)
    ]
    titles = _lane_titles(trace)
    return _json({
        "categories": CATEGORIES,
        "names": list(names),
        "lanes": [titles.get(lane, f"thread {lane[1]}") for lane in lanes],
        "steps": [
            {"number": step.get("number", 0), "begin": _short(begin), "end": _short(end), "spans": row}
            for step, (begin, end), row in zip(drawn or [{}], windows, rows)
        ],
    })  # fmt: skip


def _events_of(
    trace: dict[str, Any], windows: list[tuple[float, float]]
) -> list[list[dict[str, Any]]]:
    """Of each window, the spans that reach into it by their begin; the longest, where there are many."""
    found: list[list[dict[str, Any]]] = [[] for _ in windows]
    ends = [end for _, end in windows]
    spans = [e for e in trace["traceEvents"] if e.get("cat") in _PLACE and "dur" in e]
    for event in spans:
        number = bisect_right(ends, event["ts"])
        while number < len(windows) and windows[number][0] < event["ts"] + event["dur"]:
            found[number].append(event)
            number += 1
    most = max(MOST_SPANS // len(windows), 1)
    longest = [sorted(events, key=lambda e: -e["dur"])[:most] for events in found]
    return [sorted(events, key=lambda e: (e["ts"], -e["dur"])) for events in longest]


class _Numbers(dict[Any, int]):
    """Numbers things in the order in which they come."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number


def _lanes(trace: dict[str, Any]) -> _Numbers:
    """Those of the first rank first; of a rank, first the threads that mark steps."""
    ranks = {one["pid"]: one.get("rank") or 0 for one in trace["ltc"]["processes"]}
    found = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e.get("cat") in _PLACE}
    marking = {
        (step["pid"], step["tid"] - side) for step in trace["ltc"]["steps"] for side in (0, 1)
    }
    ordered = sorted(
        found, key=lambda lane: (ranks.get(lane[0], 0), lane[0], lane not in marking, lane[1])
    )
    return _Numbers({lane: number for number, lane in enumerate(ordered)})


def _span(
    event: dict[str, Any], begin: float, lanes: _Numbers, names: _Numbers
) -> tuple[float, ...]:
    args = event.get("args") or {}
    return (
        lanes[event["pid"], event["tid"]],
        _PLACE[event["cat"]],
        names[event["name"]],
        names[_about(args)],
        _short(event["ts"] - begin),
        _short(event["dur"]),
    )


def _about(args: dict[str, Any]) -> str:
    """What is shown of a span besides its name."""
    parts = [args.get("forward") or args.get("line") or "", args.get("module") or ""]
    if args.get("waited_for") is not None:
        parts.append(f"waited for rank {args['waited_for']}")
    return "\n".join(part for part in parts if part)


def _lane_titles(trace: dict[str, Any]) -> dict[tuple[int, int], str]:
    several = len(trace["ltc"]["processes"]) > 1
    ranks = {one["pid"]: one.get("rank") or 0 for one in trace["ltc"]["processes"]}
    return {
        (event["pid"], event["tid"]): (f"rank {ranks.get(event['pid'])}: " if several else "")
        + str(event["args"]["name"])
        for event in trace["traceEvents"]
        if event.get("ph") == "M" and event["name"] == "thread_name"
    }


def _whole(trace: dict[str, Any]) -> tuple[float, float]:
    ends = [e["ts"] + e.get("dur", 0) for e in trace["traceEvents"]]
    return 0.0, max(ends, default=1.0)


def _short(microseconds: float) -> float:
    rounded = round(microseconds, 1)
    return int(rounded) if rounded == int(rounded) else rounded


def _json(data: Any) -> str:
    """To stand in a script element, which a tag in a name must not end."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
