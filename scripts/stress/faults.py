"""Every way in which a rank, a parent or a loader can fail, some number of times: nothing may hang.

    python scripts/stress/faults.py --runs 20                all cases, 20 times each
    python scripts/stress/faults.py --sample 8 --seed 3      8 cases drawn with a seed, once each

ranks    one of three ranks dies, by every cause, under `spawn` with two start methods and under
         torchrun, while the others wait in a barrier: the parent knows within 5 s of the death,
         names it, and no process or folder is left.
parents  the parent of two ranks is killed: they end within 5 s.
loaders  a sample raises, first, in the middle or last, with 0 or 2 workers, on 1 or 2 devices: the
         consumer gets that error. And 50 loops left early: no thread is left.

A case that takes longer than --limit seconds is a hang: all stacks are printed, and the script ends
with code 1, as it does where any case went wrong.  --seconds is the promise of 5 s: a machine that
does other work at the same time needs more.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("LTC_NUM_DEVICES", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where ltc is not installed

import torch
from torch.utils.data import DataLoader, Dataset

import ltc.core.lazy_model as ltm
import ltc.distributed.lazy_multiprocessing as lmp
import ltc.distributed.parallel_loader as pl

SECONDS = 5.0  # within which a death is known to everyone
CAUSES = ("raise", "sys.exit", "os._exit", "interrupt", "SIGKILL", "SIGSEGV")
DEVICES = ["ltc:0", "ltc:1"]


# --- ranks --------------------------------------------------------------------------------------


def die(cause: str) -> None:
    match cause:
        case "raise":
            raise KeyError("a rank's own", 2)
        case "sys.exit":
            sys.exit(3)
        case "os._exit":
            os._exit(0)
        case "interrupt":
            signal.raise_signal(signal.SIGINT)
        case _:
            os.kill(os.getpid(), signal.Signals[cause])


def one_dies(rank: int, cause: str, folder: str) -> None:
    """Rank 1 dies; each rank leaves a file named after its process, that rank also the time.

    In the file is the folder of the launch.
    """
    Path(folder, f"pid-{os.getpid()}").write_text(os.environ.get("LTC_RENDEZVOUS", ""))
    if rank == 1:
        Path(folder, "died").write_text(str(time.monotonic()))  # one clock for all processes
        die(cause)
    ltm.rendezvous("the others wait here")


def spawn_dies(cause: str, start_method: str) -> None:
    """spawn raises in time, for the rank that died."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            lmp.spawn(one_dies, args=(cause, folder), nprocs=3, start_method=start_method)
        except lmp.RankFailed as error:
            check(error.rank == 1, f"rank {error.rank} was named")
        else:
            raise AssertionError("spawn returned")
        check_all_ended(folder)
        check(not any(os.path.exists(path) for path in launch_folders(folder)), "a folder is left")


def torchrun_dies(cause: str) -> None:
    """torchrun fails in time, and none of its ranks is left."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "3",
            __file__,
            "--rank-dies",
            cause,
            folder,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        check(done.returncode != 0, "torchrun saw no failure")
        check_all_ended(folder)


def check_all_ended(folder: str) -> None:
    late = time.monotonic() - float(Path(folder, "died").read_text())
    check(late <= SECONDS, f"it took {late:.1f} s")
    pids = [int(path.name.removeprefix("pid-")) for path in Path(folder).glob("pid-*")]
    check(not any(map(is_alive, pids)), "a rank is left")


def is_alive(pid: int) -> bool:
    """Return True if the process runs; one that was never waited for is dead."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def launch_folders(folder: str) -> set[str]:
    """Return the folders the ranks met in: other programs have such folders too."""
    found = {path.read_text() for path in Path(folder).glob("pid-*")} - {""}
    check(bool(found), "no rank named its folder")
    return found


# --- parents ------------------------------------------------------------------------------------


def wait_for_ever(rank: int, folder: str) -> None:
    Path(folder, f"pid-{os.getpid()}").touch()
    time.sleep(3600)


