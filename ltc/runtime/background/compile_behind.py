"""Large programs are compiled by another process, while this one runs them interpreted.

A thread would not do: a compiler written in Python holds the interpreter's lock, and each kernel
that the step calls would wait for it.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from ltc import config
from ltc.errors import LtcError, Unsupported
from ltc.explaining import faults
from ltc.ir.json_codec import Unrecordable
from ltc.runtime import core_reservation
from ltc.runtime.background.compile_worker import FIRST
from ltc.runtime.transfers import capabilities
from ltc.support.disk_cache import disk_cache
from ltc.support.lazy_module import LazyModule
from ltc.support.observation import metrics, spans
from ltc.support.process.daemon import started_daemon
from ltc.support.process.fork_safe_lock import renewed_lock
from ltc.support.sizes.as_json import dumped, record_of_trace
from ltc.support.sizes.extent import SizeTrace

worker_process = LazyModule("ltc.runtime.background.worker_process")
_starting = renewed_lock(globals(), "_starting")
_worker: Worker | None = None


class Request:
    """A program that is being compiled in the background.

    Attributes:
        over: Set once it is on the disk, or cannot be made.
        error: The error that kept it from being made; None if none is known.
    """

    def __init__(self) -> None:
        self.over = threading.Event()
        self.error: str | None = None
        self.begun, self._owner = spans.now(), os.getpid()

    @property
    def is_over(self) -> bool:
        """Return True if there is nothing to wait for: a child of fork gets no answer."""
        return self.over.is_set() or self._owner != os.getpid()

    def wait(self) -> None:
        """Block until it is over."""
        if not self.is_over:
            self.over.wait()


HERE = Request()  # of what only this process can compile
HERE.over.set()


def is_possible() -> bool:
    """Return True if programs can be handed from one process to the other."""
    return bool(
        config.value("LTC_COMPILE_BEHIND")
        and sys.executable
        and capabilities().programs is not None
        and disk_cache() is not None
    )


class Job:
    """A program to be compiled, and kept by its name.

    Args:
        keep: Does it: in a copy of this process, which has in its memory what that needs.
        record: All that another process needs; raises Unrecordable where only this one knows it.
    """

    def __init__(self, keep: Callable[[], object], record: Callable[[], dict[str, Any]]) -> None:
        self.keep, self.record = keep, record


def request_of(
    name: str,
    graph: dict[str, Any],
    device: int,
    donated: frozenset[int],
    trace: SizeTrace | None = None,
) -> dict[str, Any]:
    """Return the request that `Job.record` needs.

    Args:
        graph: Its record, as traced: no pass has run.
        trace: The decisions by its sizes, if they are symbols.
    """
    return {
        "name": name,
        "sizes": None if trace is None else record_of_trace(trace),
        "graph": graph,
        "device": device,
        "donated": sorted(donated),
    }


def begin(job: Job) -> Request | None:
    """Have a program compiled; None where it has to be done here."""
    try:
        begun = _begun(job)
    except Unrecordable:
        return None
    except OSError:  # no room for another process, or no more of them or of files are allowed
        return None
    except RuntimeError:  # from 3.12 on Python starts no process in a program that ends
        return None
    metrics.count("CompileBehind")
    return begun


def _begun(job: Job) -> Request:
    global _worker
    with _starting:
        if _worker is None or not _worker.is_usable():
            _worker = Worker(job)
            if _worker.first is not None:
                return _worker.first
        worker = _worker
    return worker.compile(job.record())


def wait() -> None:
    """Block until everything that was asked for is over."""
    if _worker is not None:
        for request in _worker.requests():
            request.wait()


def is_compiling() -> bool:
    """Return True if the other process has not answered a request yet."""
    return _worker is not None and bool(_worker.requests())


def has_compiled_since(time: int) -> bool:
    """Return True if the other process has answered a request after a time of `spans.now()`, or will."""
    return is_compiling() or (_worker is not None and _worker.answered_at > time)


def end() -> None:
    """End the worker: no process is left to run its programs."""
    if _worker is not None and _worker.is_usable():
        _worker.end()


class Worker:
    """The process, and what it was asked for.

    Attributes:
        first: The request that it was made with; None where it is no copy, and has to be asked.
        answered_at: The time of its latest answer.
    """

    def __init__(self, job: Job) -> None:
        self._process = worker_process.start(job.keep)
        self._owner = os.getpid()
        self._numbers = itertools.count(FIRST)
        self.answered_at = 0
        self._requests: dict[int, Request] = {}
        self._has_ended = False
        self._writing = threading.Lock()
        is_copy = isinstance(self._process, worker_process.Copy)
        self.first = self._new_request(next(self._numbers)) if is_copy else None
        if started_daemon(self._listen, "ltc compile worker") is None:
            self.end()
            self._end_requests()
            raise RuntimeError(
                "the thread that listens to the compiling process could not be started"
            )

    def is_usable(self) -> bool:
        """Return True if it lives, and is this process's: a child of fork has none."""
        return self._owner == os.getpid() and self._process.poll() is None

    def compile(self, request: dict[str, Any]) -> Request:
        number = next(self._numbers)
        # First: an interrupt meanwhile would leave a request behind that nobody answers.
        line = dumped({"number": number, **request}) + "\n"
        made = self._new_request(number)
        if started_daemon(self._write, "ltc compile request", (line,)) is None:
            self._process.kill()  # then `_listen` comes to the end
        return made

    def _new_request(self, number: int) -> Request:
        made = Request()
        core_reservation.compiler_begins()
        self._requests[number] = made
        if self._has_ended:  # since it was looked at, and `_listen` may have seen this one or not
            self._end_requests()
        return made

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def requests(self) -> list[Request]:
        """Return those that are not over."""
        return list(self._requests.values())

    def _write(self, line: str) -> None:
        """In a thread: the pipe takes it as fast as the process reads, which may import torch first."""
        try:
            with self._writing:
                assert self._process.stdin is not None
                self._process.stdin.write(line)
                self._process.stdin.flush()
        except OSError:
            self._process.kill()  # then `_listen` comes to the end

    def _listen(self) -> None:
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                if line.startswith("["):  # not what some import prints
                    self._note_answer(*json.loads(line))
        finally:
            self._has_ended = True
            self._end_requests()

    def _end_requests(self) -> None:
        """The process is gone: what it has not done is done here."""
        for number in list(self._requests):
            request = self._requests.pop(number, None)
            if request is not None:  # else another thread has ended it
                self._end(request)

    def _note_answer(self, number: int, error: str | None) -> None:
        if error is not None:
            metrics.count("CompileBehindFailed")
            if not error.startswith(Unsupported.__name__):
                faults.keep(LtcError(error), "the compilation in another process")
        request = self._requests.pop(number)
        request.error = error
        begin, end = max(request.begun, self.answered_at), spans.now()
        self.answered_at = end  # one after the other
        if spans.timeline is not None:
            spans.timeline.add("compile", "compile in another process", begin, end)
        self._end(request)

    @staticmethod
    def _end(request: Request) -> None:
        core_reservation.compiler_ends()
        request.over.set()
