"""Trace files: written whole, and those of several processes joined into one."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ltc.support.atomic_file import replacing

Trace = dict[str, Any]
_TIMES = ("ts", "begin_us", "end_us", "at_us", "started_us")
_TABLES = ("programs", "steps", "memory", "explanations", "collectives")


def write(trace: Trace, path: str | os.PathLike) -> None:
    """The file, whole or not at all."""
    with replacing(path) as file:
        file.write(json.dumps(trace, separators=(",", ":"), default=str).encode())


def read(path: str | os.PathLike) -> Trace:
    """A file that `write` has written.

    Raises:
        ValueError: If it is none of these.
    """
    try:
        trace = json.loads(Path(path).read_bytes())
        trace["ltc"]["processes"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{os.fspath(path)} is not a trace of ltc.profile") from error
    return trace


def merge(paths: Sequence[str | os.PathLike], out: str | os.PathLike) -> Trace:
    """Join the traces of several processes in one file and return its content.

    Times of processes of one machine are its clock's; those of several machines are aligned by the
    time of day. A collective for which ranks wait then names the awaited rank.

    Args:
        paths: Files of ltc.profile, such as those of ranks without a common folder.
        out: The file that gets all their processes; it may be one of `paths`.

    Raises:
        ValueError: For a file that is no trace, and if there is none.
    """
    if not paths:
        raise ValueError("merge: pass at least one trace")
    trace = joined([read(path) for path in paths])
    write(trace, out)
    return trace


def write_joined(trace: Trace, path: str | os.PathLike, run: str) -> Trace:
    """Write what one process of a run tells; with what others of the same run have written there.

    Args:
        run: Names the run; a file of another one is replaced.
    """
    trace["ltc"]["run"] = run
    with _alone_with(path):
        others = _of_run(path, run, trace["ltc"]["processes"][0])
        told = [one for one in (others, trace) if one is not None and not _is_idle(one)]
        whole = joined(told) if len(told) > 1 else (told or [trace])[0]
        write(whole, path)
    return whole


def _is_idle(trace: Trace) -> bool:
    """Return True if its processes did nothing on a device: launchers, or loaders of data."""
    return not (trace["ltc"]["programs"] or trace["ltc"]["steps"])


def _of_run(path: str | os.PathLike, run: str, process: dict[str, Any]) -> Trace | None:
    """Return the traces of other processes of the run; an earlier one of this rank is left out."""
    try:
        found = read(path)
    except (OSError, ValueError):
        return None
    if found["ltc"].get("run") != run:
        return None
    mine = process["rank"], process["world_size"], process["host"]
    same = {
        one["pid"]
        for one in found["ltc"]["processes"]
        if one["pid"] == process["pid"]
        or (one["world_size"] > 1 and mine == (one["rank"], one["world_size"], one["host"]))
    }
    left = _without(found, same)
    return left if left["ltc"]["processes"] else None


def _without(trace: Trace, pids: set[int]) -> Trace:
    if not pids:
        return trace
    tables = trace["ltc"]
    left = {name: [one for one in tables[name] if one["pid"] not in pids] for name in _TABLES}
    left["processes"] = [one for one in tables["processes"] if one["pid"] not in pids]
    events = [event for event in trace["traceEvents"] if event["pid"] not in pids]
    return {**trace, "traceEvents": events, "ltc": {**tables, **left}}


@contextmanager
def _alone_with(path: str | os.PathLike) -> Iterator[None]:
    """Others that write there wait: for the lock of its folder, of which nothing is left behind."""
    folder = os.open(Path(path).resolve().parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


# --- several in one ------------------------------------------------------------------------------


def joined(traces: Sequence[Trace]) -> Trace:
    """One trace with all their processes, on one clock."""
    first = min((_clock(one) for one in traces), key=lambda clock: clock["epoch_ns"])
    events: list[dict[str, Any]] = []
    tables: dict[str, list[Any]] = {name: [] for name in ("processes", *_TABLES)}
    taken: set[int] = set()
    for trace in traces:
        shift = _shift(_clock(trace), first)
        pids = _free_pids(trace, taken)
        for event in trace["traceEvents"]:
            moved = _moved(event, 0.0 if event["ph"] == "M" else shift, pids)
            events.append(moved)
        for name, rows in tables.items():
            rows += [_moved(row, shift, pids) for row in trace["ltc"][name]]
    events.sort(key=lambda event: (event["ph"] != "M", event["ts"]))
    whole = {**traces[0], "traceEvents": events, "ltc": {**traces[0]["ltc"], **tables}}
    whole["ltc"]["clock"] = first
    _tell_who_was_late(whole)
    return whole


def _clock(trace: Trace) -> dict[str, Any]:
    clock: dict[str, Any] = trace["ltc"].get("clock") or trace["ltc"]["processes"][0]["clock"]
    return clock


def _shift(clock: dict[str, Any], first: dict[str, Any]) -> float:
    """Microseconds from the beginning of the whole to that of one."""
    name = "monotonic_ns" if clock["boot"] == first["boot"] else "epoch_ns"
    return float((clock[name] - first[name]) / 1e3)


def _free_pids(trace: Trace, taken: set[int]) -> dict[int, int]:
    """A number for each process; that of the system, unless one of another machine has it."""
    pids: dict[int, int] = {}
    for process in trace["ltc"]["processes"]:
        pid = process["pid"]
        while pid in taken:
            pid += 1 << 22  # beyond what the system numbers
        pids[process["pid"]] = pid
        taken.add(pid)
    return pids


def _moved(row: dict[str, Any], shift: float, pids: dict[int, int]) -> dict[str, Any]:
    moved = dict(row)
    if "args" in row:
        moved["args"] = dict(row["args"])
    for part in (moved, moved.get("args", {})):
        for name in _TIMES:
            if name in part:
                part[name] = round(part[name] + shift, 3)
    before, after = row["pid"], pids.get(row["pid"], row["pid"])
    if before != after:
        moved["pid"] = after
        for holder, name in ((moved, "id"), (moved.get("args", {}), "program")):
            if str(holder.get(name, "")).startswith(f"{before}:"):
                holder[name] = holder[name].replace(f"{before}:", f"{after}:", 1)
    return moved


def _tell_who_was_late(trace: Trace) -> None:
    """Add to each exchange of several ranks the latest rank, and how long the others waited."""
    ranks = {one["pid"]: one["rank"] for one in trace["ltc"]["processes"]}
    together: dict[Any, list[dict[str, Any]]] = {}
    for row in trace["ltc"]["collectives"]:
        if row.get("number") is not None:
            together.setdefault(_exchange(row), []).append(row)
    late = {}
    for key, rows in together.items():
        if len({row["pid"] for row in rows}) > 1:
            last = max(rows, key=lambda row: row["started_us"])
            late[key] = ranks[last["pid"]], last["started_us"]
    for row in [*trace["ltc"]["collectives"], *trace["traceEvents"]]:
        args = row.get("args", row)
        if _exchange(args) in late:
            rank, began = late[_exchange(args)]
            waited = round(min(began - row["ts"], row["dur"]), 3)
            is_late = ranks[row["pid"]] == rank or waited <= 0
            args["waited_for"], args["waited_us"] = (None, 0.0) if is_late else (rank, waited)


def _exchange(row: dict[str, Any]) -> tuple[Any, ...]:
    return row.get("kind"), row.get("channel"), row.get("number")
