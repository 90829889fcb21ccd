"""Eight things that make programs slow, each told where a trace shows it, with the line and the cure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

from ltc.explaining.explanation import TIERS
from ltc.profiling.analysis.steady_steps import SteadySteps, Trace, steady_steps
from ltc.profiling.analysis.verdict import MANY_STEPS, most_frequent

MANY_SHAPES = 4  # at one line: one more than the tail of an epoch and an evaluation bring
_PAD = "pad to a few fixed lengths, drop_last=True, or sort the data by length"
_MANY_READS = 10  # of a run that marks no steps
_MUCH_SWAPPED = 64 << 20  # bytes
_MANY_FAULTS = 1000  # pages of the process that were read from a disk


@dataclass(frozen=True)
class Hindrance:
    """name: a word or two; sentence: what was seen; cure: what to do; line: of the user's, or ""."""

    name: str
    sentence: str
    cure: str
    line: str = ""

    def __str__(self) -> str:
        at = f", at {self.line}" if self.line else ""
        return f"{self.name}: {self.sentence}{at}"


def hindrances(trace: Trace) -> list[Hindrance]:
    """Those that the steady steps of the first rank show."""
    steady = steady_steps(trace)
    return [found for detect in _DETECTORS for found in detect(steady)]


def _recording_bound(steady: SteadySteps) -> Iterator[Hindrance]:
    share = steady.share("record")
    if steady.steps and share >= 0.5 and share >= steady.device_share:
        yield Hindrance(
            "recording-bound",
            f"{100 * share:.0f} % of a step is Python",
            "ltc.compile of the step function replays it without its Python; foreach and fused "
            "optimizers, larger batches",
        )


def _never_marked(steady: SteadySteps) -> Iterator[Hindrance]:
    counters = steady.process.get("counters") or {}
    told = [one for one in steady.trace["ltc"]["explanations"] if one["reason"] == "unmarked"]
    implied, trimmed = counters.get("ImpliedMark", 0), counters.get("TrimIrGraph", 0)
    if implied or trimmed or told:
        yield Hindrance(
            "never-marked loop",
            f"nobody marks its steps: ltc has cut it {_times(implied + trimmed or len(told))}",
            "ltm.mark_step() once per step, behind optimizer.step()",
            told[-1]["line"] if told else "",
        )


def _reads(steady: SteadySteps) -> Iterator[Hindrance]:
    eager = {
        one["line"] for one in steady.explanations("fallbacks")
    }  # they read, and are told below
    cuts = [one for one in steady.explanations("cuts") if one["reason"] == "read"]
    reads = [one for one in cuts if one["line"] not in eager]
    if _is_frequent(steady, reads, _MANY_READS):
        yield Hindrance(
            "a read in a loop",
            f"{_times(len(reads))} in {len(steady.steps)} steps a value was read before the mark",
            "read every hundredth step, behind the mark or in a step closure; torch.where in place of if",
            most_frequent(reads)["line"],
        )


def _shapes(steady: SteadySteps) -> Iterator[Hindrance]:
    at: defaultdict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for one in steady.trace["ltc"]["explanations"]:
        if one["reason"] == "shape" and one["pid"] == steady.pid:
            at[one["line"]].setdefault(one["difference"], one)
    named: set[str] = set()
    for line, differences in at.items():
        if len(differences) >= MANY_SHAPES:
            named.add(line)
            latest = list(differences)[-1]
            yield Hindrance(
                "a growing set of shapes",
                f"{len(differences)} kinds so far; the latest: {latest}",
                _PAD,
                line,
            )
    yield from _op_by_op_for_shapes(steady, named)
    yield from _sizes_of_a_path(steady)


def _op_by_op_for_shapes(steady: SteadySteps, told: Container[str]) -> Iterator[Hindrance]:
    """Of these one explanation is made for each line, and counted from then on."""
    times: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in steady.trace["ltc"]["explanations"]:
        if (one["kind"], one["reason"], one["pid"]) == (TIERS, "shape", steady.pid):
            times[one["line"]].append(one)
    for line, events in times.items():
        if len(events) >= MANY_SHAPES and line not in told:
            yield Hindrance(
                "a growing set of shapes",
                f"{_times(len(events))} a step ran op by op, at shapes that were new; "
                f"the first: {events[0]['difference']}",
                _PAD,
                line,
            )


def _sizes_of_a_path(steady: SteadySteps) -> Iterator[Hindrance]:
    counters = steady.process.get("counters") or {}
    sizes = counters.get("SymbolicSizes", 0) + counters.get("InterpretedSizes", 0)
    told = [one for one in steady.trace["ltc"]["explanations"] if one["reason"] == "symbolic"]
    lines = [one["line"] for one in told if one["pid"] == steady.pid]
    if lines and sizes >= MANY_SHAPES:
        yield Hindrance(
            "a growing set of shapes",
            f"{sizes} kinds so far, of one path whose sizes are symbols",
            "leave it: this path became symbolic; or pad to a few lengths, which have programs of their own",
            lines[-1],
        )


def _fallbacks(steady: SteadySteps) -> Iterator[Hindrance]:
    eager = steady.explanations("fallbacks")
    if _is_frequent(steady, eager, _MANY_READS):
        yield Hindrance(
            "an eager call in the hot path",
            f"{most_frequent(eager)['what']}, {_times(len(eager))} in {len(steady.steps)} steps",
            "fixed shapes stay in the program: a mask that is multiplied, torch.where, topk",
            most_frequent(eager)["line"],
        )


def _is_frequent(steady: SteadySteps, events: list[dict[str, Any]], without_steps: int) -> bool:
    if not steady.steps:
        return len(events) >= without_steps
    return bool(events) and steady.steps_with(events) >= MANY_STEPS


def _threads(steady: SteadySteps) -> Iterator[Hindrance]:
    machine, threads = steady.process.get("machine") or {}, steady.process["threads"]
    cores, ranks = machine.get("cores"), machine.get("processes", 1)
    if not cores:
        return
    if threads * ranks > cores:
        yield Hindrance(
            "too many threads",
            f"{ranks} process(es) of {threads} threads share {cores} cores",
            f"OMP_NUM_THREADS={max(1, cores // ranks)}",
        )
    if threads * ranks * 2 <= cores and steady.device_share >= MANY_STEPS:
        yield Hindrance(
            "too few threads",
            f"{ranks} process(es) of {threads} threads have {cores} cores to themselves",
            f"OMP_NUM_THREADS={cores // ranks}, or no torch.set_num_threads at all",
        )


def _swap(steady: SteadySteps) -> Iterator[Hindrance]:
    machine = steady.process.get("machine") or {}
    swapped, faults = machine.get("swapped_bytes", 0), machine.get("major_faults", 0)
    if swapped >= _MUCH_SWAPPED and faults >= _MANY_FAULTS:
        yield Hindrance(
            "swap",
            f"{swapped >> 20} MiB of the process are on disk, {faults} pages were read back",
            "smaller batches, LTC_MAX_IN_FLIGHT=1, fewer workers of loaders, or more memory",
        )


_DETECTORS = (_never_marked, _reads, _shapes, _fallbacks, _threads, _swap, _recording_bound)


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
