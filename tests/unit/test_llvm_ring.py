"""A ring of launches: in order, one at a time, until one fails or the thread is called back."""

import threading

import numpy as np
import pytest

from ltc.llvm.emit.builder import Builder, function_text
from ltc.llvm.native import thread_pool
from ltc.llvm.native.kernel_run import KernelCall, KernelRun, entry_address
from ltc.llvm.native.launch_ring import ENTRIES, Ring

pytestmark = pytest.mark.skipif(not thread_pool.is_possible(), reason="a ring needs futexes")

# Words of a launch's frame: the address of the words to count in, of the fault, the fault, arguments.
FAULT, ARGUMENTS = 2, 3


def counting(fails: bool) -> KernelRun:
    """Moves the first word counted in to the second, one higher: a launch sees those before it."""
    b = Builder(width=1)
    b.emit("%old = load i64, ptr %p0")
    b.emit("%new = add i64 %old, 1")
    b.emit("store i64 %new, ptr %p0")
    if fails:
        b.emit("store i64 7, ptr %p1")
    call = KernelCall(
        entry_address(function_text("kernel", 2, b), "kernel"), ((0, 0), (1, 0)), 1, FAULT
    )
    return KernelRun([call], ARGUMENTS, range(FAULT, FAULT + 1))


class Launches:
    """Frames that count in one word, kept alive."""

    def __init__(self) -> None:
        self.count = np.zeros(1, dtype=np.int64)
        self.runs = {fails: counting(fails) for fails in (False, True)}
        self.frames: list[np.ndarray] = []

    def give(self, ring: Ring, fails: bool = False) -> int:
        frame = np.zeros(8, dtype=np.int64)
        frame[0], frame[1] = self.count.ctypes.data, frame[FAULT:].ctypes.data
        self.frames.append(frame)
        return ring.give(self.runs[fails].address, frame.ctypes.data, 1)


def test_a_thread_that_is_called_back_has_run_everything_given_before():
    ring, launches = Ring(), Launches()
    numbers = [launches.give(ring) for _ in range(10)]
    ring.call_back()
    assert ring.serve() is False
    assert numbers == list(range(1, 11))
    assert ring.done == launches.count[0] == 10
    assert all(ring.nanoseconds(number) > 0 for number in numbers)


def test_launches_given_while_the_thread_waits_are_run():
    ring, launches = Ring(), Launches()
    thread = threading.Thread(target=ring.serve)
    thread.start()
    for _ in range(200):
        number = launches.give(ring)
        while ring.done < number:
            ring.sleep_until_done(number)
        assert launches.count[0] == number
    ring.call_back()
    thread.join()


def test_nothing_runs_after_a_launch_that_failed_until_the_ring_restarts():
    ring, launches = Ring(), Launches()
    for fails in (False, True, False):
        launches.give(ring, fails)
    assert ring.serve() is True
    assert (ring.done, ring.has_stopped, launches.count[0]) == (1, True, 2)
    assert ring.failed_call(2) == 0
    assert launches.give(ring) == 0
    ring.sleep_until_done(3)  # returns: nobody is going to end it
    ring.restart()
    assert launches.give(ring) == 4
    ring.call_back()
    assert ring.serve() is False
    assert (ring.done, launches.count[0]) == (4, 3)


def test_a_full_ring_refuses():
    ring, launches = Ring(), Launches()
    for number in range(1, ENTRIES + 1):
        assert launches.give(ring) == number
    assert launches.give(ring) == 0
    ring.call_back()
    ring.serve()
    ring.go_on()
    assert launches.give(ring) == ENTRIES + 1


def test_several_threads_wait_for_the_same_launch():
    ring, launches = Ring(), Launches()
    woken = []

    def wait() -> None:
        while ring.done < 1:
            ring.sleep_until_done(1)
        woken.append(1)

    waiters = [threading.Thread(target=wait) for _ in range(4)]
    for waiter in waiters:
        waiter.start()
    launches.give(ring)
    ring.call_back()
    ring.serve()
    for waiter in waiters:
        waiter.join()
    assert len(woken) == 4
