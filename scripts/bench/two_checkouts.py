"""Compare how long programs take in two checkouts of ltc, in turns, in processor time.

    git worktree add ../before 8e1fde2
    python scripts/bench/two_checkouts.py ../before . [PROGRAM ...] [--rounds 3] [--steps 200]
                                          [--settle 3] [--threads 1] [--core]

A program is one of `restless_programs.py`, of `workloads.py`, or of `scripts/compare/network_cases.py`
("timm xcit", which needs `pip install '.[models]'`); without names, all of the first two. Both checkouts
run this folder's programs, each in processes of their own with an empty LTC_CACHE_DIR. Every figure is
the second checkout's time as a multiple of the first's, of medians over the rounds: `first` of the first
step, `sum` of the first steps together, `steady` of a later one, after so many seconds of steps (--settle).
A step's result is read. Processes that compile beside are not counted, as in `restless.py`; but after each step
they are waited for until they have had as much processor time as the step: on a busy machine they get as far
as with a processor of their own. The exit status is 1 where `sum` or `steady` is above the bar: 1.3 for restless
programs, 1.1 for others.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
BARS = {"restless": 1.3, "workload": 1.1, "network": 1.1}
FIGURES = {"first": 1e3, "sum": 1.0, "steady": 1e3}
JUDGED = ("sum", "steady")
LATER = 50
PACE_SECONDS = 0.02


def running_seconds() -> tuple[float, bool]:
    """Return the processor time of the processes that this one has started, and if one of them runs."""
    waiting, nanoseconds, runs = [str(os.getpid())], 0, False
    while waiting:
        of = waiting.pop()
        for thread in Path(f"/proc/{of}/task").glob("*"):
            with contextlib.suppress(OSError):  # it may have ended
                waiting += (thread / "children").read_text().split()
                if int(of) != os.getpid():
                    os.setpriority(os.PRIO_PROCESS, int(thread.name), 0)  # where that is allowed
                    nanoseconds += int((thread / "schedstat").read_text().split()[0])
                    runs |= (thread / "stat").read_text().rpartition(")")[2].split()[0] in "RD"
    return nanoseconds / 1e9, runs


class Pace:
    """Steps in pace with the processes beside, as if each had a processor of its own."""

    def __init__(self) -> None:
        self._seconds, self._spent = 0.0, 0.0

    def keep(self, spent: float) -> None:
        """Wait until the processes beside have had as many seconds as this one's steps, or rest."""
        self._spent += spent
        if self._spent < PACE_SECONDS:  # looking takes longer than a small step
            return
        has_rested = False
        while True:
            seconds, runs = running_seconds()
            if seconds >= self._seconds + self._spent or (has_rested and not runs):
                break
            has_rested = not runs
            time.sleep(0.001)
        self._seconds, self._spent = seconds, 0.0


def kind_of(name: str) -> str:
    from restless_programs import RESTLESS

    if name in RESTLESS:
        return "restless"
    return "network" if " " in name else "workload"


def program(name: str) -> Callable[[int], torch.Tensor]:
    """Return a step on `ltc`, which takes its number."""
    import workloads
    from restless_programs import RESTLESS

    import ltc.core.lazy_model as ltm

    kind, device = kind_of(name), ltm.lazy_device()
    if kind == "restless":
        return RESTLESS[name](str(device), ltm.mark_step)
    if kind == "workload":
        module = (
            workloads if hasattr(workloads, name) else importlib.import_module("more_workloads")
        )
        step = getattr(module, name)(device, workloads.Way(mark=ltm.mark_step))
        return lambda number: step()
    return network(name, device, ltm.mark_step)


