"""Exchanges among ranks: how long, how much, and who waited for whom."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from ltc.profiling.analysis.steady_steps import SteadySteps
from ltc.profiling.analysis.verdict import latest_rank, waits_of_ranks
from ltc.profiling.page.markup import (
    Cell,
    bytes_text,
    milliseconds,
    number,
    section,
    table,
    text,
    words,
)


def collectives_section(steady: SteadySteps) -> str:
    """ "" where there are none."""
    found = steady.trace["ltc"]["collectives"]
    if not found:
        return ""
    ranks = {one["pid"]: one.get("rank") or 0 for one in steady.trace["ltc"]["processes"]}
    return section(
        "collectives", "Collectives",
        _waits(steady, found, ranks) + _kinds(found),
        "A rank that comes late is waited for by all others: the time stands in its column.",
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
        '<table class="matrix" aria-label="who waited for whom"><thead><tr><th>for</th>'
        f"{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _totals(steady: SteadySteps) -> str:
    """Where no rank is named that was waited for: how long each has waited."""
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
