"""Seconds until the first training step is over, in a process without a cache and in the next one.

    python scripts/bench/bench_first_step.py [WORKLOAD ...] [--rounds 5] [--threads 2]
    python scripts/bench/bench_first_step.py --layers 2 [perceptron] [transformer]
    python scripts/bench/bench_first_step.py --steps 50 [WORKLOAD ...]

The second form compares networks of so many and of ten times as many equal layers. The third takes the first steps
together, from an empty cache with nothing but the native core, if there is one, beside the same steps of eager
PyTorch in a process of its own: what runs on PyTorch's kernels while a program is compiled is among them.

Each figure is a median over new processes. The first process of a pair finds an empty
LTC_CACHE_DIR and compiles all; the second one finds what the first left. A step is recorded,
compiled, run and its loss read; importing PyTorch and making the model are not counted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import torch
import workloads
from bench_modes import Workloads
from bench_systems import SYSTEMS
from torch import nn
from workloads import Way

GOALS = {"resnet18": 3.0, "gpt": 3.0}  # seconds of a cold first step; others 1.5
OTHERS, SECOND_PROCESS = 1.5, 0.3
TIMES_AS_MANY, TIMES_AS_LONG = 10, 12


def perceptron(layers: int, device, way: Way) -> Callable:
    """Make a perceptron of so many hidden layers of 256."""
    hidden = [part for _ in range(layers) for part in (nn.Linear(256, 256), nn.ReLU())]
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 256), *hidden, nn.Linear(256, 10))
    batches = workloads.images(128, 1, 28)
    return workloads.training(model, workloads.sgd, workloads.cross_entropy, batches, device, way)


def transformer(layers: int, device, way: Way) -> Callable:
    """Make a transformer of so many blocks of width 128."""
    model = workloads.Gpt(vocabulary=256, width=128, layers=layers, length=64)
    g = torch.Generator().manual_seed(1)
    batches = [tuple(torch.randint(256, (2, 4, 64), generator=g))]

    def loss_of(model, x, y):
        return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())

    return workloads.training(model, workloads.adamw, loss_of, batches, device, way)


GROWING = {"perceptron": perceptron, "transformer": transformer}


def first_step(name: str, threads: int) -> dict:
    """Return the costs of this process's first step of a workload, or of "transformer:10"."""
    import ltc.core.lazy_model as ltm
    from ltc.debug import metrics

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    kind, _, layers = name.partition(":")
    way = Way(mark=ltm.mark_step)
    if layers:
        step = GROWING[kind](int(layers), ltm.lazy_device(), way)
    else:
        step = getattr(workloads, kind)(ltm.lazy_device(), way)
    ltm.wait_device_ops()
    start = time.perf_counter()
    step().item()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "kernels": metrics.counter_value("llvm.compiled") or 0}


def pair(name: str, threads: int) -> tuple[dict, dict]:
    """The first steps of two processes, one after the other, that share a cache of their own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", __file__, "--worker", name]
        environment = {"LTC_TIER": "native"} | os.environ | {"LTC_CACHE_DIR": f"{folder}/cache"}
        answers = []
        for _ in range(2):
            done = subprocess.run(
                [*command, "--threads", str(threads)],
                env=environment, stdout=subprocess.PIPE, text=True, check=True,
            )  # fmt: skip
            answers.append(json.loads(done.stdout.splitlines()[-1]))
    return answers[0], answers[1]


def first_steps(name: str, system: str, steps: int, threads: int) -> dict:
    """Return the seconds of this process's first steps of a workload, each of which is read."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    chosen = SYSTEMS[system]()
    step = Workloads.builders[name](chosen.device, chosen.way)
    chosen.finish()
    start = time.perf_counter()
    for _ in range(steps):
        step().item()
    return {"seconds": time.perf_counter() - start}


