"""Programs that are ended at random instants, in every way and at everything: none hangs or is left.

    python scripts/stress/endings.py --count 500
    python scripts/stress/endings.py --count 50 --phase collective --way SIGKILL

Each program is a child of fork that does one thing over and over (the phase) and is ended after a
random time (the way). It must be over within --limit seconds, with the exit code of that way; none
of its processes (ranks, the one that compiles behind) may be left a second later. The table counts
them by phase and way.

phases  training: recorded, run, read; compiling: a new program at each step; behind: the same, compiled
        by another process; uploading; saving: a checkpoint behind each step; replay: ltc.compile;
        collective: two ranks, of which one is ended; the process that has started them where it
        is still to start them, or where it ends by itself
ways    signals: SIGINT, SIGTERM, SIGKILL, stopped (SIGSTOP, then SIGCONT and SIGTERM)
        of its own: os._exit, sys.exit in mid-loop with a thread that still records, an atexit that
        raises, a fork whose child reads a tensor and exits
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import faulthandler
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
from torch import nn

import ltc
import ltc.core.lazy_model as ltm
import ltc.distributed.lazy_multiprocessing as lmp
from ltc import config
from ltc.utils.checkpoint import CheckpointManager

MARK = "LTC_ENDINGS_MARK"  # in the environment of every process that comes of this one
LONGEST_SECONDS = 1.2
CODE = 7  # of those that end by themselves

# --- phases -------------------------------------------------------------------------------------


class Model:
    """A small network, trained on batches of any size."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to("ltc")
        self.optimizer = torch.optim.SGD(self.layers.parameters(), lr=0.1, momentum=0.9)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.layers(x).square().mean()
        loss.backward()
        ltm.optimizer_step(self.optimizer)
        return loss.detach()


def train(folder: str, grows: bool = False) -> None:
    model, size = Model(), 8
    while True:
        size += grows
        loss = model.step(torch.randn(size, 16).to("ltc"))
        ltm.mark_step()
        loss.item()


def upload(folder: str) -> None:
    while True:
        (torch.randn(512, 512).to("ltc") + 1).sum().item()


def save(folder: str) -> None:
    model = Model()
    manager = CheckpointManager(folder, model=model.layers, optimizer=model.optimizer)
    for step in range(10**9):
        model.step(torch.randn(8, 16).to("ltc"))
        manager.save(step, blocking=False)


def replay(folder: str) -> None:
    model = Model()
    step = ltc.compile(model.step)
    while True:
        step(torch.randn(8, 16).to("ltc")).item()


def rank_of_two(rank: int, folder: str) -> None:
    Path(folder, f"rank-{os.getpid()}").touch()
    train(folder)


def exchange(folder: str) -> None:
    lmp.spawn(rank_of_two, args=(folder,), nprocs=2, start_method="fork")


PHASES: dict[str, tuple[Callable[[str], None], dict[str, object]]] = {
    "training": (train, {}),
    "compiling": (lambda folder: train(folder, grows=True), {"LTC_TIER": "native"}),
    "behind": (lambda folder: train(folder, grows=True), {}),
    "uploading": (upload, {}),
    "saving": (save, {}),
    "replay": (replay, {}),
    "collective": (exchange, {}),
}


def import_what_steps_need() -> None:
    """Torch imports for seconds where the first optimizer is made: the instants are to fall behind."""
    torch.optim.SGD([torch.zeros(1)], lr=0.1)


# --- ways ---------------------------------------------------------------------------------------


def end_soon(way: str, seconds: float) -> None:
    """In the child: have it end itself after so long."""

    def wait_and_end() -> None:
        time.sleep(seconds)
        if way == "os._exit":
            os._exit(CODE)
        signal.raise_signal(signal.SIGUSR2)

    def end(number: int, frame: object) -> None:
        if way == "fork":
            child = os.fork()
            if not child:
                torch.ones(2, device="ltc").tolist()
                os._exit(0)
            os.waitpid(child, 0)
        sys.exit(CODE)

    def record_for_ever() -> None:
        while True:
            (torch.ones(2, device="ltc") + 1).tolist()

    signal.signal(signal.SIGUSR2, end)
    if way == "atexit":
        atexit.register(lambda: 1 / 0)
    if way == "sys.exit":
        threading.Thread(target=record_for_ever, daemon=True).start()
    threading.Thread(target=wait_and_end, daemon=True).start()


SENT = {"SIGINT": (signal.SIGINT,), "SIGTERM": (signal.SIGTERM,), "SIGKILL": (signal.SIGKILL,)}
SENT["stopped"] = (signal.SIGSTOP, signal.SIGCONT, signal.SIGTERM)
OWN = ("os._exit", "sys.exit", "atexit", "fork")


