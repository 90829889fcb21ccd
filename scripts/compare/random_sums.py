"""Sums of 16-bit numbers at random: interpreted, compiled, of any size, as exact as their dtype.

    python scripts/compare/random_sums.py --count 1000               a thousand new programs
    python scripts/compare/random_sums.py --seed 17 --count 1        one of them again
    python scripts/compare/random_sums.py --log sums.jsonl           goes on after the last of the file
    python scripts/compare/random_sums.py --faults                   is each fault found in 200?

Says how many runs there were on which tier.  The exit code is 1 where a sum is wrong, where no program
was compiled or none was compiled for any size, and where a fault is missed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from seeded_faults import in_a_process_of_its_own, no_fault, replace

from ltc import config
from ltc.aten import wide_sums
from ltc.aten.nn import pooling
from ltc.aten.rules import indexing
from ltc.debug import metrics
from ltc.ir import build
from ltc.ir.node import make
from tests.random_sums import RandomSums
from tests.recorders import in_a_new_thread

RUNS = {
    "interpreted": "CallByCallRuns",
    "op by op": "ImmediateSteps",
    "compiled": "UncachedCompile",
    "of any size": "SymbolicSizes",
}
FOUND_WITHIN = 200


# --- faults ----------------------------------------------------------------------------------------


def scatters_add_in_16_bits() -> None:
    """Compiled scatters and index sums round after each addition."""

    def added(op, base, index, new, dim):
        return make(op, base, index, build.cast(new, base.dtype), dim=dim, mode="add")

    replace(indexing, "_added", lambda right: added)


def kernels_add_in_16_bits() -> None:
    """PyTorch's kernels are called with what the call was given."""
    wide_sums.ADD_IN_16_BITS.clear()


def pools_add_in_16_bits() -> None:
    """Compiled gradients of pooling are added as they come."""
    replace(pooling, "compute_dtype", lambda right: lambda dtype: dtype)


FAULTS = (scatters_add_in_16_bits, kernels_add_in_16_bits, pools_add_in_16_bits)


# --- runs ------------------------------------------------------------------------------------------


def judged(
    seeds: range, runs: Counter[str], begun: Callable[[int], None]
) -> Iterator[tuple[int, str | None]]:
    """Each program's seed, and what is wrong with it; `runs` counts on which tiers they ran."""
    for seed in seeds:
        begun(seed)
        program, found = RandomSums(seed), []
        with metrics.counted() as grown:
            in_a_new_thread(lambda program=program, found=found: found.append(program.failure()))
        for tier, counter in RUNS.items():
            runs[tier] += grown[counter]
        yield seed, found[0]


def first_failure(seeds: range) -> Callable[[Callable[[int], None]], str | None]:
    def look(begins: Callable[[int], None]) -> str | None:
        found = ((s, failure) for s, failure in judged(seeds, Counter(), begins) if failure)
        return next(
            (f"after {s + 1 - seeds.start} programs: {failure}" for s, failure in found), None
        )

    return look


def are_faults_found(first: int) -> bool:
    good = True
    for fault in (no_fault, *FAULTS):
        found = in_a_process_of_its_own(first_failure(range(first, first + FOUND_WITHIN)), fault)
        print(f"{fault.__name__.replace('_', ' ')}: {found or 'nothing is found'}", flush=True)
        good &= (found is None) == (fault is no_fault)
    return good


class Log:
    """A line of JSON for each program, by which a run goes on where another has ended."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self.last = json.loads(lines[-1])["seed"] if lines else None

    def add(self, seed: int, failure: str | None) -> None:
        if self._path is not None:
            line = {"seed": seed, "program": str(RandomSums(seed)), "failure": failure}
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def run(first: int, count: int, log: Log) -> int:
    runs: Counter[str] = Counter()
    wrong = 0
    for seed, failure in judged(range(first, first + count), runs, lambda seed: None):
        log.add(seed, failure)
        if failure is not None:
            wrong += 1
            print(f"seed {seed}: {failure}", flush=True)
    shown = ", ".join(f"{runs[tier]} {tier}" for tier in RUNS)
    print(f"{count} programs from seed {first} on, {wrong} wrong; runs: {shown}")
    missing = [tier for tier in RUNS if not runs[tier]]
    if missing:
        print(f"nothing was {', '.join(missing)}: too few programs to say anything")
    return int(bool(wrong or missing))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, help="seed of the first sum; default: a new one")
    parser.add_argument("--count", type=int, default=100, help="number of sums")
    parser.add_argument("--log", type=Path, help="a file with a line for each program")
    parser.add_argument(
        "--faults", action="store_true", help="put each fault back, and look for it"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # index_reduce is in beta
    log = Log(options.log)
    first = random.SystemRandom().randrange(10**9) if options.seed is None else options.seed
    first = first if log.last is None else log.last + 1
    with config.override(LTC_CACHE=0):
        return (
            int(not are_faults_found(first)) if options.faults else run(first, options.count, log)
        )


if __name__ == "__main__":
    sys.exit(main())
