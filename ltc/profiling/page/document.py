"""The whole page."""

from __future__ import annotations

import json
import linecache
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from ltc.profiling.analysis.hindrances import Hindrance, hindrances
from ltc.profiling.analysis.kernel_parts import kernel_words
from ltc.profiling.analysis.steady_steps import SteadySteps, duration, main_process, steady_steps
from ltc.profiling.analysis.verdict import Verdict, verdict
from ltc.profiling.page.charts import area, share_bar, step_strip
from ltc.profiling.page.costs_shown import (
    collectives_section,
    kernels_section,
    lines_section,
    modules_section,
)
from ltc.profiling.page.markup import (
    Cell,
    bytes_text,
    milliseconds,
    nothing,
    number,
    percent,
    section,
    shortened,
    table,
    words,
)
from ltc.profiling.page.templating import file_text, filled

_NAMES = {
    "mend": "fixes", "steps": "step", "modules": "modules", "lines": "lines", "kernels": "kernels",
    "memory": "memory", "why": "why", "collectives": "collectives",
}  # fmt: skip
# Nothing is loaded from anywhere, whatever names and sources the trace has in it.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def document(trace: dict[str, Any]) -> str:
    """Return the HTML of a trace; raise ValueError if ltc.profile has not written it."""
    steady = steady_steps(checked(trace))
    lane = steady.steps[0]["tid"] if steady.steps else None
    steps = [
        step for step in trace["ltc"]["steps"] if step["pid"] == steady.pid and step["tid"] == lane
    ]
    steps.sort(key=lambda step: step["begin_us"])
    shown = shown_steps(steady, steps)
    start = shown[typical(steps)] if steps else 0
    sections = [
        hindrances_section(hindrances(trace)),
        steps_section(steady, steps, shown, start),
        modules_section(steady),
        lines_section(steady),
        kernels_section(steady),
        memory_section(steady),
        explanations_section(steady),
        collectives_section(steady),
    ]
    made = {name: body for name, body in zip(_NAMES, sections) if body}
    return whole_page(
        _title(trace), head(steady, verdict(trace)), made, timeline_data(trace, steps, shown)
    )


def whole_page(title: str, head: Markup, sections: dict[str, Markup], data: str) -> str:
    """Return the HTML of a page.

    Args:
        sections: By their identities; those without text are left out of the navigation, too.
        data: JSON for page.js's timeline.
    """
    page = filled(
        "page",
        policy=Markup(_POLICY),
        title=title,
        style=file_text("page.css"),
        names=[(name, _NAMES.get(name, name)) for name in sections],
        head=head,
        sections=list(sections.values()),
        data=Markup(data),
        script=file_text("page.js"),
    )
    return str(page)  # whoever adds to it adds markup


def checked(trace: Any) -> dict[str, Any]:
    """Return the trace; raise ValueError if ltc.profile has not written it."""
    if not isinstance(trace, dict) or not {"traceEvents", "ltc"} <= set(trace):
        raise ValueError(
            "This is not a trace of ltc.profile: it has no tables under `ltc`. Write one with "
            '`with ltc.profile("out.json"):` or `python -m ltc profile train.py`.'
        )
    return trace


def _title(trace: dict[str, Any]) -> str:
    script = (main_process(trace)["argv"] or [""])[0].rsplit("/", 1)[-1]
    return f"ltc: {script or 'a run'}"


# The head of the page: the verdict, a few figures, where a step's time goes, all steps at a
# glance.


def head(steady: SteadySteps, verdict: Verdict) -> Markup:
    """Return the run's facts, its bound, and the figures that a reader asks for first."""
    process = steady.process
    ranks = len(steady.trace["ltc"]["processes"])
    versions = ", ".join(f"{name} {version}" for name, version in process["versions"].items())
    about = [
        " ".join(process["argv"]),
        f"{ranks} ranks" if ranks > 1 else "",
        f"{process['threads']} thread{'s' * (process['threads'] != 1)}",
        process["host"],
        versions,
    ]
    return filled(
        "head",
        about=" · ".join(filter(None, about)),
        kind=verdict.kind,
        sentence=_capital(verdict.sentence),
        line=verdict.line,
        figures=_figures(steady),
        dropped=process.get("dropped") or 0,
    )


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _figures(steady: SteadySteps) -> list[tuple[str, str]]:
    told = steady.trace["ltc"]
    counts = {
        kind: sum(1 for one in told["explanations"] if one["kind"] in kinds)
        for kind, kinds in _COUNTED.items()
    }
    steps = [step for step in told["steps"] if step["pid"] == steady.pid]
    longest = max(map(duration, steps), default=0.0)
    peak = max((one["peak_bytes"] for one in told["memory"]), default=0)
    return [
        ("a step takes (median)", milliseconds(steady.median_us / 1e6) if steady.steps else "—"),
        ("the longest step", milliseconds(longest / 1e6) if steps else "—"),
        ("steps", str(len(steps))),
        *((kind, str(number)) for kind, number in counts.items()),
        ("peak memory", bytes_text(peak) if told["memory"] else "—"),  # launches measure it
    ]


