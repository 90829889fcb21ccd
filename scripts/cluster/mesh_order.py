"""Four ranks as a 2 x 2 mesh, each reading the values of its two groups in an order of its own.

    python scripts/cluster/mesh_order.py --runs 200

In every run all ranks record the same collectives, over rows and over columns, and read what comes
out in orders drawn for each rank alone, with step marks and barriers in between. Every value is
checked. A run that takes longer than --limit seconds is a hang: the stacks of all ranks are printed
and the script ends with code 1.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from multiprocessing.connection import Connection, wait

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

import ltc.core.lazy_model as ltm

WORLD, SIDE = 4, 2
COLLECTIVES = 6  # in each run


def rank_of(rank: int, runs: int, seed: int, folder: str, report: Connection) -> None:
    """One rank: does all runs, tells the watchdog after each."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the watchdog asks where it hangs
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("ltc", init_method=store, rank=rank, world_size=WORLD)
    mesh = init_device_mesh("ltc", (SIDE, SIDE), mesh_dim_names=("column", "row"))
    mine = (mesh.get_group("row"), mesh.get_group("column"))
    for run in range(runs):
        one_run(rank, mine, random.Random(f"{seed} {run}"), random.Random(f"{seed} {run} {rank}"))
        report.send(run)
    dist.destroy_process_group()


def one_run(rank: int, groups: tuple, shared: random.Random, own: random.Random) -> None:
    """Record what `shared` draws, the same on all ranks; read in the order that `own` draws."""
    pending = []
    for _ in range(COLLECTIVES):
        which, size = shared.randrange(2), shared.randrange(1, 2000)
        x = torch.full((size,), float(rank + 1), device="ltc")
        if shared.random() < 0.5:
            dist.all_reduce(x, group=groups[which])
        else:
            x = functional.all_reduce(x, "sum", groups[which])
        pending.append((x, expected(rank, which)))
        if own.random() < 0.2:
            ltm.mark_step()
    if shared.random() < 0.2:
        dist.barrier(groups[shared.randrange(2)])
    own.shuffle(pending)
    for x, value in pending[: own.randrange(len(pending) + 1)]:
        found = x[-1].item()
        if found != value:
            raise AssertionError(f"rank {rank} read {found} instead of {value}")
    ltm.mark_step()


def expected(rank: int, which: int) -> float:
    """The sum over this rank's row (0) or column (1) of rank + 1."""
    row, column = divmod(rank, SIDE)
    in_row = [SIDE * row + other for other in range(SIDE)]
    in_column = [SIDE * other + column for other in range(SIDE)]
    return float(sum(other + 1 for other in (in_column if which else in_row)))


def watch(reports: list[Connection], runs: int, limit_seconds: float) -> str:
    """ "" once every rank has done every run; else what went wrong."""
    done, last = [0] * WORLD, time.monotonic()
    silent, other_end = multiprocessing.Pipe()
    while min(done) < runs:
        ready = wait(reports, timeout=1.0)
        for report in ready:
            rank = reports.index(report)
            try:
                done[rank] = report.recv() + 1
                last = time.monotonic()
            except EOFError:
                if done[rank] < runs:
                    return f"rank {rank} ended in run {done[rank]}"
                reports[rank] = silent  # an ended one would always be ready
        if time.monotonic() - last > limit_seconds:
            return f"a hang: runs done by the ranks {done}"
    other_end.close()
    return ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200, help="number of runs")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that make a hang")
    chosen = parser.parse_args(argv)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(WORLD)]
        processes = [
            context.Process(
                target=rank_of, args=(rank, chosen.runs, chosen.seed, folder, pipes[rank][1])
            )
            for rank in range(WORLD)
        ]
        started = time.monotonic()
        try:
            for process, (_, sender) in zip(processes, pipes):
                process.start()
                sender.close()  # so that the end of the process is seen
            problem = watch([receiver for receiver, _ in pipes], chosen.runs, chosen.limit)
            if not problem:
                for process in processes:
                    process.join()
        finally:
            end(processes)
    seconds = time.monotonic() - started
    print(problem or f"{chosen.runs} runs of {WORLD} ranks, 0 hangs, {seconds:.1f} s")
    return 1 if problem else 0


def end(processes: list) -> None:
    """Have every rank that still runs print where it is, then end it."""
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(1.0 if any(process.is_alive() for process in processes) else 0.0)
    for process in processes:
        if process.pid is not None:
            process.kill()
            process.join()


if __name__ == "__main__":
    sys.exit(main())
