"""The processes of one launch, as their parent sees them: started, watched, and none left over."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing  # noqa: F401  lets the memory of CPU tensors travel

from ltc import config
from ltc.distributed import world
from ltc.distributed.launch.child import STACKS, Error, ReturnedValue, Role, Stacks, run_rank
from ltc.distributed.launch.pickled_call import PickledCall, importable_main
from ltc.distributed.rendezvous import rendezvous
from ltc.distributed.transport import session
from ltc.distributed.transport.bootstrap import processes_per_host, store
from ltc.distributed.transport.shm_segment import LANES, region_bytes
from ltc.errors import RankFailed
from ltc.support.process import processors
from ltc.support.process.private_folder import private_folder
from ltc.tracebacks import entrance

POLL_SECONDS = 0.1  # how soon a death is seen that no pipe tells of
FIRST_CAUSE_SECONDS = 0.3  # how long others may take to report before the first to fail is named
STACKS_SECONDS = 1.0  # how long a rank may take to say where it is
TERMINATE_SECONDS = 1.0  # between asking a process to end and ending it
END_SECONDS = 60.0  # what the end of a killed one may take where processors or disks are busy


class Ranks:
    """The processes that run `fn(rank, *args)` for rank 0 to count - 1.

    After `spawn(..., join=False)`, `join` must be called: it returns the values, or raises RankFailed.

    Example:
        >>> from ltc.distributed.lazy_multiprocessing import spawn
        >>> ranks = spawn(lambda rank: rank, nprocs=2, join=False, start_method="fork")
        >>> len(ranks.pids()), ranks.join()
        (2, [0, 1])
    """

    def __init__(
        self,
        fn: Callable,
        args: tuple,
        count: int,
        *,
        start_method: str = "spawn",
        daemon: bool = False,
        devices: int | None = None,
        prefixed: bool = False,
        dies_with_thread: bool = True,
    ):
        """Start the processes.

        Args:
            devices: Number of devices of each process; None: as the environment says.
            prefixed: True to put the rank before each line that they print.
            dies_with_thread: True if they may not outlive the thread that starts them, either.
        """
        self._resources = contextlib.ExitStack()
        self._members: list[_Member] = []
        user_call = PickledCall(fn, args)
        replicas = count * (devices or config.value("LTC_NUM_DEVICES") or 1)
        self._folder = self._resources.enter_context(private_folder(LANES * region_bytes(replicas)))
        try:
            for rank in range(count):
                member = _Member(rank, self._folder, prefixed)
                self._members.append(member)
                settings = _settings(rank, count, self._folder, devices)
                inherited = self._ends() if start_method == "fork" else []
                role = Role(
                    rank,
                    settings,
                    settings["OMP_NUM_THREADS"],
                    0 if start_method == "forkserver" else os.getpid(),
                    dies_with_thread,
                    member.crash_file,
                    inherited,
                )
                member.start(start_method, role, user_call, daemon)
        except BaseException:
            self.kill()
            raise

    @property
    def processes(self) -> list:
        """The multiprocessing.Process of each rank."""
        return [member.process for member in self._members]

    def pids(self) -> list[int]:
        """The process id of each rank."""
        return [member.process.pid for member in self._members]

    @entrance
    def join(self, timeout: float | None = None) -> list | None:
        """The value that each rank returned, once all have; None where `timeout` seconds are over.

        Raises:
            RankFailed: If a rank ends without a value; then no process is left.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while not all(member.finished for member in self._members):
                if deadline is not None and time.monotonic() >= deadline:
                    return None
                if self._listen(POLL_SECONDS):
                    self._raise_failure()
        except BaseException:  # Ctrl-C too
            self.kill()
            raise
        self._resources.close()
        outcomes: list[Any] = [member.outcome for member in self._members]  # all have finished
        return [pickle.loads(outcome.pickled) for outcome in outcomes]

    def kill(self) -> None:
        """End every process that still runs, and what it started."""
        for number, seconds in ((signal.SIGTERM, TERMINATE_SECONDS), (signal.SIGKILL, END_SECONDS)):
            for member in self._members:
                member.signal(number)
            deadline = time.monotonic() + seconds
            for member in self._members:
                member.wait(deadline)
        self._resources.close()

    def _ends(self) -> list[Connection]:
        """The parent's ends of all pipes: a forked child has copies that it must not keep."""
        return [end for member in self._members for end in member.ends if not end.closed]

    def _listen(self, seconds: float) -> bool:
        """Take what the ranks send within some time; whether one of them has failed."""
        sources = [s for member in self._members for s in member.sources()]
        multiprocessing.connection.wait(sources, seconds)
        for member in self._members:
            member.take()
        return any(member.failed for member in self._members)

    def _raise_failure(self) -> None:
        deadline = time.monotonic() + FIRST_CAUSE_SECONDS
        while time.monotonic() < deadline and any(member.runs for member in self._members):
            self._listen(min(POLL_SECONDS, FIRST_CAUSE_SECONDS))
        first = min((member for member in self._members if member.failed), key=_time_of_failure)
        waiting = self._whereabouts(first)
        pid, cause, text, error = first.process.pid, first.cause(), first.traceback(), first.error()
        raise RankFailed(first.rank, pid, cause, text, waiting) from error

    def _whereabouts(self, first: _Member) -> dict[int, str]:
        """Return what every other rank was doing, or how it failed too."""
        asked = [member for member in self._members if member.runs and member.ask(STACKS)]
        deadline = time.monotonic() + STACKS_SECONDS
        while time.monotonic() < deadline and any(m.runs and not m.stacks for m in asked):
            self._listen(POLL_SECONDS)
        others = {m.rank: m.whereabouts() for m in self._members if m is not first}
        return {rank: text for rank, text in others.items() if text}