def parent_dies(number: str) -> None:
    """Ranks end with their parent."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--parent-waits", folder]
        parent = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        while len(list(Path(folder).glob("pid-*"))) < 2:
            check(parent.poll() is None, "the parent did not start")
            time.sleep(0.05)
        parent.send_signal(signal.Signals[number])
        Path(folder, "died").write_text(str(time.monotonic()))
        parent.wait()
        pids = [int(path.name.removeprefix("pid-")) for path in Path(folder).glob("pid-*")]
        while any(map(is_alive, pids)):
            check_all_in_time(folder)
            time.sleep(0.05)


def check_all_in_time(folder: str) -> None:
    late = time.monotonic() - float(Path(folder, "died").read_text())
    check(late <= SECONDS, f"ranks run on after {late:.1f} s")


# --- loaders ------------------------------------------------------------------------------------


class Samples(Dataset):
    """Twelve numbers, one of which raises."""

    def __init__(self, bad: int):
        self.bad = bad

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.bad:
            raise KeyError("sample", index)
        return torch.tensor(float(index))


def loader_fails(bad: int, workers: int, devices: int) -> None:
    """Every device's consumer gets the error of the sample."""
    source = DataLoader(Samples(bad), batch_size=None, num_workers=workers)
    loader = pl.ParallelLoader(source, DEVICES[:devices])
    for device in DEVICES[:devices]:
        try:
            list(loader.per_device_loader(device))
        except KeyError as error:
            check("sample" in str(error), f"another error: {error}")
        else:
            raise AssertionError(f"no error on {device}")
    loader.close()
    check_no_thread()


def loops_left_early(workers: int, devices: int) -> None:
    """Fifty loops with a break leave no thread."""
    source = DataLoader(Samples(bad=-1), batch_size=None, num_workers=workers)
    loader = pl.ParallelLoader(source, DEVICES[:devices])
    for _ in range(50):
        for device in DEVICES[:devices]:
            for _ in loader.per_device_loader(device):
                break
    loader.close()
    check_no_thread()


def check_no_thread() -> None:
    deadline = time.monotonic() + SECONDS
    while threads := [t.name for t in threading.enumerate() if t.name.startswith("ltc loader")]:
        check(time.monotonic() < deadline, f"threads are left: {threads}")
        time.sleep(0.01)


# --- all of them --------------------------------------------------------------------------------


def check(fact: bool, otherwise: str) -> None:
    if not fact:
        raise AssertionError(otherwise)


def cases() -> dict[str, Callable[[], None]]:
    """Every case by its name."""
    found: dict[str, Callable[[], None]] = {}
    for cause, method in itertools.product(CAUSES, ("spawn", "fork")):
        found[f"rank {cause} {method}"] = lambda c=cause, m=method: spawn_dies(c, m)
    for cause in CAUSES:
        found[f"rank {cause} torchrun"] = lambda c=cause: torchrun_dies(c)
    for number in ("SIGKILL", "SIGTERM", "SIGINT"):
        found[f"parent {number}"] = lambda n=number: parent_dies(n)
    for workers, devices in itertools.product((0, 2), (1, 2)):
        where = f"{workers} workers, {devices} devices"
        for bad in (0, 6, 11):
            found[f"loader sample {bad}, {where}"] = lambda b=bad, w=workers, d=devices: (
                loader_fails(b, w, d)
            )
        found[f"loops left early, {where}"] = lambda w=workers, d=devices: loops_left_early(w, d)
    return found


def run_all(chosen: argparse.Namespace) -> int:
    """Run the cases and print a line for each; the number of failures."""
    global SECONDS
    SECONDS, selected = chosen.seconds, cases()
    if chosen.only:
        selected = {name: case for name, case in selected.items() if chosen.only in name}
    if chosen.sample:
        drawn = random.Random(chosen.seed).sample(sorted(selected), chosen.sample)
        selected = {name: selected[name] for name in drawn}
    failures = 0
    for name, case in selected.items():
        longest, wrong = 0.0, []
        for _ in range(chosen.runs):
            faulthandler.dump_traceback_later(chosen.limit, exit=True)
            began = time.monotonic()
            try:
                case()
            except AssertionError as error:
                wrong.append(str(error))
            longest = max(longest, time.monotonic() - began)
            faulthandler.cancel_dump_traceback_later()
        failures += len(wrong)
        said = f"{len(wrong)} of {chosen.runs} WRONG: {wrong[0]}" if wrong else "ok"
        print(f"{name:45} longest {longest:5.1f} s  {said}", flush=True)
    print(f"{len(selected)} cases x {chosen.runs}: {failures} wrong")
    return failures


def main() -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1, help="runs of each case")
    parser.add_argument("--sample", type=int, default=0, help="number of cases to draw; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the drawing")
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="seconds that a death may take"
    )
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that make a hang")
    parser.add_argument("--rank-dies", nargs=2, help=argparse.SUPPRESS)  # one of torchrun's ranks
    parser.add_argument("--parent-waits", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank_dies:
        lmp.spawn(one_dies, args=tuple(chosen.rank_dies))
    elif chosen.parent_waits:
        lmp.spawn(wait_for_ever, args=(chosen.parent_waits,), nprocs=2)
    else:
        return int(run_all(chosen) > 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
