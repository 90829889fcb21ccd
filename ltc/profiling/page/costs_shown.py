"""Time by module, by line of the user's source, and by kernel."""

from __future__ import annotations

import linecache
import re
from collections import defaultdict

from ltc.profiling.analysis.costs import Cost, by_kernel, by_line, by_module
from ltc.profiling.analysis.steady_steps import SteadySteps
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

_MOST_ROWS = 300
_MOST_FILES, _AROUND = 8, 3  # files that are shown; lines before and after one that costs something
_PLACE = re.compile(r"^(?P<file>.+):(?P<line>\d+)(?: in (?P<function>.*))?$")


def modules_section(steady: SteadySteps) -> str:
    """A row for each module's path."""
    costs = by_module(steady.trace)
    rows = [[words(cost.name), *_figures(cost, costs, steady)] for cost in costs[:_MOST_ROWS]]
    return section(
        "modules", "Time by module", table(["module", *_HEADS], rows, "time by module"),
        "What a module's own calls cost, forward and backward; not the modules inside it.",
    )  # fmt: skip


def kernels_section(steady: SteadySteps) -> str:
    """The roofline, and a row for each kernel."""
    costs = by_kernel(steady.trace)
    rows = [
        [
            words(cost.name, ", ".join(cost.ops)),
            words(", ".join(_places(cost)), "\n".join(cost.lines)),
            words(", ".join(list(cost.modules)[:2]), "\n".join(cost.modules)),
            *_figures(cost, costs, steady),
        ]
        for cost in costs[:_MOST_ROWS]
    ]
    heads = ["kernel", "line", "module", *_HEADS]
    return section(
        "kernels", "Time by kernel", _roofline(costs, steady) + table(heads, rows, "time by kernel"),
        "One row for each kernel that runs in a step; the shares of the limits are those of this "
        "machine, measured once. Above 100 % of the copy limit, operands were in the caches.",
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
    return number(percent(share or None), share or 0.0, share or None)


def _roofline(costs: list[Cost], steady: SteadySteps) -> str:
    limits = steady.process.get("limits")
    total = sum(cost.seconds for cost in costs)
    dots = [
        (cost.name, cost.work / cost.moved_bytes, cost.work / cost.seconds, cost.seconds / total)
        for cost in costs[:_MOST_ROWS]
        if cost.work and cost.moved_bytes and cost.seconds
    ]
    if not limits or not dots:
        return nothing("No roofline: what the machine does at most was not measured.")
    return (
        '<div class="beside">'
        + roofline(dots, limits["copy_bytes_per_s"], limits["fma_per_s"])
        + '<p class="about">Each dot is a kernel: how much it computes for each byte that it moves, and '
        "how fast it does. Its size is its share of the time. The line is the most that this machine "
        f"does: {bytes_text(limits['copy_bytes_per_s'])} a second copied, "
        f"{count_text(limits['fma_per_s'])} multiply-adds a second. Dots far below it have room.</p></div>"
    )


# --- the user's files ---------------------------------------------------------------------------


def lines_section(steady: SteadySteps) -> str:
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
    body = "\n".join(_listing(name, files[name], total, steady) for name in ordered[:_MOST_FILES])
    if elsewhere:
        rows = [
            [words(cost.name), number(milliseconds(cost.seconds / max(len(steady.steps), 1)), cost.seconds),
             number(percent(cost.seconds / total), cost.seconds, cost.seconds / total)]
            for cost in elsewhere[:_MOST_ROWS]
        ]  # fmt: skip
        body += table(["line", "per step", "share"], rows, "lines of files that cannot be shown")
    return section(
        "lines", "Time by source line", body or nothing("No kernel was timed."),
        "A backward is told at the forward line that it goes back from; a kernel that was fused of "
        "several lines, in equal parts at each.",
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