def _settings(rank: int, count: int, folder: str, devices: int | None) -> dict[str, Any]:
    """The environment of a rank; its share of the cores, where the user has not said."""
    settings = {
        "XRT_SHARD_WORLD_SIZE": count,
        "XRT_SHARD_ORDINAL": rank,
        "XRT_SHARD_LOCAL_ORDINAL": rank,
        "LOCAL_WORLD_SIZE": count,
        "LTC_RENDEZVOUS": folder,
        "OMP_NUM_THREADS": config.value("OMP_NUM_THREADS") or max(processors.count() // count, 1),
    }
    if devices is not None:
        settings["LTC_NUM_DEVICES"] = devices
    return settings


_starting = threading.Lock()  # the environment belongs to all threads


class _Member:
    """One rank: its process, the pipes to it, and how it ended."""

    def __init__(self, rank: int, folder: str, prefixed: bool):
        self.rank, self.crash_file = rank, str(Path(folder, f"crash-{rank}"))
        self.report, self._report_end = multiprocessing.Pipe(duplex=False)
        self._control_end, self.control = multiprocessing.Pipe(duplex=False)
        self.output, self._output_end = None, None
        if prefixed:
            self.output, self._output_end = multiprocessing.Pipe(duplex=False)
            os.set_blocking(self.output.fileno(), False)
        self.ends = [end for end in (self.report, self.control, self.output) if end is not None]
        self.outcome: ReturnedValue | Error | None = None
        self.stacks = ""
        self.process: Any = None
        self._line = b""

    def start(self, start_method: str, role: Role, user_call: PickledCall, daemon: bool) -> None:
        context: Any = multiprocessing.get_context(start_method)
        theirs = (self._report_end, self._control_end, self._output_end)
        self.process = context.Process(
            target=run_rank,
            args=(role, user_call, *theirs),
            name=f"rank {self.rank}",
            daemon=daemon,
        )
        with _starting, config.override(**role.settings), importable_main():
            self.process.start()
        for end in theirs:
            if end is not None:
                end.close()

    # --- how it is

    @property
    def runs(self) -> bool:
        return self.process.exitcode is None

    @property
    def is_over(self) -> bool:
        """Return True if it has ended, and all its output has been taken."""
        return self.report.closed

    @property
    def finished(self) -> bool:
        """Return True if it returned a value and has ended."""
        return isinstance(self.outcome, ReturnedValue) and self.is_over

    @property
    def failed(self) -> bool:
        """Return True if it has reported an error, or ended without reporting anything."""
        return isinstance(self.outcome, Error) or (self.outcome is None and self.is_over)

    # --- what it says

    def sources(self) -> list:
        """Return the handles that become readable when there is something to take."""
        open_ = [end for end in (self.report, self.output) if end is not None and not end.closed]
        return open_ + ([self.process.sentinel] if self.runs else [])

    def take(self) -> None:
        """Take everything it has said so far."""
        ended = not self.runs  # looked at first: what it said last is there by then
        with contextlib.suppress(EOFError, OSError):
            while not self.report.closed and self.report.poll():
                self._note(self.report.recv())
        self._print(ended)
        if ended:
            self.report.close()

    def _note(self, message: ReturnedValue | Error | Stacks) -> None:
        if isinstance(message, Stacks):
            self.stacks = message.text
        else:
            self.outcome = message

    def _print(self, ended: bool) -> None:
        if self.output is None or self.output.closed:
            return
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self.output.fileno(), 1 << 16):
                self._line += part
        *lines, self._line = self._line.split(b"\n")
        if ended:
            self.output.close()
            lines += [self._line] if self._line else []
        for line in lines:
            sys.stdout.write(f"[rank {self.rank}] {line.decode(errors='replace')}\n")
        if lines:
            sys.stdout.flush()

    def ask(self, question: bytes) -> bool:
        """Put a question; False if the process no longer listens."""
        try:
            self.control.send_bytes(question)
        except OSError:
            return False
        return True

    def cause(self) -> str:
        """Return how the rank ended, in a line."""
        if isinstance(self.outcome, Error):
            return self.outcome.cause
        return _describe_exit(self.process.exitcode, self._began())

    def _began(self) -> bool:
        """Return True if the process came as far as its own code, which opens this file first."""
        return os.path.exists(self.crash_file)

    def traceback(self) -> str:
        """Return the stack that it left: the exception's traceback, or that of a crash."""
        if isinstance(self.outcome, Error):
            return self.outcome.traceback
        with contextlib.suppress(OSError):
            return Path(self.crash_file).read_text(errors="replace")
        return ""

    def error(self) -> BaseException | None:
        """The exception it raised, where it could travel."""
        if not isinstance(self.outcome, Error) or self.outcome.pickled is None:
            return None
        try:
            return pickle.loads(self.outcome.pickled)
        except Exception:
            return None  # of a class that only the rank has

    def whereabouts(self) -> str:
        """Return where the rank is while another fails; empty if it was done."""
        if self.failed:
            return f"{RankFailed.FAILED_TOO}{self.cause()}"
        if not self.runs or isinstance(self.outcome, ReturnedValue):
            return ""
        return self.stacks or "It did not answer: it is starting, or inside native code."

    # --- its end

    def signal(self, number: int) -> None:
        """Send a signal to the process and to those it started."""
        if self.process is None or self.process.pid is None:
            return
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:  # it has no group of its own yet, or everyone is gone
            if self.runs:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.process.pid, number)

    def wait(self, deadline: float) -> None:
        """Wait until it has ended, or the time has come."""
        if self.process is not None and self.process.pid is not None:
            self.process.join(max(deadline - time.monotonic(), 0))


