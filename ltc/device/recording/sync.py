"""The end of recordings, and the waits of threads for one another.

A recording ends at a step mark, when a value is read, and when it is too long. It also ends when
another thread needs a value pending in it, and when torch's default dtype changes on which a
pending call depends (default_dtype.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from threading import get_ident
from types import CodeType
from typing import Any, TypeVar

from ltc.aten.call import Call, CallResult
from ltc.backends.plain_dispatch import is_plain_now
from ltc.device.evidence.cuts_explained import (
    explain_side_exit,
    pending_elsewhere,
    read_of,
)
from ltc.device.evidence.forks_explained import value_text
from ltc.device.evidence.hints import End, iteration_ended, launching
from ltc.device.evidence.transitions import show_left
from ltc.device.immediate.immediate_session import ImmediateSession
from ltc.device.immediate.memory import buffer_of
from ltc.device.immediate.notes import FollowedPart
from ltc.device.immediate.permission import is_forced
from ltc.device.policy import Begin
from ltc.device.recording.core_ends import ends_in_core
from ltc.device.recording.entries import (
    END,
    KERNEL_FILE,
    STOPPED,
    Interrupted,
    RunsAtOnce,
    TakesOtherPath,
)
from ltc.device.recording.exit_liveness import end, end_immediate, pass_cut
from ltc.device.recording.recorder import Device, Recorder, devices, devices_in_use
from ltc.device.recording.state import State
from ltc.device.shapes.meta import result_types
from ltc.device.user_line import user_line
from ltc.errors import SyncForbidden
from ltc.explaining.explanation import Explanation
from ltc.explaining.no_sync import call_before_blocks, reads_are_forbidden
from ltc.runtime.account import account_of
from ltc.runtime.buffer import Buffer
from ltc.runtime.executor import executor_of
from ltc.runtime.transfers import backend
from ltc.support.observation import metrics, spans
from ltc.support.observation.often import counting
from ltc.support.process.held_signals import held
from ltc.support.process.thread_frames import thread_frames
from ltc.support.torch_private import plain_functions, shown_region

# --- a recording and its threads ------------------------------------------------------------------


Function = TypeVar("Function", bound=Callable[..., Any])
_count_early_read = counting("EarlySyncLiveTensorsCount")


class _ClosedRecordings(threading.local):
    holding = 0  # how many recordings of its own this thread has closed to others


_this_thread = _ClosedRecordings()


class PendingElsewhere(Exception):
    """A needed value is pending in another thread, and this thread holds a recording of its own."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder


def exclusively(recorder: Recorder, action: Callable[..., Any], *arguments: Any) -> Any:
    """`action(*arguments)` while no other thread can end the recording of `recorder`, this thread's own.

    Whatever changes a recording outside the generated kernels runs in here.  Two threads that held
    their own recordings and waited for each other's would wait for ever, so a thread that needs
    another's lets go of its own first and begins anew: `action` reads before it writes.
    """
    return closed(recorder, _begin, recorder, action, arguments)


def _begin(recorder: Recorder, action: Callable[..., Any], arguments: tuple) -> Any:
    walk, recording = recorder.walk, recorder.recordings
    recorder.catch_up()
    recorder.interrupted = False  # what is read from here on is of one recording
    result = action(*arguments)
    if walk is not None:
        recorder.walk_again(recording)
    return result


def closed(recorder: Recorder, action: Callable[..., Any], *arguments: Any) -> Any:
    """The same for a part of a call; what it has read may be of a recording that has ended."""
    while True:
        try:
            with recorder.lock:
                _this_thread.holding += 1
                try:
                    return action(*arguments)
                finally:
                    _this_thread.holding -= 1
        except PendingElsewhere as pending:
            if _this_thread.holding:
                raise
            _flush_having_let_go(pending.recorder)
        except TakesOtherPath as other:
            if _this_thread.holding:
                raise
            with recorder.lock:
                other.way()
        except RunsAtOnce as fork:
            if _this_thread.holding:
                raise
            _run_at_once(fork.recorder)


def _run_at_once(recorder: Recorder) -> None:
    """Leave what was followed so far, which is started; what comes runs when it is made."""
    with recorder.lock:
        part = None
        if recorder.begins is Begin.FOLLOW and not is_forced():
            part = _leave_path(recorder)
        else:
            flush(recorder)  # a setting that has changed meanwhile asks for it
            if not recorder.runs_at_once():
                return  # what comes now is followed
        recorder.run_at_once(part)