def print_first_steps(names: Sequence[str], steps: int, rounds: int, threads: int) -> None:
    """Print the first steps' seconds on eager PyTorch and on ltc, whose processes take turns."""
    from ltc.native import core_build

    kept = core_build.kept_in()
    core = {} if kept is None else {"LTC_NATIVE_DIR": str(kept.folder)}
    print(f"{'':18s} {'eager s':>8s} {'ltc s':>8s} {'eager / ltc':>12s}")
    for name in names:
        found: dict[str, list[float]] = {"eager": [], "ltc": []}
        for _, (system, seconds) in itertools.product(range(rounds), found.items()):
            command = [
                sys.executable,
                "-W",
                "ignore",
                __file__,
                "--worker",
                name,
                "--system",
                system,
            ]
            command += ["--steps", str(steps), "--threads", str(threads)]
            with tempfile.TemporaryDirectory() as folder:
                environment = os.environ | core | {"LTC_CACHE_DIR": folder}
                done = subprocess.run(
                    command, env=environment, stdout=subprocess.PIPE, text=True, check=True
                )
            seconds.append(json.loads(done.stdout.splitlines()[-1])["seconds"])
        eager, ours = map(statistics.median, found.values())
        print(f"{name:18s} {eager:8.2f} {ours:8.2f} {eager / ours:12.2f}", flush=True)


def medians(name: str, rounds: int, threads: int) -> tuple[float, int, float, int]:
    """(seconds, kernels compiled) of the first process and of the second one."""
    pairs = [pair(name, threads) for _ in range(rounds)]
    found: list = []
    for answers in zip(*pairs):
        found.append(statistics.median(answer["seconds"] for answer in answers))
        found.append(max(answer["kernels"] for answer in answers))
    return tuple(found)


def print_workloads(names: Sequence[str], rounds: int, threads: int) -> None:
    print(f"{'':14s} {'cold s':>8s} {'kernels':>8s} {'goal':>6s}   {'next s':>7s} compiled  goal")
    for name in names:
        cold, kernels, warm, compiled = medians(name, rounds, threads)
        print(
            f"{name:14s} {cold:8.2f} {kernels:8d} {GOALS.get(name, OTHERS):6.1f}   "
            f"{warm:7.3f} {compiled:8d}  {SECOND_PROCESS}",
            flush=True,
        )


def print_layers(kinds: list[str], layers: int, rounds: int, threads: int) -> None:
    for kind in kinds:
        more = layers * TIMES_AS_MANY
        few, many = [medians(f"{kind}:{n}", rounds, threads) for n in (layers, more)]
        print(
            f"{kind}: {layers} to {more} layers: {few[0]:.2f} to {many[0]:.2f} s, "
            f"{many[0] / few[0]:.1f} times (goal {TIMES_AS_LONG}); "
            f"{few[1]} to {many[1]} kernels, {many[1] / few[1]:.2f} times; "
            f"next process {few[2]:.2f} to {many[2]:.2f} s",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="all by default")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds")
    parser.add_argument("--threads", type=int, default=2, help="number of threads")
    parser.add_argument("--layers", type=int, help="number of layers, then ten times as many")
    parser.add_argument("--steps", type=int, help="number of first steps, beside eager PyTorch")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--system", default="ltc", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = arguments.steps, arguments.rounds, arguments.threads
    if arguments.worker and arguments.steps:
        steps, _, threads = sizes
        print(json.dumps(first_steps(arguments.worker, arguments.system, steps, threads)))
    elif arguments.steps:
        print_first_steps(arguments.names or Workloads.cases, *sizes)
    elif arguments.worker:
        print(json.dumps(first_step(arguments.worker, arguments.threads)))
    elif arguments.layers:
        kinds = arguments.names or list(GROWING)
        print_layers(kinds, arguments.layers, arguments.rounds, arguments.threads)
    else:
        print_workloads(arguments.names or workloads.OPEN, arguments.rounds, arguments.threads)


if __name__ == "__main__":
    main()
