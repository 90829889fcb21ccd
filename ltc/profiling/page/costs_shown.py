"""Time by module, by line of the user's source, and by kernel."""

from __future__ import annotations

import linecache
import re
import time
from collections import defaultdict
from typing import Any

from markupsafe import Markup

from ltc.profiling.analysis.costs import Cost, by_kernel, by_line, by_module
from ltc.profiling.analysis.steady_steps import SteadySteps
from ltc.profiling.analysis.verdict import latest_rank, waits_of_ranks
from ltc.profiling.page.charts import roofline
from ltc.profiling.page.markup import (
    Cell,
    bytes_text,
    count_text,
    milliseconds,
    nothing,
    number,
    percent,
    section,
    shortened,
    table,
    text,
    words,
)

_MOST_ROWS, _TOP = 300, 20
_MOST_FILES, _AROUND = 8, 3  # files that are shown; lines before and after one that costs something
_PLACE = re.compile(r"^(?P<file>.+):(?P<line>\d+)(?: in (?P<function>.*))?$")


def modules_section(steady: SteadySteps) -> Markup:
    """A row for each module's path."""
    costs = by_module(steady.trace)
    classes = steady.process.get("modules") or {}
    rows = [
        [words(cost.name), words(classes.get(cost.name, "")), *_figures(cost, costs, steady)]
        for cost in costs[:_MOST_ROWS]
    ]
    heads = ["module", "class", *_HEADS]
    return section(
        "modules", "Time by module", table(heads, rows, "time by module", _TOP),
        "The cost of a module's own calls, forward and backward, without the modules inside it.",
    )  # fmt: skip


def kernels_section(steady: SteadySteps) -> Markup:
    """The roofline, and a row for each kernel."""
    costs = by_kernel(steady.trace)
    rows = [
        [
            words(cost.words, f"{cost.name}\n{', '.join(cost.ops)}"),
            words(", ".join(_places(cost)), "\n".join(cost.lines)),
            words(", ".join(list(cost.modules)[:2]), "\n".join(cost.modules)),
            *_figures(cost, costs, steady),
        ]
        for cost in costs[:_MOST_ROWS]
    ]
    heads = ["kernel", "line", "module", *_HEADS]
    return section(
        "kernels", "Time by kernel", Markup(_roofline(costs, steady)) + table(heads, rows, "time by kernel", _TOP),
        "One row for each kernel that runs in a step, with shares of this machine's limits. Pointed at, a "
        "kernel shows its operands. A copy limit of 100 % may have been exceeded: operands that are in "
        "the caches need no memory.",
    )  # fmt: skip


def _places(cost: Cost) -> list[str]:
    """ "file.py:12" of the first few lines."""
    return list(dict.fromkeys(shortened(line).split(" in ")[0] for line in cost.lines))[:3]


_HEADS = ("per step", "share", "launches", "moved", "multiply-adds", "copy limit", "fma limit")


def _figures(cost: Cost, costs: list[Cost], steady: SteadySteps) -> list[Cell]:
    total = sum(one.seconds for one in costs) or 1.0
    steps = max(len(steady.steps), 1)
    share = cost.seconds / total
    return [
        number(milliseconds(cost.seconds / steps), cost.seconds),
        number(percent(share), share, share),
        number(count_text(cost.launches), cost.launches),
        number(bytes_text(cost.moved_bytes / steps), cost.moved_bytes),
        number(count_text(cost.multiply_adds / steps) if cost.multiply_adds else "", cost.multiply_adds),
        _of_a_limit(cost.copy_share),
        _of_a_limit(cost.fma_share),
    ]  # fmt: skip


def _of_a_limit(share: float | None) -> Cell:
    shown = min(share, 1.0) if share else None
    return number(percent(shown), share or 0.0, shown)


