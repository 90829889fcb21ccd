"""Counters and metrics of a training loop as Prometheus reads them.

    python examples/metrics/prometheus.py /var/lib/node_exporter/ltc.prom

The file is replaced whole at every tenth step, as node exporter's textfile collector wants it.  In
a program of your own, call `write` from a step closure.
"""

from __future__ import annotations

import sys

import torch

import ltc.core.lazy_model as ltm
from ltc.debug import metrics
from ltc.support.atomic_file import replacing

NANOSECONDS = 1e-9
UNITS = {"time": ("seconds", NANOSECONDS), "bytes": ("bytes", 1), "value": ("value", 1)}


def text() -> str:
    """The totals of this process, in Prometheus' text format."""
    totals = metrics.totals()
    rows = ["# HELP ltc_events_total What ltc has counted, by the names of docs/api.md."]
    rows.append("# TYPE ltc_events_total counter")
    rows += [f"ltc_events_total{label(n)} {v}" for n, v in totals["counters"].items()]
    for unit, (word, factor) in UNITS.items():
        found = {n: m for n, m in totals["metrics"].items() if m["kind"] == unit}
        if found:
            rows.append(f"# TYPE ltc_{word} summary")
        for name, metric in found.items():
            rows.append(f"ltc_{word}_sum{label(name)} {metric['accumulator'] * factor!r}")
            rows.append(f"ltc_{word}_count{label(name)} {metric['total_samples']}")
    return "\n".join(rows) + "\n"


def label(name: str) -> str:
    """The name as a label: your own counters may be called anything."""
    escaped = name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'{{name="{escaped}"}}'


def write(path: str) -> None:
    with replacing(path) as file:
        file.write(text().encode())


def train(path: str) -> None:
    weight = torch.randn(64, 64).to("ltc").requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    for step in range(100):
        optimizer.zero_grad()
        (torch.randn(32, 64).to("ltc") @ weight).square().mean().backward()
        optimizer.step()
        if step % 10 == 9:
            ltm.add_step_closure(write, args=(path,))
        ltm.mark_step()


if __name__ == "__main__":
    train(sys.argv[1])
