"""Compare the sizes of results by ltc's rules with PyTorch's for all calls of its own table.

    python scripts/compare/result_shapes.py                      every overload
    python scripts/compare/result_shapes.py --overload pool      those whose names have that in them

Each call is compared at its sizes, and then, with its sizes as symbols, at others where the guards
hold. The exit code is 1 where a size differs, where ltc tells a size that PyTorch refuses, or where
a rule fails.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import ltc  # noqa: F401  (registers the rules)
from ltc.aten.registry import rule_of
from ltc.aten.result_shapes import is_told
from ltc.aten.schema import schema_of
from ltc.support.torch_private import all_overload_names
from tests.rule_shapes import Compared
from tests.unit.recorded_calls import of_torchs_table

DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64, torch.bfloat16)


def overloads(part: str) -> frozenset[str]:
    """Return the aten overloads with a rule or a statement, in-place and out forms included."""
    names = [name for name in all_overload_names() if name.startswith("aten::") and part in name]
    return frozenset(name for name in names if schema_of(name) is not None and is_told(name))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--overload", default="", help="a part of the names")
    parser.add_argument("--samples", type=int, default=5, help="samples of each operator and dtype")
    chosen = parser.parse_args()
    wanted = overloads(chosen.overload)
    calls = of_torchs_table(wanted, chosen.samples, DTYPES, left_out=())
    kinds: Counter[str] = Counter()
    moved = 0
    faults: list[str] = []
    for name, values in ((name, values) for name, listed in calls.items() for values in listed):
        compared = Compared(name, values)
        kinds[compared.kind] += 1
        moved += compared.moved
        if compared.kind == "fails":
            faults.append(
                f"{name}{values}: {'the rule' if rule_of(name) else 'the statement'} fails"
            )
        if compared.wrong:
            faults.append(compared.wrong)
    print(f"{len(calls)} of {len(wanted)} overloads are called; calls: {dict(kinds)}")
    print(f"{moved} comparisons at other sizes, as expressions; {len(faults)} faults")
    print("\n".join(faults))
    return 1 if faults or not moved else 0


if __name__ == "__main__":
    sys.exit(main())