def network(name: str, device: torch.device, mark: Callable) -> Callable[[int], torch.Tensor]:
    sys.path.insert(0, str(FOLDER.parent / "compare"))
    from network_cases import NETWORKS
    from torch.utils import _pytree as pytree

    case = NETWORKS[name]
    model = case.model().train().to(device)
    batch = pytree.tree_map_only(torch.Tensor, lambda x: x.to(device), case.batch())
    optimizer = case.optimizer(model.parameters())

    def step(number: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = case.loss_of(model, batch)[0]
        loss.backward()
        optimizer.step()
        mark()
        return loss.detach()

    return step


def measured(name: str, chosen: argparse.Namespace) -> dict[str, float]:
    """Return this process's figures of one program, in seconds."""
    import ltc.core.lazy_model as ltm

    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    step, pace = program(name), Pace()

    def timed(number: int) -> float:
        started = time.process_time()
        step(number).sum().item()
        ltm.wait_device_ops()
        spent = time.process_time() - started
        pace.keep(spent)
        return spent

    seconds = [timed(number) for number in range(chosen.steps)]
    settled, number = time.monotonic() + chosen.settle, 0
    while time.monotonic() < settled or running_seconds()[1]:
        timed(number % chosen.steps)
        number += 1
    later = [timed(chosen.steps + number) for number in range(min(LATER, chosen.steps))]
    return {"first": seconds[0], "sum": sum(seconds), "steady": statistics.median(later)}


def in_a_new_process(name: str, checkout: str, chosen: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, "-W", "ignore", __file__, checkout, checkout, name, "--worker"]
    for option in ("steps", "settle", "threads"):
        command += [f"--{option}", str(getattr(chosen, option))]
    with tempfile.TemporaryDirectory(prefix="ltc-turns-") as folder:
        settings = {"LTC_CACHE_DIR": folder, "PYTHONPATH": checkout}
        if not chosen.core:
            settings["LTC_NATIVE"] = "0"
        done = subprocess.run(
            command, env=os.environ | settings, cwd=folder, capture_output=True, text=True
        )
    if done.returncode:
        raise SystemExit(f"{name} failed in {checkout}:\n{done.stderr}")
    answer = json.loads(done.stdout.splitlines()[-1])
    if not Path(answer.pop("ltc")).is_relative_to(checkout):
        raise SystemExit(f"{checkout} was asked for, another ltc was imported")
    return answer


def is_within(name: str, checkouts: list[str], chosen: argparse.Namespace) -> bool:
    """Run a program in both checkouts in turns, print a row, and return True if its bar holds."""
    found: dict[str, list[dict[str, float]]] = {checkout: [] for checkout in checkouts}
    for number in range(chosen.rounds):
        for checkout in checkouts if number % 2 == 0 else reversed(checkouts):
            found[checkout].append(in_a_new_process(name, checkout, chosen))
    before, after = (
        {key: statistics.median(answer[key] for answer in found[one]) for key in FIGURES}
        for one in checkouts
    )
    ratios = {key: after[key] / before[key] for key in FIGURES}
    bar = BARS[kind_of(name)]
    is_met = all(ratios[key] <= bar for key in JUDGED)
    cells = (
        f"{key} {before[key] * unit:9.2f} {after[key] * unit:9.2f} x {ratios[key]:4.2f}"
        for key, unit in FIGURES.items()
    )
    print(f"{name:26} {'   '.join(cells)}   {'' if is_met else f'above {bar}'}", flush=True)
    return is_met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("before", help="folder of the first checkout")
    parser.add_argument("after", help="folder of the second checkout")
    parser.add_argument("programs", nargs="*", help="programs to run")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each checkout")
    parser.add_argument("--steps", type=int, default=200, help="first steps")
    parser.add_argument("--settle", type=float, default=3.0, help="seconds before the later steps")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch and of ltc")
    parser.add_argument(
        "--core", action="store_true", help="with the native core, where it is built"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        import ltc

        print(json.dumps(measured(chosen.programs[0], chosen) | {"ltc": ltc.__file__}))
        return 0
    from restless_programs import RESTLESS
    from workloads import OPEN

    checkouts = [str(Path(one).resolve()) for one in (chosen.before, chosen.after)]
    print("milliseconds, seconds, milliseconds of processor time: before, after, ratio")
    within = [is_within(name, checkouts, chosen) for name in chosen.programs or [*RESTLESS, *OPEN]]
    return int(not all(within))


if __name__ == "__main__":
    sys.exit(main())