def live(phase: str, way: str, seconds: float, folder: str, limit: float) -> NoReturn:
    """The child; where it hangs, the file `said` tells where its threads are."""
    said = os.open(f"{folder}/said", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    faulthandler.enable()
    faulthandler.dump_traceback_later(limit * 0.9)
    code = 1
    try:
        work, settings = PHASES[phase]
        if way in OWN:
            end_soon(way, seconds)
        with config.override(**settings):
            work(folder)
    except KeyboardInterrupt:
        code = -signal.SIGINT
    except SystemExit as error:
        code = error.code
    except lmp.RankFailed:
        code = CODE
    except BaseException:
        traceback.print_exc()
    # what Python does at the end of a program; a child of fork would go on in its parent's frames
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    os._exit(abs(code))


# --- trials -------------------------------------------------------------------------------------


def processes_of(mark: str) -> list[int]:
    """Return the running processes, but this one, with that mark in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            marked = f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0")
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            if marked and state != "Z" and int(process.name) != os.getpid():
                found.append(int(process.name))
    return found


def send(child: int, way: str, folder: str) -> None:
    """Send the signals of a way to the child, or to one of the ranks that it has started."""
    ranks = [int(path.name.partition("-")[2]) for path in Path(folder).glob("rank-*")]
    victim = random.choice(ranks or [child])
    for number in SENT[way]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, number)
        time.sleep(0.2 if number == signal.SIGSTOP else 0)


def said_in(folder: str) -> str:
    """The end of what the child has said; nothing of one that never ran."""
    return "".join(path.read_text()[-5000:] for path in Path(folder).glob("said"))


def finding(phase: str, way: str, seconds: float, limit: float) -> str | None:
    """Return the error of one program; None if it ended as it should."""
    folder = tempfile.mkdtemp()  # no TemporaryDirectory: the child's exit functions would remove it
    try:
        return finding_in(folder, phase, way, seconds, limit)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def finding_in(folder: str, phase: str, way: str, seconds: float, limit: float) -> str | None:
    """The same, with a folder of its own."""
    child = os.fork()
    if not child:
        live(phase, way, seconds, folder, limit)
    deadline = time.monotonic() + limit
    while not Path(folder, "said").exists() and time.monotonic() < deadline:
        time.sleep(0.0005)  # Python drops what comes to a child of fork before it runs
    if way in SENT:
        time.sleep(seconds)
        send(child, way, folder)
    deadline = time.monotonic() + limit
    while not (done := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"it hung\n{said_in(folder)}"
        time.sleep(0.01)
    code = os.waitstatus_to_exitcode(done[1])
    expected = {CODE} if way in OWN else {-SENT[way][-1], int(SENT[way][-1])}
    if phase == "collective":
        expected |= {CODE, 1}  # the launcher says which rank has failed
    deadline = time.monotonic() + 1 + limit / 10
    while (left := processes_of(os.environ[MARK])) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if left:
        return f"{len(left)} processes are left"
    return None if code in expected else f"exit code {code}\n{said_in(folder)}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=500, help="number of endings")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--phase", choices=PHASES, help="end programs in this phase alone")
    parser.add_argument("--way", choices=(*SENT, *OWN), help="end programs in this way alone")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that make a hang")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)  # a child of fork has no thread pool
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    import_what_steps_need()
    choose, done, wrong = random.Random(chosen.seed), Counter(), Counter()
    for number in range(chosen.count):
        phase = chosen.phase or list(PHASES)[number % len(PHASES)]
        way = chosen.way or choose.choice([*SENT, *OWN])
        found = finding(phase, way, choose.uniform(0, LONGEST_SECONDS), chosen.limit)
        done[phase, way] += 1
        if found:
            wrong[phase, way] += 1
            print(f"{phase} {way}: {found}", flush=True)
    ways = [*SENT, *OWN]
    print(f"{'':11}" + "".join(f"{way:>10}" for way in ways))
    for phase in PHASES:
        row = [
            f"{done[phase, way]}" + f" ({wrong[phase, way]})" * bool(wrong[phase, way])
            for way in ways
        ]
        print(f"{phase:11}" + "".join(f"{cell:>10}" for cell in row))
    print(f"{done.total()} endings, {wrong.total()} wrong (in brackets)")
    return int(wrong.total() > 0)


if __name__ == "__main__":
    if MARK not in os.environ:  # the environment that /proc shows is that of the start
        os.environ[MARK] = str(os.getpid())
        os.execv(sys.executable, [sys.executable, *sys.argv])
    sys.exit(main(sys.argv[1:]))
