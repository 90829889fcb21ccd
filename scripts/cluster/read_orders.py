"""Four replicas as a 2 x 2 mesh, each reading its row's and its column's sum in an order of its own.

    python scripts/cluster/read_orders.py [--runs 200]

A hang ends with PeerFailure after 60 s, and the script with it.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ.setdefault("LTC_PEER_TIMEOUT", "60")

import torch

ROWS, COLUMNS = [[0, 1], [2, 3]], [[0, 2], [1, 3]]


def read(index: int, runs: int) -> int:
    """Return how many runs gave the right sums."""
    import ltc.core.lazy_model as ltm

    order, right = random.Random(index), 0
    for number in range(runs):
        x = torch.full((3 * 10_000 ** (number % 2),), float(index), device="ltc")
        sums = [ltm.all_reduce("sum", x, groups=groups) for groups in (ROWS, COLUMNS)]
        expected = [4 * (index // 2) + 1, 2 * (index % 2) + 2]
        read_first = order.choice([[0, 1], [1, 0], [0], [1], []])
        right += all(sums[k][0].item() == expected[k] for k in read_first)
        if number % 5 == 0:
            ltm.mark_step()
    return right


def main() -> None:
    from ltc.distributed.lazy_multiprocessing import spawn

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200, help="number of runs")
    runs = parser.parse_args().runs
    found = spawn(read, (runs,), nprocs=4)
    print(f"{runs} runs, right on each replica: {found}")
    sys.exit(found != [runs] * 4)


if __name__ == "__main__":
    main()
