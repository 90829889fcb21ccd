"""Replicas for tests: a function run once in each thread, or in each of some processes."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 60  # a hang ends here; a shared machine takes a fraction of it


def in_threads(function: Callable, replicas: int = 4) -> list:
    """What `function(ordinal, device)` returns, or raises, in a thread for each of some devices."""
    from ltc.distributed import session, world

    devices = [f"ltc:{index}" for index in range(replicas)]
    found: list = [TimeoutError("a thread hangs")] * replicas
    session.renew_threads(range(replicas))

    def run(ordinal: int) -> None:
        world.set_replication(devices[ordinal], devices)
        try:
            found[ordinal] = function(ordinal, devices[ordinal])
        except BaseException as error:  # the test looks at it
            found[ordinal] = error
        finally:
            world.set_replication(devices[ordinal], [])

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(replicas)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + LIMIT_SECONDS
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
    return found


def values(found: list) -> list:
    """The results; raises the first error among them."""
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found


def in_processes(path: str, name: str, processes: int = 2, **environment: str) -> list:
    """What function `name` of file `path` returns, or raises, given the ordinal, in each process.

    A process that ends without either is represented by its exit status.
    """
    with tempfile.TemporaryDirectory(prefix="ltc-test-") as folder:
        running = [_start(path, name, r, processes, folder, environment) for r in range(processes)]
        try:
            for process in running:
                process.wait(LIMIT_SECONDS)
        finally:
            for process in running:
                process.kill()
                process.wait()
        return [_found(Path(folder) / f"found-{r}", p.returncode) for r, p in enumerate(running)]


def _start(path, name, ordinal, processes, folder, environment) -> subprocess.Popen:
    given = {
        **os.environ, "XRT_SHARD_WORLD_SIZE": str(processes), "XRT_SHARD_ORDINAL": str(ordinal),
        "XRT_SHARD_LOCAL_ORDINAL": str(ordinal), "LTC_RENDEZVOUS": folder, "LTC_NUM_DEVICES": "2",
        "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment,
    }
    command = [sys.executable, __file__, path, name, str(ordinal), f"{folder}/found-{ordinal}"]
    return subprocess.Popen(command, env=given, cwd=ROOT)


def _found(path: Path, status: int):
    return pickle.loads(path.read_bytes()) if path.exists() else status


def _run(path: str, name: str, ordinal: int, result: str) -> None:
    sys.path.insert(0, str(Path(path).parent))
    module = __import__(Path(path).stem)
    try:
        found = getattr(module, name)(ordinal)
    except Exception as error:
        found = RuntimeError(f"{type(error).__name__}: {error}")
    Path(result).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    _run(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
