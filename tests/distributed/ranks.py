"""Checks that run in several processes at once, for tests that look at what each of them found.

A test file defines functions named `check_<claim>(rank, world)`; `checks_of` runs all of them, in
order, in `world` processes that share one process group, and tells how each went.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 240  # a hang ends here; a shared machine takes a fraction of it


def names_of(module: str) -> list[str]:
    """The claims that a module checks, in the order of its text."""
    return [name for name in vars(sys.modules[module]) if name.startswith("check_")]


class Findings:
    """How the checks of one file went: name -> what it returned on each rank, or the errors."""

    def __init__(self, path: str, world: int, backend: str = "ltc", **environment: str) -> None:
        self.world = world
        self._run(path, world, backend, environment)

    def of(self, name: str) -> list:
        """What the check returned on each rank; fails with their tracebacks where it raised."""
        errors = [f"rank {r}:\n{f[name]}" for r, f in enumerate(self.failed) if name in f]
        assert not errors, "\n".join(errors)
        missing = [r for r, found in enumerate(self.returned) if name not in found]
        assert not missing, f"rank(s) {missing} did not come to {name}:\n{self.output}"
        return [found[name] for found in self.returned]

    def _run(self, path: str, world: int, backend: str, environment: dict) -> None:
        folder = Path(os.environ["LTC_TEST_FOLDER"])
        command = [sys.executable, "-W", "ignore", __file__, path, str(world), backend, str(folder)]
        settings = {"OMP_NUM_THREADS": "1", "LTC_NUM_DEVICES": "2", **environment}
        inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        processes = [
            subprocess.Popen(
                [*command, str(rank)], env={**inherited, **settings}, cwd=ROOT,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank in range(world)
        ]
        try:
            outputs = [p.communicate(timeout=LIMIT_SECONDS)[0] for p in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        self.output = "\n".join(outputs)
        self.returned, self.failed = [], []
        for rank in range(world):
            record = folder / f"rank{rank}"
            returned, failed = pickle.loads(record.read_bytes()) if record.exists() else ({}, {})
            self.returned.append(returned)
            self.failed.append(failed)


def findings(path: str, folder: Path, world: int = 2, **settings: str) -> Findings:
    """Run the checks of a file; `folder` is one of its own, for what the ranks leave."""
    os.environ["LTC_TEST_FOLDER"] = str(folder)
    return Findings(path, world, **settings)


def main(path: str, world: str, backend: str, folder: str, rank: str) -> None:
    """One rank: run the checks in order until one fails, since the others then wait for this one."""
    import torch.distributed as dist

    import ltc  # noqa: F401  the device

    specification = importlib.util.spec_from_file_location("checks", path)
    checks = importlib.util.module_from_spec(specification)
    sys.modules["checks"] = checks
    specification.loader.exec_module(checks)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=int(rank), world_size=int(world)
    )
    returned, failed = {}, {}
    for name in names_of("checks"):
        try:
            returned[name] = getattr(checks, name)(int(rank), int(world))
            dist.barrier()
        except BaseException:
            failed[name] = traceback.format_exc()
            break
    (Path(folder) / f"rank{rank}").write_bytes(pickle.dumps((returned, failed)))
    if not failed:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main(*sys.argv[1:])
