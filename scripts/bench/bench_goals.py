"""Goals of ltc in bench.py: at most so many microseconds, or programs so much faster than peers."""

from __future__ import annotations

import tracing_cases

# Of the fastest peer's time to that of a program alone; whole steps are judged by table.py.
PROGRAMS = {
    "mlp": 2.4, "adamw_many": 1.0, "softmax": 1.8, "layer norm, gradients": 2.0,
    "cross entropy, gradient": 3.0,
}  # fmt: skip


def verdict(mode: str, case: str, medians: dict[str, float | None], best: float | None) -> str:
    """The goals of a case and whether they were met; nothing where it has none."""
    if mode == "tracing":
        limit = tracing_cases.CASES[case][1] if case in tracing_cases.CASES else None
        if limit is None or medians.get("ltc") is None:
            return ""
        return f"{limit:g} {'kept' if medians['ltc'] <= limit else 'MISSED'}"
    goal, ours = PROGRAMS.get(case), medians.get("ltc program")
    if goal is None or best is None or ours is None:
        return ""
    return f"{goal:g}x {'reached' if best / ours >= goal else 'MISSED'}"