_COUNTED = {
    "programs compiled": ("compiles", "recompiles"),
    "cuts": ("cuts",),
    "eager calls": ("fallbacks",),
}


def steps_section(
    steady: SteadySteps, steps: Sequence[dict[str, Any]], shown: Sequence[int], start: int
) -> Markup:
    """The parts of a steady step, a bar for each step, and the place where page.js draws one."""
    if steps:
        shares = share_bar([*_parts(steady), ("else", "rest", 1 - sum(steady.parts.values()))])
        parts, strip = _parts_table(steady), Markup(step_strip(steps, shown))
    else:
        shares = "<p>No step was marked: the whole run is drawn.</p>"
        parts = strip = Markup("")
    body = filled("steps", shares=Markup(shares), parts=parts, strip=strip, start=start)
    return section(
        "steps", "A step", body,
        "Parts that run at the same time count once, for the first of them.",
    )  # fmt: skip


WORDS_OF_PARTS = {
    "peers": ("waiting for other ranks", "collective"),
    "running": ("running kernels", "execute"),
    "compiling": ("compiling", "compile"),
    "input": ("input pipeline (DataLoader)", "user"),
    "copying": ("copying to and from the device", "transfer"),
    "waiting": ("waiting, no kernel running", "wait"),
    "recording": ("Python and recording", "record"),
}


def _parts(steady: SteadySteps) -> list[tuple[str, str, float]]:
    has_peers = len({one.get("rank") or 0 for one in steady.trace["ltc"]["processes"]}) > 1
    shares = steady.parts.items()
    return [
        (*WORDS_OF_PARTS[name], share) for name, share in shares if has_peers or name != "peers"
    ]


def _parts_table(steady: SteadySteps) -> Markup:
    each = steady.total_us / max(len(steady.steps), 1) / 1e6
    rows = [
        [
            words(name),
            number(milliseconds(share * each), share),
            number(percent(share), share, share),
        ]
        for name, _, share in _parts(steady)
    ]
    return table(["part", "per step", "share"], rows, "the parts of a step")


# --- Calls compiled, cut and run eagerly, each with its reason; and what is to be mended ---------

_MOST = 200
_KINDS = ("recompiles", "cuts", "fallbacks", "tiers", "faults", "compiles")
_PLACE = re.compile(r"^(.+):(\d+)(?: in .*)?$")


def hindrances_section(hindrances: Sequence[Hindrance]) -> Markup:
    """Return the hindrances with their cures, first."""
    if not hindrances:
        return Markup("")
    return section("mend", "Suggested fixes", filled("mend", hindrances=hindrances))


