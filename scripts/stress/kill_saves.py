"""Kill -9 in the middle of saves: the path always holds one whole file, the old or the new.

    python scripts/stress/kill_saves.py --count 200 [--way xser|ltm|manager] [--crash-loop]

A child saves versions 1, 2, 3, … of a state over and over and is killed at a random instant. Then
the file is read here: every element of it must be of one version, at least the last one whose save
had returned.

With --crash-loop no save ever ends: each child is killed in its first one. At most one unfinished file
may be there then, that of the last child.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch

import ltc.core.lazy_model as ltm
import ltc.utils.serialization as xser
from ltc.utils.checkpoint import CheckpointManager

TENSORS, ELEMENTS = 8, 1 << 18  # 8 MB, so that most of the time is inside of the write
LONGEST_SECONDS = 0.4


class State:
    """A state whose every element says its version."""

    def __init__(self, version: int = 0):
        self.version = version

    def state_dict(self) -> dict:
        value = float(self.version)
        tensors = [torch.full((ELEMENTS,), value, device="ltc") for _ in range(TENSORS)]
        return {"version": self.version, "tensors": tensors}

    def load_state_dict(self, state: dict) -> None:
        self.version = state["version"]
        for tensor in state["tensors"]:
            assert bool((tensor == self.version).all()), "a tensor of another version"


# --- ways to save -------------------------------------------------------------------------------


def save_xser(folder: Path, version: int) -> None:
    xser.save(State(version).state_dict(), folder / "state")


def load_xser(folder: Path) -> int:
    state = State()
    state.load_state_dict(xser.load(folder / "state"))
    return state.version


def save_ltm(folder: Path, version: int) -> None:
    ltm.save(State(version).state_dict(), folder / "state")


def load_ltm(folder: Path) -> int:
    state = State()
    state.load_state_dict(torch.load(folder / "state"))
    return state.version


_managers: dict[Path, CheckpointManager] = {}
_state = State()


def save_manager(folder: Path, version: int) -> None:
    if folder not in _managers:
        _managers[folder] = CheckpointManager(folder, keep_last=2, state=_state)
    manager, _state.version = _managers[folder], version
    manager.save(version, blocking=version % 2 == 0)
    if version % 2:
        manager.wait()


def load_manager(folder: Path) -> int:
    state = State()
    restored = CheckpointManager(folder, keep_last=2, state=state).restore_latest()
    assert restored is not None and restored.step == state.version, "no checkpoint is left"
    return state.version


WAYS: dict[str, tuple[Callable[[Path, int], None], Callable[[Path], int]]] = {
    "xser": (save_xser, load_xser),
    "ltm": (save_ltm, load_ltm),
    "manager": (save_manager, load_manager),
}


# --- killing ------------------------------------------------------------------------------------


def save_for_ever(way: str, folder: Path, version: int, told: int) -> NoReturn:
    """In the child: save, say so, save the next version."""
    while True:
        WAYS[way][0](folder, version)
        os.write(told, version.to_bytes(8, "little"))
        version += 1


def killed_once(way: str, folder: Path, version: int, choose: random.Random) -> int:
    """Kill one child at a random instant; returns the version that its folder holds."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            save_for_ever(way, folder, version, writer)
        finally:
            os._exit(1)
    os.close(writer)
    with open(reader, "rb") as pipe:
        told = pipe.read(8)  # the first save is done
        time.sleep(choose.uniform(0, LONGEST_SECONDS))
        os.kill(child, signal.SIGKILL)
        told += pipe.read()
    os.waitpid(child, 0)
    assert told, "the child ended before its first save"
    returned = int.from_bytes(told[-8:], "little")
    held = WAYS[way][1](folder)
    assert held >= returned, f"version {returned} was saved, and {held} is there"
    return held


def crash_loop(way: str, count: int) -> None:
    """Kill `count` children, each in its first save; another version each, as a step of a training."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        began = most = 0
        for version in range(1, count + 1):
            killed_in_save(way, Path(name), version)
            left = unfinished_in(Path(name))
            began, most = began + bool(left), max(most, len(left))
        print(f"{way}: {count} kills, {began} in mid-save, {most} unfinished files at most")
    assert began, "no save was killed in its midst"
    assert most <= 1, f"{most} unfinished files at once"


def killed_in_save(way: str, folder: Path, version: int) -> None:
    """Kill one child as soon as it has begun to write, or has saved."""
    before = set(unfinished_in(folder))
    child = os.fork()
    if not child:
        try:
            WAYS[way][0](folder, version)
        finally:
            os._exit(0)
    while not os.waitpid(child, os.WNOHANG)[0]:
        if any(file not in before for file in unfinished_in(folder)):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return


def unfinished_in(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.name.startswith(".")]


def run(way: str, count: int, seed: int = 0) -> int:
    """Kill `count` children one after the other; returns how many versions were saved in all."""
    choose = random.Random(seed)
    torch.set_num_threads(1)  # a child of fork has no thread pool
    with tempfile.TemporaryDirectory() as name:
        version = 0
        for _ in range(count):
            version = killed_once(way, Path(name), version + 1, choose)
        unfinished = unfinished_in(Path(name))
        print(f"{way}: {count} kills, {version} versions, {len(unfinished)} left in mid-save")
        assert len(unfinished) <= 1, "the saves of killed children are not removed"
    return version


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200, help="number of kills")
    parser.add_argument(
        "--way", choices=WAYS, action="append", help="a way to save; may be repeated; default: all"
    )
    parser.add_argument(
        "--crash-loop", action="store_true", help="kill each child in its first save"
    )
    chosen = parser.parse_args(arguments)
    for way in chosen.way or WAYS:
        if chosen.crash_loop:
            crash_loop(way, chosen.count)
        else:
            run(way, chosen.count)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
