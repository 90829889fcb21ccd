"""A timeline as the file has it: see the docstring of ltc/profiling for the format."""

from __future__ import annotations

import platform
import resource
import socket
import sys
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from ltc import config
from ltc.backends.capabilities import KernelFacts
from ltc.explaining.explanation import Explanation
from ltc.profiling.analysis.kernel_parts import groups_of_parts, joined_parts
from ltc.profiling.holders import holders_of
from ltc.support.observation.spans import LaunchRecord, Timeline
from ltc.support.process import processors
from ltc.support.version import VERSION

FORMAT = 1
UNKNOWN = KernelFacts("kernel")
Event = dict[str, Any]


class TraceWriter:
    """The report of one process on the time from `begin` to `end`.

    Attributes:
        trace: The whole, ready for json.dump.
    """

    def __init__(
        self,
        timeline: Timeline,
        begin: int,
        end: int,
        limits: Mapping[str, float] | None,
        explanations: Sequence[tuple[int, int, Explanation]] = (),
        names: Mapping[int, tuple[str, Any]] | None = None,
        counters: Mapping[str, float] | None = None,
        modules: Mapping[str, str] | None = None,
    ) -> None:
        """Make the report.

        Args:
            limits: copy_bytes_per_s and fma_per_s of this machine, if they are known.
            explanations: (when, in which thread, what).
            names: For each buffer, by its identity: its holder, and its type.
            counters: Their growth.
            modules: The class of each module, by its path.
        """
        self._timeline, self._begin, self._end = timeline, begin, end
        self._limits, self._names = limits, names or {}
        self._explained, self._counters = explanations, dict(counters or {})
        self._modules = dict(modules or {})
        self._pid = timeline.process
        self._lanes: dict[int, int] = {}
        self._sums = 0  # sums among replicas that kernels have waited for
        self._ids: dict[int, str] = {}  # of programs
        self._in_parts: set[int] = set()  # records of kernels that are one of several parts
        self._programs: dict[str, dict[str, Any]] = {}
        self._events: list[Event] = []
        self._busy: dict[int, list[tuple[str, int, int]]] = defaultdict(list)

    def trace(self) -> dict[str, Any]:
        """The whole file as JSON has it."""
        for _, thread, *_ in self._timeline.steps:  # whoever marks steps comes first
            self._lane(thread)
        for launch in self._within(self._timeline.launches, lambda one: one.begin):
            self._add_launch(launch)
        self._add_calls()
        self._add_events()
        steps = self._add_steps()
        self._add_memory()
        explanations = self._add_explanations()
        for program in self._programs.values():
            for parts in groups_of_parts(program["kernels"]):
                whole = joined_parts(parts)
                seconds = whole["seconds"] / max(whole["launches"], 1)
                for kernel in parts:
                    kernel |= _NO_SHARES | self._shares(whole, seconds)
        self._raise_limit()
        named = self._named_lanes()
        return {
            "traceEvents": named + sorted(self._events, key=lambda event: event["ts"]),
            "displayTimeUnit": "ms",
            "ltc": {
                "version": FORMAT,
                "processes": [self._process()],
                "programs": list(self._programs.values()),
                "steps": steps,
                "memory": self._peaks(),
                "explanations": explanations,
                "collectives": self._collectives(),
            },
        }

    def _within(self, found: Iterable[Any], moment: Any) -> list[Any]:
        return [one for one in found if self._begin <= moment(one) <= self._end]

    def _us(self, nanoseconds: int) -> float:
        return round((nanoseconds - self._begin) / 1e3, 3)

    def _lane(self, thread: int) -> int:
        """The lane of a thread; that before it is for its steps."""
        return self._lanes.setdefault(thread, 2 * len(self._lanes) + 2)

    def _span(
        self, category: str, name: str, lane: int, begin: int, end: int, args: Mapping[str, Any]
    ) -> Event:
        event: Event = {
            "ph": "X", "cat": category, "name": name, "pid": self._pid, "tid": lane,
            "ts": self._us(begin), "dur": round((end - begin) / 1e3, 3), "args": dict(args),
        }  # fmt: skip
        if "started_ns" in args:
            event["args"]["started_us"] = self._us(event["args"].pop("started_ns"))
        self._events.append(event)
        return event

    # --- launches and their kernels

    def _add_launch(self, launch: LaunchRecord) -> None:
        thread = launch.thread
        assert thread is not None
        program, lane = self._program(launch), self._lane(thread)
        name = program["id"]
        program["launches"] += 1
        program["seconds"] += (launch.end - launch.begin) / 1e9
        args = {"program": name, "tier": launch.tier, "step": launch.step, "inline": launch.inline}
        title = f"launch of {program['calls']} calls"
        self._span("launch", title, lane, launch.begin, launch.end, args)
        self._busy[thread].append(("launch", launch.begin, launch.end))
        timed = launch.computation
        times = timed.times(launch.stamps) if timed is not None and launch.stamps else ()
        begun: deque[int] = deque()  # sums among replicas that nobody has waited for yet
        for kernel, (begin, end) in zip(program["kernels"], times):
            event = self._add_kernel(program, kernel, lane, begin, end, launch.step)
            if kernel["name"].startswith("collective_start"):
                begun.append(begin)
            elif kernel["name"].startswith("collective_wait") and begun:
                self._note_sum(event, begun.popleft())

    def _program(self, launch: LaunchRecord) -> dict[str, Any]:
        key = id(launch.computation or launch.program)
        if key not in self._ids:
            self._ids[key] = name = f"{self._pid}:{len(self._ids)}"
            program, timed = launch.program, launch.computation
            facts = None
            if timed is not None:
                facts = timed.kernels(program.graph_of, program.donated)
                count = len(list(timed.times(launch.stamps))) if launch.stamps else 0
                facts = [UNKNOWN] * count if facts is None else facts
            why = getattr(program, "why", None)
            self._programs[name] = {
                "id": name, "pid": self._pid, "tier": launch.tier, "calls": program.calls,
                "launches": 0, "seconds": 0.0, "why": None if why is None else str(why),
                "block_bytes": getattr(timed, "block_bytes", None),
                "kernels": [_kernel_record(*one) for one in enumerate(facts or ())],
            }  # fmt: skip
            groups = groups_of_parts(self._programs[name]["kernels"])
            self._in_parts |= {id(one) for parts in groups if len(parts) > 1 for one in parts}
        return self._programs[self._ids[key]]

    def _add_kernel(
        self,
        program: dict[str, Any],
        kernel: dict[str, Any],
        lane: int,
        begin: int,
        end: int,
        step: int,
    ) -> Event:
        kernel["launches"] += 1
        kernel["seconds"] += (end - begin) / 1e9
        args = {"program": program["id"], "kernel": kernel["number"], "step": step}
        args |= {key: kernel[key] for key in _SHOWN if kernel[key]}
        if id(kernel) not in self._in_parts:  # of a part alone they say nothing
            args |= self._shares(kernel, (end - begin) / 1e9)
        return self._span("kernel", kernel["name"], lane, begin, end, args)

    def _note_sum(self, event: Event, started: int) -> None:
        """A kernel that waits for the operands of others, of a sum that began at `started`."""
        sums = {"kind": "one_shot_sum", "channel": "", "number": self._sums}
        event["args"] |= sums | {"started_us": self._us(started)}
        self._sums += 1

    def _shares(self, kernel: Mapping[str, Any], seconds: float) -> dict[str, float]:
        """Return the kernel's shares of this machine's limits."""
        limits = self._limits
        if limits is None or seconds <= 0:
            return {}
        moved = kernel["read_bytes"] + kernel["written_bytes"]
        multiplied = kernel["multiply_adds"] * (2 if kernel["is_double"] else 1)
        return {
            "copy_share": round(moved / seconds / limits["copy_bytes_per_s"], 4),
            "fma_share": round(multiplied / seconds / limits["fma_per_s"], 4),
        }

    def _raise_limit(self) -> None:
        """A kernel that was faster than the limit shows that this was measured too low."""
        kernels = [one for program in self._programs.values() for one in program["kernels"]]
        reached = max((one["fma_share"] or 0.0 for one in kernels), default=0.0)
        if self._limits is None or reached <= 1:
            return
        self._limits = {**self._limits, "fma_per_s": self._limits["fma_per_s"] * reached}
        for kernel in kernels:
            if kernel["fma_share"]:
                kernel["fma_share"] = round(kernel["fma_share"] / reached, 4)

    def _add_calls(self) -> None:
        """Calls that ran one by one: a program of each step, of which each is a kernel."""
        kinds: dict[KernelFacts, dict[str, Any]] = {}
        program: dict[str, Any] | None = None
        for facts, thread, begin, end, step in self._within(
            self._timeline.calls, lambda one: one[2]
        ):
            if program is None:
                name = f"{self._pid}:calls"
                program = self._programs[name] = {
                    "id": name, "pid": self._pid, "tier": "op_by_op", "calls": 0, "launches": 1,
                    "seconds": 0.0, "why": None, "block_bytes": 0, "kernels": [],
                }  # fmt: skip
            if facts not in kinds:
                kinds[facts] = _kernel_record(len(kinds), facts)
                program["kernels"].append(kinds[facts])
            program["calls"] += 1
            program["seconds"] += (end - begin) / 1e9
            self._add_kernel(program, kinds[facts], self._lane(thread), begin, end, step)
            self._busy[thread].append(("launch", begin, end))

    # --- what threads do

    def _add_events(self) -> None:
        for category, name, thread, begin, end, args in self._within(
            self._timeline.events, lambda one: one[3]
        ):
            lane = self._lane(thread)
            if end is None:
                self._instant(category, name, lane, begin, args or {})
            else:
                self._span(category, name, lane, begin, end, args or {})
                self._busy[thread].append((category, begin, end))

    def _instant(
        self, category: str, name: str, lane: int, when: int, args: Mapping[str, Any]
    ) -> None:
        self._events.append({
            "ph": "i", "s": "t", "cat": category, "name": name, "pid": self._pid, "tid": lane,
            "ts": self._us(when), "args": dict(args),
        })  # fmt: skip

    def _add_steps(self) -> list[dict[str, Any]]:
        busy = {thread: InOrder(spans, lambda one: one[1]) for thread, spans in self._busy.items()}
        memory = InOrder(self._timeline.memory, lambda one: one[0])
        steps = []
        for number, thread, begin, mark, end in self._timeline.steps:
            begin = max(begin, self._begin)
            if not self._begin <= mark <= end <= self._end:
                continue
            spans = busy[thread].between(begin, end) if thread in busy else []
            parts = parts_of_step(spans, begin, mark, end)
            lane = self._lane(thread)
            if end - mark > 1000:  # else nobody has marked it: a replayed call
                self._span("mark", "mark", lane, mark, end, {"step": number})
            self._span("step", f"step {number}", lane - 1, begin, end, {"step": number, **parts})
            self._span("record", "record", lane - 1, begin, mark, {"step": number})
            peak = max((held[2] for held in memory.between(begin, end)), default=None)
            steps.append({
                "pid": self._pid, "tid": lane, "number": number, "begin_us": self._us(begin),
                "end_us": self._us(end), **parts, "peak_bytes": peak,
            })  # fmt: skip
        return steps

    def _add_explanations(self) -> list[dict[str, Any]]:
        records = []
        for when, thread, one in self._explained:
            if self._begin <= when <= self._end:
                stack = [str(frame) for frame in one.stack]
                args = {
                    "what": one.what, "difference": one.difference, "cure": one.cure,
                    "reason": one.reason, "line": one.line, "stack": stack,
                }  # fmt: skip
                self._instant(one.kind, one.what, self._lane(thread), when, args)
                records.append({"pid": self._pid, "ts": self._us(when), "kind": one.kind, **args})
        return records

    def _collectives(self) -> list[dict[str, Any]]:
        return [
            {"pid": self._pid, "ts": e["ts"], "dur": e["dur"], "name": e["name"], **e["args"]}
            for e in self._events
            if e["args"].get("number") is not None
        ]

    # --- memory

    def _add_memory(self) -> None:
        for when, device, nbytes in self._within(self._timeline.memory, lambda one: one[0]):
            self._events.append({
                "ph": "C", "cat": "memory", "name": f"live bytes ltc:{device}", "pid": self._pid,
                "tid": 0, "ts": self._us(when), "args": {"bytes": nbytes},
            })  # fmt: skip

    def _peaks(self) -> list[dict[str, Any]]:
        return [
            {
                "pid": self._pid, "device": f"ltc:{device}", "peak_bytes": peak.nbytes,
                "at_us": self._us(peak.at), "step": peak.step,
                "holders": holders_of(peak, self._names),
            }
            for device, peak in self._timeline.peaks.items()
            if self._begin <= peak.at <= self._end
        ]  # fmt: skip

    # --- whose they are

    def _process(self) -> dict[str, Any]:
        timeline = self._timeline
        return {
            "pid": self._pid,
            "rank": config.value("XRT_SHARD_ORDINAL"),
            "world_size": config.value("XRT_SHARD_WORLD_SIZE"),
            "host": socket.gethostname(),
            "argv": sys.argv,
            "threads": torch.get_num_threads(),
            "begin_us": 0.0,
            "end_us": self._us(self._end),
            "versions": {
                "ltc": VERSION, "torch": torch.__version__, "python": platform.python_version(),
            },
            "limits": None if self._limits is None else dict(self._limits),
            "counters": self._counters,
            "modules": self._modules,
            "machine": machine_facts(),
            "dropped": timeline.dropped,
            "clock": {
                "monotonic_ns": self._begin,
                "epoch_ns": timeline.epoch + self._begin - timeline.begin,
                "boot": _boot(),
            },
        }  # fmt: skip

    def _named_lanes(self) -> list[Event]:
        rank, world = config.value("XRT_SHARD_ORDINAL"), config.value("XRT_SHARD_WORLD_SIZE")
        who = f"rank {rank}, " if world > 1 else ""
        found = [
            self._metadata(
                "process_name", 0, {"name": f"{who}pid {self._pid} on {socket.gethostname()}"}
            ),
            self._metadata("process_sort_index", 0, {"sort_index": rank}),
        ]
        steps = {event["tid"] for event in self._events if event["cat"] == "step"}
        for thread, lane in self._lanes.items():
            name = self._timeline.threads.get(thread, f"thread {thread}")
            for tid, title in ((lane, name), (lane - 1, f"{name}: steps")):
                if tid == lane or tid in steps:
                    found.append(self._metadata("thread_name", tid, {"name": title}))
                    found.append(self._metadata("thread_sort_index", tid, {"sort_index": tid}))
        return found

    def _metadata(self, name: str, lane: int, args: Mapping[str, Any]) -> Event:
        return {
            "ph": "M",
            "name": name,
            "pid": self._pid,
            "tid": lane,
            "ts": 0,
            "cat": "",
            "args": args,
        }


