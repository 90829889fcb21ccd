"""Images per second of 1 replica, of some processes, and of as many threads with a device each, in turns.

    python scripts/bench/bench_scaling.py                      # the mnist_cnn of workloads.py
    python scripts/bench/bench_scaling.py --network example    # the small network of examples/mnist
    python scripts/bench/bench_scaling.py --replicas 16        # needs as many processors

Every replica computes with one thread, and trains on batches of --batch-size images of its own; the
gradients are averaged in each step.  The trainings stay alive for the whole run and are asked
for a few steps at a time, so that a change in the machine's mood meets all of them.  The figures
are medians over all rounds, and the speed-ups medians of the rounds' own; "at best" compares the
best rounds of each, which other programs on the machine have disturbed least.  "apart" are
processes that train alone at the same time: what the machine has to give in those rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[1:1] = [str(ROOT), str(ROOT / "examples" / "mnist")]

import torch  # noqa: E402
from model import MNIST  # noqa: E402
from torch.nn import functional  # noqa: E402
from workloads import MnistCnn  # noqa: E402

import ltc.core.lazy_model as ltm  # noqa: E402
import ltc.distributed.data_parallel as dp  # noqa: E402
import ltc.distributed.lazy_multiprocessing as lmp  # noqa: E402

NETWORKS = {"mnist_cnn": MnistCnn, "example": MNIST}
# times the images per second of one replica, for two of them
NEEDED = {"apart": 0.0, "processes": 1.75, "threads": 1.6}
WARM_UP_STEPS = 10


def train_when_asked(model: torch.nn.Module, address: str, batch_size: int) -> None:
    """One replica: answers each number of steps with the seconds they took; ends at 0."""
    device = ltm.lazy_device()
    draw = torch.Generator().manual_seed(ltm.get_ordinal())
    images = torch.randn(batch_size, 1, 28, 28, generator=draw).to(device)
    labels = torch.randint(10, (batch_size,), generator=draw).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            functional.nll_loss(model(images), labels).backward()
            ltm.optimizer_step(optimizer)
            ltm.mark_step()
        ltm.wait_device_ops()

    train(WARM_UP_STEPS)
    with Client(address) as controller:
        controller.send(None)
        while steps := controller.recv():
            ltm.rendezvous("begin")
            started = time.perf_counter()
            train(steps)
            controller.send(time.perf_counter() - started)


def process(rank: int, network: str, address: str, batch_size: int) -> None:
    """A replica that has this process to itself."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train_when_asked(NETWORKS[network]().to(ltm.lazy_device()), address, batch_size)


def threads(network: str, address: str, batch_size: int, count: int) -> None:
    """A replica in a thread for each device of this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)

    def loop(model, loader, device, context) -> None:
        train_when_asked(model, address, batch_size)

    dp.DataParallel(NETWORKS[network])(loop, [torch.zeros(1)] * count)


def serve(way: str, network: str, address: str, batch_size: int, replicas: int) -> None:
    """Run the process of one way."""
    if way == "threads":
        threads(network, address, batch_size, replicas)
    else:
        count = replicas if way == "processes" else 1
        lmp.spawn(process, (network, address, batch_size), nprocs=count)


class Way:
    """One way to train, in processes of its own, and the connections to its replicas."""

    def __init__(self, name: str, replicas: int, chosen: argparse.Namespace, folder: str) -> None:
        address = f"{folder}/{name}"
        devices = replicas if name == "threads" else 1
        with Listener(address) as listener:
            self.started = [
                subprocess.Popen(
                    [
                        sys.executable,
                        __file__,
                        "--serve",
                        name,
                        "--address",
                        address,
                        "--network",
                        chosen.network,
                        "--batch-size",
                        str(chosen.batch_size),
                        "--replicas",
                        str(replicas),
                    ],
                    env={**os.environ, "OMP_NUM_THREADS": "1", "LTC_NUM_DEVICES": str(devices)},
                )
                for _ in range(replicas if name == "apart" else 1)
            ]
            self.replicas: list[Connection] = [listener.accept() for _ in range(replicas)]
        for replica in self.replicas:
            replica.recv()
        self.batch_size, self.speeds = chosen.batch_size, []

    def measure(self, steps: int) -> None:
        for replica in self.replicas:
            replica.send(steps)
        seconds = max(replica.recv() for replica in self.replicas)
        self.speeds.append(len(self.replicas) * self.batch_size * steps / seconds)

    def end(self) -> None:
        for replica in self.replicas:
            replica.send(0)
        for process in self.started:
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--network", choices=NETWORKS, default="mnist_cnn", help="the network to train"
    )
    parser.add_argument("--batch-size", type=int, default=64, help="batch size of each replica")
    parser.add_argument("--replicas", type=int, default=2, help="number of replicas")
    parser.add_argument("--steps", type=int, default=20, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=15, help="number of rounds")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        serve(chosen.serve, chosen.network, chosen.address, chosen.batch_size, chosen.replicas)
        return 0
    with tempfile.TemporaryDirectory(prefix="ltc-scaling-") as folder:
        alone = Way("alone", 1, chosen, folder)
        others = [Way(name, chosen.replicas, chosen, folder) for name in NEEDED]
        for _ in range(chosen.rounds):
            for way in (alone, *others):
                way.measure(chosen.steps)
        for way in (alone, *others):
            way.end()
    print(f"1 replica: {statistics.median(alone.speeds):.0f} images per second")
    reached = True
    for (name, goal), way in zip(NEEDED.items(), others):
        needed = goal if chosen.replicas == 2 else 0.0
        times = statistics.median(b / a for a, b in zip(alone.speeds, way.speeds))
        best = max(way.speeds) / max(alone.speeds)
        reached &= times >= needed
        print(
            f"{chosen.replicas} {name}: {statistics.median(way.speeds):.0f} images per second, "
            f"{times:.2f} x{f' (needed: {needed} x)' if needed else ''}, at best {best:.2f} x"
        )
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
