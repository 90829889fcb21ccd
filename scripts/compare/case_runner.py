"""Runs named cases in worker processes: a crash or a hang costs one case, not the run.

A script that has cases calls `serve(run_case)` where it was started as a worker, and
`run(script, names, ...)` everywhere else.  A worker that dies is replaced by one that goes on with
the next name.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

WORKER = "--worker"
STOPPED_BY_TIMEOUT = "Timeout ("  # how faulthandler opens the stack it prints before it exits
MORE_TIME = 4  # times as long for a case that took too long: others may have kept the machine busy


@dataclass(frozen=True)
class Outcome:
    """The outcome of one case.

    Attributes:
        name: The case.
        status: The answer of `run_case`, or "died" (by a signal or an exit), or "timeout".
        reason: One line for a reader of the table; empty where all is well.
        detail: A traceback, or the last lines that the worker printed.
    """

    name: str
    status: str
    reason: str = ""
    detail: str = ""


def serve(run_case: Callable[[str], Outcome]) -> None:
    """Run the cases named on standard input, one a line, and report each on standard output."""
    reports = _open_reports()
    for name in sys.stdin.read().splitlines():
        _report(run_case, name, reports)


def serve_in_forks(run_case: Callable[[str], Outcome]) -> None:
    """The same with a forked process for each case: nothing that it changes outlives it."""
    reports = _open_reports()
    for name in sys.stdin.read().splitlines():
        child = os.fork()
        if child == 0:
            _report(run_case, name, reports)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            _end_like(code)


def _open_reports():
    reports = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a case prints must not look like a report
    faulthandler.enable()
    return reports


def _report(run_case, name, reports) -> None:
    print(json.dumps({"begin": name}), file=reports)
    faulthandler.dump_traceback_later(float(os.environ["CASE_TIMEOUT"]), exit=True)
    outcome = run_case(name)
    faulthandler.cancel_dump_traceback_later()
    print(json.dumps({"end": asdict(outcome)}), file=reports)


def _end_like(code: int) -> None:
    """End this process as its child ended, for the parent of both to see."""
    if code > 0:
        os._exit(code)
    faulthandler.disable()
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)


def run(
    script: str | Path,
    names: Sequence[str],
    arguments: Sequence[str] = (),
    processes: int = 1,
    timeout_seconds: float = 30,
    progress: bool = True,
    tell: Callable[[Outcome], object] = lambda outcome: None,
) -> list[Outcome]:
    """The outcome of every name, in the order of `names`.

    Args:
        arguments: Passed on to each worker.
        processes: Workers at a time; worker i takes every `processes`-th name from the i-th on.
        timeout_seconds: For one case; one that takes longer is tried again, with MORE_TIME.
        tell: Called with each outcome as it comes.
    """
    outcomes = _Told(tell)
    command = [sys.executable, "-W", "ignore", str(script), WORKER, *arguments]
    threads = [
        threading.Thread(
            target=_run_shard, args=(command, names[i::processes], timeout_seconds, outcomes)
        )
        for i in range(processes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(timeout=15)
            if progress and thread.is_alive():
                print(f"{len(outcomes)} of {len(names)} cases", file=sys.stderr, flush=True)
    return [outcomes[name] for name in names]


class _Told(dict[str, Outcome]):
    """Outcomes by name; each is told when it is added."""

    def __init__(self, tell: Callable[[Outcome], object]):
        self.tell = tell

    def __setitem__(self, name: str, outcome: Outcome) -> None:
        super().__setitem__(name, outcome)
        self.tell(outcome)


def _run_shard(command, names, timeout_seconds, outcomes) -> None:
    """A case that takes too long is tried once more behind the others."""
    late = _run_in_turn(command, names, timeout_seconds, outcomes)
    for name, ending in _run_in_turn(command, late, MORE_TIME * timeout_seconds, outcomes).items():
        outcomes[name] = ending


def _run_in_turn(command, names, timeout_seconds, outcomes) -> dict[str, Outcome]:
    """Workers in turn until every name has an outcome; returns those that took too long."""
    names, late = list(names), {}
    while names:
        begun, code, printed = _run_worker(command, names, timeout_seconds, outcomes)
        if begun is not None:
            ending = _ending(begun, code, printed)
            (late if ending.status == "timeout" else outcomes)[begun] = ending
        elif not any(name in outcomes for name in names):
            reason = (printed.strip().splitlines() or [f"exit code {code}"])[-1]
            for name in names:
                outcomes[name] = Outcome(name, "died", f"no worker starts: {reason}", printed)
        names = [name for name in names if name not in outcomes and name not in late]
    return late


def _run_worker(command, names, timeout_seconds, outcomes) -> tuple[str | None, int, str]:
    """Add what one worker finishes.

    Returns the name of the case that it ended in, if it did; its exit code; what it printed last.
    """
    environment = dict(
        {"LTC_TIER": "native"} | os.environ,  # what is compared is what is compiled
        CASE_TIMEOUT=str(timeout_seconds),
        PYTHONPATH=os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p),
    )
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        worker = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=folder,  # cases write files under names of their own
            env=environment,
        )
        begun = _follow(worker, names, outcomes)
        code = worker.wait()
        errors.seek(0)
        return begun, code, errors.read()[-8000:]


def _follow(worker: subprocess.Popen, names, outcomes) -> str | None:
    """Hand out names and take in reports; returns a case that was begun and not ended, if any."""
    try:
        worker.stdin.write("\n".join(names))
        worker.stdin.close()
    except BrokenPipeError:
        return None  # it died while starting
    begun = None
    for line in worker.stdout:
        report = json.loads(line)
        begun = report.get("begin")
        if begun is None:
            outcome = Outcome(**report["end"])
            outcomes[outcome.name] = outcome
    return begun


def _ending(name: str, code: int, printed: str) -> Outcome:
    if STOPPED_BY_TIMEOUT in printed:
        where = next((line for line in printed.splitlines() if line.startswith("  File")), "")
        return Outcome(name, "timeout", f"still running:{where}", printed)
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return Outcome(name, "died", how, printed)


def table(outcomes: Iterable[Outcome]) -> str:
    """One line for each outcome: status, case, reason."""
    rows = [(outcome.status, outcome.name, outcome.reason) for outcome in outcomes]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
    return "\n".join(f"{s:{widths[0]}}  {n:{widths[1]}}  {r}" for s, n, r in rows)


def write(path: str, outcomes: Iterable[Outcome], totals: dict) -> None:
    """`totals` and the outcomes as JSON."""
    content = {"totals": totals, "cases": [asdict(outcome) for outcome in outcomes]}
    Path(path).write_text(json.dumps(content, indent=1))