_SHOWN = (
    "ops", "line", "forward", "module", "read_bytes", "written_bytes", "multiply_adds", "operations",
)  # fmt: skip
_NO_SHARES = {"copy_share": None, "fma_share": None}


def _kernel_record(number: int, facts: KernelFacts) -> dict[str, Any]:
    told = asdict(facts).items()
    record = {key: list(value) if isinstance(value, tuple) else value for key, value in told}
    return {"number": number, **record, "launches": 0, "seconds": 0.0}


def _boot() -> str:
    """Return an id common to all processes of one boot of a machine: its clock."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


# --- what the process has of its machine: cores, neighbours, pages on disk --------------------


def machine_facts(major_faults_before: int = 0) -> dict[str, Any]:
    """Return the cores and neighbours of this process, its bytes in swap, its pages read from disk.

    Args:
        major_faults_before: Number of these pages that are not counted.
    """
    return {
        "cores": processors.count(),
        "processes": config.value("LOCAL_WORLD_SIZE") or config.value("XRT_SHARD_WORLD_SIZE"),
        "swapped_bytes": swapped_bytes(),
        "major_faults": major_faults() - major_faults_before,
    }


def major_faults() -> int:
    """Pages of this process that had to be read from a disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def swapped_bytes(status: str = "/proc/self/status") -> int:
    """Return how much of this process's memory the system has put on disk."""
    with open(status) as file:
        found = [line.split() for line in file if line.startswith("VmSwap:")]
    return int(found[0][1]) << 10 if found else 0


