"""Operands of odd shapes for every rule: computed as on the CPU, or refused as there.

    python scripts/compare/odd_shapes.py                     every overload that has a rule
    python scripts/compare/odd_shapes.py --op batch_norm     those whose names have that in them

Each overload has a process of its own, since the CPU's kernels may read what they were not given.
The exit code is 1 where anything differs, or nothing was tried.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from ltc import config
from tests.odd_shapes import Call, calls, failures

LINE_BYTES = 1 << 20


def in_a_child(known: list[Call]) -> tuple[int, list[str]]:
    """Return the result of `failures` in a copy of this process; a fault if that ends otherwise."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        with os.fdopen(writer, "w") as pipe:
            json.dump(failures(known), pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read(LINE_BYTES)
    _, status = os.waitpid(child, 0)
    return json.loads(text) if not status else (0, [f"the process ended with status {status}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", default="", help="part of the names of overloads")
    options = parser.parse_args()
    tried = wrong = overloads = 0
    with config.override(LTC_BACKEND="eager", LTC_TIER="native", LTC_CHECK=1, LTC_CACHE=0):
        for name, known in calls().items():
            if options.op not in name:
                continue
            count, found = in_a_child(known)
            overloads, tried, wrong = overloads + 1, tried + count, wrong + len(found)
            for failure in found[:3]:
                print(f"{name}: {failure}"[:400], flush=True)
    print(f"{tried} calls of {overloads} overloads, {wrong} wrong")
    return int(bool(wrong) or not tried)


if __name__ == "__main__":
    sys.exit(main())