def _roofline(costs: list[Cost], steady: SteadySteps) -> str:
    limits = steady.process.get("limits")
    total = sum(cost.seconds for cost in costs)
    dots = [
        (cost.words, cost.work / cost.moved_bytes, cost.work / cost.seconds, cost.seconds / total)
        for cost in costs[:_MOST_ROWS]
        if cost.work and cost.moved_bytes and cost.seconds
    ]
    if not limits or not dots:
        return nothing("No roofline: the machine's limits were not measured.")
    return (
        '<div class="beside">'
        + roofline(dots, limits["copy_bytes_per_s"], limits["fma_per_s"])
        + '<p class="about">Each dot is a kernel: how much it computes for each byte that it moves, and '
        "how fast it does. Its size is its share of the time. The line is the most that this machine "
        f"does: {bytes_text(limits['copy_bytes_per_s'])} a second copied, "
        f"{count_text(limits['fma_per_s'])} multiply-adds a second{_measured(limits)}. Dots far below it "
        "have room.</p></div>"
    )


def _measured(limits: dict[str, Any]) -> str:
    """Return when the limits were measured, and if others kept the machine busy."""
    moment = limits.get("measured_at")
    if moment is None:
        return ""
    day = time.strftime("%d %B %Y", time.localtime(moment)).lstrip("0")
    share = limits.get("others_share") or 0.0
    busy = f", while others used {percent(share)} of the processors" if share > 0.1 else ""
    return f", measured on {day}{busy}"


# --- the user's files ---------------------------------------------------------------------------


def lines_section(steady: SteadySteps) -> Markup:
    """The files with the cost beside each line, and lines of files that are not here."""
    costs = by_line(steady.trace)
    total = sum(cost.seconds for cost in costs) or 1.0
    files: defaultdict[str, dict[int, Cost]] = defaultdict(dict)
    elsewhere = []
    for cost in costs:
        place = _PLACE.match(cost.name)
        if place is not None and linecache.getline(place["file"], int(place["line"])):
            known = files[place["file"]].setdefault(int(place["line"]), Cost(cost.name))
            known.seconds, known.launches = (
                known.seconds + cost.seconds,
                known.launches + cost.launches,
            )
        else:
            elsewhere.append(cost)
    ordered = sorted(files, key=lambda name: -sum(one.seconds for one in files[name].values()))
    shown = ordered[:_MOST_FILES]
    body = Markup("\n".join(_listing(name, files[name], total, steady) for name in shown))
    if elsewhere:
        rows = [
            [words(cost.name), number(milliseconds(cost.seconds / max(len(steady.steps), 1)), cost.seconds),
             number(percent(cost.seconds / total), cost.seconds, cost.seconds / total)]
            for cost in elsewhere[:_MOST_ROWS]
        ]  # fmt: skip
        body += table(["line", "per step", "share"], rows, "lines of files that cannot be shown")
    return section(
        "lines", "Time by source line", body or nothing("No kernel was timed."),
        "A backward counts for its forward's line; a kernel fused from several lines counts for each "
        "of them in equal parts.",
    )  # fmt: skip


def _listing(name: str, costs: dict[int, Cost], total: float, steady: SteadySteps) -> str:
    most = max(cost.seconds for cost in costs.values()) or 1.0
    shown = sorted(
        {n for line in costs for n in range(line - _AROUND, line + _AROUND + 1) if n > 0}
    )
    rows, before = [], 0
    for line in shown:
        source = linecache.getline(name, line).rstrip()
        if not source and not linecache.getline(name, line + 1):
            continue
        if before and line > before + 1:
            rows.append('<tr class="gap"><td colspan="4">⋯</td></tr>')
        rows.append(_source_row(line, source, costs.get(line), most, total, steady))
        before = line
    spent = sum(cost.seconds for cost in costs.values()) / total
    return (
        f"<h3>{text(name)} <small>{percent(spent)} of the kernels' time</small></h3>"
        f'<div class="scroll"><table class="source"><tbody>{"".join(rows)}</tbody></table></div>'
    )


