"""Threads that are switched at chosen places, where chance does it once in many million calls.

One thread records; the main thread needs what is pending there, and so ends its recording meanwhile.
"""

import sys
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import ltc.core.lazy_model as ltm
from ltc.debug import graphs
from ltc.device.recording import exit_liveness, fallback, state, sync
from ltc.device.recording.entries import KERNEL_FILE
from ltc.device.recording.recorder import Recorder, device_at
from ltc.device.recording.tensors import state_of
from ltc.support.process.thread_frames import thread_frames

pytestmark = pytest.mark.native("threads are switched in the midst of a recording")

X, Y = torch.arange(4.0), torch.arange(4.0) * 10 + 3


class Events(defaultdict):
    """An event for each name; all are set where one of the two threads fails."""

    def __init__(self):
        super().__init__(threading.Event)
        for name in ("pending", "ending", "reached", "go", "asked", "over"):
            self[name]

    def meet(self, told: str, awaited: str) -> None:
        self[told].set()
        self[awaited].wait()


class ToldLock:
    """The lock of a recording, which tells when the recording's own thread asks for it."""

    def __init__(self, recorder: Recorder, asked: threading.Event):
        self._lock, self._thread, self._asked = recorder.lock, recorder.thread, asked

    def acquire(self):
        if threading.get_ident() == self._thread:
            self._asked.set()
        self._lock.acquire()

    def release(self):
        self._lock.release()

    def __enter__(self):
        self.acquire()

    def __exit__(self, *error):
        self.release()


@pytest.fixture
def events():
    return Events()


def run(record, read, events: Events):
    """What `record` returns, called in a thread while `read` is called here."""

    def recorded():
        try:
            return record()
        finally:
            sys.settrace(None)
            for event in events.values():
                event.set()

    with ThreadPoolExecutor(1) as pool:
        recording = pool.submit(recorded)
        try:
            read()
        finally:
            for event in events.values():
                event.set()
        return recording.result()


def stop_in_kernel(name: str, wait) -> None:
    """Let the calling thread call `wait` once its next kernel has a variable `name`."""
    waits = [wait]

    def trace(frame, event, argument):
        if frame.f_code.co_filename != KERNEL_FILE:
            return None
        if waits and name in frame.f_locals:
            waits.pop()()
        return trace

    sys.settrace(trace)


def add_switched(x, known, other, shown: list, events: Events):
    """x + other, stopped once x is read; x + known before it, pending, has the same path."""
    for _ in range(2):
        ltm.mark_step()
        shown.append(x + known)
    recorder = device_at(0).recorder()
    recorder.lock = ToldLock(recorder, events["asked"])
    events.meet("pending", "ending")
    stop_in_kernel("value0", lambda: events.meet("reached", "go"))
    total = x + other
    sys.settrace(None)
    return total


def is_of_another_thread(recorder: Recorder) -> bool:
    return recorder.thread != threading.get_ident()


def test_a_kernel_that_moves_the_cursor_late_does_not_open_a_walk_that_ends(
    equal, events, monkeypatch
):
    x, shown = X.to("ltc"), []

    def record():
        for switched in (False, True):
            first = x + 1
            shown.append(first)
            if switched:
                recorder = device_at(0).recorder()
                recorder.lock = ToldLock(recorder, events["asked"])
                stop_in_kernel("entry", lambda: events.meet("reached", "go"))
            second = first * 2
            if switched:
                sys.settrace(None)
                events.meet("over", "ending")
            third = second - 3
            if switched:
                events["asked"].set()
            fourth = third * 5
            ltm.mark_step()
        return first, second, third, fourth

    frames, launch = sync.thread_frames, exit_liveness._launch

    def frames_once_the_kernel_is_over():
        events.meet("go", "over")
        return frames()

    def launch_once_more_is_recorded(recorder, ended):
        if is_of_another_thread(recorder):
            events.meet("ending", "asked")
        return launch(recorder, ended)

    def read():
        events["reached"].wait()
        monkeypatch.setattr(sync, "thread_frames", frames_once_the_kernel_is_over)
        monkeypatch.setattr(exit_liveness, "_launch", launch_once_more_is_recorded)
        assert shown[-1].tolist() == (X + 1).tolist()

    made = run(record, read, events)
    assert all(state_of(tensor).value is None for tensor in made)  # nothing is pending any more
    equal(made, (X + 1, (X + 1) * 2, (X + 1) * 2 - 3, ((X + 1) * 2 - 3) * 5))


def test_a_kernel_under_way_mixes_no_values_of_two_walks(equal, events, monkeypatch):
    """It has read x, then the recording ends; y becomes the first input, as x was, of the next."""
    x, y, shown = X.to("ltc"), Y.to("ltc"), []

    def record():
        total = add_switched(x, x, y, shown, events)
        events["asked"].set()
        return total

    end, restart = sync.end, Recorder.restart

    def end_once_x_is_read(recorder):
        if is_of_another_thread(recorder):
            events.meet("ending", "reached")
        end(recorder)

    def restart_and_switch(recorder):
        restart(recorder)
        if is_of_another_thread(recorder):
            events.meet("go", "asked")

    def read():
        events["pending"].wait()
        monkeypatch.setattr(sync, "end", end_once_x_is_read)
        monkeypatch.setattr(Recorder, "restart", restart_and_switch)
        assert shown[-1].tolist() == (X + X).tolist()

    equal(run(record, read, events), X + Y)


