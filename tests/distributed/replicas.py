"""Replicas for tests: a function run once in each thread, or in each of some processes."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 600  # a hang ends here; a shared machine takes a fraction of it


def in_threads(function: Callable, replicas: int = 4) -> list:
    """What `function(ordinal, device)` returns, or raises, in a thread for each of some devices."""
    from ltc.distributed import world
    from ltc.distributed.transport import session

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


def wait_until_others_are_in(collective: str, communicator) -> None:
    """Return when every replica but the caller's is inside a collective whose line begins so."""
    board = communicator.board
    others = [replica for replica in board.ordinals() if replica != communicator.replica]
    while not all(_line_of(board, replica).startswith(collective) for replica in others):
        time.sleep(0.01)


@contextlib.contextmanager
def whole_tables() -> Iterator[None]:
    """A report that is made inside tells what each replica is in, however late it comes to that."""
    from ltc.distributed.transport.status_board import StatusBoard

    rows = StatusBoard.rows

    def complete(board) -> str:
        while not all(_line_of(board, r) for r in board.ordinals()) and not board.region.failed:
            time.sleep(0.01)
        return rows(board)

    StatusBoard.rows = complete
    try:
        yield
    finally:
        StatusBoard.rows = rows


def _line_of(board, replica: int) -> str:
    """The collective that a replica is inside; empty where it is in none."""
    _, inside, _, line = board.entry(replica)
    return line if inside and line != "nothing yet" else ""


def in_processes(path: str, name: str, processes: int = 2, **environment: str) -> list:
    """What function `name` of file `path` returns, or raises, given the ordinal, in each process.

    A process that ends without either is represented by its exit status.  They are forked from one
    that has imported ltc, which takes longer than most of what they do.
    """
    with tempfile.TemporaryDirectory(prefix="ltc-test-") as folder:
        of_now = {name: text for name, text in os.environ.items() if name.startswith("LTC_")}
        settings = {**of_now, "LTC_NUM_DEVICES": "1"}
        request = (path, name, processes, folder, settings, environment)
        server = _server()
        pickle.dump(request, server.stdin)
        server.stdin.flush()
        statuses = pickle.load(server.stdout)
        return [_found(Path(folder) / f"found-{r}", status) for r, status in enumerate(statuses)]


@functools.cache
def _server() -> subprocess.Popen:
    # Devices are counted once in a process, so those of the test that came first would be everyone's.
    one = {"OMP_NUM_THREADS": "1", "LTC_NUM_DEVICES": "1"}
    given = {**os.environ, **one, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, __file__],
        env=given,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def _found(path: Path, status: int):
    return pickle.loads(path.read_bytes()) if path.exists() else status


# --- the process that forks them --------------------------------------------------------------


def serve() -> None:
    """Answer requests until there are none; returns in every forked process as well."""
    import ltc.core.lazy_model  # noqa: F401  what the processes shall have

    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what they print is no answer
    while True:
        try:
            path, name, processes, folder, settings, environment = pickle.load(requests)
        except EOFError:
            return
        running = []
        for ordinal in range(processes):
            running.append(os.fork())
            if running[-1] == 0:
                for variable in [one for one in os.environ if one.startswith("LTC_")]:
                    del os.environ[variable]
                os.environ.update(settings | _settings(ordinal, processes, folder) | environment)
                _run(path, name, ordinal, f"{folder}/found-{ordinal}")
                return
        pickle.dump(_statuses(running), answers)
        answers.flush()


def _settings(ordinal: int, processes: int, folder: str) -> dict[str, str]:
    return {
        "XRT_SHARD_WORLD_SIZE": str(processes),
        "XRT_SHARD_ORDINAL": str(ordinal),
        "XRT_SHARD_LOCAL_ORDINAL": str(ordinal),
        "LTC_RENDEZVOUS": folder,
    }


def _statuses(running: list[int]) -> list[int]:
    """The exit status of each process; one that hangs is killed."""
    deadline = time.monotonic() + LIMIT_SECONDS
    found: dict[int, int] = {}
    while len(found) < len(running):
        for pid in set(running) - set(found):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                found[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return [found[pid] for pid in running]


def _run(path: str, name: str, ordinal: int, result: str) -> None:
    sys.path.insert(0, str(Path(path).parent))
    module = __import__(Path(path).stem)
    try:
        found = getattr(module, name)(ordinal)
    except Exception as error:
        found = RuntimeError(f"{type(error).__name__}: {error}")
    Path(result).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    serve()
