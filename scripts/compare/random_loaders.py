"""Loaders at random: what arrives is what their source gives alone, and nothing hangs.

    python scripts/compare/random_loaders.py --count 1000             a thousand new ones
    python scripts/compare/random_loaders.py --seed 17 --count 1      one of them again
    python scripts/compare/random_loaders.py --seed 17 --text         what the program of one seed does
    python scripts/compare/random_loaders.py --only "persistent workers"    with one kind of source
    python scripts/compare/random_loaders.py --fault NAME             with a fault put in: it has to show

A program is a source (lists, streams, data sets, workers, memory that is used again), a form of
batches, and loops that end early, at an error or at the end, side by side, nested and in threads; on
one device or two.  One that takes longer than --limit seconds has failed.  A run that was stopped
goes on with the seed behind the last line that it printed.  The exit code is 1 where any has failed,
with --fault where none has.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

os.environ.setdefault("LTC_NUM_DEVICES", "2")  # read at import, so set before it
os.environ.setdefault("OMP_NUM_THREADS", "1")

import case_runner

from ltc.device.recording.tensors import upload_many
from ltc.distributed import loader_epoch
from ltc.training_loop import batch_source
from ltc.training_loop.transfer import ToLazyTensorArena
from tests.distributed.random_loaders import ALL_SOURCES, Program, judged

BLOCK = 50  # programs between two lines of progress


def batches_are_copied_late() -> None:
    """A batch is moved when it is asked for: its source may have used its memory again."""
    move = loader_epoch._upload
    get = loader_epoch.Epoch.get
    loader_epoch._upload = lambda content, device: content
    loader_epoch.Epoch.get = lambda self, device: move(get(self, device), device)


def containers_become_plain() -> None:
    """Named tuples become lists, subclasses dictionaries, and other tensors stay on the host."""

    def moved(batch: Any, device: torch.device) -> Any:
        upload = functools.partial(upload_many, device=device)
        return ToLazyTensorArena(upload, lambda x: type(x) is torch.Tensor).transform(batch)

    loader_epoch.batch_on_device = moved


def several_are_inside_the_source() -> None:
    """The next loop begins while the reader of the one before is inside next()."""
    batch_source.BatchSource.used_alone = lambda self: contextlib.nullcontext()
    batch_source.BatchSource.epochs = lambda self: []


def what_was_read_ahead_is_lost() -> None:
    """A loop that is left drops what was read for it."""
    batch_source.BatchSource.hand_back = lambda self, batches: None


FAULTS: dict[str, Callable[[], None]] = {
    fault.__name__.replace("_", " "): fault
    for fault in (
        batches_are_copied_late,
        containers_become_plain,
        several_are_inside_the_source,
        what_was_read_ahead_is_lost,
    )
}


def run_case(name: str) -> case_runner.Outcome:
    seed, _, source = name.partition(" ")
    wrong = judged(int(seed), source or None)
    return case_runner.Outcome(name, "wrong" if wrong else "right", wrong)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seed", type=int, default=None, help="seed of the first loader; default: a new one"
    )
    parser.add_argument("--count", type=int, default=200, help="number of programs")
    parser.add_argument(
        "--limit", type=float, default=60, metavar="SECONDS", help="time limit of one program"
    )
    parser.add_argument(
        "--only", choices=ALL_SOURCES, metavar="SOURCE", help="use this kind of source alone"
    )
    parser.add_argument("--text", action="store_true", help="print the program and stop")
    parser.add_argument(
        "--fault",
        choices=FAULTS,
        help="put this fault in, and count the programs until it is found",
    )
    parser.add_argument(case_runner.WORKER, action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def failures(first: int, count: int, options: argparse.Namespace) -> int:
    arguments = ["--fault", options.fault] if options.fault else []
    only = f" {options.only}" if options.only else ""
    names = [f"{seed}{only}" for seed in range(first, first + count)]
    outcomes = case_runner.run(
        __file__, names, arguments, timeout_seconds=options.limit, progress=False
    )
    failed = [outcome for outcome in outcomes if outcome.status != "right"]
    for outcome in failed:
        print(
            f"seed {outcome.name}: {outcome.status} {outcome.reason}\n{outcome.detail}", flush=True
        )
    print(f"seeds {first} to {first + count - 1}: {len(failed)} of {count} failed", flush=True)
    return len(failed)


def main() -> int:
    options = parsed()
    if options.worker:
        FAULTS.get(options.fault, lambda: None)()
        case_runner.serve(run_case)
        return 0
    first = random.SystemRandom().randrange(10**9) if options.seed is None else options.seed
    if options.text:
        print(Program(first, options.only))
        return 0
    failed = 0
    for start in range(first, first + options.count, BLOCK):
        failed += failures(start, min(BLOCK, first + options.count - start), options)
        if options.fault and failed:
            print(f"{options.fault}: found within {start + BLOCK - first} programs")
            return 0
    return int(bool(failed)) if options.fault is None else 1


if __name__ == "__main__":
    sys.exit(main())
