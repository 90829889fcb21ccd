"""all_reduce between processes of this host, beside gloo's in the same run.

    python scripts/bench/bench_collectives.py [--processes 2]

Prints the best of some rounds, ours and gloo's in turn: other programs on the machine only slow a
round down.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.distributed import collectives
from ltc.distributed.lazy_multiprocessing import spawn

ROUNDS = 9


def measured(action, repeats: int) -> float:
    """Seconds of one call, all replicas beginning together."""
    ltm.rendezvous("begin")
    started = time.perf_counter()
    for _ in range(repeats):
        action()
    return (time.perf_counter() - started) / repeats


def compare(elements: int, repeats: int) -> tuple[float, float]:
    """(ours, gloo's) best seconds."""
    x = torch.ones(elements)
    ours, theirs = [], []
    for _ in range(ROUNDS):
        ours.append(measured(lambda: collectives.host_all_reduce(x), repeats))
        theirs.append(measured(lambda: dist.all_reduce(x), repeats))
        x.fill_(1)  # sums of sums would overflow
    return min(ours), min(theirs)


def rank(index: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        rank=index,
        world_size=ltm.xrt_world_size(),
        init_method=f"file://{config.value('LTC_RENDEZVOUS')}/gloo",
    )
    ours, theirs = compare(16 << 20, 3)
    small, their_small = compare(256, 100)
    if index == 0:
        size = (64 << 20) / 1e9
        print(f"64 MiB: {size / ours:.2f} GB/s, gloo {size / theirs:.2f}: {theirs / ours:.1f} x")
        print(
            f"1 KiB: {small * 1e6:.0f} us, gloo {their_small * 1e6:.0f} us: "
            f"{their_small / small:.1f} x",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    spawn(rank, nprocs=parser.parse_args().processes)
