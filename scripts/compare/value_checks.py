"""Random values in and outside the ranges that PyTorch's CPU kernels check, on `ltc` against the CPU.

    python scripts/compare/value_checks.py --count 2000              two thousand programs
    python scripts/compare/value_checks.py --seed 1700 --count 300   from number 1700 on
    python scripts/compare/value_checks.py --faults                  is each check that is left out found?

A program is one call of tests/value_checks.py, run several times on one tier with other values; it is
right where it gives what the CPU gives, or raises what the CPU raises, with the line. With --faults each
check is left out in turn, in a process of its own, and it is told after how many programs that shows.
Exits with an error where anything is wrong, or a fault is not found.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # of the tests
sys.path.insert(0, str(Path(__file__).parent))

from seeded_faults import WITHOUT, in_a_process_of_its_own, no_fault, replace

from ltc import config
from ltc.backends import kernel_call
from ltc.ir import build
from ltc.llvm.loops import values
from tests.value_checks import failure_of

# A word of each message that a rule raises.
MESSAGES = ("between 0 and 1", "p_in", "normal expects", "quantile", "Class values", "zero_point")


def left_out(word: str) -> Callable[[], None]:
    """The fault of a rule that does not look: the one whose message has that word."""

    def without(check: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, holds, message: x if word in message else check(x, holds, message)

    return lambda: replace(build, "check", without)


def nothing_is_reported() -> None:
    """Compiled kernels look, and say nothing."""
    replace(values, "_held", lambda right: lambda b, value, operands, *rest: operands[0])


def gradients_look_at_nothing() -> None:
    """The kernels of gradients that trust their forward are run as they are."""
    kernel_call._LOOKS_FIRST.clear()


FAULTS: dict[str, Callable[[], None]] = {
    WITHOUT: no_fault,
    **{f"no check of {word!r}": left_out(word) for word in MESSAGES},
    "compiled kernels report nothing": nothing_is_reported,
    "gradients look at nothing": gradients_look_at_nothing,
}


def first_failure(seeds: range, begins: Callable[[int], None]) -> str | None:
    for number, seed in enumerate(seeds, 1):
        begins(seed)
        failure = failure_of(seed)
        if failure is not None:
            return f"after {number} programs, seed {seed}: {failure}"
    return None


def all_failures(seeds: range) -> int:
    """Return how many programs are wrong; each is printed."""
    failures = 0
    for seed in seeds:
        failure = failure_of(seed)
        if failure is not None:
            failures += 1
            print(f"seed {seed}: {failure}", flush=True)
    print(f"{len(seeds)} programs, seeds {seeds.start} to {seeds.stop - 1}: {failures} wrong")
    return failures


def faults_missed(seeds: range) -> int:
    missed = 0
    for name, seed in FAULTS.items():
        found = in_a_process_of_its_own(lambda begins: first_failure(seeds, begins), seed)
        print(f"{name}: {found or 'nothing is found'}", flush=True)
        missed += (found is None) != (name == WITHOUT)
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of the first program")
    parser.add_argument("--count", type=int, default=200, help="programs; of each fault, at most")
    parser.add_argument("--faults", action="store_true", help="leave out the checks, one at a time")
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.count)
    with config.override(LTC_CACHE=0):
        return int((faults_missed if options.faults else all_failures)(seeds) > 0)


if __name__ == "__main__":
    sys.exit(main())
