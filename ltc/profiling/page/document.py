"""The whole page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ltc.profiling.analysis.hindrances import hindrances
from ltc.profiling.analysis.steady_steps import main_process, steady_steps
from ltc.profiling.analysis.verdict import verdict
from ltc.profiling.page.costs_shown import kernels_section, lines_section, modules_section
from ltc.profiling.page.exchanges_shown import collectives_section
from ltc.profiling.page.markup import text
from ltc.profiling.page.memory import memory_section
from ltc.profiling.page.overview import head, steps_section
from ltc.profiling.page.timeline import shown_steps, timeline_data, typical
from ltc.profiling.page.told import explanations_section, hindrances_section

_HERE = Path(__file__).parent
_NAMES = {
    "mend": "mend", "steps": "step", "modules": "modules", "lines": "lines", "kernels": "kernels",
    "memory": "memory", "why": "why", "collectives": "collectives",
}  # fmt: skip
# Nothing is loaded from anywhere, whatever names and sources the trace has in it.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def document(trace: dict[str, Any]) -> str:
    """HTML of a trace; raises ValueError where it is none that ltc.profile has written."""
    steady = steady_steps(_checked(trace))
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
    data = timeline_data(trace, steps, shown)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{text(_title(trace))}</title>\n<style>\n{_part('page.css')}</style></head>\n<body>\n"
        f"{_navigation(made)}\n<main>\n{head(steady, verdict(trace))}\n"
        f"{chr(10).join(made.values())}\n</main>\n"
        f'<script type="application/json" id="data">{data}</script>\n'
        f"<script>\n{_part('page.js')}</script>\n</body></html>\n"
    )


def _checked(trace: Any) -> dict[str, Any]:
    if not isinstance(trace, dict) or not {"traceEvents", "ltc"} <= set(trace):
        raise ValueError(
            "This is no trace of ltc.profile: it has no tables under `ltc`. Write one with "
            '`with ltc.profile("out.json"):` or `python -m ltc profile train.py`.'
        )
    return trace


def _title(trace: dict[str, Any]) -> str:
    script = (main_process(trace)["argv"] or [""])[0].rsplit("/", 1)[-1]
    return f"ltc: {script or 'a run'}"


def _navigation(made: dict[str, str]) -> str:
    links = "".join(
        f'<a href="#{name}"><kbd>{number}</kbd>{_NAMES[name]}</a>'
        for number, name in enumerate(made, start=1)
    )
    return (
        f'<nav aria-label="sections">{links}<input id="filter" type="search" placeholder="filter  /" '
        'aria-label="show only rows with these words"><button id="theme" title="light or dark: t" '
        'aria-label="light or dark">◐</button></nav>'
    )


def _part(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")
