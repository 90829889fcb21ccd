"""What was compiled, cut and run eagerly, each with its reason; and what is to be mended."""

from __future__ import annotations

import linecache
import re
from collections.abc import Sequence
from typing import Any

from ltc.profiling.analysis.hindrances import Hindrance
from ltc.profiling.analysis.steady_steps import SteadySteps
from ltc.profiling.page.markup import nothing, section, shortened, text

_MOST = 200
_KINDS = ("recompiles", "cuts", "fallbacks", "tiers", "compiles")
_PLACE = re.compile(r"^(.+):(\d+)(?: in .*)?$")


def hindrances_section(hindrances: Sequence[Hindrance]) -> str:
    """What is to be mended, first."""
    if not hindrances:
        return ""
    rows = "".join(
        f"<li><b>{text(one.name)}</b> {text(one.sentence)}"
        f"{f'<code>{text(one.line)}</code>' if one.line else ''}"
        f'<span class="cure">{text(one.cure)}</span></li>'
        for one in hindrances
    )
    return section("mend", "What to mend", f'<ul class="mend">{rows}</ul>')


def explanations_section(steady: SteadySteps) -> str:
    """Each different one once, the latest first, with checkboxes for their kinds."""
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
    boxes = "".join(
        f'<label class="{kind}"><input type="checkbox" data-kind="{kind}" checked> {kind} {count}</label>'
        for kind, count in counts.items()
        if count
    )
    rows = "\n".join(map(_explanation, told[:_MOST]))
    return section(
        "why", "Compiles and cuts",
        f'<div class="kinds" role="group" aria-label="kinds that are shown">{boxes}</div>'
        f'<ol class="why">{rows}</ol>',
        "What was expected, what came, at which line, and the cure. The latest first.",
    )  # fmt: skip


def _explanation(one: dict[str, Any]) -> str:
    stack = one.get("stack") or ([one["line"]] if one["line"] else [])
    callers = "".join(f" ← {text(shortened(line))}" for line in stack[1:])
    often = f"<b>{one['times']} times</b> " if one["times"] > 1 else ""
    cure = f'<p class="cure">{text(one["cure"])}</p>' if one["cure"] else ""
    source = _source(stack[0]) if stack else ""
    return (
        f'<li data-filter data-of="{text(one["kind"])}"><p><i class="tag {text(one["kind"])}">'
        f"{text(one['kind'])}</i> {often}{text(one['what'])}</p>"
        f"<p>{text(one['difference'])}</p>"
        + (f'<p class="at">{text(stack[0])}{callers}</p>' if stack else "")
        + (f"<pre>{text(source)}</pre>" if source else "")
        + f"{cure}</li>"
    )


def _source(line: str) -> str:
    place = _PLACE.match(line)
    return linecache.getline(place[1], int(place[2])).strip() if place else ""
