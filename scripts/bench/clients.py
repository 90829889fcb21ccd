"""Packages that train with PyTorch, unchanged, on the CPU and on ltc: the same losses, how quickly.

    python -m ltc build
    python scripts/bench/clients.py [--only NAME ...] [--steps 100] [--rounds 5] [--threads 1]

Each device has a process of its own for each program of client_programs.py, with an empty
LTC_CACHE_DIR. They are asked for steps in turns: for the first 50, for so many seconds until nothing
is compiled any more (--settle), then for --steps in each round. The loss is read at every tenth step.

first    milliseconds of processor time of one of the first 50 steps: their mean
steady   the same of a later one: the median over the tens of all rounds, each ten with its read
x        ltc's time by eager's: above 1 is a loss
losses   the largest relative difference of those that were read in the first 50 steps. `drawn`: a
         program that draws on the device; its losses are compared in two more processes, which draw
         on the CPU in its place
calls    of a steady step: that ran in the core, or were followed there; that came to Python
eager    calls of a steady step that no program could take, of which ltc counts each kind
programs compiled in the process and by the other one, and side exits, all from the first step on

Processor time counts all threads of the process, and not the process that compiles.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from client_programs import CLIENTS, Client

FIRST, BLOCK = 50, 10
DEVICES = "cpu", "ltc"
COMPILE_SECONDS = 60  # that a process may wait for its programs
READS = {"aten::_local_scalar_dense"}  # counted as those without a rule are
COUNTED = "UncachedCompile", "CompileBehind", "SideExits", "ImmediateCalls", "InternalFaults"


# --- in a process of its own ---------------------------------------------------------------------


class Watched:
    """Answers each order on standard input with the steps that the program makes for it."""

    def __init__(self, device: str) -> None:
        self.counts: Callable[[], dict[str, int]] = counts if device == "ltc" else dict
        self.is_compiling: Callable[[], bool] = compiling() if device == "ltc" else lambda: False
        self.answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # what the program prints is no answer
        self.number = 0

    def begin(self) -> None:
        self.await_order()

    def await_order(self) -> None:
        line = sys.stdin.readline()
        if not line:
            raise SystemExit
        self.order = json.loads(line)
        self.seconds: list[float] = []
        self.losses: dict[int, float] = {}
        self.before = self.counts()
        self.until = time.monotonic() + self.order.get("seconds", 0)
        self.block = time.process_time()

    def step(self, loss: torch.Tensor | float) -> None:
        self.number += 1
        if self.number % BLOCK and self.number >= BLOCK // 2:
            return
        self.losses[self.number] = float(loss)
        if self.number % BLOCK:
            return
        now = time.process_time()
        self.seconds.append((now - self.block) / BLOCK)
        self.block = now
        if self.is_over():
            self.answer()
            self.await_order()

    def is_over(self) -> bool:
        if "steps" in self.order:
            return len(self.seconds) * BLOCK >= self.order["steps"]
        late = time.monotonic() - self.until
        return late > 0 and (late > COMPILE_SECONDS or not self.is_compiling())

    def answer(self) -> None:
        after = self.counts()
        told = {
            "seconds": self.seconds,
            "losses": self.losses,
            "grown": {name: after[name] - self.before.get(name, 0) for name in after},
            "totals": after,
        }
        print(json.dumps(told), file=self.answers)


class Unwatched:
    """Lets the other processes of torchrun run for as long as the first one does."""

    def begin(self) -> None: ...

    def step(self, loss: torch.Tensor | float) -> None: ...


def counts() -> dict[str, int]:
    """Return the counts of this process so far."""
    from ltc.debug import metrics
    from ltc.native.core import CORE

    found = {name: metrics.counter_value(name) or 0 for name in COUNTED}
    found |= {name: metrics.counter_value(name) for name in metrics.executed_fallback_ops()}
    if CORE is not None:
        found |= {"core": CORE.ran(), "followed": CORE.followed()}
        found |= {f"python {name}": calls for name, calls in CORE.left_to_python().items()}
    return found


def compiling() -> Callable[[], bool]:
    from ltc.runtime.background import compile_behind

    return compile_behind.is_compiling


DRAWING = {
    torch: ("bernoulli", "dropout", "multinomial", "normal", "rand", "rand_like", "randint",
            "randn", "randn_like", "randperm"),
    torch.Tensor: ("bernoulli_", "exponential_", "multinomial", "normal_", "random_", "uniform_"),
    torch.nn.functional: ("dropout",),
}  # fmt: skip


def draw_on_the_cpu() -> None:
    """Have the functions that draw random numbers do so on the CPU, for tensors of any device."""
    for owner, names in DRAWING.items():
        for name in names:
            setattr(owner, name, drawn_on_the_cpu(getattr(owner, name), name.endswith("_")))


def drawn_on_the_cpu(function: Callable, in_place: bool) -> Callable:
    @functools.wraps(function)
    def draw(*arguments: Any, **named: Any) -> Any:
        device = named.pop("device", None)
        tensors = [one for one in (*arguments, *named.values()) if torch.is_tensor(one)]
        device = tensors[0].device if tensors and device is None else device or "cpu"
        named = {name: moved(one) for name, one in named.items()}
        if in_place:
            arguments[0].copy_(function(torch.empty_like(arguments[0], device="cpu"),
                                        *map(moved, arguments[1:]), **named))  # fmt: skip
            return arguments[0]
        return function(*map(moved, arguments), **named).to(device)

    return draw


def moved(value: Any) -> Any:
    return value.cpu() if torch.is_tensor(value) else value


def work(name: str, device: str, threads: int, draws_on_cpu: bool) -> None:
    """Run a program until standard input ends."""
    torch.set_num_threads(threads)
    if device == "ltc":
        importlib.import_module("ltc")
    if draws_on_cpu:
        draw_on_the_cpu()
    torch.manual_seed(0)
    first = os.environ.get("RANK", "0") == "0"
    CLIENTS[name].run(device, Watched(device) if first else Unwatched())


# --- the run -------------------------------------------------------------------------------------


class Worker:
    """A process that runs one program on one device."""

    def __init__(self, name: str, device: str, chosen: argparse.Namespace, draws_on_cpu: bool):
        self.folder = tempfile.TemporaryDirectory()
        path = self.folder.name
        environment = os.environ | {"LTC_CACHE_DIR": path, "OMP_NUM_THREADS": str(chosen.threads)}
        environment["LTC_NATIVE_DIR"] = core_folder()
        if device == "ltc":
            environment["ACCELERATE_TORCH_DEVICE"] = "ltc"
        command = [*interpreter(CLIENTS[name]), __file__, "--worker", name, device]
        command += ["--threads", str(chosen.threads)] + ["--draws-on-cpu"] * draws_on_cpu
        self.errors = open(Path(path) / "errors", "w+")  # noqa: SIM115  as long as the worker
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self.errors, text=True,
        )  # fmt: skip

    def take(self, **order: float) -> dict[str, Any]:
        """Return what the process says to an order; raise RuntimeError with its last words."""
        try:
            print(json.dumps(order), file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            return json.loads(line)
        self.process.wait()
        self.errors.seek(0)
        raise RuntimeError(last_words(self.errors.read()))

    def close(self) -> None:
        try:
            self.process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait()
        self.errors.close()
        self.folder.cleanup()


def interpreter(client: Client) -> list[str]:
    if not client.processes:
        return [sys.executable, "-W", "ignore"]
    run = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    return [*run, "--nproc-per-node", str(client.processes)]


def last_words(text: str) -> str:
    """The last line of a process's errors that names one."""
    lines = [line for line in text.splitlines() if "Error" in line or "Exception" in line]
    return (lines or text.splitlines() or ["it ended without a word"])[-1].strip()[:120]