def explanations_section(steady: SteadySteps) -> Markup:
    """Return each different explanation once, the latest first, with checkboxes for their kinds."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for one in steady.trace["ltc"]["explanations"]:
        key = one["kind"], one["line"], one["what"], one["difference"]
        known = found.setdefault(key, {**one, "times": 0})
        known["times"] += 1
        known["ts"] = one["ts"]
    told = sorted(found.values(), key=lambda one: -one["ts"])
    if not told:
        return section(
            "why", "Compiles and cuts", nothing("Nothing was compiled, cut or run eagerly.")
        )
    counts = {kind: sum(one["times"] for one in told if one["kind"] == kind) for kind in _KINDS}
    body = filled("why", counts=counts, explanations=list(map(_explanation, told[:_MOST])))
    return section(
        "why", "Compiles and cuts", body,
        "The expected and the actual state, the line, and the cure. The latest first.",
    )  # fmt: skip


def _explanation(one: dict[str, Any]) -> dict[str, Any]:
    stack = one.get("stack") or ([one["line"]] if one["line"] else [])
    source = _source(stack[0]) if stack else ""
    return {**one, "stack": stack, "callers": map(shortened, stack[1:]), "source": source}


def _source(line: str) -> str:
    place = _PLACE.match(line)
    return linecache.getline(place[1], int(place[2])).strip() if place else ""


# --- Memory over the steps, and what holds it at the peak ----------------------------------------

_MOST_POINTS, _MOST_HOLDERS = 2000, 60
_KINDS_OF_MEMORY = {
    "parameter": "parameters", "buffer": "buffers of modules", "gradient": "gradients",
    "optimizer": "optimizer state", "input": "inputs", "output": "results", "value": "activations",
    "block": "packing and reuse in a program", "other": "other tensors and programs",
}  # fmt: skip
_MOST_OWNERS = 20


def memory_section(steady: SteadySteps) -> Markup:
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
    drawn = area(_thinned(sorted(points)), ends, peak["at_us"]) if points else ""
    title = (
        f"{peak['device']}{_whose(steady, peak)}: {bytes_text(peak['peak_bytes'])} at most, in step "
        f"{peak['step']}, after {milliseconds(peak['at_us'] / 1e6)}"
    )
    return f"<h3>{title}</h3>{drawn}{_owners(peak)}{_holders(peak)}"


def _owners(peak: dict[str, Any]) -> Markup:
    """Return a row for each kind of holder, the largest first."""
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for one in peak["holders"]:
        sizes[one["kind"]] += one["bytes"]
        counts[one["kind"]] += 1
    total = peak["peak_bytes"]
    rows = [
        [
            words(_KINDS_OF_MEMORY.get(kind, kind)), number(str(counts[kind]), counts[kind]),
            number(bytes_text(size), size), number(percent(size / total), size, size / total),
        ]
        for kind, size in sizes.most_common()
        if total
    ]  # fmt: skip
    return table(["owner", "values", "size", "share"], rows, "owners of memory at its peak")


def _holders(peak: dict[str, Any]) -> Markup:
    rows = [_holder(one, peak["peak_bytes"]) for one in peak["holders"][:_MOST_HOLDERS]]
    left = peak["holders"][_MOST_HOLDERS:]
    if left:
        rest = sum(one["bytes"] for one in left)
        rows.append(_row(f"{len(left)} more", "", "", rest, "", peak["peak_bytes"]))
    heads = ["what", "name", "type", "size", "share", "made at"]
    return table(heads, rows, "what holds memory at its peak", _MOST_OWNERS)


def _whose(steady: SteadySteps, peak: dict[str, Any]) -> str:
    processes = steady.trace["ltc"]["processes"]
    if len(processes) == 1:
        return ""
    rank = next((one.get("rank") for one in processes if one["pid"] == peak["pid"]), "?")
    return f" of rank {rank}"


def _holder(one: dict[str, Any], total: int) -> list[Cell]:
    shape = "" if one["shape"] is None else f"{one['dtype']}{one['shape']}"
    place = " ".join(part for part in (one.get("line"), one.get("module")) if part)
    kind = _KINDS_OF_MEMORY.get(one["kind"], one["kind"])
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


# --- The data for page.js's timeline: lanes, names and spans, as small as JSON gets them ---------

MOST_SPANS = 24_000  # in one page: about a megabyte
CATEGORIES = (
    "record", "mark", "cut", "compile", "launch", "kernel", "upload", "download", "wait", "collective",
    "fallback", "closure", "user", "gc",
)  # fmt: skip
_PLACE_OF_SPAN = {name: number for number, name in enumerate(CATEGORIES)}


def shown_steps(steady: SteadySteps, steps: list[dict[str, Any]]) -> list[int]:
    """Return each step's place among those that the page can draw; -1 if it cannot."""
    spans = [
        e for e in steady.trace["traceEvents"] if e.get("cat") in _PLACE_OF_SPAN and "dur" in e
    ]
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
    """Return the spans of each window by their begin; the longest, if there are many."""
    found: list[list[dict[str, Any]]] = [[] for _ in windows]
    ends = [end for _, end in windows]
    spans = [e for e in trace["traceEvents"] if e.get("cat") in _PLACE_OF_SPAN and "dur" in e]
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
    """Return the lanes of the first rank first; of a rank, first the threads that mark steps."""
    ranks = {one["pid"]: one.get("rank") or 0 for one in trace["ltc"]["processes"]}
    found = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e.get("cat") in _PLACE_OF_SPAN}
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
    args, name = event.get("args") or {}, event["name"]
    about = _about(args)
    if event["cat"] == "kernel":
        name, about = kernel_words(name, args.get("ops") or ()), f"{about}\n{name}".lstrip()
    return (
        lanes[event["pid"], event["tid"]],
        _PLACE_OF_SPAN[event["cat"]],
        names[name],
        names[about],
        _short(event["ts"] - begin),
        _short(event["dur"]),
    )


def _about(args: dict[str, Any]) -> str:
    """Return the text that a span shows besides its name."""
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
