"""A training whose processes are killed at random instants ends with the bits of one left alone.

    python scripts/stress/elastic.py --runs 50
    python scripts/stress/elastic.py --runs 5 --only agent --seed 3

examples/mnist/train_elastic.py runs under torchrun with two replicas. In each run one or two deaths
come at random instants: of a rank (SIGKILL, as an out-of-memory killer sends it), of torchrun, which
is the host's agent and has the store that the ranks meet in, or of a rank that is stopped first
(SIGSTOP). torchrun starts dead ranks again; where it has died itself, its ranks must end within
--limit seconds, and the same command is given again. At the end the saved weights are compared with
those of an undisturbed run, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "mnist" / "train_elastic.py"
DEATHS = ("rank", "stopped", "agent")
ENDS_SECONDS = 30.0  # within which ranks end whose torchrun is gone
# One tier: what is recorded for the first time would else run on PyTorch's kernels, which add in
# another order, and how often depends on the time that compiling takes.
SETTINGS = {"LTC_TIER": "native", "OMP_NUM_THREADS": "1", "LTC_PEER_TIMEOUT": "20"}


class Wrong(Exception):
    """A run went wrong."""


def launched(folder: Path, chosen: argparse.Namespace, replicas: int = 2) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(replicas)]
    command += ["--max-restarts", "8", "--monitor-interval", "0.1", "--master-port", "0"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(EXAMPLE)]
    command += ["--checkpoints", str(folder / "checkpoints"), "--save", str(folder / "weights.pt")]
    command += ["--epochs", str(chosen.epochs), "--interval", str(chosen.interval)]
    with open(folder / "said", "ab") as said:
        environment = {**os.environ, **SETTINGS}
        return subprocess.Popen(command, stdout=said, stderr=said, env=environment)


def children_of(parent: int) -> list[int]:
    """The processes that a process has started and that live."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, owner = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue  # it has ended meanwhile
        if int(owner) == parent and state != "Z":
            found.append(int(stat.parent.name))
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def strike(death: str, agent: subprocess.Popen, choose: random.Random) -> None:
    """One death."""
    ranks = children_of(agent.pid)
    if death == "agent":
        agent.kill()
        agent.wait()
        deadline = time.monotonic() + ENDS_SECONDS
        while any(map(is_alive, ranks)):
            if time.monotonic() > deadline:
                left = [pid for pid in ranks if is_alive(pid)]
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                raise Wrong(f"{len(left)} ranks lived {ENDS_SECONDS:g} s longer than torchrun")
            time.sleep(0.05)
    elif ranks:
        victim = choose.choice(ranks)
        if death == "stopped":
            os.kill(victim, signal.SIGSTOP)
            time.sleep(choose.uniform(0, 2))
            if choose.random() < 0.5:  # it wakes, and all go on
                os.kill(victim, signal.SIGCONT)
                return
        os.kill(victim, signal.SIGKILL)


def run_once(
    folder: Path, chosen: argparse.Namespace, choose: random.Random, seconds: float
) -> str:
    """A training with its deaths; returns which there were."""
    kinds = [chosen.only] if chosen.only in DEATHS else DEATHS
    deaths = [choose.choice(kinds) for _ in range(choose.choice((1, 1, 2)))]
    agent, deadline = launched(folder, chosen), time.monotonic() + chosen.limit
    had = []
    for death in deaths:
        wait = choose.uniform(0.2, 0.95) * seconds
        try:
            agent.wait(wait)
            break  # it was over sooner
        except subprocess.TimeoutExpired:
            strike(death, agent, choose)
        had.append(f"{death} at {wait:.1f} s")
        if agent.poll() is not None:
            agent = launched(folder, chosen)
    try:
        code = agent.wait(deadline - time.monotonic())
    except subprocess.TimeoutExpired:
        for pid in (*children_of(agent.pid), agent.pid):
            os.kill(pid, signal.SIGKILL)
        raise Wrong(f"it hangs ({', '.join(had)})") from None
    if code:
        raise Wrong(f"torchrun ended with {code} ({', '.join(had)})")
    return ", ".join(had) or "none"


def differing(one: Path, other: Path) -> list[str]:
    first, second = torch.load(one / "weights.pt"), torch.load(other / "weights.pt")
    return [name for name in first if not torch.equal(first[name], second[name])]


def undisturbed(folder: Path, chosen: argparse.Namespace) -> float:
    """Seconds that it takes when everything is compiled already."""
    for name in ("first", "reference"):
        (folder / name).mkdir()
        began = time.monotonic()
        if launched(folder / name, chosen).wait(chosen.limit):
            raise SystemExit((folder / name / "said").read_text())
    if different := differing(folder / "first", folder / "reference"):
        raise SystemExit(f"two undisturbed runs differ in {different}")
    return time.monotonic() - began


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=50, help="number of runs")
    parser.add_argument("--only", choices=DEATHS, help="use this kind of death alone")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of each training")
    parser.add_argument("--interval", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that make a hang")
    chosen = parser.parse_args(arguments)
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seconds = undisturbed(folder, chosen)
        print(f"undisturbed: {seconds:.1f} s, twice the same bits", flush=True)
        for number in range(chosen.runs):
            choose, place = random.Random(f"{chosen.seed} {number}"), folder / str(number)
            place.mkdir()
            try:
                had = run_once(place, chosen, choose, seconds)
                if different := differing(place, folder / "reference"):
                    raise Wrong(f"{len(different)} weights differ ({had})")
                print(f"run {number}: the same bits; deaths: {had}", flush=True)
            except Wrong as error:
                wrong += 1
                print(f"run {number}: WRONG: {error}", flush=True)
                print((place / "said").read_text()[-3000:])
    print(f"{chosen.runs} runs, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
