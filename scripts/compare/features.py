"""Features of torch, each a small program: does ltc give what the CPU gives?

    python scripts/compare/features.py [--name vmap] [--details] [--markdown]

Ends with 1 where one is neither equal nor among those that the docs say ltc has not. The programs
are those of feature_cases/; `equal` allows what another order of adding changes.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
import warnings

import torch
from feature_cases import FEATURES
from torch.utils import _pytree as pytree

import ltc  # noqa: F401

RELATIVE, ABSOLUTE = 1e-3, 1e-4
COARSE = {"Muon"}  # it computes in bfloat16, whose rounding is 1e-2
# What the docs say there is not, and in which words: docs/api.md, "What differs from PyTorch".
REASONS = {
    "sparse coo": "Layouts: sparse tensors stay on the CPU",
    "sparse csr": "Layouts: sparse tensors stay on the CPU",
    "sparse product": "Layouts: sparse tensors stay on the CPU",
    "views share memory after loading": "troubleshooting.md: save one of them, or clone()",
    "quantized": "Layouts: quantized tensors stay on the CPU",
}


def difference(expected, found, relative: float, absolute: float) -> str:
    """Return how two results differ; "" if they are equal."""
    expected, found = pytree.tree_leaves(expected), pytree.tree_leaves(found)
    if len(expected) != len(found):
        return f"{len(found)} results, not {len(expected)}"
    for one, other in zip(expected, found):
        if isinstance(one, torch.Tensor):
            try:
                torch.testing.assert_close(
                    other.detach().cpu(), one.detach(), rtol=relative, atol=absolute, equal_nan=True
                )
            except AssertionError as error:
                return " ".join(str(error).split())
        elif isinstance(one, float):
            if abs(one - other) > absolute + relative * abs(one):
                return f"{other}, not {one}"
        elif one != other:
            return f"{other!r}, not {one!r}"
    return ""


def judged(name: str, program) -> tuple[str, str, str]:
    """(verdict, reason, details) of one program."""
    try:
        expected = program("cpu")
    except Exception as error:
        return "fails on the CPU", f"{type(error).__name__}: {error}", traceback.format_exc()
    try:
        wider = 10 if name in COARSE else 1
        found = program("ltc")
        wrong = difference(expected, found, RELATIVE * wider, ABSOLUTE * wider)
    except Exception as error:
        reason = REASONS.get(name, "")
        text = reason or f"{type(error).__name__}: {error}"
        return ("documented" if reason else "raised"), text, traceback.format_exc()
    return ("differs" if wrong else "equal"), wrong, ""


def main() -> int:
    os.environ.setdefault("LTC_TIER", "native")  # what is compared is what is compiled
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--name", default="", help="only programs whose name has this")
    options.add_argument("--details", action="store_true", help="tracebacks of what raised")
    options.add_argument("--markdown", action="store_true", help="the table of the docs")
    chosen = options.parse_args()
    warnings.simplefilter("ignore")
    counts: dict[str, int] = {}
    for group, programs in FEATURES.items():
        for name, program in programs.items():
            if chosen.name not in name:
                continue
            verdict, reason, details = judged(name, program)
            counts[verdict] = counts.get(verdict, 0) + 1
            tell(group, name, verdict, " ".join(reason.split())[:160], chosen.markdown)
            if chosen.details and details:
                print(details)
    print(f"\n{counts.get('equal', 0)} of {sum(counts.values())} are equal: {counts}")
    return int(bool(counts.keys() - {"equal", "documented"}))


def tell(group: str, name: str, verdict: str, reason: str, markdown: bool) -> None:
    if markdown:
        print(f"| {group} | {name} | {verdict} | {reason} |", flush=True)
    else:
        print(f"{group:34} {name:42} {verdict:10} {reason}".rstrip(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