@functools.cache
def core_folder() -> str:
    """The folder where `python -m ltc build` leaves the core."""
    from ltc import config

    return config.value("LTC_NATIVE_DIR") or config.value("LTC_CACHE_DIR")


def workers(name: str, chosen: argparse.Namespace, draws_on_cpu: bool = False) -> dict[str, Worker]:
    return {device: Worker(name, device, chosen, draws_on_cpu) for device in DEVICES}


def timed(name: str, chosen: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return each device's first steps, steady ones and counts."""
    both = workers(name, chosen)
    try:
        found = {device: {"first": one.take(steps=FIRST)} for device, one in both.items()}
        for one in both.values():
            one.take(seconds=chosen.settle)
        for device in DEVICES:
            found[device]["rounds"] = []
        for _ in range(chosen.rounds):
            for device, one in both.items():
                found[device]["rounds"].append(one.take(steps=chosen.steps))
    finally:
        for one in both.values():
            one.close()
    return found


def losses_drawn_alike(name: str, chosen: argparse.Namespace) -> dict[str, dict[str, float]]:
    both = workers(name, chosen, draws_on_cpu=True)
    try:
        return {device: one.take(steps=FIRST)["losses"] for device, one in both.items()}
    finally:
        for one in both.values():
            one.close()


def difference(losses: dict[str, dict[str, float]]) -> float:
    """The largest relative difference of losses of the same steps."""
    pairs = [(losses["cpu"][step], losses["ltc"][step]) for step in losses["cpu"]]
    return max(abs(a - b) / max(abs(a), 1e-12) for a, b in pairs)


# --- the table -----------------------------------------------------------------------------------


HEAD = ("client", "losses", "cpu ms", "ltc ms", "steady x", "first ms", "first x",
        "core, followed, python", "python's", "eager", "compiled; behind; exits")  # fmt: skip


def row(name: str, chosen: argparse.Namespace) -> list[str]:
    client = CLIENTS[name]
    missing = [package for package in client.packages if not importlib.util.find_spec(package)]
    if missing:
        return [name, f"needs {', '.join(missing)}"]
    try:
        found = timed(name, chosen)
        first = {device: found[device]["first"] for device in DEVICES}
        losses = {device: first[device]["losses"] for device in DEVICES}
        if client.draws:
            losses = losses_drawn_alike(name, chosen)
    except RuntimeError as error:
        return [name, f"failed: {error}"]
    steady = {device: steady_of(found[device]["rounds"]) for device in DEVICES}
    starts = {device: statistics.fmean(first[device]["seconds"]) for device in DEVICES}
    return [
        name,
        f"{difference(losses):.0e}{' drawn' if client.draws else ''}",
        f"{steady['cpu'] * 1e3:.2f}",
        f"{steady['ltc'] * 1e3:.2f}",
        f"{steady['ltc'] / steady['cpu']:.2f}",
        f"{starts['ltc'] * 1e3:.2f}",
        f"{starts['ltc'] / starts['cpu']:.2f}",
        *counted(found["ltc"]["rounds"]),
    ]


def steady_of(rounds: list[dict[str, Any]]) -> float:
    return statistics.median([seconds for one in rounds for seconds in one["seconds"]])


def counted(rounds: list[dict[str, Any]]) -> list[str]:
    """The cells of the table that are counts, of the last round."""
    last = rounds[-1]
    steps = len(last["seconds"]) * BLOCK
    grown, totals = last["grown"], last["totals"]
    python = {n.split()[1]: count for n, count in grown.items() if n.startswith("python ")}
    eager = {n: count for n, count in grown.items() if n.startswith("aten::") and n not in READS}
    calls = [grown.get("core", 0), grown.get("followed", 0), sum(python.values())]
    behind = [totals[name] for name in ("UncachedCompile", "CompileBehind", "SideExits")]
    faults = totals["InternalFaults"]
    return [
        " ".join(f"{count / steps:.1f}" for count in calls),
        most_of(python, steps),
        most_of(eager, steps),
        "; ".join(map(str, behind)) + (f"; {faults} faults" if faults else ""),
    ]


def most_of(calls: dict[str, int], steps: int, shown: int = 4) -> str:
    most = sorted(calls.items(), key=lambda pair: -pair[1])[:shown]
    return ", ".join(f"{n.removeprefix('aten::')} {c / steps:.1f}" for n, c in most if c) or "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=[*CLIENTS], help="may be repeated")
    parser.add_argument("--steps", type=int, default=100, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process")
    parser.add_argument("--settle", type=float, default=5, help="seconds of steps in between")
    parser.add_argument("--worker", nargs=2, metavar=("NAME", "DEVICE"), help=argparse.SUPPRESS)
    parser.add_argument("--draws-on-cpu", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        work(*chosen.worker, chosen.threads, chosen.draws_on_cpu)
        return
    print("| " + " | ".join(HEAD) + " |\n" + "|---" * len(HEAD) + "|")
    for name in chosen.only or CLIENTS:
        print("| " + " | ".join(row(name, chosen)) + " |", flush=True)


if __name__ == "__main__":
    main()
