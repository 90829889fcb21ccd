"""Nine things that make programs slow, each reported with the line and the cure if a trace shows it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ltc.profiling.analysis.steady_steps import SteadySteps, Trace, steady_steps
from ltc.profiling.analysis.verdict import MANY_STEPS, most_frequent

MANY_SHAPES = 4  # at one line: one more than the tail of an epoch and an evaluation bring
_PAD = "pad to a few fixed lengths, drop_last=True, or sort the data by length"
_MANY_READS = 10  # of a run that marks no steps
_MUCH_SWAPPED = 64 << 20  # bytes
_MANY_FAULTS = 1000  # pages of the process that were read from a disk


@dataclass(frozen=True)
class Hindrance:
    """name: a word or two; sentence: the observation; cure: the remedy; line: the user's, or ""."""

    name: str
    sentence: str
    cure: str
    line: str = ""

    def __str__(self) -> str:
        at = f", at {self.line}" if self.line else ""
        return f"{self.name}: {self.sentence}{at}"


def hindrances(trace: Trace) -> list[Hindrance]:
    """Return the hindrances that the steady steps of the first rank show."""
    steady = steady_steps(trace)
    return [found for detect in _DETECTORS for found in detect(steady)]


def _recording_bound(steady: SteadySteps) -> Iterator[Hindrance]:
    share = steady.parts["recording"]
    if steady.steps and share >= 0.5 and share >= steady.device_share:
        yield Hindrance(
            "recording-bound",
            f"{100 * share:.0f} % of a step is Python",
            "ltc.compile of the step function replays it without its Python; use foreach and fused "
            "optimizers, larger batches",
        )


def _input_bound(steady: SteadySteps) -> Iterator[Hindrance]:
    share = steady.parts["input"]
    if steady.steps and share >= MANY_STEPS and share >= max(steady.parts.values()):
        yield Hindrance(
            "input pipeline",
            f"{100 * share:.0f} % of a step waits for the DataLoader",
            "DataLoader(num_workers=..., persistent_workers=True); make each sample cheaper, or keep the "
            "prepared data in memory",
        )


def _never_marked(steady: SteadySteps) -> Iterator[Hindrance]:
    counters = steady.process.get("counters") or {}
    told = [one for one in steady.trace["ltc"]["explanations"] if one["reason"] == "unmarked"]
    implied, trimmed = counters.get("ImpliedMark", 0), counters.get("TrimIrGraph", 0)
    if implied or trimmed or told:
        yield Hindrance(
            "never-marked loop",
            f"the loop has no step mark: ltc has cut it {_times(implied + trimmed or len(told))}",
            "call ltm.mark_step() once per step, after optimizer.step()",
            told[-1]["line"] if told else "",
        )


def _reads(steady: SteadySteps) -> Iterator[Hindrance]:
    eager = {
        one["line"] for one in steady.explanations("fallbacks")
    }  # they read, and are told below
    reads: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in steady.trace["ltc"]["explanations"]:
        is_read = one["kind"] == "cuts" and one["reason"] == "read" and one["pid"] == steady.pid
        if is_read and one["line"] not in eager:
            reads[one["line"]].append(one)
    for line, found in sorted(reads.items(), key=lambda item: -len(item[1])):
        within = [one for one in found if steady.begin <= one["ts"] <= steady.end]
        behind = [one for one in found if one["ts"] > steady.end or not steady.steps]
        if steady.steps and steady.steps_with(within) >= MANY_STEPS:
            often = f"before the mark {_times(len(within))} in {len(steady.steps)} steps"
        elif len(behind) >= _MANY_READS:
            often = f"{_times(len(behind))} in a loop without step marks"
        else:
            continue
        yield Hindrance("a read in a loop", f"a value was read {often}", found[-1]["cure"], line)


def _shapes(steady: SteadySteps) -> Iterator[Hindrance]:
    at: defaultdict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for one in steady.trace["ltc"]["explanations"]:
        if one["reason"] == "shape" and one["pid"] == steady.pid:
            at[one["line"]].setdefault(one["difference"], one)
    for line, differences in at.items():
        if len(differences) >= MANY_SHAPES:
            latest = list(differences)[-1]
            yield Hindrance(
                "a growing set of shapes",
                f"{len(differences)} kinds so far; the latest: {latest}",
                _PAD,
                line,
            )
    yield from _sizes_of_a_path(steady)


def _sizes_of_a_path(steady: SteadySteps) -> Iterator[Hindrance]:
    counters = steady.process.get("counters") or {}
    sizes = counters.get("SymbolicSizes", 0)
    told = [one for one in steady.trace["ltc"]["explanations"] if one["reason"] == "symbolic"]
    lines = [one["line"] for one in told if one["pid"] == steady.pid]
    if lines and sizes >= MANY_SHAPES:
        yield Hindrance(
            "a growing set of shapes",
            f"{sizes} kinds so far, on one path with symbolic sizes",
            "no action is needed: this path is symbolic; or pad to a few lengths, which get programs of their own",
            lines[-1],
        )


def _fallbacks(steady: SteadySteps) -> Iterator[Hindrance]:
    eager = steady.explanations("fallbacks")
    if _is_frequent(steady, eager, _MANY_READS):
        yield Hindrance(
            "an eager call in the hot path",
            f"{most_frequent(eager)['what']}, {_times(len(eager))}{_in_steps(steady)}",
            "use fixed shapes, which stay in the program: multiply by the mask, torch.where, topk",
            most_frequent(eager)["line"],
        )


def _in_steps(steady: SteadySteps) -> str:
    return f" in {len(steady.steps)} steps" if steady.steps else ""


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
            f"{_counted(ranks, 'process', 'es')} with {_counted(threads, 'thread')} each share "
            f"{_counted(cores, 'core')}",
            f"OMP_NUM_THREADS={max(1, cores // ranks)}",
        )
    if threads * ranks * 2 <= cores and steady.device_share >= MANY_STEPS:
        yield Hindrance(
            "too few threads",
            f"{_counted(ranks, 'process', 'es')} with {_counted(threads, 'thread')} each, on "
            f"{_counted(cores, 'core')}",
            f"OMP_NUM_THREADS={cores // ranks}, and no torch.set_num_threads",
        )


def _swap(steady: SteadySteps) -> Iterator[Hindrance]:
    machine = steady.process.get("machine") or {}
    swapped, faults = machine.get("swapped_bytes", 0), machine.get("major_faults", 0)
    if swapped >= _MUCH_SWAPPED and faults >= _MANY_FAULTS:
        yield Hindrance(
            "swap",
            f"{swapped >> 20} MiB of the process are on disk, {faults} pages were read back",
            "smaller batches, LTC_MAX_IN_FLIGHT=1, fewer loader workers, or more memory",
        )


_DETECTORS = (
    _input_bound,
    _never_marked,
    _reads,
    _shapes,
    _fallbacks,
    _threads,
    _swap,
    _recording_bound,
)


def _counted(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural * (number != 1)}"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