def test_a_kernel_that_waits_to_derive_a_view_reads_its_other_operands_anew(
    equal, events, monkeypatch
):
    """It has read x, then waits for the end of the recording to derive a view of y in the next."""
    x, y, shown = X.to("ltc"), Y.to("ltc"), []
    view_of_x, view_of_y = x.view(4), y.view(4)

    def record():
        return add_switched(x, view_of_x, view_of_y, shown, events)

    end = sync.end

    def end_once_the_view_is_asked_for(recorder):
        if is_of_another_thread(recorder):
            events.meet("ending", "reached")
            events.meet("go", "asked")
        end(recorder)

    def read():
        events["pending"].wait()
        monkeypatch.setattr(sync, "end", end_once_the_view_is_asked_for)
        assert shown[-1].tolist() == (X + X).tolist()

    ltm.mark_step()
    equal(run(record, read, events), X + Y)


def test_two_threads_that_need_each_others_values_do_not_wait_for_each_other(equal, monkeypatch):
    both, made, waiting = threading.Barrier(2), {}, set()

    def add(own: str, other: str):
        try:
            for switched in (False, True):
                made[own] = x = X.to("ltc") * len(own)
                both.wait()
                if switched:
                    stop_in_kernel("value1", both.wait)
                total = made[other] + x
                sys.settrace(None)
                both.wait()
            return total
        except BaseException:
            both.abort()
            raise

    def sleep(seconds: float) -> None:
        """One may wait for a call of the other's; by then that one no longer waits for it."""
        waiting.add(threading.get_ident())
        try:
            assert len(waiting) < 2
            time.sleep(seconds)
        finally:
            waiting.discard(threading.get_ident())

    monkeypatch.setattr(sync, "time", SimpleNamespace(sleep=sleep))  # others may sleep
    with ThreadPoolExecutor(2) as pool:
        totals = [pool.submit(add, *names) for names in (("a", "bb"), ("bb", "a"))]
        equal([total.result() for total in totals], [X * 3, X * 3])


def test_a_thread_that_begins_while_ended_ones_are_looked_for_keeps_its_recorder(
    events, monkeypatch
):
    device, made, threads = device_at(0), [], []

    def begin():
        made.append(device.recorder())
        events.meet("pending", "over")

    def begin_another():
        events["pending"].clear()
        threads.append(threading.Thread(target=begin))
        threads[-1].start()
        events["pending"].wait()

    def frames_and_a_new_thread():
        found = thread_frames()
        if len(threads) == 1:
            begin_another()
        return found

    try:
        device.recorder()
        begin_another()  # a device with one recorder looks for none that ended
        device.has_one_recorder()  # a new thread may have the number of one that ended
        monkeypatch.setattr("ltc.device.recording.recorder.thread_frames", frames_and_a_new_thread)
        device.has_one_recorder()
        assert [device.recorders.get(thread.ident) for thread in threads] == made
    finally:
        events["over"].set()
        for thread in threads:
            thread.join()
    assert len(made) == 2


class SharedLock:
    """A lock whose first holder goes on once another thread asks for it."""

    def __init__(self, events: Events):
        self._lock, self.first, self._events = threading.RLock(), None, events

    def __enter__(self):
        if self.first is None:
            self.first = threading.get_ident()
            self._lock.acquire()
            self._events.meet("reached", "asked")
        else:
            self._events["asked"].set()
            self._lock.acquire()

    def __exit__(self, *error):
        self._lock.release()


def test_first_views_of_two_threads_both_learn_of_writes(events, monkeypatch):
    x, shown, lock = X.to("ltc"), [], SharedLock(events)

    def view_and_wait():
        view = x.view(4)
        events.meet("over", "go")
        return (view * 1).tolist()  # in the recording that it was made in

    def view_and_write():
        events["reached"].wait()
        view = x.view(4)
        events["over"].wait()
        x.add_(1)
        shown.append((view * 1).tolist())
        events["go"].set()

    monkeypatch.setattr(state, "_views_change", lock)
    shown.append(run(view_and_wait, view_and_write, events))
    assert shown == [(X + 1).tolist()] * 2
    assert lock.first not in (None, threading.get_ident())


class Switched(list):
    """References to views, to which another thread adds one at the first call of a method."""

    def __init__(self, views, method: str, add):
        super().__init__(views)
        self._method, self._adds = method, [add]

    def _switch(self, method: str) -> None:
        if method == self._method and self._adds:
            self._adds.pop()()

    def __delitem__(self, place):
        super().__delitem__(place)
        self._switch("__delitem__")

    def __bool__(self):
        filled = len(self) > 0
        self._switch("__bool__")
        return filled


@pytest.mark.parametrize("method", ["__delitem__", "__bool__"])
def test_a_view_that_is_made_while_ended_ones_are_forgotten_learns_of_writes(equal, method):
    x = X.to("ltc")
    base, views = state_of(x), [x.view(4), x.view(4)]
    ltm.mark_step()  # a recording holds what it has made
    base.views = Switched(base.views, method, lambda: views.append(x.view(4)))
    views.clear()
    base.forget_ended_views()
    x.add_(1)
    equal([view * 1 for view in views], [X + 1])
    views.clear()
    base.forget_ended_views()
    assert base.views is None


def test_what_eager_calls_bring_back_and_what_is_shown_is_read_with_the_walk_closed(
    equal, monkeypatch
):
    closed = []

    def noting(function):
        def noted(*args):
            closed.append(device_at(0).recorder().lock._is_owned())
            return function(*args)

        return noted

    x = X.to("ltc")
    view = x.view(2, 2)
    monkeypatch.setattr(fallback, "write", noting(fallback.write))
    fallback.assign_host(view, Y.view(2, 2))
    equal(x, Y)
    monkeypatch.setattr(graphs, "value_of", noting(graphs.value_of))
    assert "ltc::input" in graphs.text(x + 1, stage="recorded")
    assert closed == [True, True]