def _leave_path(recorder: Recorder) -> FollowedPart:
    """A side exit: start what was followed so far; what comes is noted behind it."""
    metrics.count("SideExits")
    evidence, before, behind = recorder.fork_evidence, recorder.before, recorder.ended
    recorder.policy.left(behind.ended_path)
    part = FollowedPart(recorder)
    recorder.is_left = True
    try:
        flush(recorder)
    finally:
        recorder.is_left = False
    part.started()
    recorder.before, recorder.ended, recorder.begins = before, behind, Begin.NOTE
    explain_side_exit(evidence)
    show_left(recorder.policy, behind.ended_path, part.calls, "the step left their path")
    return part


def _begun_at_once(recorder: Recorder) -> ImmediateSession | None:
    """The session that begins here, where what comes next would be the first to run at once.

    So no kernel is made to read anew: the one that asks has read nothing of this recording yet.
    """
    if recorder.interrupted or _this_thread.holding or not recorder.begins_at_once():
        return None
    _run_at_once(recorder)
    recorder.interrupted = False
    return recorder.now


def begin_for_core() -> None:
    """Begin to run the calling thread's calls when they are made; the core has been told that they are."""
    recorder = devices()[0].recorder()
    if not _this_thread.holding and recorder.begins_at_once():
        _run_at_once(recorder)
        recorder.interrupted = False


def _settled_late(state: State, value: Any) -> bool:
    """Give a state its buffer where the session of its value is over, and has not found it.

    Another thread can end a session while a call in it writes to a view. Its value is there.
    """
    recorder = value.recorder
    if not recorder.nothing_pending or not hasattr(value, "tensor"):
        return False
    if not recorder.lock.acquire(blocking=False):  # its thread may wait for this one
        return False
    try:
        held_here: Any = state.value
        is_over = recorder.nothing_pending and not _is_recording(recorder.thread)
        if not is_over or held_here is not value:
            return False
        metrics.count("LateValues")
        with plain_functions():
            state.buffer = buffer_of(value, recorder.device.index)
        state.value = None
    finally:
        recorder.lock.release()
    return True


def _flush_foreign(recorder: Recorder) -> None:
    if _this_thread.holding:
        raise PendingElsewhere(recorder)
    flush_other_thread(recorder)


def _flush_having_let_go(recorder: Recorder) -> None:
    """`flush_other_thread` where the calling thread's own recording may be ended meanwhile.

    A frame of this function says so to the other thread, which may need what is pending here.
    """
    flush_other_thread(recorder)


# --- reading values -------------------------------------------------------------------------------


def value_of(state: State) -> CallResult:
    """The Value that `state` has in this thread's recording, bound or derived where needed."""
    recorder = state.device.recorders.get(get_ident()) or state.device.recorder()
    value, buffer, entry = state.value, state.buffer, recorder.cursor
    # the common cases of Recorder.bind, without its calls
    if value is None and buffer is not None:
        if entry.key is buffer.key:
            execution = buffer.execution
            if execution is None or execution.failure is None:
                recorder.last, recorder.cursor = entry, entry.next
                recorder.inputs.append(buffer)
                recorder.bound.append(state)
                value = state.value = entry.value
                return value
        elif entry is STOPPED and (session := recorder.now or _begun_at_once(recorder)) is not None:
            value = state.value = session.bind(state)
            return value
    while True:
        value = state.value
        if value is None:
            if state.buffer is not None:
                value = state.value = recorder.bind(state)
                return value
            if state.base is not None:
                return closed(recorder, _derive_uninterrupted, recorder, state)
        elif value.recorder is recorder:
            return value
        elif state.buffer is not None:
            return recorder.bind_foreign(state)
        elif not _settled_late(state, value):
            _flush_foreign(value.recorder)
        # else another thread is just writing to it: look again


def values_of(states: list[State]) -> list[CallResult]:
    """`value_of` each, in order: what list kernels call where not all have a value yet."""
    recorder = states[0].device.recorder()
    values = [state.value for state in states]
    if any(values):
        return [
            value_of(s) if v is None or v.recorder is not recorder else v
            for s, v in zip(states, values)
        ]
    if recorder.now is not None and all([state.buffer is not None for state in states]):
        return recorder.now.bind_all(states)
    return recorder.bind_as_before(states) or recorder.note_run([value_of(s) for s in states])


def _derive_uninterrupted(recorder: Recorder, state: State) -> CallResult:
    if recorder.interrupted:
        raise Interrupted
    return derive_view(state)


def derive_view(state: State) -> CallResult:
    """Apply a stale view's chain to the present value of its base; called exclusively."""
    base: Any = state.base
    value = value_of(base)
    session = value.recorder.immediate
    known = None if session is None else session.view_followed(state, value)
    value.recorder.live.append(state)  # so that the end of this recording makes it stale again
    if known is None:
        known = _derived(state, value)
    state.value = known
    return known


