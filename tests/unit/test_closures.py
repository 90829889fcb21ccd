import os
import subprocess
import sys
import threading
import time

import pytest

from ltc import config
from ltc.training_loop import closures
from ltc.training_loop.closures import AsyncClosureHandler, ClosureHandler, StepClosures

REFUSAL = "Cannot run asynchronous closure due to previously raised exception"


def fail():
    raise KeyError("boom")


def failed(handler):
    """Wait until the handler's thread has met the error of `fail`."""
    while handler._error is None:
        time.sleep(0.001)


def test_closures_run_in_order_in_a_thread_of_their_own():
    handler, ran = AsyncClosureHandler(), []
    handler.run_all(lambda n=n: ran.append((n, threading.current_thread())) for n in range(50))
    handler.wait()
    assert [n for n, _ in ran] == list(range(50))
    assert threading.current_thread() not in {thread for _, thread in ran}


def test_run_returns_before_the_closure_has_ended():
    handler, go = AsyncClosureHandler(), threading.Event()
    handler.run(go.wait)
    go.set()
    handler.wait()


def test_an_error_is_raised_once_to_the_next_caller_whose_closure_is_refused():
    handler, ran = AsyncClosureHandler(), []
    handler.run(fail)
    failed(handler)
    with pytest.raises(RuntimeError, match=REFUSAL) as raised:
        handler.run(lambda: ran.append("refused"))
    assert isinstance(raised.value.__cause__, KeyError)
    handler.run(lambda: ran.append("next"))
    handler.wait()
    assert ran == ["next"]


def test_an_error_reaches_whoever_waits():
    handler = AsyncClosureHandler()
    handler.run(fail)
    with pytest.raises(RuntimeError, match=REFUSAL):
        handler.wait()
    handler.wait()


def test_closures_behind_an_error_go_on_after_it_was_raised():
    handler, go, ran = AsyncClosureHandler(), threading.Event(), []
    handler.run(lambda: go.wait() and fail())
    handler.run(lambda: ran.append("behind"))
    go.set()
    failed(handler)
    assert ran == []
    with pytest.raises(RuntimeError, match=REFUSAL):
        handler.wait()
    handler.wait()
    assert ran == ["behind"]


def test_a_full_queue_blocks_until_there_is_room():
    handler, go = AsyncClosureHandler(max_queue_size=1), threading.Event()
    handler.run(go.wait)
    blocked = threading.Thread(target=lambda: [handler.run(lambda: None) for _ in range(2)])
    blocked.start()
    blocked.join(0.05)
    assert blocked.is_alive()
    go.set()
    blocked.join(600)
    assert not blocked.is_alive()
    handler.wait()


def test_an_error_wakes_a_caller_that_waits_for_room():
    handler, go, raised = AsyncClosureHandler(max_queue_size=1), threading.Event(), []

    def add_two():
        try:
            handler.run(lambda: None)
            handler.run(lambda: None)
        except RuntimeError as error:
            raised.append(error)

    handler.run(lambda: go.wait() and fail())
    blocked = threading.Thread(target=add_two)
    blocked.start()
    blocked.join(0.05)
    go.set()
    blocked.join(600)
    assert [str(error) for error in raised] == [REFUSAL]
    handler.wait()


def test_a_closure_may_queue_another_although_the_queue_is_full():
    handler, ran = AsyncClosureHandler(max_queue_size=1), []
    handler.run(lambda: [handler.run(lambda n=n: ran.append(n)) for n in range(3)])
    handler.wait()
    assert ran == [0, 1, 2]


def test_an_idle_thread_ends_and_a_later_closure_starts_another(monkeypatch):
    monkeypatch.setattr(closures, "IDLE_SECONDS", 0.01)
    handler, threads = AsyncClosureHandler(), []
    for _ in range(2):
        handler.run(lambda: threads.append(threading.current_thread()))
        handler.wait()
        threads[-1].join(600)
        assert not threads[-1].is_alive()
    assert threads[0] is not threads[1]


def test_an_error_raised_to_one_caller_lets_another_that_waits_for_room_go_on():
    handler, go, outcomes = AsyncClosureHandler(max_queue_size=1), threading.Event(), []

    def add():
        try:
            handler.run(lambda: None)
            outcomes.append("added")
        except RuntimeError:
            outcomes.append("refused")

    handler.run(lambda: go.wait() and fail())
    callers = [threading.Thread(target=add) for _ in range(4)]
    for caller in callers:
        caller.start()
    go.set()
    for caller in callers:
        caller.join(600)
    handler.wait()
    assert sorted(outcomes) == ["added"] * 3 + ["refused"]


