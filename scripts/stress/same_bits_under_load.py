"""Check that trainings give the same bits in every run, however busy the machine is.

    python scripts/stress/same_bits_under_load.py [PROGRAM ...] [--runs 5] [--steps 60]

Each program of `scripts/bench/restless_programs.py` that trains is run several times under
`torch.use_deterministic_algorithms(True)`, each time in a new process with an empty cache, beside
processes that work and rest in turns of random length. A run is known by a digest of what its steps
gave. The exit status is 1 where two runs of a program differ.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

from restless_programs import RESTLESS

PROGRAMS = (
    "classifier_of_any_length", "perceptron_of_any_batch", "graph_network", "reinforcement", "tiny",
    "many_parameters", "without_marks", "lstm", "gru", "deep_convolutions",
)  # fmt: skip
MOST_SECONDS = 0.4  # of one turn of a load


def digest_of_training(name: str, steps: int) -> tuple[str, int]:
    """Train in this process; return a digest of all losses, and how many compiled programs ran."""
    import ltc.core.lazy_model as ltm
    from ltc.debug import metrics

    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    step, digest = RESTLESS[name]("ltc", ltm.mark_step), hashlib.sha256()
    with metrics.counted() as grown:
        for number in range(steps):
            digest.update(step(number).detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16], int(grown["ExecuteTime"])


def work_and_rest(seed: int) -> None:
    """Keep a processor busy, and leave it alone, in turns."""
    draw = random.Random(seed)
    while True:
        until = time.monotonic() + draw.uniform(0, MOST_SECONDS)
        while time.monotonic() < until:
            pass
        time.sleep(draw.uniform(0, MOST_SECONDS))


@contextmanager
def load(seed: int) -> Iterator[None]:
    """Beside the block run up to twice as many busy processes as there are processors."""
    count = random.Random(seed).randint(0, 2 * (os.cpu_count() or 1))
    made = get_context("spawn")
    busy = [made.Process(target=work_and_rest, args=(seed + k,), daemon=True) for k in range(count)]
    for process in busy:
        process.start()
    try:
        yield
    finally:
        for process in busy:
            process.terminate()
            process.join()


def run(name: str, steps: int, seed: int) -> str:
    """Return what a new process prints of one training."""
    with tempfile.TemporaryDirectory(prefix="ltc-bits-") as folder, load(seed):
        command = [sys.executable, __file__, name, "--once", "--steps", str(steps)]
        environment = {**os.environ, "LTC_CACHE_DIR": folder}
        made = subprocess.run(command, env=environment, capture_output=True, text=True)
    if made.returncode:
        raise SystemExit(f"{name} failed:\n{made.stderr}")
    return made.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("programs", nargs="*", default=PROGRAMS, help="programs to train")
    parser.add_argument("--runs", type=int, default=5, help="trainings of each program")
    parser.add_argument("--steps", type=int, default=60, help="steps of a training")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.once:
        print(*digest_of_training(asked.programs[0], asked.steps))
        return 0
    differ = 0
    for name in asked.programs:
        found = [run(name, asked.steps, seed) for seed in range(asked.runs)]
        is_same = len({one.split()[0] for one in found}) == 1
        differ += not is_same
        print(f"{name:26} {'same bits' if is_same else 'DIFFERS'}: {', '.join(found)}", flush=True)
    return 1 if differ else 0


if __name__ == "__main__":
    raise SystemExit(main())
