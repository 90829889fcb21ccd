"""The head of the page: the verdict, a few figures, where a step's time goes, all steps at a glance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ltc.profiling.analysis.steady_steps import SteadySteps
from ltc.profiling.analysis.verdict import Verdict
from ltc.profiling.page.charts import PARTS, share_bar, step_strip
from ltc.profiling.page.markup import bytes_text, milliseconds, section, text


def head(steady: SteadySteps, verdict: Verdict) -> str:
    """What it was, what bounded it, and the figures that a reader asks for first."""
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
    line = f'<p class="at">{text(verdict.line)}</p>' if verdict.line else ""
    return (
        f'<header><p class="about">{text(" · ".join(filter(None, about)))}</p>'
        f'<h1 data-kind="{text(verdict.kind)}">{text(_capital(verdict.sentence))}.</h1>{line}'
        f'<dl class="figures">{"".join(_figures(steady))}</dl>{_dropped(process)}</header>'
    )


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _figures(steady: SteadySteps) -> list[str]:
    told = steady.trace["ltc"]
    counts = {
        kind: sum(1 for one in told["explanations"] if one["kind"] in kinds)
        for kind, kinds in _COUNTED.items()
    }
    steps = [step for step in told["steps"] if step["pid"] == steady.pid]
    peak = max((one["peak_bytes"] for one in told["memory"]), default=0)
    figures = [
        ("a step takes", milliseconds(steady.median_us / 1e6) if steady.steps else "—"),
        ("steps", str(len(steps))),
        *((kind, str(number)) for kind, number in counts.items()),
        ("memory at most", bytes_text(peak)),
    ]
    return [f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in figures]


_COUNTED = {
    "programs made": ("compiles", "recompiles"),
    "cuts": ("cuts",),
    "eager calls": ("fallbacks",),
}


def _dropped(process: dict[str, Any]) -> str:
    dropped = process.get("dropped") or 0
    return (
        f"<p>{dropped} events beyond the most that are kept are not shown.</p>" if dropped else ""
    )


def steps_section(
    steady: SteadySteps, steps: Sequence[dict[str, Any]], shown: Sequence[int], start: int
) -> str:
    """The parts of a steady step, a bar for each step, and the place where page.js draws one."""
    if not steps:
        body = "<p>No step was marked: the whole run is drawn.</p>"
    else:
        parts = [(words, kind, steady.share(key[:-3])) for key, words, kind in PARTS]
        rest = max(0.0, 1 - sum(share for *_, share in parts))
        body = share_bar([*parts, ("else", "rest", rest)]) + step_strip(steps, shown)
    return section(
        "steps", "A step",
        f'{body}<div class="controls"><button data-move="-1" title="the step before: [">&lsaquo;</button>'
        '<output id="which"></output><button data-move="1" title="the step after: ]">&rsaquo;</button>'
        '<button data-zoom="1.6" title="nearer: +">+</button>'
        '<button data-zoom="0.625" title="farther: -">&minus;</button>'
        '<button data-zoom="0" title="the whole step: 0">whole</button></div>'
        f'<div id="timeline" data-start="{start}" tabindex="0" role="group" '
        'aria-label="timeline: arrow keys move, + and - zoom"></div><p id="span"></p>'
        "<noscript>The timeline is drawn by a script in this page.</noscript>",
    )  # fmt: skip
