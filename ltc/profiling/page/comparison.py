"""Two runs side by side: their steps, the parts of these, modules, lines and kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from markupsafe import Markup

from ltc.profiling.analysis.costs import Cost, by_kernel, by_line, by_module
from ltc.profiling.analysis.steady_steps import PARTS, SteadySteps, steady_steps
from ltc.profiling.page.document import WORDS_OF_PARTS, checked, whole_page
from ltc.profiling.page.markup import (
    Cell,
    bytes_text,
    milliseconds,
    number,
    section,
    shortened,
    table,
    words,
)
from ltc.profiling.page.templating import filled

_TOP = 20
_NO_TIMELINE = "{}"
Costs = Callable[[dict[str, Any]], list[Cost]]


def comparison(traces: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """Return the HTML of a page that compares two traces.

    Args:
        traces: The one before and the one after.
        names: Their names, as the page shows them.

    Raises:
        ValueError: If one is no trace of ltc.profile.
    """
    before, after = (steady_steps(checked(trace)) for trace in traces)
    tables = {
        "step": ("The parts of a step", _parts(before, after)),
        "modules": ("Time by module", _costs(by_module, before, after, "module")),
        "lines": ("Time by source line", _costs(by_line, before, after, "line")),
        "kernels": ("Time by kernel", _costs(by_kernel, before, after, "kernel")),
    }
    sections = {name: section(name, title, body) for name, (title, body) in tables.items()}
    return whole_page("ltc: two runs", _head(before, after, names), sections, _NO_TIMELINE)


def sentence(traces: Sequence[dict[str, Any]]) -> str:
    """Return the difference of two runs in one sentence."""
    before, after = (steady_steps(trace).median_us for trace in traces)
    ratio = before / max(after, 1e-9)
    told = f"{ratio:.2f} times as fast" if ratio >= 1 else f"{1 / ratio:.2f} times slower"
    return (
        f"a step takes {milliseconds(after / 1e6)} in place of {milliseconds(before / 1e6)}: {told}"
    )


def _head(before: SteadySteps, after: SteadySteps, names: Sequence[str]) -> Markup:
    runs = before, after
    steps = [run.median_us / 1e6 for run in runs]
    peaks = [
        max((one["peak_bytes"] for one in run.trace["ltc"]["memory"]), default=0) for run in runs
    ]
    counts = [len(run.trace["ltc"]["explanations"]) for run in runs]
    told = sentence([run.trace for run in runs])
    return filled(
        "compare",
        about=" · ".join(" ".join(run.process["argv"]) for run in runs),
        sentence=told[:1].upper() + told[1:],
        names=[shortened(name) for name in names],
        figures=[
            ("a step takes (median)", [milliseconds(one) for one in steps], _change(*steps)),
            ("peak memory", [bytes_text(one) for one in peaks], _change(*peaks)),
            ("compiles, cuts, eager calls", [str(one) for one in counts], _change(*counts)),
        ],
    )


def _parts(before: SteadySteps, after: SteadySteps) -> Markup:
    rows = [
        _row(
            words(WORDS_OF_PARTS[name][0]),
            *(_each(run) * run.parts[name] for run in (before, after)),
        )
        for name in PARTS
    ]
    return _table("part", rows)


def _each(steady: SteadySteps) -> float:
    """Return the mean seconds of a step."""
    return steady.total_us / max(len(steady.steps), 1) / 1e6


def _costs(costs_of: Costs, before: SteadySteps, after: SteadySteps, head: str) -> Markup:
    """Return a row for each name that either run has, the greatest difference first."""
    found = [_seconds(costs_of, run) for run in (before, after)]
    names = dict.fromkeys([*found[0], *found[1]])
    pairs = [(name, found[0].get(name, 0.0), found[1].get(name, 0.0)) for name in names]
    pairs.sort(key=lambda pair: -abs(pair[2] - pair[1]))
    return _table(head, [_row(words(shortened(name), name), *times) for name, *times in pairs])


def _seconds(costs_of: Costs, steady: SteadySteps) -> dict[str, float]:
    """Return the seconds of a step by the names of the costs; kernels are told apart by their words."""
    steps, found = max(len(steady.steps), 1), dict[str, float]()
    for cost in costs_of(steady.trace):
        name = cost.words or cost.name
        found[name] = found.get(name, 0.0) + cost.seconds / steps
    return found


def _row(name: Cell, before: float, after: float) -> list[Cell]:
    return [
        name,
        number(milliseconds(before), before),
        number(milliseconds(after), after),
        number(_signed(after - before), after - before),
        number(_change(before, after), after / before if before else float("inf")),
    ]


def _table(head: str, rows: list[list[Cell]]) -> Markup:
    return table([head, "before", "after", "difference", "change"], rows, f"time by {head}", _TOP)


def _signed(seconds: float) -> str:
    return f"{'+' if seconds > 0 else '-'}{milliseconds(abs(seconds))}" if seconds else "0"


def _change(before: float, after: float) -> str:
    """ "-25 %"; "" where there was nothing before."""
    if not before:
        return "new" if after else ""
    change = 100 * (after / before - 1)
    return f"{change:+.0f} %"
