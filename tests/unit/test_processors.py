"""A thread that records beside a program gets a processor, for as long as it usually computes."""

import itertools
import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from ltc.device.recording import core_ends
from ltc.runtime import core_reservation
from ltc.runtime.buffer import Execution
from ltc.runtime.executor import Executor
from ltc.support.process import control_groups, processors


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.monotonic = self.computed = 1_000

    def monotonic_ns(self) -> int:
        return self.monotonic

    def thread_time_ns(self) -> int:
        return self.computed


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Control groups as files; what this process may use of processors is asked anew."""
    monkeypatch.setattr(control_groups, "GROUP", tmp_path / "own")
    monkeypatch.setattr(control_groups, "GROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    yield tmp_path
    monkeypatch.undo()


def counted() -> int:
    return processors.count.__wrapped__()


@pytest.mark.parametrize(
    "limits, expected",
    [
        ({"": "max 100000"}, 8),
        ({"": "150000 100000"}, 2),
        ({"pod/worker": "max 100000", "pod": "50000 100000"}, 1),
        ({"pod/worker": "300000 100000", "pod": "900000 100000"}, 3),
        ({"pod/worker": "nonsense"}, 8),
        ({}, 8),
    ],
)
def test_a_container_has_as_many_processors_as_it_is_given_the_time_of(groups, limits, expected):
    (groups / "own").write_text("0::/pod/worker\n")
    for path, text in limits.items():
        (groups / path).mkdir(parents=True, exist_ok=True)
        (groups / path / "cpu.max").write_text(text)
    assert counted() == expected


@pytest.mark.parametrize("quota, expected", [("-1", 8), ("200000", 2), ("1000", 1)])
def test_so_it_has_under_the_first_version_of_control_groups(groups, quota, expected):
    (groups / "own").write_text("3:cpuset:/\n1:cpu,cpuacct:/pod\n")
    (groups / "cpu" / "pod").mkdir(parents=True)
    (groups / "cpu" / "pod" / "cpu.cfs_quota_us").write_text(quota)
    (groups / "cpu" / "pod" / "cpu.cfs_period_us").write_text("100000")
    assert counted() == expected


def test_without_control_groups_the_mask_counts(groups):
    assert counted() == 8


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(core_reservation, "time", clock)
    monkeypatch.setattr(core_reservation, "_usual", 0)
    monkeypatch.setattr(core_reservation, "_is_left", False)
    monkeypatch.setattr(core_reservation, "_compiling", 0)
    monkeypatch.setattr(core_reservation, "_this_thread", core_reservation._Recording())
    monkeypatch.setattr(processors, "count", lambda: 2)
    return clock


@pytest.fixture
def left(monkeypatch):
    """What programs were told, in order."""
    told = []
    monkeypatch.setattr(core_reservation, "_leave", told.append)
    return told


def test_as_long_as_the_thread_computed_the_last_time(clock, left):
    core_reservation.recording_goes_on(None, 0.0, core_reservation.Waits())
    clock.computed += 300_000
    clock.monotonic += 9_000_000  # it slept meanwhile
    core_reservation.recording_is_over()
    core_reservation.leave_one()
    assert left[1:] == [clock.monotonic + 300_000]


def test_no_longer_than_a_wrong_guess_may_cost(clock, left):
    core_reservation.recording_goes_on(None, 0.0, core_reservation.Waits())
    clock.computed += 10**12
    core_reservation.recording_is_over()
    core_reservation.leave_one()
    assert left[1:] == [clock.monotonic + core_reservation.LONGEST]


def test_each_threads_own_time_counts(clock, left):
    core_reservation.recording_goes_on(None, 0.0, core_reservation.Waits())
    clock.computed += 5
    other = threading.Thread(target=core_reservation.recording_is_over)  # never went on recording
    other.start()
    other.join()
    clock.computed += 7
    core_reservation.recording_is_over()
    core_reservation.leave_one()
    assert left[1:] == [clock.monotonic + 12]


class Work:
    """One that ends when told."""

    usual_seconds = 0.0

    def __init__(self) -> None:
        self.execution, self.may_end = Execution(), threading.Event()
        self.waits = core_reservation.Waits()

    def __call__(self) -> None:
        self.may_end.wait()
        self.execution.finish()

    def lose_outputs(self) -> None:
        pass


def end_once(work: Work, somebody_waits) -> threading.Thread:
    def look() -> None:
        while not somebody_waits():
            time.sleep(0.001)
        work.may_end.set()

    thread = threading.Thread(target=look)
    thread.start()
    return thread


def test_who_waits_within_a_time_waits_for_programs_that_take_no_longer(clock, left):
    executor, work = Executor(0), Work()
    work.usual_seconds = 0.002
    executor.run(work, long=True)
    executor.wait_within(0.001)
    assert not executor.is_done
    thread = end_once(work, lambda: core_reservation._this_thread.last is None)
    executor.wait_within(0.002)
    assert executor.is_done
    thread.join()


@pytest.mark.parametrize("is_handed_over", [False, True])
def test_a_program_may_run_in_its_caller_for_as_long_as_python_takes_to_hand_it_over(
    is_handed_over, clock, monkeypatch, left
):
    """What the caller has computed is its end of a recording, and the program if that ran there."""
    monkeypatch.setattr(core_ends, "thread_time_ns", lambda: 5_000_000)
    if is_handed_over:
        core_reservation.recording_goes_on(None, 0.0, core_reservation.Waits())
    walk, program = SimpleNamespace(caught_up=1_000_000), SimpleNamespace(seconds=0.003)
    longest = core_ends._longest(walk, program, SimpleNamespace(guard=0))
    assert longest == pytest.approx(0.004 if is_handed_over else 0.001)


def test_a_long_program_leaves_one_until_somebody_waits_for_it(clock, left):
    executor, work = Executor(0), Work()
    executor.wait_for_room()
    executor.run(work, long=True)
    assert left == [clock.monotonic]
    ending = end_once(work, lambda: len(left) > 1)
    work.execution.wait()
    assert left[1:] == [0]
    ending.join()
    executor.wait()


def test_a_program_that_its_caller_runs_has_all(clock, left):
    executor, work = Executor(0), Work()
    work.may_end.set()
    core_reservation.leave_one()
    executor.run(work, long=False)
    assert left[1:] == [0]


def test_where_no_program_runs_beside_nothing_is_left(clock, left):
    executor = Executor(0)
    for _ in range(3):
        work = Work()
        work.may_end.set()
        executor.wait_for_room()
        executor.run(work, long=False)
    assert left == []


def test_who_waits_for_room_gives_back_and_is_given_before_it_goes_on(clock, left, monkeypatch):
    monkeypatch.setenv("LTC_MAX_IN_FLIGHT", "1")
    executor, work = Executor(0), Work()
    executor.wait_for_room()
    executor.run(work, long=True)
    ending = end_once(work, lambda: executor._without_room)
    executor.wait_for_room()
    assert left == [clock.monotonic, 0, clock.monotonic]
    ending.join()


def test_how_long_there_was_no_room_is_told_to_the_next_launch(monkeypatch):
    monkeypatch.setenv("LTC_MAX_IN_FLIGHT", "1")
    executor, work = Executor(0), Work()
    executor.wait_for_room()
    assert executor.take_waited() == 0
    executor.run(work, long=True)
    ending = end_once(work, lambda: executor._without_room)
    executor.wait_for_room()
    assert executor.take_waited() > 0
    assert executor.take_waited() == 0
    ending.join()


def hand_over_and_wait(clock: Clock, waits: core_reservation.Waits, after: int) -> None:
    """A run of a millisecond, waited for so many nanoseconds after it was handed over."""
    launch = Execution()
    core_reservation.recording_goes_on(launch, 0.001, waits)
    clock.monotonic += after
    core_reservation.waits_for(launch)


def test_what_is_waited_for_soon_runs_in_its_caller_but_for_one_run_now_and_then(clock, left):
    waits = core_reservation.Waits()
    for _ in range(core_reservation.WAITS_IN_A_ROW):
        assert not waits.are_expected()
        hand_over_and_wait(clock, waits, 200_000)
    expected = [waits.are_expected() for _ in range(core_reservation.LOOKS_EVERY)]
    assert expected == [True] * (core_reservation.LOOKS_EVERY - 1) + [False]
    assert not core_reservation.Waits().are_expected()  # another program's


def test_what_is_recorded_beside_runs_behind_again(clock, left):
    waits = core_reservation.Waits()
    for _ in range(core_reservation.WAITS_IN_A_ROW):
        hand_over_and_wait(clock, waits, 200_000)
    hand_over_and_wait(clock, waits, 300_000)
    assert not waits.are_expected()


def test_the_programs_of_who_waits_no_more_run_behind_again(clock, left):
    waits = core_reservation.Waits()
    for _ in range(core_reservation.WAITS_IN_A_ROW):
        hand_over_and_wait(clock, waits, 200_000)
    for after, is_expected in ((200_000, True), (100_000, False)):
        core_reservation.recording_goes_on(Execution(), 0.001, waits)
        clock.monotonic += after
        core_reservation.recording_is_over()
        assert waits.are_expected() is is_expected


def test_who_reads_what_the_step_before_gave_records_beside_its_programs(clock, left):
    waits, launches = core_reservation.Waits(), [Execution() for _ in range(20)]
    for before, launch in itertools.pairwise(launches):
        core_reservation.recording_goes_on(launch, 0.001, waits)
        core_reservation.waits_for(before)
        assert not waits.are_expected()


def test_a_short_program_that_is_read_counts_for_the_long_one_before_it(clock, left):
    waits = core_reservation.Waits()
    for _ in range(core_reservation.WAITS_IN_A_ROW):
        core_reservation.recording_goes_on(Execution(), 0.001, waits)
        clock.monotonic += 100_000
        hand_over_and_wait(clock, core_reservation.Waits(), 100_000)
    assert waits.are_expected()


def test_waiting_for_the_device_uses_all_processors(clock, left):
    executor, work = Executor(0), Work()
    executor.run(work, long=True)
    ending = end_once(work, lambda: len(left) > 1)
    executor.wait()
    assert left == [clock.monotonic, 0]
    ending.join()


def test_above_four_processors_none_is_left(clock, left, monkeypatch):
    monkeypatch.setattr(processors, "count", lambda: 4)
    core_reservation.leave_one()
    core_reservation.use_all()
    assert left == [clock.monotonic, 0]
    monkeypatch.setattr(processors, "count", lambda: 5)
    core_reservation.leave_one()
    core_reservation.use_all()
    assert left == [clock.monotonic, 0]


def test_a_compiler_in_another_process_has_one_until_it_ends(clock, left, monkeypatch):
    monkeypatch.setattr(processors, "count", lambda: 64)
    core_reservation.compiler_begins()
    core_reservation.compiler_begins()
    core_reservation.use_all()  # somebody waits for a program
    core_reservation.compiler_ends()
    assert left == [clock.monotonic + core_reservation._EVER] * 2
    core_reservation.compiler_ends()
    assert left[2:] == [0]


def test_what_is_left_for_a_compiler_that_ends_meanwhile_is_taken_back(clock, left, monkeypatch):
    """The thread that is about to record has found it at work still."""
    monkeypatch.setattr(processors, "count", lambda: 64)

    def leave(until: int) -> None:
        if core_reservation._compiling and left:
            core_reservation.compiler_ends()
        left.append(until)

    monkeypatch.setattr(core_reservation, "_leave", leave)
    core_reservation.compiler_begins()
    core_reservation.leave_one()
    core_reservation.use_all()
    assert core_reservation._compiling == 0
    assert left[-1] == 0


def threads_of_a_new_thread() -> int:
    found: list[int] = []
    one = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    one.start()
    one.join()
    return found[0]


def test_torchs_kernels_leave_it_one_too(clock, left, monkeypatch):
    monkeypatch.setattr(processors, "count", lambda: 3)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert core_reservation.beside_compiler(torch.get_num_threads) == 3
        core_reservation.compiler_begins()
        assert core_reservation.beside_compiler(torch.get_num_threads) == 2
        assert core_reservation.beside_compiler(threads_of_a_new_thread) == 3
        with pytest.raises(ZeroDivisionError):
            core_reservation.beside_compiler(lambda x: 1 / x, 0)
        assert torch.get_num_threads() == 3
        torch.set_num_threads(1)
        assert core_reservation.beside_compiler(torch.get_num_threads) == 1
        core_reservation.compiler_ends()
    finally:
        torch.set_num_threads(before)


def test_a_child_of_fork_has_no_compiler(clock, left):
    core_reservation.compiler_begins()
    try:
        child = os.fork()
        if child == 0:
            os._exit(core_reservation._compiling)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        core_reservation.compiler_ends()


def test_a_compiler_that_begins_where_none_is_left_ends_well(clock, left, monkeypatch):
    monkeypatch.setenv("LTC_RESERVE_CORE", "0")
    core_reservation.compiler_begins()
    core_reservation.compiler_ends()
    assert left == []


def test_switched_off_none_is_left(clock, left, monkeypatch):
    monkeypatch.setenv("LTC_RESERVE_CORE", "0")
    core_reservation.leave_one()
    core_reservation.use_all()
    assert left == []


def test_a_backend_that_has_no_use_for_it_is_not_asked(monkeypatch):
    monkeypatch.setenv("LTC_BACKEND", "eager")
    core_reservation.leave_one()
    core_reservation.use_all()