def _derived(view: State, value: CallResult) -> CallResult:
    """Return the value of a view, from that of its base.

    Meanwhile the view holds what is derived so far: where the path turns out to be another one, values have
    other names there, and those that states hold get them.
    """
    try:
        for overload, args, kwargs, index in view.chain:
            view.value = value
            value = view_value(value, overload, args, kwargs)[index or 0]
    except BaseException:
        view.value = None
        raise
    return value


def view_value(
    value: CallResult, overload: Any, args: tuple, kwargs: dict
) -> tuple[CallResult, ...]:
    """The results of a view overload on `value`, as an entry of the recording."""
    session = value.recorder.immediate
    if session is not None:
        return session.viewed(value, overload, args, kwargs)
    key = (overload, value, args, tuple(kwargs.items()))
    entry = value.recorder.advance(key, lambda: _view_call(value, overload, args, kwargs))
    return entry.call.results


def _view_call(value: CallResult, overload: Any, args: tuple, kwargs: dict) -> Call:
    call = Call(overload, (value, *args), kwargs, line=user_line())
    value.recorder.values(call, result_types(call))
    return call


def ready_buffer(state: State) -> Buffer:
    """The buffer of a state that is not a view; what is pending for it is started first."""
    while state.buffer is None:
        value = state.value
        if value is None:
            continue  # another thread has just started it, and gives it its buffer first
        if reads_are_forbidden():
            raise SyncForbidden(_forbidden_text(value))
        _count_early_read()
        if value.recorder.thread == get_ident():
            cut_at_read(value)
        elif not _settled_late(state, value):
            _flush_foreign(value.recorder)
    buffer = state.buffer = state.buffer.settled()
    return buffer


def passes_read(value: CallResult, session: ImmediateSession) -> bool:
    """A value is read that a call has computed. Return True if it can be read where it is.

    Else its recording ends, and its state has a buffer.
    """
    if session.goes_on:
        session.note_read()
        return True
    recorder = value.recorder
    if pass_cut(recorder, is_read=True):
        iteration_ended(End.READ)
        return True
    cut_at_read(value)
    return False


def cut_at_read(value: CallResult) -> None:
    """End the calling thread's recording, in which a value is that is read."""
    marks = executor_of(value.recorder.device.index).marks
    _cut(value.recorder, read_of(value, marks))
    iteration_ended(End.READ)


def end_at_read(is_number: bool) -> bool:
    """End the recording that the core follows where a value of it is read, so that the value is there."""
    held.deliver()
    if reads_are_forbidden() or not is_plain_now():
        return False
    if not ends_in_core(devices()[0].recorder(), is_read=True):
        return False
    if not is_number:  # of a number the core counts it
        _count_early_read()
    iteration_ended(End.READ)
    return True


def _forbidden_text(value: CallResult) -> str:
    return (
        f"A read of the pending tensor {value_text(value)} would cut the step, which ltc.no_sync() "
        f"forbids. Read it after ltm.mark_step(), or leave the block first; print shows its shape, dtype and line."
    )


# --- ending a recording ---------------------------------------------------------------------------


def _cut(recorder: Recorder, explanation: Explanation) -> None:
    """End a recording before its step's mark; the one behind it knows of that where it is new."""
    recorder.cut_here = explanation
    timeline = spans.timeline
    began = 0 if timeline is None else spans.now()
    flush(recorder)
    if timeline is not None:
        line = explanation.line
        timeline.add("cut", "cut at a read", began, spans.now(), {"line": line})
    recorder.cut_by = explanation if recorder.ended.follow is END else None


def flush(recorder: Recorder) -> None:
    """Start everything pending in `recorder`; its own thread, or one that stopped it, calls this.

    An error of the program is not raised here: it is raised by reads of the failed values, and at
    the next mark.
    """
    with recorder.lock:
        if recorder.nothing_pending:
            return
        recorder.catch_up()
        executor_of(recorder.device.index).wait_for_room()  # while it can be interrupted
        with held:
            try:
                if recorder.immediate is not None:
                    end_immediate(recorder)
                else:
                    launching(recorder, end)
            finally:
                recorder.restart()


def _raise_unreported(device: Device) -> None:
    failed = executor_of(device.index).unreported()
    if failed is not None:
        failed.raise_it()


def start_collectives() -> None:
    """Start the pending calls of the calling thread on each device with a recorded collective.

    Called before a wait for other replicas outside a program: they may be waiting for values that
    are pending here.
    """
    thread = get_ident()
    for device in devices():
        recorder = device.recorders.get(thread)
        if recorder is not None and recorder.token is not None:
            flush(recorder)