def _time_of_failure(member: _Member) -> float:
    """When it failed; one that died without a report is the first: others fail because of it."""
    return member.outcome.time if isinstance(member.outcome, Error) else 0.0


def _describe_exit(code: int, began: bool) -> str:
    """Describe how a process ended that reported nothing.

    Args:
        began: True if it had started and imported what the function needs.
    """
    when = (
        "before its function returned"
        if began
        else ("while it started Python and imported the modules of its function: see its output")
    )
    hint = ""
    if code == -signal.SIGKILL:
        hint = " (the system does that when memory runs out: see dmesg)"
    elif code == 1 and not began:
        hint = ". A script that calls spawn must do so below `if __name__ == '__main__':`"
    if code < 0:
        return f"it was killed by {signal.Signals(-code).name}{hint}, {when}"
    return f"it left with exit code {code} {when}{hint}"


# Ranks of a host that look after each other where no parent does: torchrun sees exit codes alone.
# torchrun ends all ranks when one fails, but one that leaves early with code 0 is a success to
# it, and the others would wait for that one until their time is over.

WATCH_SECONDS = 0.5

_runs = itertools.count()


@contextlib.contextmanager
def peers_watched() -> Iterator[None]:
    """Fail all ranks that wait in this block if a rank of this host ends inside its own."""
    here = session.current()
    if here is None or config.value("LTC_RENDEZVOUS"):  # alone, or watched by a parent
        yield
        return
    # A rank that is done says so in the store: it may end while others still read what it sent.
    processes, run = config.value("XRT_SHARD_WORLD_SIZE"), next(_runs)
    done, on_host = store(processes), processes_per_host(processes)
    pids = {
        rank: int(pid)
        for rank, pid in enumerate(rendezvous("ltc.peers", b"%d" % os.getpid()))
        if rank // on_host == world.ordinal() // on_host and rank != world.ordinal()
    }
    over = threading.Event()

    def watch() -> None:
        with contextlib.suppress(dist.DistError):  # the store ends with the launcher, and so do we
            while not over.wait(WATCH_SECONDS):
                for rank, pid in pids.items():
                    if not _runs_still(pid) and not done.check([f"done/{run}/{rank}"]):
                        here.abort(f"Rank {rank} (pid {pid}) ended before its function returned.")
                        return

    threading.Thread(target=watch, name="ltc peers", daemon=True).start()
    try:
        yield
        done.set(f"done/{run}/{world.ordinal()}", "")
    finally:
        over.set()


def _runs_still(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
