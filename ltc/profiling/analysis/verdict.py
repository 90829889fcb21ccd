"""The bound of a run, in one sentence."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

from ltc.profiling.analysis.costs import by_kernel, kernels
from ltc.profiling.analysis.steady_steps import SteadySteps, Trace, steady_steps

# From here on a share is what is to be told first. Two thirds of "most of the time" is a third.
MANY_STEPS = 0.4  # of the steps: a program that comes this often is made "again and again"
_HEAVY = 0.3  # of the time
_EXPECTED = re.compile(r"^expected (.+?), got (.+)")
_MANY_READS = 10  # of a run that marks no steps
_NEAR_A_LIMIT = 0.4  # of what the machine does at most, weighed by time


@dataclass(frozen=True)
class Verdict:
    """kind: a word, such as "recording-bound"; sentence: with its figures, for a reader; line: to look at.

    What is no full sentence begins with a small letter, and none ends with a full stop.
    """

    kind: str
    sentence: str
    line: str = ""


def verdict(trace: Trace) -> Verdict:
    """Return the bound of the steps behind the first few."""
    steady = steady_steps(trace)
    for ask in (
        _nothing,
        _recompiles,
        _peers,
        _transfers,
        _input,
        _recording,
        _reads,
        _uncompiled,
        _device,
    ):
        found = ask(steady)
        if found is not None:
            return found
    return _balanced(steady)


def _nothing(steady: SteadySteps) -> Verdict | None:
    if steady.steps or any(program["launches"] for program in steady.trace["ltc"]["programs"]):
        return None
    return Verdict("idle", "nothing ran: no step was marked, and no program launched")


def _recompiles(steady: SteadySteps) -> Verdict | None:
    made = steady.explanations("recompiles", "tiers", "compiles")
    new = [one for one in made if one["reason"] not in ("repeated", "paid")]
    share, often = steady.share("compile"), _frequency(steady, new)
    if new and often >= MANY_STEPS:
        cause = most_frequent(new)
        how = "every step" if often > 0.9 else f"in {_percent(often)} of the steps"
        verb = "runs op by op" if cause["kind"] == "tiers" else "compiles again"
        return Verdict("recompiling", f"{verb} {how} because {_because(cause)}", cause["line"])
    compiling = [step for step in steady.steps if step.get("compile_us")]
    if share >= _HEAVY and len(compiling) > 1:
        text = f"compile-bound: {_percent(share)} of a step is compiling"
        return Verdict("compile-bound", text, most_frequent(made)["line"] if made else "")
    return None


def _frequency(steady: SteadySteps, new: list[dict[str, Any]]) -> float:
    """Return the share of the steps, or of the recordings of a run without steps, that were new."""
    if steady.steps:
        return steady.steps_with(new)
    counters = steady.process.get("counters") or {}
    names = ("UncachedCompile", "CachedCompile", "ImmediateSteps")
    return len(new) / max(sum(counters.get(name, 0) for name in names), len(new), _MANY_READS)


def most_frequent(explanations: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the explanation of the most frequent line and reason; of these the latest."""
    (where, _), *_ = Counter((one["line"], one["reason"]) for one in explanations).most_common(1)
    return [one for one in explanations if (one["line"], one["reason"]) == where][-1]


def _because(explanation: dict[str, Any]) -> str:
    """Turn "expected A, got B: C" into "ltc expected A and got B: C"."""
    told = explanation["difference"]
    return _EXPECTED.sub(r"ltc expected \1 and got \2", told)


def _peers(steady: SteadySteps) -> Verdict | None:
    share = steady.peers_share
    if share < _HEAVY:
        return None
    text = f"waiting for other ranks: collectives take {_percent(share)} of a step"
    late = latest_rank(steady.trace)
    return Verdict("peers-bound", text if late is None else f"{text}; {late}")


def latest_rank(trace: Trace) -> str | None:
    """Return the rank that the others wait for, in words; None if none stands out."""
    found = trace["ltc"]["collectives"]
    late = Counter(one["waited_for"] for one in found if one.get("waited_for") is not None)
    if late:
        (rank, times), *_ = late.most_common(1)
        return f"rank {rank} was the last to arrive in {times} of {late.total()}"
    spent = waits_of_ranks(trace)
    least = min(spent, key=lambda rank: spent[rank], default=None)
    if least is None or len(spent) < 2 or spent[least] * 2 > max(spent.values()):
        return None
    return f"rank {least} is the last to arrive: it waits least"


