"""Checks that run in several processes at once, for tests that look at what each of them found.

A test file defines functions named `check_<claim>(rank, world)`, and imports `test_on_all_ranks`;
`findings` runs all of them, in order, in `world` processes that share one process group, and tells
how each went.  There are as many as LTC_NUM_DEVICES says, 2 where it says nothing, unless the file
needs another number and sets RANKS.  Each process has one device, unless the file sets DEVICES.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 900  # a hang ends here; a shared machine takes a fraction of it
GRACE_SECONDS = 20  # for the other ranks to come to the end of a check that fails on one
WORLD = int(os.environ.get("TEST_RANKS", "2"))  # tests/conftest.py
OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def names_of(names: dict) -> list[str]:
    """The claims that a module with these globals checks, in the order of its text."""
    return [name for name in names if name.startswith("check_")]


@dataclass
class Findings:
    """How the checks of one file went.

    returned  for each rank: name of the check -> what it returned
    failed    likewise: name -> traceback
    output    what the ranks printed
    """

    returned: list[dict]
    failed: list[dict]
    output: str

    def of(self, name: str) -> list:
        """What the check returned on each rank; fails where it raised, or was never reached."""
        errors = [f"rank {r}:\n{f[name]}" for r, f in enumerate(self.failed) if name in f]
        assert not errors, "\n".join(errors)
        missing = [r for r, found in enumerate(self.returned) if name not in found]
        assert not missing, f"rank(s) {missing} did not come to {name}:\n{self.output}"
        return [found[name] for found in self.returned]


def test_on_all_ranks(found: Findings, claim: str) -> None:
    """One check; for the files that import this (see conftest.py)."""
    found.of(claim)


def findings(
    path: str, folder: Path, world: int | None = None, backend: str = "ltc", devices: int = 1
) -> Findings:
    """Run the checks of a file in `world` processes; `folder` is for what they leave."""
    world = world or WORLD
    kept = {k: v for k, v in os.environ.items() if k not in OF_A_LAUNCHER}
    environment = {**kept, "OMP_NUM_THREADS": "1", "LTC_NUM_DEVICES": str(devices)}
    command = [sys.executable, "-W", "ignore", __file__, path, str(world), backend, str(folder)]
    logs = [folder / f"output{rank}" for rank in range(world)]  # a full pipe would stop its rank
    processes = [
        subprocess.Popen(
            [*command, str(rank)],
            env=environment,
            cwd=ROOT,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        for process in processes:
            process.wait(LIMIT_SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    returned, failed = zip(*[_left_by(rank, folder) for rank in range(world)])
    output = "\n".join(log.read_text(errors="replace") for log in logs)
    return Findings(list(returned), list(failed), output)


def _left_by(rank: int, folder: Path) -> tuple[dict, dict]:
    record = folder / f"rank{rank}"
    return pickle.loads(record.read_bytes()) if record.exists() else ({}, {})


def main(path: str, world: str, backend: str, folder: str, rank: str) -> None:
    """One rank: run the checks in order, up to one that fails here otherwise than on the others."""
    specification = importlib.util.spec_from_file_location("checks", path)
    checks = importlib.util.module_from_spec(specification)
    sys.modules["checks"] = checks
    specification.loader.exec_module(checks)  # imports ltc
    dist = checks.dist
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=int(rank), world_size=int(world)
    )
    returned, failed = {}, {}
    for name in names_of(vars(checks)):
        ended = Ended(Path(folder), name, int(rank), int(world))
        try:
            returned[name] = getattr(checks, name)(int(rank), int(world))
            ended.tell("returned")
            dist.barrier()
        except BaseException as error:
            failed[name] = traceback.format_exc()
            ended.tell(_place(error))
            if not ended.alike():
                break
    (Path(folder) / f"rank{rank}").write_bytes(pickle.dumps((returned, failed)))
    if not failed:
        dist.destroy_process_group()


def _place(error: BaseException) -> str:
    """What was raised, and at which lines: of ranks that share it none is a collective ahead."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} {[(frame.filename, frame.lineno) for frame in frames]}"


@dataclass
class Ended:
    """How one check ended on each rank, in files that all of them see."""

    folder: Path
    name: str
    rank: int
    world: int

    def tell(self, how: str) -> None:
        unfinished = self.folder / f"unfinished{self.rank}"
        unfinished.write_text(how)
        unfinished.rename(self._file_of(self.rank))

    def alike(self) -> bool:
        """Whether it ended alike on all ranks; False as well where one does not come to its end.

        That one may wait for this rank, whose end is that of its wait.
        """
        files = [self._file_of(rank) for rank in range(self.world)]
        deadline = time.monotonic() + GRACE_SECONDS
        while not all(file.exists() for file in files):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return len({file.read_text() for file in files}) == 1

    def _file_of(self, rank: int) -> Path:
        return self.folder / f"{self.name} ended on {rank}"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main(*sys.argv[1:])