def _source_row(
    line: int, source: str, cost: Cost | None, most: float, total: float, steady: SteadySteps
) -> str:
    if cost is None:
        return f'<tr class="free"><td></td><td></td><td>{line}</td><td>{text(source)}</td></tr>'
    heat = cost.seconds / most
    took = milliseconds(cost.seconds / max(len(steady.steps), 1))
    return (
        f'<tr data-filter style="--heat:{heat:.3f}"><td>{took}</td><td>{percent(cost.seconds / total)}</td>'
        f"<td>{line}</td><td>{text(source)}</td></tr>"
    )


# --- Exchanges among ranks: how long, how much, and which rank waited for which ------------------


def collectives_section(steady: SteadySteps) -> Markup:
    """ "" where there are none."""
    found = steady.trace["ltc"]["collectives"]
    if not found:
        return Markup("")
    ranks = {one["pid"]: one.get("rank") or 0 for one in steady.trace["ltc"]["processes"]}
    return section(
        "collectives", "Collectives",
        Markup(_waits(steady, found, ranks)) + _kinds(found),
        "All other ranks wait for a late rank: its column has the time.",
    )  # fmt: skip


def _waits(steady: SteadySteps, found: list[dict[str, Any]], ranks: dict[int, int]) -> str:
    waited: defaultdict[tuple[int, int], float] = defaultdict(float)
    for one in found:
        if one.get("waited_for") is not None:
            waited[ranks.get(one["pid"], 0), one["waited_for"]] += one.get("waited_us") or 0.0
    if not waited:
        return _totals(steady)
    all_ranks = sorted({*ranks.values(), *(late for _, late in waited)})
    most = max(waited.values()) or 1.0
    head = "".join(f'<th scope="col">rank {rank}</th>' for rank in all_ranks)
    body = "".join(
        f'<tr><th scope="row">rank {rank} waited</th>'
        + "".join(_wait(waited.get((rank, late), 0.0), most, rank == late) for late in all_ranks)
        + "</tr>"
        for rank in all_ranks
    )
    return (
        '<table class="matrix" aria-label="waits of each rank for each other"><thead><tr><th>for</th>'
        f"{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _totals(steady: SteadySteps) -> str:
    """Return the waits of each rank, if no rank is named as the awaited one."""
    spent = waits_of_ranks(steady.trace)
    most = max(spent.values()) or 1.0
    rows = "".join(
        f'<tr><th scope="row">rank {rank} waited</th>{_wait(took, most, False)}</tr>'
        for rank, took in sorted(spent.items())
    )
    late = latest_rank(steady.trace)
    told = f"<p>{text(late[:1].upper() + late[1:])}.</p>" if late else ""
    return f'{told}<table class="matrix" aria-label="how long each rank waited"><tbody>{rows}</tbody></table>'


def _wait(microseconds: float, most: float, itself: bool) -> str:
    shown = "—" if itself else milliseconds(microseconds / 1e6)
    return f'<td style="--heat:{microseconds / most:.3f}">{text(shown)}</td>'


def _kinds(found: list[dict[str, Any]]) -> str:
    groups: defaultdict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for one in found:
        groups[str(one.get("kind") or one["name"]), one.get("line") or ""].append(one)
    rows = [_row(kind, line, members) for (kind, line), members in groups.items()]
    rows.sort(key=lambda row: -(row[3].order or 0))
    heads = ["exchange", "line", "times", "time", "longest", "waited", "bytes each"]
    return table(heads, rows, "collectives")


def _row(kind: str, line: str, members: list[dict[str, Any]]) -> list[Cell]:
    spent = sum(one["dur"] for one in members)
    waited = sum(one.get("waited_us") or 0.0 for one in members)
    longest = max(one["dur"] for one in members)
    size = sum(one.get("bytes") or 0 for one in members) / len(members)
    return [
        words(kind), words(line), number(str(len(members)), len(members)),
        number(milliseconds(spent / 1e6), spent), number(milliseconds(longest / 1e6), longest),
        number(milliseconds(waited / 1e6), waited), number(bytes_text(size), size),
    ]  # fmt: skip