# --- parts of a step: recording, compiling, waiting, running programs -------------------------

Span = tuple[str, int, int]  # category, begin, end
_PARTS = {
    "compile": frozenset({"compile"}),
    "wait": frozenset({"wait", "collective"}),
    "execute": frozenset({"launch"}),
}
_NOT_RECORDING = frozenset({"compile", "wait", "collective", "launch", "upload", "fallback", "gc"})


class InOrder:
    """Rows by their moments, to be asked for a part."""

    def __init__(self, rows: Iterable[Any], moment: Callable[[Any], int]) -> None:
        self._rows = sorted(rows, key=moment)
        self._moments = [moment(row) for row in self._rows]

    def between(self, begin: int, end: int) -> list[Any]:
        first, last = bisect_left(self._moments, begin), bisect_right(self._moments, end)
        return self._rows[first:last]


def _covered(spans: Iterable[Span], categories: frozenset[str], begin: int, end: int) -> float:
    """Microseconds between `begin` and `end` in which one of the spans was open."""
    total, until = 0, begin
    for _, first, last in sorted(
        [one for one in spans if one[0] in categories and one[2] > begin and one[1] < end],
        key=lambda one: one[1],
    ):
        first, last = max(first, until), min(last, end)
        if last > first:
            total, until = total + last - first, last
    return round(total / 1e3, 3)


def parts_of_step(spans: Sequence[Span], begin: int, mark: int, end: int) -> dict[str, float]:
    """Return the microseconds of each part.

    Args:
        spans: Spans of the thread that marks, which may be inside one another.
    """
    parts = {f"{name}_us": _covered(spans, kinds, begin, end) for name, kinds in _PARTS.items()}
    others = _covered(spans, _NOT_RECORDING, begin, mark)
    return {**parts, "record_us": round((mark - begin) / 1e3 - others, 3)}