def waits_of_ranks(trace: Trace) -> dict[int, float]:
    """Microseconds that each rank has spent in collectives of the steady steps."""
    steady = steady_steps(trace)
    ranks = {one["pid"]: one.get("rank") or 0 for one in trace["ltc"]["processes"]}
    spent: defaultdict[int, float] = defaultdict(float, dict.fromkeys(ranks.values(), 0.0))
    for one in trace["ltc"]["collectives"]:
        if steady.begin <= one["ts"] <= steady.end:
            spent[ranks.get(one["pid"], 0)] += one["dur"]
    return dict(spent)


def _transfers(steady: SteadySteps) -> Verdict | None:
    share = steady.transfer_share
    if share < _HEAVY or share < steady.device_share:
        return None
    return Verdict(
        "transfer-bound",
        f"transfer-bound: {_percent(share)} of a step is copies to and from the device",
    )


def _input(steady: SteadySteps) -> Verdict | None:
    share = steady.parts["input"]
    if share < _HEAVY or share < max(steady.parts.values()):
        return None
    return Verdict("input-bound", f"input-bound: {_percent(share)} of a step waits for its batch")


def _recording(steady: SteadySteps) -> Verdict | None:
    share = steady.parts["recording"]
    if share < 0.5 or share < steady.device_share:
        return None
    text = f"recording-bound: {_percent(share)} of a step is Python"
    return Verdict("recording-bound", text)


def _reads(steady: SteadySteps) -> Verdict | None:
    cuts = [one for one in steady.explanations("cuts") if one["reason"] == "read"]
    if not steady.steps and len(cuts) >= _MANY_READS:
        text = (
            f"no step is marked: {len(cuts)} reads end the recordings, and each waits for its value"
        )
        return Verdict("read-bound", text, most_frequent(cuts)["line"])
    if not cuts or steady.steps_with(cuts) < MANY_STEPS or steady.share("wait") < _HEAVY:
        return None
    cause = most_frequent(cuts)
    text = (
        f"waiting for values: reads before the mark take {_percent(steady.share('wait'))} of a step"
    )
    return Verdict("read-bound", text, cause["line"])


def _uncompiled(steady: SteadySteps) -> Verdict | None:
    spent = Counter[str]()
    for kernel in kernels(steady.trace):
        spent[kernel["tier"]] += kernel["seconds"]
    share = 1 - spent["native"] / (spent.total() or 1.0)
    if steady.device_share < _HEAVY or share < 0.5 or not spent:
        return None
    text = f"not compiled: {_percent(share)} of the kernels' time is in PyTorch's own kernels"
    return Verdict("uncompiled", text, next(iter(by_kernel(steady.trace)[0].lines), ""))


def _device(steady: SteadySteps) -> Verdict | None:
    if steady.device_share < max(_HEAVY, steady.parts["recording"]):
        return None
    costs = by_kernel(steady.trace)
    total = sum(cost.seconds for cost in costs)
    if not total:
        text = f"execution-bound: programs run {_percent(steady.device_share)} of the time"
        return Verdict("execution-bound", text)
    copy, multiply = limits_reached(steady.trace)
    top = costs[0]
    line = next(iter(top.lines), "")
    if copy >= max(_NEAR_A_LIMIT, multiply):
        return Verdict("memory-bound", f"memory-bound at {_percent(copy)} of the copy limit", line)
    if multiply >= _NEAR_A_LIMIT:
        text = f"compute-bound at {_percent(multiply)} of the multiply-add limit"
        return Verdict("compute-bound", text, line)
    text = (
        f"execution-bound: kernels run {_percent(steady.device_share)} of the time, far from the "
        f"machine's limits; {_percent(top.seconds / total)} of it in {top.words.partition(', then')[0]}"
    )
    return Verdict("execution-bound", text, line)


def limits_reached(trace: Trace) -> tuple[float, float]:
    """Return the shares of the machine's copies and products that compiled kernels reach: by time.

    Data from the caches are not copied: no kernel counts for more than the limit.
    """
    known = [
        (kernel["seconds"], kernel.get("copy_share"), kernel.get("fma_share"))
        for kernel in kernels(trace)
        if kernel["tier"] == "native"
    ]
    seconds = sum(row[0] for row in known)
    if not seconds:
        return 0.0, 0.0
    copy = sum(time * min(share or 0.0, 1.0) for time, share, _ in known) / seconds
    multiply = sum(time * min(share or 0.0, 1.0) for time, _, share in known) / seconds
    return copy, multiply


def _balanced(steady: SteadySteps) -> Verdict:
    parts = sorted(steady.parts.items(), key=lambda one: -one[1])
    told = ", ".join(f"{_percent(share)} {name}" for name, share in parts if share > 0.01)
    return Verdict("balanced", f"nothing stands out: {told}" if told else "nothing stands out")


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
