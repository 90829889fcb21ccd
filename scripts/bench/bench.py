"""Times of `ltc` next to eager PyTorch, torch.compile and PyTorch's own lazy backend, in turns.

    python scripts/bench/bench.py --tracing                 recording a step, nothing executed in between
    python scripts/bench/bench.py --workloads --only mlp    whole training steps, executed
    python scripts/bench/bench.py --kernels                 single layers: the compiled program alone
    python scripts/bench/bench.py --checkpoint              saving and loading (see bench_checkpoint.py)

Each system lives in a process of its own for the whole run and is asked for a few steps at a time,
so that a change in the machine's mood meets all of them.  The figures are medians over all rounds.

--tracing  microseconds that Python is busy with a step.  `ltc` throws its recording away after each
           step.  `torch._lazy` has nothing like it: its step is executed and waited for, untimed.
           Eager PyTorch computes while it is timed.  "cold" reads 16 MB between steps.
           One thread, garbage collector off while timing.
--workloads  milliseconds of a step of the networks of workloads.py and more_workloads.py, all work
           included; "ltc program" leaves out recording and handing over.  "compile" is torch.compile
           of the model, "compile all" of the optimizer's step too.
--kernels  milliseconds of the cases of kernel_cases.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import bench_checkpoint
import bench_goals
from bench_modes import MODES
from bench_systems import SYSTEMS


def serve(mode: str, system: str, threads: int) -> None:
    """Answer each case named on standard input with a line of times, or of what went wrong."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    measured = MODES[mode](SYSTEMS[system](), threads)
    for line in sys.stdin:
        try:
            answer = {"times": measured.times(line.strip())}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


# --- the run: turns over rounds -----------------------------------------------------------------


class Turns:
    """The processes of all systems; one works while the others wait."""

    def __init__(self, mode: str, systems: tuple[str, ...], threads: int):
        path = os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p)
        self.workers = {
            system: subprocess.Popen(
                [
                    sys.executable,
                    "-W",
                    "ignore",
                    __file__,
                    f"--{mode}",
                    "--worker",
                    system,
                    "--threads",
                    str(threads),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=dict(os.environ, PYTHONPATH=path),
            )
            for system in systems
        }

    def take(self, system: str, case: str) -> dict:
        """`{"times": [...]}` or `{"error": ...}`."""
        worker = self.workers[system]
        try:
            print(case, file=worker.stdin, flush=True)
        except BrokenPipeError:
            return {"error": "its process has ended"}
        line = worker.stdout.readline()
        return json.loads(line) if line else {"error": f"its process ended with {worker.wait()}"}

    def close(self) -> None:
        for worker in self.workers.values():
            worker.stdin.close()
            worker.wait()


def measure(mode: str, systems, cases, rounds: int, threads: int) -> dict:
    """{case: {system: {"times": [...]}}} with an "error" in place of times where there is one."""
    turns = Turns(mode, systems, threads)
    results = {case: {system: {"times": []} for system in systems} for case in cases}
    try:
        for case in cases:  # all rounds of a case together: a workload's memory is freed after it
            for _ in range(rounds):
                for system, result in results[case].items():
                    if "error" in result:
                        continue
                    answer = turns.take(system, case)
                    result["times"] += answer.get("times", [])
                    result.update({k: v for k, v in answer.items() if k == "error"})
    finally:
        turns.close()
    return results


def median_of(result: dict) -> float | None:
    return None if "error" in result else statistics.median(result["times"])


def table(mode: str, results: dict) -> str:
    """A row for each case: every system's median, how much faster than the fastest peer, its goal."""
    kind = MODES[mode]
    systems = list(next(iter(results.values())))
    ours = [s for s in systems if s.startswith("ltc")]
    peers = [s for s in systems if s not in ours]
    rows = [["", *(f"{s} {kind.unit}" for s in systems), *(f"best / {s}" for s in ours), "goal"]]
    for case, by_system in results.items():
        medians = {system: median_of(result) for system, result in by_system.items()}
        best = min((medians[s] for s in peers if medians[s]), default=None)
        cells = [_number(medians[s], kind.digits) for s in systems]
        cells += [_ratio(best, medians[s]) for s in ours]
        rows.append([case, *cells, bench_goals.verdict(mode, case, medians, best)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join([f"{r[0]:{widths[0]}}", *map(str.rjust, r[1:], widths[1:])]) for r in rows]
    return "\n".join(lines + errors_of(results))


def errors_of(results: dict) -> list[str]:
    return [
        f"{system}, {case}: {result['error']}"
        for case, by_system in results.items()
        for system, result in by_system.items()
        if "error" in result
    ]


def _number(value: float | None, digits: int) -> str:
    if value is None:
        return "failed"
    return f"{value:.{digits if value >= 10 else digits + 1}f}"


def _ratio(value: float | None, other: float | None) -> str:
    return f"{value / other:.2f}" if value and other else "-"


def arguments_of(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    modes = parser.add_mutually_exclusive_group(required=True)
    for mode, kind in MODES.items():
        modes.add_argument(
            f"--{mode}", dest="mode", action="store_const", const=mode, help=kind.__doc__
        )
    parser.add_argument("--only", action="append", help="a case; may be repeated")
    parser.add_argument("--systems", help="comma-separated, in place of the mode's own")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds")
    parser.add_argument("--threads", type=int, default=2, help="threads of all but --tracing")
    parser.add_argument("--json", help="write all times here")
    parser.add_argument("--worker", choices=list(SYSTEMS), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> int:
    if "--checkpoint" in sys.argv[1:]:
        return bench_checkpoint.main([word for word in sys.argv[1:] if word != "--checkpoint"])
    arguments = arguments_of(sys.argv[1:])
    if arguments.worker:
        serve(arguments.mode, arguments.worker, arguments.threads)
        return 0
    kind = MODES[arguments.mode]
    systems = tuple(arguments.systems.split(",")) if arguments.systems else kind.systems
    cases = arguments.only or kind.cases
    results = measure(arguments.mode, systems, cases, arguments.rounds, arguments.threads)
    print(table(arguments.mode, results))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
