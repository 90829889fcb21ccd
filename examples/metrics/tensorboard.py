"""What each step has cost, in TensorBoard: beside the loss, programs compiled, cuts, bytes, times.

pip install tensorboard
python examples/metrics/tensorboard.py runs/ltc
tensorboard --logdir runs
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import ltc.core.lazy_model as ltm
from ltc.debug import metrics

NANOSECONDS = 1e-9


class StepMetrics:
    """`write(step)` adds a scalar for whatever was counted since it was called the last time."""

    def __init__(self, writer: Any) -> None:
        """`writer`: a torch.utils.tensorboard.SummaryWriter."""
        self.writer, self.before = writer, metrics.totals()

    def write(self, step: int) -> None:
        now = metrics.totals()
        grown = metrics.growth(self.before, now)
        self.before = now
        for name, n in grown["counters"].items():
            self.writer.add_scalar(f"ltc/{name}", n, step)
        for name, metric in grown["metrics"].items():
            factor = NANOSECONDS if metric["kind"] == "time" else 1
            self.writer.add_scalar(f"ltc/{name}", metric["accumulator"] * factor, step)


def train(writer: Any) -> None:
    weight = torch.randn(64, 64).to("ltc").requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    counted = StepMetrics(writer)
    for step in range(100):
        optimizer.zero_grad()
        loss = (torch.randn(32, 64).to("ltc") @ weight).square().mean()
        loss.backward()
        optimizer.step()
        ltm.mark_step()
        counted.write(step)
        if step % 10 == 9:
            writer.add_scalar("loss", loss.item(), step)


if __name__ == "__main__":
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(sys.argv[1]) as writer:
        train(writer)
