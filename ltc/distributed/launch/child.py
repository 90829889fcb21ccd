"""The frame of a launched process around the user's function: it reports its end, and ends in time.

It tells its parent the function's value, or the error with its whole traceback, and, when asked,
where its threads are. It does not outlive the parent.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import reprlib
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from ltc import config
from ltc.device.recording import sync
from ltc.device.recording.recorder import device_at
from ltc.device.recording.tensors import current_device, set_current_device
from ltc.distributed.launch.pickled_call import PickledCall
from ltc.distributed.transport.bootstrap import say_process
from ltc.profiling.last_lines import last_lines
from ltc.profiling.profile import whole_run
from ltc.support.process.parent_death import end_with_parent
from ltc.support.process.thread_frames import thread_frames
from ltc.tracebacks import is_of_python, is_users, shorten
from ltc.training_loop import steps

STACKS = b"stacks"  # the parent's question
FAILED = 1  # the exit code of a rank that has reported an error


@dataclass(frozen=True)
class Role:
    """The facts that one process of a launch is given about itself.

    Attributes:
        settings: Environment variables.
        threads: Number of threads of torch's pool; 0: as the environment says.
        parent: The pid of the launching process; 0: another process starts this one for it.
        dies_with: True to be killed with the thread that started it.
        crash_file: The file that gets the traceback of a crash.
        inherited: The ends of its siblings' and its parent's pipes, which a forked process
        inherits unintentionally.
    """

    rank: int
    settings: dict[str, Any]
    threads: int
    parent: int
    dies_with: bool
    crash_file: str
    inherited: list[Connection] = field(default_factory=list)


@dataclass(frozen=True)
class ReturnedValue:
    """The end of a rank whose function returned this value, pickled."""

    pickled: bytes


@dataclass(frozen=True)
class Error:
    """The end of a rank whose function raised an error.

    Attributes:
        pickled: The exception; None where it can not travel.
        time: On the clock that all processes of a machine share (time.monotonic).
    """

    cause: str
    traceback: str
    pickled: bytes | None
    time: float


@dataclass(frozen=True)
class Stacks:
    """The stacks of a rank's threads, by name; the main one first."""

    text: str


def run_rank(
    role: Role,
    user_call: PickledCall,
    report: Connection,
    control: Connection,
    output: Connection | None,
) -> None:
    """The life of a rank, from its first line to its last.

    Args:
        report: Takes a ReturnedValue or an Error at the end, and Stacks in between.
        control: Brings questions; its end is the parent's end.
        output: Gets what the rank prints; None leaves it where it goes.
    """
    for connection in role.inherited:
        connection.close()
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)  # so that it can be ended together with its own children
    if role.dies_with:
        end_with_parent(signal.SIGKILL)  # where the kernel can; else see _start_watcher
    if role.parent and os.getppid() != role.parent:
        os._exit(FAILED)  # the parent was gone before
    if output is not None:
        _print_to(output)
    os.register_at_fork(after_in_child=lambda: _close(report, control))
    _start_watcher(report, control)
    with (
        config.override(**role.settings),
        open(role.crash_file, "w") as crash,
    ):
        say_process(config.value("LTC_RENDEZVOUS"), role.rank)
        faulthandler.enable(crash)
        if role.threads:
            torch.set_num_threads(role.threads)
        set_current_device(device_at(0))
        try:
            value = _called(role.rank, user_call)
            _send(report, ReturnedValue(_pickled_value(role.rank, value)))
        except BaseException as error:  # the parent raises it
            _send(report, _described(error))
            _flush()
            os._exit(FAILED)  # the parent ends the others; waiting for anything here could hang
        faulthandler.disable()


def _called(rank: int, user_call: PickledCall) -> Any:
    """Return the result of the user's function, once all that it has begun is over."""
    fn, args = user_call.open()
    with whole_run(), last_lines():
        value = fn(rank, *args)
        finish()
    return value


