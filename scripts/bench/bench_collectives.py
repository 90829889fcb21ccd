"""all_reduce between processes of this machine, beside gloo's in the same run.

    python scripts/bench/bench_collectives.py [--processes 2 4] [--busy 0 4]
        [--transports memory hosts] [--sizes 1K 64K 1M 16M 64M 256M] [--rounds 9]

One line for each size, number of processes, number of busy programs beside them, and transport: the
median milliseconds of ltc and of gloo, and the median of the rounds' ratios, which is what counts: in
each round both are timed one after the other, in turns first, so that what else runs on the machine
slows both. Times are the wall's, since a collective mostly waits, and those of the slowest process.
`hosts` is what goes between hosts, tried on one machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.distributed import collectives
from ltc.distributed.lazy_multiprocessing import spawn

SIZES = ("1K", "16K", "64K", "256K", "1M", "4M", "16M", "64M", "256M")
UNITS = {"K": 1 << 10, "M": 1 << 20}
ROUND_BYTES, MOST_CALLS = 16 << 20, 50  # of one round: as many calls as have so many bytes


def measured(action: Callable[[], object], calls: int) -> float:
    """Seconds of one call of the slowest process, all beginning together."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        action()
    seconds = torch.tensor((time.perf_counter() - started) / calls, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def compare(nbytes: int, rounds: int) -> list[tuple[float, float]]:
    """(ltc's, gloo's) seconds, round by round."""
    x = torch.ones(nbytes // 4)
    ways = [lambda: collectives.host_all_reduce(x), lambda: dist.all_reduce(x)]
    calls = max(min(ROUND_BYTES // nbytes, MOST_CALLS), 1)
    found = []
    for number in range(-1, rounds):  # the first round connects, and touches memory
        order = ways if number % 2 else ways[::-1]
        seconds = {way: measured(way, calls) for way in order}
        x.fill_(1)  # sums of sums would overflow
        found.append((seconds[ways[0]], seconds[ways[1]]))
    return found[1:]


def rank(index: int, sizes: list[str], rounds: int) -> list[list[tuple[float, float]]]:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        rank=index,
        world_size=ltm.xrt_world_size(),
        init_method=f"file://{config.value('LTC_RENDEZVOUS')}/gloo",
    )
    found = [compare(int(size[:-1]) * UNITS[size[-1]], rounds) for size in sizes]
    dist.destroy_process_group()
    return found


@contextlib.contextmanager
def busy_programs(count: int) -> Iterator[None]:
    """Start so many programs that do nothing but compute."""
    programs = [
        subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)
    ]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def table(options: argparse.Namespace, transport: str, processes: int, busy: int) -> None:
    os.environ["LTC_TRANSPORT"] = transport
    with busy_programs(busy):
        found = spawn(rank, args=(options.sizes, options.rounds), nprocs=processes)
    for size, rounds in zip(options.sizes, found[0]):
        ours, theirs = [statistics.median(times) * 1e3 for times in zip(*rounds)]
        ratios = sorted(ours / theirs for ours, theirs in rounds)
        print(
            f"{transport:8} {processes:9} {busy:4} {size:>6} {ours:10.3f} {theirs:10.3f} "
            f"{statistics.median(ratios):6.2f}  {ratios[0]:.2f} to {ratios[-1]:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--processes", type=int, nargs="*", default=[2, 4], help="numbers of processes"
    )
    parser.add_argument(
        "--busy", type=int, nargs="*", default=[0, 4], help="numbers of busy programs beside them"
    )
    parser.add_argument(
        "--transports", nargs="*", default=["memory", "hosts"], help="values of LTC_TRANSPORT"
    )
    parser.add_argument("--sizes", nargs="*", default=SIZES, help="sizes of the operands")
    parser.add_argument("--rounds", type=int, default=9, help="number of rounds")
    options = parser.parse_args()
    print(f"load at the beginning {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    print("transport processes busy   size     ltc ms    gloo ms  ratio  of all rounds")
    for transport in options.transports:
        for busy in options.busy:
            for processes in options.processes:
                table(options, transport, processes, busy)
