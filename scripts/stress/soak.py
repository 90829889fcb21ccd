"""Check that memory, compiled graphs and recorded entries do not grow over a long training.

    python scripts/stress/soak.py                   all four
    python scripts/stress/soak.py --only schedule   one of steps, chain, schedule, replicas
    python scripts/stress/soak.py --only replicas --count 7200          for two hours

steps     10 000 training steps; memory stays within 2 MB of what it was after the first 100
chain     `acc = acc + 1` a million times without a step mark; at most 50 MB more
schedule  200 steps with Adam and a cosine schedule after 20; no new graph, no new recorded entry
replicas  60 seconds of two replicas with a loader, step closures, checkpoints, a metrics file and
          batches of six sizes: memory, descriptors, threads, memory maps and files stay as they were
          after the first half; at the end the weights have the bits of a training of as many
          steps without all that

Each runs in a process of its own, so that none inherits the memory of another.
"""

from __future__ import annotations

import argparse
import collections
import gc
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
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
    from ltc import config

    # four programs as long as all later ones: compiled by then, for a compiler's own memory stays
    warm_up = 4 * config.value("LTC_MAX_PENDING_NODES")
    value = torch.zeros(16, device=device)
    for _ in range(warm_up):
        value = value + 1
    value.cpu()
    before = most = resident_megabytes()
    for done in range(additions):
        value = value + 1
        if done % 1000 == 0:
            most = max(most, resident_megabytes())
    wrong = float((value.cpu() - (additions + warm_up)).abs().max())
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


# --- two replicas with everything ------------------------------------------------------------------

SIZES = (4, 7, 12, 9, 16, 5)  # of batches, one after the other
SAVE_STEPS, REPORT_STEPS = 50, 10
READING_S = 0.02  # for a batch: the steps of two hours are then repeated in some minutes


class ManySizes(torch.utils.data.IterableDataset):
    """Batches of every size in turn, without end; of a seed for each replica."""

    def __init__(self, seed: int, reading_s: float = 0.0):
        self.seed, self.reading_s = seed, reading_s

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        drawn = torch.Generator().manual_seed(self.seed)
        for size in itertools.cycle(SIZES):
            x = torch.randn(size, 8, generator=drawn)
            time.sleep(self.reading_s)
            yield x, torch.randint(4, (size,), generator=drawn)


class Replica:
    """One of two that train together."""

    def __init__(self, rank: int):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))
        self.rank, self.model = rank, model.to("ltc")
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-3)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        import ltc.core.lazy_model as ltm

        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        ltm.optimizer_step(self.optimizer)
        return loss

    def weights(self) -> bytes:
        return b"".join(p.detach().cpu().numpy().tobytes() for p in self.model.parameters())

    def plain(self, steps: int) -> bytes:
        """The weights after so many steps without anything around them."""
        import ltc.core.lazy_model as ltm

        for x, y in itertools.islice(ManySizes(self.rank), steps):
            self.step(x.to("ltc"), y.to("ltc"))
            ltm.mark_step()
        return self.weights()


def resources(folder: str) -> dict[str, float]:
    """Return the resources of a process."""
    gc.collect()
    return {
        "MB resident": resident_megabytes(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "memory maps": len(Path("/proc/self/maps").read_text().splitlines()),
        "files": sum(len(files) for _, _, files in os.walk(folder)),
    }


def soak_rank(rank: int, seconds: float, folder: str) -> tuple[dict, dict, int, bool]:
    """Return the rank's resources in the middle and at the end, its steps, and if its bits were
    right.
    """
    import ltc.core.lazy_model as ltm
    import ltc.distributed.parallel_loader as pl
    from ltc.debug import metrics
    from ltc.utils.checkpoint import CheckpointManager

    replica, losses = Replica(rank), collections.deque(maxlen=100)
    parts = {"model": replica.model, "optimizer": replica.optimizer}
    manager = CheckpointManager(f"{folder}/checkpoints", keep_last=2, sharded=True, **parts)
    loader = pl.MpDeviceLoader(ManySizes(rank, READING_S), "ltc")
    began, middle, steps = time.monotonic(), {}, 0
    for steps, (x, y) in enumerate(loader, start=1):
        loss = replica.step(x, y)
        if steps % REPORT_STEPS == 0:
            show = lambda loss: losses.append(loss.item())  # noqa: E731
            ltm.add_step_closure(show, args=(loss,), run_async=steps % 20 == 0)
        if steps % SAVE_STEPS == 0:
            manager.save(steps, blocking=False)
            metrics.metrics_report()
            elapsed = ltm.mesh_reduce("elapsed", time.monotonic() - began, max)  # all stop together
            if not middle and elapsed > seconds / 2:
                manager.wait()
                middle = resources(folder)
            if elapsed > seconds and middle:
                break
    manager.wait()
    ltm.wait_device_ops()
    ltm.rendezvous("all are saved")
    end = resources(folder)
    return middle, end, steps, Replica(rank).plain(steps) == replica.weights()


LIMITS = {"MB resident": 8, "descriptors": 4, "threads": 2, "memory maps": 40, "files": 4}


def soak_replicas(device: str, seconds: int) -> list[Finding]:
    import ltc.distributed.lazy_multiprocessing as lmp

    findings = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(LTC_METRICS_FILE=f"{folder}/metrics.jsonl", LTC_TIER="native")
        found = lmp.spawn(soak_rank, args=(float(seconds), folder), nprocs=2)
    for rank, (middle, end, steps, is_equal) in enumerate(found):
        findings += [
            Finding(f"rank {rank}: {what} more than in the middle", end[what] - middle[what], most)
            for what, most in LIMITS.items()
        ]
        what = f"rank {rank}: weights that differ from those of {steps} undisturbed steps"
        findings.append(Finding(what, not is_equal, 0))
    return findings


SOAKS = {
    "steps": (soak_steps, 10_000),
    "chain": (soak_chain, 1_000_000),
    "schedule": (soak_schedule, 200),
    "replicas": (soak_replicas, 60),
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
    parser.add_argument("--only", choices=list(SOAKS), help="run this one alone")
    parser.add_argument("--count", type=int, help="steps, additions or seconds")
    parser.add_argument("--device", default="ltc", help="the device to test")
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
