"""LTC_AUTOTUNE=1: the ways to compute a product take turns once, and the quickest is remembered.

All ways that are tried have the same bits, so that a choice is a matter of time alone: one that is
lost, damaged or made on a busy machine makes no result differ.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from ltc.debug import metrics
from ltc.llvm.compiler import llvm_binding
from ltc.llvm.gemm.timing import quickest
from ltc.llvm.native import runner
from ltc.support.bounded_table import BoundedTable
from ltc.support.disk_cache import disk_cache

Way = TypeVar("Way", bound=Hashable)
_KIND = "choice"  # tells these entries from machine code
# The repr of the way, by name; of this process.
_chosen: BoundedTable[str, str] = BoundedTable("TunedProducts", 4096)


def choose(what: str, ways: Sequence[Way], trial: Callable[[Way], Callable[[], object]]) -> Way:
    """The way that was the quickest when it was first asked for, by this or another process.

    what   everything that the time depends on, but for the machine and the number of threads
    ways   that may be chosen, told apart by their repr; the first is the usual one
    trial  what to run, to time a way
    """
    name = llvm_binding.name_of(f"{_KIND}\0{what}\0{runner.thread_count()}")
    by_text = {repr(way): way for way in ways}
    text = _chosen.get(name) or _kept(name)
    if text not in by_text:
        metrics.count("llvm.tuned")
        text = repr(quickest({way: trial(way) for way in ways})) if len(ways) > 1 else repr(ways[0])
        _keep(name, text)
    if _chosen.keep(name, text) != text:
        _chosen[name] = text  # what is on disk now, was chosen anew
    return by_text[text]


def _kept(name: str) -> str | None:
    """What an earlier process chose; None where that can not be read."""
    disk = disk_cache()
    return disk.read_as(name, lambda data: str(json.loads(data)["choice"])) if disk else None


def _keep(name: str, text: str) -> None:
    disk = disk_cache()
    if disk is not None:
        disk.write(name, json.dumps({"choice": text}).encode())