# --- another thread's recording -------------------------------------------------------------------


def flush_other_thread(recorder: Recorder) -> None:
    """Start a recording's pending calls, though another thread may be extending it at this moment.

    Its kernels take no lock, so it is stopped first: with STOPPED at the cursor its next call takes
    the slow path, which waits for the lock; and a call under way shows as a frame of that thread.
    """
    metrics.count("CrossThreadFlush")
    pending_elsewhere()
    with recorder.lock:
        while not _stop(recorder):
            recorder.lock.release()
            time.sleep(0)  # lets the other thread finish its call
            recorder.lock.acquire()
        flush(recorder)


def _stop(recorder: Recorder) -> bool:
    """Return True once no kernel extends the recording until its lock, held here, is released.

    A kernel that had read the cursor before may move it on and be over when the stack is looked at;
    the next one would go on from there. None puts STOPPED back: where it still is, none did. Where
    calls run at once, a kernel reads `now`, and the slow path puts it back.
    """
    recorder.cursor, recorder.now = STOPPED, None
    if recorder.immediate is not None:
        recorder.immediate.leave_core()
    recorder.stop_walk()
    if _is_recording(recorder.thread):
        return False
    return recorder.cursor is STOPPED and recorder.now is None


_extends_recordings: set[CodeType] = set()


def extends_recording(function: Function) -> Function:
    """For a function that extends a recording as generated kernels do, without its lock."""
    _extends_recordings.add(function.__code__)
    return function


def _is_recording(thread: int) -> bool:
    """Return True if a kernel that goes on with the cursor it read is on that thread's stack."""
    frame = thread_frames().get(thread)
    while frame is not None and frame.f_code is not _flush_having_let_go.__code__:
        code = frame.f_code
        if code.co_filename == KERNEL_FILE or code in _extends_recordings:
            return True
        frame = frame.f_back
    return False


# --- step marks -----------------------------------------------------------------------------------


def end_step(device: Device) -> None:
    """Start everything the calling thread has pending on a device; random draws begin anew.

    Raises the error of a program that failed since the last mark, this one or an earlier one.
    """
    held.deliver()
    recorder = device.recorder()
    ends_here = ends_in_core(recorder, is_read=False)
    passes = ends_here or pass_cut(recorder, is_read=False)
    if not ends_here and (
        passes or recorder.nothing_pending
    ):  # else the end of the recording sees to it
        held.watch()  # over handlers that the program has set meanwhile
    recorder.note_mark()
    timeline = spans.timeline
    began = 0 if timeline is None else spans.now()
    try:
        with shown_region("ltc::mark_step"):
            if not passes:
                flush(recorder)
        _raise_unreported(device)
    finally:
        device.random.end_step()
        executor_of(device.index).marks += 1
        account = account_of(device.index)
        account.freed_by_mark = account.freed
        if timeline is not None:
            timeline.end_step(began)


def end_what_runs_at_once(device: Device) -> None:
    """Turn the results of the thread's calls there into buffers, which are counted."""
    recorder = device.recorders.get(get_ident())
    if recorder is not None and recorder.immediate is not None:
        flush(recorder)


def _end_what_passed_marks() -> None:
    """End the thread's earlier steps: their results are no longer pending."""
    for device in devices_in_use():
        recorder = device.recorders.get(get_ident())
        session = None if recorder is None else recorder.immediate
        if session is not None and session.has_passed_mark:
            end_what_runs_at_once(device)


call_before_blocks(_end_what_passed_marks)


def wait_device_ops(chosen: list[Device] | None = None) -> None:
    """Block until what was started on the devices (all where None) is over; raise its errors."""
    for device in chosen or devices():
        executor_of(device.index).wait()
        backend().computation.wait(device.index)
    for device in chosen or devices():
        _raise_unreported(device)


def synchronize(device: Device | None = None) -> None:
    """Start what the calling thread has pending on the device (all where None), and wait."""
    chosen = devices() if device is None else [device]
    for one in chosen:
        flush(one.recorder())
    wait_device_ops(chosen)


def discard(device: Device) -> None:
    """Drop what the calling thread has pending, unrun; bound tensors get their old values back.

    What the dropped calls made has no value any more. For measuring the recording alone.
    """
    recorder = device.recorder()
    with recorder.lock:
        recorder.catch_up()
        for state, buffer in zip(recorder.bound, recorder.inputs):
            state.value, state.buffer = None, buffer
        for state in recorder.live:
            state.value = None
        recorder.restart()
    device.random.end_step()
