"""Step functions at random under `ltc.compile`: equal to calls that are recorded, or said not to be.

    python scripts/compare/random_steps.py --count 1000              a thousand new ones
    python scripts/compare/random_steps.py --seed 17 --count 1       one of them again
    python scripts/compare/random_steps.py --seed 17 --text          the function of one seed
    python scripts/compare/random_steps.py --aliases --count 2000 --done done.json
                                                                     goes on where it was stopped

Three in ten are impure.  One that is replayed wrongly and neither refused nor found by a check has
failed.  With --aliases, arguments share memory with one another and with what a function closes over,
and each call is compared with the CPU's: compiled before its first run, and under the default settings.
The exit code is 1 where any has failed, or where nothing was replayed, or no program compiled.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.networks import aliased_steps, step_functions
from tests.networks.repetition import follow_small_steps

COUNTED = {
    "ReplayedCalls": "calls replayed",
    "ReplayRecordings": "recorded",
    "ReplayChecks": "checked",
    "ReplayRefused": "functions refused",
    "UncachedCompile": "programs compiled",
    "ImmediateSteps": "immediate steps",
    "SideExits": "side exits",
    "CallByCallRuns": "runs call by call",
    "CoreLaunches": "launches of the core",
    "SymbolicPrograms": "programs of symbols",
    "SymbolicSizes": "runs at sizes of symbols",
}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seed", type=int, default=None, help="seed of the first program; default: a new one"
    )
    parser.add_argument("--count", type=int, default=100, help="number of programs")
    parser.add_argument("--text", action="store_true", help="print the function and stop")
    parser.add_argument("--aliases", action="store_true", help="arguments share memory")
    parser.add_argument(
        "--loops", action="store_true", help="the same in a loop that nothing replays"
    )
    parser.add_argument("--tier", choices=aliased_steps.TIERS, help="with --aliases; default: each")
    small = "small steps get programs as well, though the native core runs them as quickly without"
    parser.add_argument("--small-steps", action="store_true", help=small)
    parser.add_argument("--done", type=Path, help="a file of the finished seeds, to continue from")
    return parser.parse_args()


class Run:
    """The progress of a run, kept in a file if there is one.

    Attributes:
        first, end: The seeds: of the first program, and behind the last.
        next: The seed of the first program still to be checked.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._file = options.done
        first = random.SystemRandom().randrange(10**12) if options.seed is None else options.seed
        self.first, self.next, self.counts = first, first, Counter()
        if self._file is not None and self._file.exists():
            kept = json.loads(self._file.read_text())
            self.first, self.next, self.counts = (
                kept["first"],
                kept["next"],
                Counter(kept["counts"]),
            )
        self.end = self.first + options.count

    def seeds(self) -> Iterator[int]:
        """Give the remaining seeds; each is done once the next is asked for."""
        while self.next < self.end:
            yield self.next
            self.next += 1
            if self._file is not None:
                kept = {"first": self.first, "next": self.next, "counts": self.counts}
                self._file.write_text(json.dumps(kept))

    def note(self, fault: str, grown: dict[str, int], what: str) -> None:
        self.counts["programs that replayed"] += grown.get("ReplayedCalls", 0) > 0
        self.counts["failed"] += bool(fault)
        self.counts.update({text: grown.get(name, 0) for name, text in COUNTED.items()})
        if fault:
            print(f"{what}: {fault}", flush=True)

    @property
    def is_good(self) -> bool:
        ran = self.counts["calls replayed"] or self.counts["launches of the core"]
        was_seen = ran and self.counts["programs compiled"]
        return bool(was_seen) and not self.counts["failed"]


def _text(options: argparse.Namespace, seed: int) -> str:
    if options.loops or options.aliases:
        return aliased_steps.aliased_step(seed, options.loops).text
    return step_functions.step_function(seed).text


def main() -> int:
    options = parsed()
    run = Run(options)
    if options.text:
        print(_text(options, run.first))
        return 0
    if options.small_steps:
        follow_small_steps()
    warnings.simplefilter("ignore")  # what is refused is counted
    print(f"step functions from seed {run.first}, from {run.next} on, to {run.end}", flush=True)
    for seed in run.seeds():
        if options.loops:
            run.note(*aliased_steps.judged_loop(seed), f"seed {seed}")
        elif options.aliases:
            for tier in [options.tier] if options.tier else aliased_steps.TIERS:
                run.note(*aliased_steps.judged(seed, tier), f"seed {seed}, {tier}")
        else:
            run.note(*step_functions.judged(seed), f"seed {seed}")
            run.counts["impure"] += step_functions.step_function(seed).is_impure
    print(", ".join(f"{name} {count}" for name, count in run.counts.items()))
    if not run.is_good and not run.counts["failed"]:
        print("no call was replayed, or no program compiled")
    return 0 if run.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
