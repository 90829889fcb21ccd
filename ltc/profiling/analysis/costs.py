"""The costs of a trace's kernels, by kernel, by module, by line of the user's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ltc.profiling.analysis.kernel_parts import groups_of_parts, joined_parts, kernel_words
from ltc.profiling.analysis.steady_steps import steady_steps

_UNKNOWN_PLACE = "(no line of the program)"
_UNKNOWN_MODULE = "(in no module)"


@dataclass
class Cost:
    """The joint cost of all kernels of one name.

    Attributes:
        name: A kernel, a module's path, or "file.py:12 in function".
        words: A kernel in words; "" of other names.
        seconds, launches: Time and launches of its kernels in the steady steps.
        moved_bytes: Bytes read and written.
        multiply_adds: Number of multiply-adds in products.
        work: The multiply-adds, or without any the elementwise operations.
        copy_share, fma_share: Share of the machine's limit, weighed by time; None where unknown.
        ops: The calls that it consists of.
        lines, modules: The lines and modules of these calls.
    """

    name: str
    words: str = ""
    seconds: float = 0.0
    launches: int = 0
    moved_bytes: float = 0.0
    multiply_adds: float = 0.0
    work: float = 0.0
    copy_share: float | None = None
    fma_share: float | None = None
    ops: dict[str, None] = field(default_factory=dict)
    lines: dict[str, None] = field(default_factory=dict)
    modules: dict[str, None] = field(default_factory=dict)

    def add(self, kernel: dict[str, Any], part: float = 1.0) -> None:
        """A part of a kernel's cost: 1.0 is all of it."""
        seconds, launches = kernel["seconds"] * part, kernel["launches"]
        self.copy_share = self._weighed(self.copy_share, kernel.get("copy_share"), seconds)
        self.fma_share = self._weighed(self.fma_share, kernel.get("fma_share"), seconds)
        self.seconds += seconds
        self.launches += launches
        moved = (kernel.get("read_bytes") or 0) + (kernel.get("written_bytes") or 0)
        self.moved_bytes += moved * launches * part
        multiply_adds = kernel.get("multiply_adds") or 0
        self.multiply_adds += multiply_adds * launches * part
        self.work += (multiply_adds or kernel.get("operations") or 0) * launches * part
        for name in kernel.get("ops") or ():
            self.ops.setdefault(name)
        for line in kernel.get("lines") or [kernel.get("line")]:
            if line:
                self.lines.setdefault(line)
        for module in kernel.get("modules") or [kernel.get("module")]:
            if module:
                self.modules.setdefault(module)

    def _weighed(self, known: float | None, new: float | None, seconds: float) -> float | None:
        if new is None:
            return known
        before = self.seconds if known is not None else 0.0
        return ((known or 0.0) * before + new * seconds) / max(before + seconds, 1e-12)


def kernels(trace: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each kernel that ran in the steady steps, with its program's `tier`; all, where none ran there.

    A kernel of several parts comes once.
    """
    counted: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    steady = steady_steps(trace)
    for event in trace["traceEvents"]:
        if event.get("cat") == "kernel" and steady.begin <= event["ts"] <= steady.end:
            place = event["args"]["program"], event["args"]["kernel"]
            counted[place].append(event["dur"] / 1e6)
    for program in trace["ltc"]["programs"]:
        ran = []
        for number, kernel in enumerate(program["kernels"]):
            times = counted.get((program["id"], number), [])
            launches, seconds = len(times), sum(times)
            if not counted:
                launches, seconds = kernel["launches"], kernel["seconds"]
            if launches:
                own = {"tier": program["tier"], "launches": launches, "seconds": seconds}
                ran.append(kernel | own)
        yield from map(joined_parts, groups_of_parts(ran))


def by_kernel(trace: dict[str, Any]) -> list[Cost]:
    """The costliest first; kernels of the same name and place are one."""
    costs = _grouped(trace, lambda kernel: [(kernel["name"], kernel.get("line") or "")])
    for cost in costs:
        cost.words = kernel_words(cost.name, list(cost.ops))
    return costs


def by_module(trace: dict[str, Any]) -> list[Cost]:
    """A module has what its own calls cost, not those of the modules in it."""
    return _grouped(trace, lambda kernel: [kernel.get("module") or _UNKNOWN_MODULE])


def by_line(trace: dict[str, Any]) -> list[Cost]:
    """A kernel that was fused of several lines is told in equal parts at each.

    What a backward makes is told at the forward line that it goes back from.
    """
    return _grouped(trace, lines_of)


def lines_of(kernel: dict[str, Any]) -> list[str]:
    """Return the lines that a kernel comes from."""
    lines = kernel.get("lines") or [kernel.get("forward") or kernel.get("line")]
    return list(dict.fromkeys(line for line in lines if line)) or [_UNKNOWN_PLACE]


def _grouped(trace: dict[str, Any], names_of: Any) -> list[Cost]:
    found: defaultdict[Any, Cost] = defaultdict(lambda: Cost(""))
    for kernel in kernels(trace):
        names = names_of(kernel)
        for name in names:
            cost = found[name]
            cost.name = name if isinstance(name, str) else name[0]
            cost.add(kernel, 1 / len(names))
    return sorted(found.values(), key=lambda cost: -cost.seconds)