def test_where_no_thread_can_be_started_the_caller_runs_the_closures(monkeypatch):
    def refused(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    handler, ran = AsyncClosureHandler(), []
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        handler.run(lambda: handler.run(lambda: ran.append(threading.current_thread())))
        handler.wait()
        handler.run(fail)
        with pytest.raises(RuntimeError, match=REFUSAL):
            handler.wait()
    assert ran == [threading.current_thread()]
    handler.run(lambda: ran.append(threading.current_thread()))
    handler.wait()
    assert ran[1] is not ran[0]


def run_python(lines):
    return subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True)


PROGRAM = """
import time
from ltc.utils.closures import AsyncClosureHandler
handler = AsyncClosureHandler()
handler.run(lambda: time.sleep(0.2))
"""


def test_a_program_that_ends_waits_for_its_closures_and_shows_their_error():
    ended = run_python(f"{PROGRAM}\nhandler.run(lambda: 1 / 0)\nhandler.run(lambda: print('ran'))")
    assert ended.stdout == "ran\n" and "ZeroDivisionError" in ended.stderr


def test_a_program_that_ends_runs_what_is_queued_behind_errors():
    """From Python 3.12 on it starts no thread, and waited for ever for one that it could not start."""
    lines = f"""{PROGRAM}
handler.run(lambda: 1 / 0)
handler.run(lambda: handler.run(lambda: print('queued')))
handler.run(lambda: {{}}['missing'])
handler.run(lambda: print('ran'))
"""
    ended = run_python(lines)
    assert ended.stdout == "ran\nqueued\n"
    assert "ZeroDivisionError" in ended.stderr and "KeyError" in ended.stderr


def test_a_program_that_ends_does_not_wait_until_the_thread_is_idle():
    """The thread would end after an hour without work; a program that waited for it would hang."""
    idle = "import ltc.training_loop.closures\nltc.training_loop.closures.IDLE_SECONDS = 3600.0"
    ended = run_python(f"{idle}\n{PROGRAM}\nhandler.wait()\nprint('ends')")
    assert ended.stdout == "ends\n" and ended.returncode == 0


def test_a_child_of_fork_has_none_of_its_parents_closures():
    handler, go = AsyncClosureHandler(), threading.Event()
    handler.run(go.wait)
    handler.run(lambda: None)
    child = os.fork()
    if child == 0:
        try:
            ran = []
            handler.run(lambda: ran.append("child"))
            handler.wait()
            os._exit(7 if ran == ["child"] else 1)
        finally:
            os._exit(2)  # never on into the parent's tests
    go.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    handler.wait()


def test_the_bound_comes_from_the_environment_when_something_is_queued():
    handler, go, queued = AsyncClosureHandler(), threading.Event(), []
    handler.run(go.wait)

    def queue_three():
        for number in range(3):
            handler.run(lambda: None)
            queued.append(number)

    with config.override(LTC_MAX_ASYNC_QUEUE="2"):
        thread = threading.Thread(target=queue_three)
        thread.start()
        while thread.is_alive() and not handler._changed._waiters:
            time.sleep(0.001)
        assert queued in ([0], [0, 1])  # the thread may have begun with the first
        go.set()
        thread.join()
    handler.wait()
    assert len(queued) == 3


def test_46_the_refusal_is_the_seeds():
    steps = StepClosures()
    steps.add(fail, run_async=True)
    steps.run()
    failed(steps._handler)
    steps.add(lambda: None, run_async=True)
    with pytest.raises(RuntimeError, match=REFUSAL):
        steps.run()
    steps.run()
    steps.wait()


class Recording(ClosureHandler):
    def __init__(self, ran):
        self._ran = ran

    def run(self, closure):
        self._ran.append("handed over")
        closure()


def test_47_asynchronous_closures_are_handed_over_before_the_others_run_in_order():
    ran = []
    steps = StepClosures(Recording(ran))
    steps.add(ran.append, ("first",))
    steps.add(ran.append, ("asynchronous",), run_async=True)
    steps.add(ran.append, ("second",))
    steps.run()
    assert ran == ["handed over", "asynchronous", "first", "second"]


def test_48_a_closure_added_by_a_closure_waits_for_the_next_step():
    ran = []
    steps = StepClosures()
    steps.add(lambda: steps.add(ran.append, ("inner",)))
    steps.run()
    assert ran == []
    steps.run()
    assert ran == ["inner"]


def test_45_an_error_is_raised_and_the_closures_behind_it_wait_for_the_next_step():
    ran = []
    steps = StepClosures()
    steps.add(fail)
    steps.add(ran.append, ("behind",))
    with pytest.raises(KeyError, match="boom"):
        steps.run()
    assert ran == []
    steps.run()
    assert ran == ["behind"]
