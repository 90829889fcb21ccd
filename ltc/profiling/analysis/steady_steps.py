"""The steps of a trace that are like those to come, and where their time went."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

FIRST_STEPS = 3  # that record and compile what later ones find
Trace = dict[str, Any]
PARTS = {  # of a step, by the categories of their spans: what comes first hides the others
    "peers": ("collective",),
    "running": ("launch", "kernel"),
    "compiling": ("compile",),
    "input": ("user",),
    "copying": ("upload", "download"),
    "waiting": ("wait",),
    "recording": ("record",),
}


def is_of_loader(event: dict[str, Any]) -> bool:
    """Return True if a span is a batch that torch's DataLoader makes or waits for."""
    return str(event["name"]).startswith("enumerate(DataLoader)")


@dataclass(frozen=True)
class SteadySteps:
    """One process's steps behind the first few; all of them where there are no more.

    Attributes:
        process: Its record in the trace.
        steps: The records of these steps, in order.
        trace: The whole.
    """

    process: dict[str, Any]
    steps: list[dict[str, Any]]
    trace: Trace

    @property
    def pid(self) -> int:
        return int(self.process["pid"])

    @property
    def begin(self) -> float:
        """Microseconds from the trace's begin; so is `end`."""
        return float(self.steps[0]["begin_us"]) if self.steps else 0.0

    @property
    def end(self) -> float:
        return float(self.steps[-1]["end_us"]) if self.steps else float(self.process["end_us"] or 0)

    @cached_property
    def total_us(self) -> float:
        """Return how long they took; without steps, the whole run's time."""
        return sum(map(duration, self.steps)) or max(self.end - self.begin, 1e-9)

    @cached_property
    def median_us(self) -> float:
        """A step in the middle of them, by how long it took."""
        return median(map(duration, self.steps)) if self.steps else self.total_us

    def share(self, part: str) -> float:
        """Return the share of "record", "compile", "wait" or "execute" in their time."""
        return sum(float(step.get(f"{part}_us") or 0) for step in self.steps) / self.total_us

    @cached_property
    def device_share(self) -> float:
        """Return the share of programs, in any thread, in their time."""
        return self.parts["running"]

    @cached_property
    def parts(self) -> dict[str, float]:
        """Return the share of each part of their time; together they are at most 1.

        What goes on at the same time counts once, for the first part that has it: a program that runs
        in another thread hides the recording of the next step.
        """
        found, before, spans = {}, 0.0, list[tuple[float, float]]()
        for name in PARTS:
            spans += self._spans_of_part(name)
            covered = min(_covered(spans) / self.total_us, 1.0)
            found[name], before = covered - before, covered
        return found

    def _spans_of_part(self, name: str) -> list[tuple[float, float]]:
        if name in ("peers", "running"):  # in whichever thread
            return self._spans(*PARTS[name])
        tid = self.steps[0]["tid"] if self.steps else None
        return [
            (max(e["ts"], self.begin), min(e["ts"] + e["dur"], self.end))
            for e in self.events(*PARTS[name])
            if "dur" in e
            and tid in (None, e["tid"], e["tid"] + 1)  # the lane above it has the step's parts
            and (name != "input" or is_of_loader(e))
        ]

    @cached_property
    def peers_share(self) -> float:
        """Return the share of collectives in their time."""
        return self.parts["peers"]

    @cached_property
    def transfer_share(self) -> float:
        """Return the share of copies to and from the device in their time."""
        return min(1.0, _covered(self._spans("upload", "download")) / self.total_us)

    def events(self, *categories: str) -> list[dict[str, Any]]:
        """Spans and instants of this process in these steps."""
        return [
            event
            for event in self.trace["traceEvents"]
            if event.get("cat") in categories
            and event["pid"] == self.pid
            and self.begin <= event["ts"] <= self.end
        ]

    def _spans(self, *categories: str) -> list[tuple[float, float]]:
        return [(e["ts"], e["ts"] + e["dur"]) for e in self.events(*categories) if "dur" in e]

    def explanations(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the explanations of this process in these steps."""
        return [
            one
            for one in self.trace["ltc"]["explanations"]
            if one["kind"] in kinds
            and one["pid"] == self.pid
            and self.begin <= one["ts"] <= self.end
        ]

    def steps_with(self, events: Iterable[dict[str, Any]]) -> float:
        """In which part of the steps one of these has happened: 1.0 is each."""
        moments = sorted(event["ts"] for event in events)
        hit = sum(_any_between(moments, s["begin_us"], s["end_us"]) for s in self.steps)
        return hit / len(self.steps) if self.steps else float(bool(moments))


def steady_steps(trace: Trace) -> SteadySteps:
    """Return the steady steps of the first rank, in the thread that marked most of them.

    The first few are left out, and of the first half all up to the last that compiled.
    """
    process = main_process(trace)
    mine = [step for step in trace["ltc"]["steps"] if step["pid"] == process["pid"]]
    lanes = [step["tid"] for step in mine]
    steps = [step for step in mine if step["tid"] == max(lanes, key=lanes.count)]
    steps.sort(key=lambda step: step["begin_us"])
    first_half = steps[: len(steps) // 2]
    compiled = [number for number, step in enumerate(first_half, 1) if step.get("compile_us")]
    begin = max([min(FIRST_STEPS, len(first_half)), *compiled])
    return SteadySteps(process, steps[begin:], trace)


def main_process(trace: Trace) -> dict[str, Any]:
    """The record of the first rank."""
    processes = trace["ltc"]["processes"]
    if not processes:
        raise ValueError("This trace has no process: ltc.profile has not written it.")
    return min(processes, key=lambda one: (one.get("rank") or 0, one["pid"]))


def duration(step: dict[str, Any]) -> float:
    """Microseconds from its begin to its end."""
    return float(step["end_us"]) - float(step["begin_us"])


def _covered(spans: list[tuple[float, float]]) -> float:
    """Return how long at least one of the spans was open."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def _any_between(moments: list[float], begin: float, end: float) -> bool:
    return any(begin <= moment <= end for moment in moments)
