"""Train well-known architectures for three steps on ltc; compare with eager PyTorch and float64.

    python scripts/compare/real_networks.py --all [--markdown] [--processes 2]
    python scripts/compare/real_networks.py --name xcit --name "timm resnet" [--details]

Needs `pip install '.[models]'`. Ends with 1 where a network is wrong; what that means is said in
scripts/compare/network_check.py. The networks are those of scripts/compare/network_cases.py, each in a process of
its own, with a limit of time and memory. The columns are

    parameters  how many numbers are trained
    loss        relative distance of ltc's loss from float64's
    worst       the same for the gradient, output or buffer that uses most of its bound, then
                eager's own distance there, and the share of the bound
    jumps       quantities that pass only because the network jumps nearby
    on torch    calls that PyTorch's CPU kernels run: within the compiled step, or eagerly
    programs    compiled in three steps
    first       processor seconds of the first step, with all that is compiled for it
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import traceback
from dataclasses import asdict

import case_runner
import network_check
from case_runner import Outcome
from network_cases import NETWORKS
from network_check import Compared

SECONDS, GIGABYTES = 900, 12  # generous: machines are shared
HEAD = ("network", "parameters", "loss", "worst", "eager's", "share", "jumps", "on torch",
        "programs", "first", "verdict")  # fmt: skip
JUDGED = ("right", "wrong")


def run_case(name: str) -> Outcome:
    """Check one network, in a process that only does that."""
    resource.setrlimit(resource.RLIMIT_DATA, (GIGABYTES << 30, GIGABYTES << 30))
    try:
        checked = network_check.check(NETWORKS[name])
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return Outcome(name, "raised", reason, traceback.format_exc())
    wrong = [c for c in checked.compared if not c.is_right]
    status = "wrong" if wrong else "right"
    return Outcome(name, status, reason_for(wrong), json.dumps(asdict(checked)))


def reason_for(wrong: list[Compared]) -> str:
    if not wrong:
        return ""
    worst = max(wrong, key=lambda c: c.share)
    return f"{len(wrong)} quantities, {worst.name} by {worst.share:.2g} times its bound"


def row(outcome: Outcome) -> list[str]:
    """The cells of one network."""
    verdict = ": ".join(filter(None, (outcome.status, outcome.reason)))
    if outcome.status not in JUDGED:
        return [outcome.name, *[""] * (len(HEAD) - 2), verdict]
    checked = json.loads(outcome.detail)
    compared = [Compared(**fields) for fields in checked["compared"]]
    loss = compared[0]
    near = [c for c in compared if c.share > 1 and c.is_right]
    worst = max((c for c in compared if c not in near), key=lambda c: c.share)
    return [
        outcome.name,
        f"{checked['parameters']:,}",
        relative(loss.ltc, loss.norm),
        relative(worst.ltc, worst.norm),
        relative(worst.eager, worst.norm),
        f"{worst.share:.2f}",
        f"{len(near)} of {len(compared)}",
        str(len(checked["on_torch"])),
        str(checked["programs"]),
        f"{checked['seconds']:.1f}",
        verdict,
    ]


def relative(distance: float, norm: float) -> str:
    """Return the share of the norm, unless that itself is a zero's rounding."""
    return f"{distance / norm:.1e}" if norm > distance else f"{distance:.1e} of 0"


def details(outcome: Outcome) -> str:
    """Every quantity of a network, or what it raised."""
    if outcome.status not in JUDGED:
        return outcome.detail
    checked = json.loads(outcome.detail)
    compared = [Compared(**fields) for fields in checked["compared"]]
    lines = [
        f"  {c.name:60s} {c.norm:9.2e} eager {c.eager:8.1e} ltc {c.ltc:8.1e} jump {c.jump:8.1e} "
        f"share {c.share:6.2g}{'' if c.is_right else ' wrong'}"
        for c in compared
    ]
    return "\n".join([f"  on torch: {' '.join(checked['on_torch'])}", *lines])


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--all", action="store_true", help="every network")
    options.add_argument("--name", action="append", default=[], help="networks whose name has this")
    options.add_argument("--markdown", action="store_true", help="the table of the docs")
    options.add_argument("--details", action="store_true", help="every quantity, or the traceback")
    options.add_argument("--processes", type=int, default=1, help="networks at a time")
    chosen = options.parse_args()
    names = [n for n in NETWORKS if chosen.all or any(part in n for part in chosen.name)]
    if not names:
        options.error("name some networks, or --all; there are\n" + "\n".join(NETWORKS))

    def tell(outcome: Outcome) -> None:
        print_row(row(outcome), chosen.markdown)
        if chosen.details:
            print(details(outcome), flush=True)

    print_row(HEAD, chosen.markdown)
    if chosen.markdown:
        print_row(["---"] * len(HEAD), chosen.markdown)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LTC_CACHE_DIR"] = folder  # empty; networks that follow find equal kernels
        outcomes = case_runner.run(
            __file__, names, processes=chosen.processes, timeout_seconds=SECONDS, progress=False,
            tell=tell,
        )  # fmt: skip
    statuses = [outcome.status for outcome in outcomes]
    print(f"\n{statuses.count('right')} of {len(statuses)} networks are right")
    return int(statuses.count("right") < len(statuses))


def print_row(cells, markdown: bool) -> None:
    if markdown:
        print("| " + " | ".join(cells) + " |", flush=True)
    else:
        widths = (34, 11, 8, 8, 8, 6, 10, 9, 9, 6, 0)
        print(" ".join(f"{cell:{w}}" for cell, w in zip(cells, widths)).rstrip(), flush=True)


if __name__ == "__main__":
    if case_runner.WORKER in sys.argv:
        case_runner.serve_in_forks(run_case)
    else:
        raise SystemExit(main())
