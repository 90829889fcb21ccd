"""Goals of ltc in bench.py: at most so many microseconds, or so much faster than peers."""

from __future__ import annotations

import tracing_cases

# Of the fastest peer's time to ours: a whole step, and its program alone.
STEPS = {
    "mlp": 2.0, "mnist_cnn": 2.1, "resnet18": 1.25, "gpt": 2.0, "black_scholes": 1.0,
    "adamw_many": 0.8, "vit": 1.0, "inverted_residuals": 1.0, "lstm": 1.0, "dlrm": 1.0,
    "pointwise": 1.0, "tiny": 0.45,
}  # fmt: skip
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
    found = [
        f"{goals[case]:g}x {'reached' if best / medians[system] >= goals[case] else 'MISSED'}"
        for system, goals in (("ltc", STEPS), ("ltc program", PROGRAMS))
        if case in goals and best and medians.get(system)
    ]
    return ", ".join(found)
