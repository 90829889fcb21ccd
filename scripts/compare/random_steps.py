"""Step functions at random under `ltc.compile`: equal to calls that are recorded, or said not to be.

    python scripts/compare/random_steps.py --count 1000              a thousand new ones
    python scripts/compare/random_steps.py --seed 17 --count 1       one of them again
    python scripts/compare/random_steps.py --seed 17 --text          the function of one seed

Three in ten are impure.  One that is replayed wrongly and neither refused nor found by a check has
failed.  The exit code is 1 where any has.
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.networks.step_functions import judged, step_function

COUNTERS = ("ReplayedCalls", "ReplayRecordings", "ReplayChecks", "ReplayRefused")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=None, help="of the first; default: a new one")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--text", action="store_true", help="print the function and stop")
    return parser.parse_args()


def main() -> int:
    options = parsed()
    first = random.SystemRandom().randrange(10**12) if options.seed is None else options.seed
    if options.text:
        print(step_function(first).text)
        return 0
    warnings.simplefilter("ignore")  # what is refused is counted
    print(f"{options.count} step functions from seed {first}", flush=True)
    counts: Counter[str] = Counter()
    for seed in range(first, first + options.count):
        fault, grown = judged(seed)
        counts["impure"] += step_function(seed).is_impure
        counts["replayed"] += grown.get("ReplayedCalls", 0) > 0
        counts["failed"] += bool(fault)
        counts.update({name: grown.get(name, 0) for name in COUNTERS})
        if fault:
            print(f"seed {seed}: {fault}", flush=True)
    print(", ".join(f"{name} {count}" for name, count in counts.items()))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
