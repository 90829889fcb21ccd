"""A script run three ways, side by side: on PyTorch's kernels, compiled, and on two replicas.

Each run is a process of its own, or two, that runs the script from its first line with the same seeds
and ends it after some backward passes. What it tells: the value that each of them began from, which
is the loss, and what of its steps was compiled, read early, or left to the CPU.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ltc import config
from ltc.distributed.lazy_multiprocessing import Ranks
from ltc.errors import RankFailed
from ltc.support.observation import metrics

SEED = 0
TOLERANCE = 1e-3  # relative: rounding grows in training, and a fault is larger
_READS = ("aten::_local_scalar_dense", "aten::equal")  # these too are counted as the CPU's
_COUNTED = {  # row -> what it adds up
    "steps": ("MarkStep", "ImpliedMark", "TrimIrGraph"),
    "compiled": ("UncachedCompile",),
    "read early": ("EarlySyncLiveTensorsCount",),
    "reads": _READS,
}
_FALLBACKS = "on the CPU"


@dataclass(frozen=True)
class Way:
    """One way to run a script."""

    name: str
    ranks: int
    settings: dict[str, str]


WAYS = (
    Way("eager", 1, {"LTC_BACKEND": "eager"}),
    Way("1 rank", 1, {}),
    Way("2 ranks", 2, {}),
)


@dataclass(frozen=True)
class Observed:
    """The observations of one rank's run of the script.

    Attributes:
        losses: The loss of each backward pass, in order.
        counts: Row -> number of events.
        failed: The reason why the run did not end; "" where it did.
    """

    losses: tuple[float, ...]
    counts: dict[str, int]
    failed: str = ""


def check(script: str, arguments: Sequence[str], backwards: int) -> tuple[str, bool]:
    """Compare the runs: return a report as text, and True if all ended and the compiled one computed
    the same.

    Args:
        backwards: Number of backward passes of each run; a script that ends earlier makes fewer.
    """
    found = {way.name: _run(way, script, list(arguments), backwards) for way in WAYS}
    expected, compiled = found["eager"], found["1 rank"]
    remarks = [f"{name} failed: {one.failed}" for name, one in found.items() if one.failed]
    is_right = not remarks
    if not expected.failed and not compiled.failed:
        difference = _difference(expected.losses, compiled.losses)
        is_right = is_right and difference <= TOLERANCE
        remarks.append(_verdict(difference, bool(expected.losses)))
    return "\n".join([_table(found), "", *remarks]), is_right


def run_as_main(script: str, arguments: Sequence[str]) -> None:
    """Run the script in this process as its main program."""
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:  # as many scripts end: sys.exit(main())
        if end.code not in (None, 0):
            raise


def run_module_as_main(module: str, arguments: Sequence[str]) -> None:
    """Run the module in this process as its main program, as `python -m` does."""
    sys.argv = [module, *arguments]
    sys.path[0] = os.getcwd()
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise


def _run(way: Way, script: str, arguments: list[str], backwards: int) -> Observed:
    """Run the script one way and return the observations of rank 0."""
    try:
        with config.override(**way.settings):
            ranks = Ranks(_observed, (script, arguments, backwards), way.ranks, start_method="fork")
        values: Any = ranks.join()
    except RankFailed as error:
        return Observed((), {}, str(error))
    return values[0]


def _observed(rank: int, script: str, arguments: list[str], backwards: int) -> Observed:
    random.seed(SEED)
    torch.manual_seed(SEED)
    losses: list[torch.Tensor] = []
    with metrics.counted() as grown, _at_each_backward(_keeping(losses, backwards)):
        with contextlib.redirect_stdout(io.StringIO()):
            run_as_main(script, arguments)
    counts = {row: sum(grown[name] for name in names) for row, names in _COUNTED.items()}
    fallbacks = set(metrics.executed_fallback_ops()) - set(_READS)
    counts[_FALLBACKS] = sum(grown[name] for name in fallbacks)
    return Observed(tuple(float(loss.sum()) for loss in losses), counts)


def _keeping(losses: list[torch.Tensor], most: int) -> Callable[[Any], None]:
    """Keeps what each backward begins from; the one after the last wanted ends the script."""

    def keep(roots: Any) -> None:
        if len(losses) == most:
            raise SystemExit(0)
        root = roots if isinstance(roots, torch.Tensor) else roots[0]
        losses.append(root.detach())

    return keep


@contextlib.contextmanager
def _at_each_backward(call: Callable[[Any], None]) -> Iterator[None]:
    """Call it with what torch.autograd.backward, and so Tensor.backward, is given."""
    original = torch.autograd.backward

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        call(tensors)
        original(tensors, *args, **kwargs)

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = original


# --- the text -----------------------------------------------------------------------------------


def _table(found: dict[str, Observed]) -> str:
    """A column for each run: its losses, then its counts."""
    longest = max(len(one.losses) for one in found.values())
    runs = list(found.values())
    rows = [
        ["", *found],
        *([f"loss {k + 1}", *(_loss(one, k) for one in runs)] for k in range(longest)),
        *(
            [row, *(str(one.counts.get(row, "-")) for one in runs)]
            for row in (*_COUNTED, _FALLBACKS)
        ),
    ]
    return "\n".join("".join(f"{cell:<14}" for cell in row).rstrip() for row in rows)


def _loss(one: Observed, k: int) -> str:
    return f"{one.losses[k]:.6g}" if k < len(one.losses) else "-"


def _difference(expected: Sequence[float], found: Sequence[float]) -> float:
    """The largest relative one; infinite where one of them has more, or is no number alone."""
    if len(expected) != len(found):
        return float("inf")
    return max((_relative(a, b) for a, b in zip(expected, found)), default=0.0)


def _relative(expected: float, found: float) -> float:
    if expected == found or (expected != expected and found != found):
        return 0.0
    difference = abs(expected - found) / max(abs(expected), 1e-6)
    return difference if difference == difference else float("inf")


def _verdict(difference: float, any_losses: bool) -> str:
    if not any_losses:
        return "The script makes no backward pass, so there is nothing to compare."
    if difference <= TOLERANCE:
        return f"1 rank agrees with eager: the losses differ by at most {difference:.1e}."
    return (
        f"1 rank disagrees with eager: the losses differ by up to {difference:.1e}. If the script seeds all "
        "its random numbers, run it with LTC_VERIFY=1, and report the difference."
    )
