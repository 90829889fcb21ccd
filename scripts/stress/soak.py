"""What must not grow over a long training: resident memory, compiled graphs, recorded entries.

    python scripts/stress/soak.py                   all three
    python scripts/stress/soak.py --only schedule   one of steps, chain, schedule

steps     10 000 training steps; memory stays within 2 MB of what it was after the first 100
chain     `acc = acc + 1` a million times without a step mark; at most 50 MB more
schedule  200 steps with Adam and a cosine schedule after 20; no new graph, no new recorded entry

Each runs in a process of its own, so that none inherits the memory of another.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

MEGABYTE = 1 << 20
GROWTH_LIMIT_MB, CHAIN_LIMIT_MB = 2, 50


@dataclass(frozen=True)
class Finding:
    """One figure next to the most it may be."""

    what: str
    value: float
    limit: float

    @property
    def kept(self) -> bool:
        return abs(self.value) <= self.limit

    def __str__(self) -> str:
        verdict = "kept" if self.kept else "MISSED"
        return f"{self.what}: {self.value:.6g} (at most {self.limit:g}) {verdict}"


def resident_megabytes() -> float:
    """Memory of this process that is in RAM now; Linux reports it in pages."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MEGABYTE


def training(device: str, schedule_steps: int = 1000) -> Callable[[], torch.Tensor]:
    """A step of a small network under Adam and a cosine schedule; returns its loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, schedule_steps)
    inputs, targets = torch.randn(4, 8), torch.randint(4, (4,))

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs.to(device)), targets.to(device))
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss.detach()

    return step


def soak_steps(device: str, steps: int) -> list[Finding]:
    import ltc.core.lazy_model as ltm

    step, before = training(device), 0.0
    for done in range(steps):
        loss = step()
        ltm.mark_step()
        if done % 10 == 9:
            loss.item()  # as a training loop that prints does
        if done == 99:
            gc.collect()
            before = resident_megabytes()
    ltm.wait_device_ops()
    gc.collect()
    growth = resident_megabytes() - before
    return [Finding(f"MB grown from step 100 to step {steps}", growth, GROWTH_LIMIT_MB)]


def soak_chain(device: str, additions: int) -> list[Finding]:
    for _ in range(4):  # compiled the third time: LLVM's own memory is not looked at
        value = torch.zeros(16, device=device)
        for _ in range(100):
            value = value + 1
        value.cpu()
    before = most = resident_megabytes()
    for done in range(additions):
        value = value + 1
        if done % 1000 == 0:
            most = max(most, resident_megabytes())
    wrong = float((value.cpu() - (additions + 100)).abs().max())
    return [
        Finding(f"MB more in {additions} additions without a mark", most - before, CHAIN_LIMIT_MB),
        Finding("error of their sum", wrong, 0),
    ]


def soak_schedule(device: str, steps: int, warm_up: int = 20) -> list[Finding]:
    import ltc.core.lazy_model as ltm
    from ltc.debug import metrics

    step = training(device)
    for _ in range(warm_up):
        step()
        ltm.mark_step()
    ltm.wait_device_ops()
    with metrics.counted() as grown:
        for _ in range(steps):
            step()
            ltm.mark_step()
        ltm.wait_device_ops()
    return [
        Finding(f"new graphs in {steps} steps under a schedule", grown["UncachedCompile"], 0),
        Finding("new recorded entries in them", grown["RecordedEntries"], 0),
    ]


SOAKS = {
    "steps": (soak_steps, 10_000),
    "chain": (soak_chain, 1_000_000),
    "schedule": (soak_schedule, 200),
}


def run_here(name: str, count: int | None, device: str) -> int:
    """Print the findings; 1 where a limit is missed."""
    import ltc  # noqa: F401

    torch.set_num_threads(1)
    soak, usual_count = SOAKS[name]
    findings = soak(device, count or usual_count)
    for finding in findings:
        print(f"{name}: {finding}", flush=True)
    return int(not all(finding.kept for finding in findings))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(SOAKS))
    parser.add_argument("--count", type=int, help="steps or additions")
    parser.add_argument("--device", default="ltc")
    arguments = parser.parse_args()
    if arguments.only:
        return run_here(arguments.only, arguments.count, arguments.device)
    path = os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p)
    codes = [
        subprocess.run(
            [sys.executable, __file__, "--only", name, "--device", arguments.device],
            env=dict(os.environ, PYTHONPATH=path),
        ).returncode
        for name in SOAKS
    ]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
