"""The page's table of training steps: a column for each kind of machine, and what was faster there before.

    python scripts/bench/table.py [--rounds 3] [--threads 2]  # measures this machine beside what is kept of its kind
    python scripts/bench/table.py --write  # keeps the ratios in ratios.json, and writes docs/performance.md's table

A ratio is the time of the fastest of eager PyTorch and torch.compile as a multiple of ltc's: medians of all rounds,
the systems in turns. Ends with 1 where a ratio is a tenth below the one that is kept. The processors have to be free:
what the machine reaches in multiply-adds and copies is measured first, and refused where others compute.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from bench import measure, median_of
from bench_modes import PEERS

ROOT = Path(__file__).resolve().parents[2]
KEPT = Path(__file__).with_name("ratios.json")
PAGE = ROOT / "docs" / "performance.md"
TABLE = re.compile(r"^\| model \|.*?\n(?=\n)", re.M | re.S)
LOST = 0.9  # of a ratio: less is no noise
VENDORS = {"AuthenticAMD": "AMD", "GenuineIntel": "Intel"}
MODELS = {
    "mlp": "perceptron 784-512-512-10, batch 128",
    "mnist_cnn": "convolutions on 28 x 28 images, batch 64",
    "resnet18": "ResNet-18 on 32 x 32 images, batch 16",
    "inverted_residuals": "depthwise and 1 x 1 convolutions",
    "gpt": "GPT: 4 layers of 256, 8 x 128 tokens",
    "vit": "vision transformer: 6 layers of 192, batch 32",
    "dlrm": "recommendation: 16 embedding tables, batch 256",
    "pointwise": "a long formula and its gradient",
    "black_scholes": "Black-Scholes prices, 4 million",
    "adamw_many": "AdamW over 120 tensors",
    "lstm": "LSTM: two layers, 64 steps",
    "tiny": "32-32-10, batch 8: 0.1 to 0.6 ms a step",
}


@dataclass(frozen=True)
class Column:
    """The ratios of one kind of machine.

    Attributes:
        measured: When, and what is unlike the others.
        by: The commits, which the page leaves out.
        gflops, copied: 10^9 multiply-adds a second, GB a second read and written; None where they were not noted.
        ratios: By workload; those that were not measured are left out.
    """

    measured: str
    by: str
    gflops: float | None
    copied: float | None
    ratios: dict[str, float]

    def lost(self, now: dict[str, float]) -> list[str]:
        """Return a sentence for each workload whose ratio is a tenth below the one that is kept."""
        return [
            f"{name}: {now[name]:.3g}, {before:.3g} before ({self.measured})"
            for name, before in self.ratios.items()
            if name in now and now[name] < LOST * before
        ]


def kept() -> dict[str, Column]:
    return {machine: Column(**told) for machine, told in json.loads(KEPT.read_text()).items()}


def written(columns: dict[str, Column]) -> str:
    """Return the page's table."""
    rows = [["model", *columns], ["---", *["---:"] * len(columns)]]
    for name, model in MODELS.items():
        ratios = [column.ratios.get(name) for column in columns.values()]
        rows.append([f"{model} (`{name}`)", *["" if r is None else f"{r:.3g}" for r in ratios]])
    told = [(column.gflops, column.copied) for column in columns.values()]
    limits = ["" if None in one else f"{one[0]:.0f}, {one[1]:.0f}" for one in told]
    rows.append(["*the machine: 10^9 multiply-adds, GB copied a second*", *limits])
    rows.append(["*measured*", *[column.measured for column in columns.values()]])
    return "".join(f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in row)}|\n" for row in rows)


def this_machine(threads: int) -> str:
    """Return the kind of this machine: vendor and family of its processor, its vectors, and the threads."""
    told = dict(re.findall(r"^(vendor_id|cpu family|model|flags)\s*: (.*)$", _processors(), re.M))
    vendor = VENDORS.get(told.get("vendor_id", ""), "processor")
    kind = f"{vendor} family {told.get('cpu family', '?')}"
    if vendor == "Intel":  # whose family is 6
        kind += f" model {told.get('model', '?')}"
    elif vendor == "AMD":  # Zen 4 is of the family of Zen 3
        kind += " with AVX-512" if "avx512f" in told.get("flags", "") else " with AVX2"
    return f"{kind}, {threads} threads"


def _processors() -> str:
    first, *_ = Path("/proc/cpuinfo").read_text().split("\n\n")
    return first


def measured(rounds: int, threads: int) -> Column:
    """Measure this machine; raises SystemExit where others compute on it."""
    from ltc.llvm.native.machine_limits import limits

    torch.set_num_threads(threads)
    most = limits()
    if not most.is_quiet:
        raise SystemExit(
            f"others use {most.others_share:.0%} of the processors: nothing is measured"
        )
    results = measure("workloads", (*PEERS, "ltc"), list(MODELS), rounds, threads)
    ratios = {}
    for name, by_system in results.items():
        ours, *peers = [median_of(by_system[system]) for system in ("ltc", *PEERS)]
        fastest = min((time for time in peers if time), default=None)
        if ours and fastest:
            ratios[name] = round(fastest / ours, 3)
    head = subprocess.check_output(["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, text=True)
    by = f"{head.strip()}, torch {torch.__version__}"
    when = f"{datetime.date.today():%-d %B %Y}"
    return Column(when, by, most.fma_per_s / 1e9, most.copy_bytes_per_s / 1e9, ratios)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds")
    parser.add_argument("--threads", type=int, default=2, help="number of threads")
    parser.add_argument("--write", action="store_true", help="keep the ratios, and write the page")
    asked = parser.parse_args()
    columns, machine = kept(), this_machine(asked.threads)
    now = measured(asked.rounds, asked.threads)
    print(written({machine: now}))
    lost = columns[machine].lost(now.ratios) if machine in columns else []
    print("\n".join(lost))
    if asked.write:
        columns[machine] = now
        told = {name: asdict(column) for name, column in columns.items()}
        KEPT.write_text(json.dumps(told, indent=1) + "\n")
        PAGE.write_text(TABLE.sub(lambda _: written(columns), PAGE.read_text(), count=1))
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