def _pickled_value(rank: int, value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:  # whatever a class's own way to pickle raises
        raise pickle.PicklingError(
            f"rank {rank} returned {reprlib.repr(value)}, of type {type(value).__qualname__}, which "
            f"cannot be pickled: {error}. Return numbers, strings, tensors, or lists of them."
        ) from None


def finish() -> None:
    """Wait for everything a rank has under way; raise the errors that no caller has seen."""
    sync.start_collectives()  # others may wait for what nobody reads here
    steps.closures_of(current_device()).wait()
    sync.wait_device_ops()


_sending = threading.Lock()


def _send(report: Connection, message: Any) -> None:
    with _sending:  # the watcher sends too
        report.send(message)


def _described(error: BaseException) -> Error:
    now = time.monotonic()
    if isinstance(error, SystemExit):
        cause = f"it called sys.exit({error.code!r})"
    else:
        cause = f"it raised {''.join(traceback.format_exception_only(error)).strip()}"
    shorten(error)
    text = "".join(traceback.format_exception(error))
    return Error(cause, text, _pickled_exception(error), now)


def _pickled_exception(error: BaseException) -> bytes | None:
    """The exception as bytes that become one like it; None where they do not."""
    try:
        content = pickle.dumps(error)
        return content if type(pickle.loads(content)) is type(error) else None
    except Exception:
        return None  # the text is there all the same


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _print_to(output: Connection) -> None:
    """Let everything printed here, by native code too, go to the parent, line by line."""
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    streams: tuple[Any, ...] = (sys.stdout, sys.stderr)
    for stream in streams:
        stream.reconfigure(line_buffering=True)


# --- the parent ---------------------------------------------------------------------------------


def _close(*connections: Connection) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.close()


def _start_watcher(report: Connection, control: Connection) -> None:
    """Answer the parent's questions in a thread, and end this process when the parent has."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while True:
                try:
                    question = control.recv_bytes()
                except EOFError:
                    os._exit(FAILED)
                if question == STACKS:
                    _send(report, Stacks(stacks(without=threading.get_ident())))

    threading.Thread(target=watch, name="ltc watcher", daemon=True).start()


_MACHINERY = ("multiprocessing", "threading.py", "runpy", "<string>", "<frozen")


def stacks(without: int | None = None) -> str:
    """The stack of every Python thread but one, the main thread's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(thread_frames().items(), key=lambda item: item[0] != main)
    texts = []
    for ident, frame in frames:
        lines = _users_part(traceback.extract_stack(frame))
        if ident != without and lines:
            texts.append(f"{names.get(ident, ident)}:\n{_folded(lines)}")
    return "".join(texts)


def _folded(stack: traceback.StackSummary) -> str:
    """The frames up to the innermost of the user's; those of ltc and torch behind it are one line."""
    if config.value("LTC_DEBUG"):
        return "".join(stack.format())
    shown = [k for k, frame in enumerate(stack) if is_users(frame.filename)]
    shown = [k for k in shown if not is_of_python(stack[k].filename)]
    length = shown[-1] + 1 if shown else 0
    lines = stack.from_list(stack[:length]).format()
    if length < len(stack):
        last, count = stack[-1], len(stack) - length
        place = f"{os.path.basename(last.filename)}:{last.lineno}"
        lines.append(f"  in {last.name} ({place}), {count} frames inside: LTC_DEBUG=1 shows them\n")
    return "".join(lines)


def _users_part(stack: traceback.StackSummary) -> traceback.StackSummary:
    """The frames from the user's function on; all but the machinery's where that is not running."""
    own = [position for position, frame in enumerate(stack) if frame.filename == __file__]
    begin = own[-1] + 1 if own else 0
    while begin < len(stack) and any(part in stack[begin].filename for part in _MACHINERY):
        begin += 1
    return traceback.StackSummary.from_list(stack[begin:])
