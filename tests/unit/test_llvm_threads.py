"""One team runs a list of kernels: every task once, in order, whoever takes it."""

import concurrent.futures
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from ltc.errors import Unsupported
from ltc.llvm.compiler import symbols
from ltc.llvm.emit.builder import Builder, function_text
from ltc.llvm.native import kernel_cache, runner, system
from ltc.llvm.native.kernel_run import EntryCall, KernelRun, entry_address
from ltc.support.process import processors

TASKS = [64, 1, 7, 2, 1, 30] * 20


def run_of(tasks: list[int], faults: range = range(0), failing: int = -1) -> KernelRun:
    """Kernels that each add 1 to a word of their own for every task, in a frame of such words.

    failing  the kernel that stores a fault as well
    """
    calls = []
    for number, count in enumerate(tasks):
        b = Builder(width=1)
        b.emit("%old = atomicrmw add ptr %p0, i64 1 monotonic, align 8")
        if number == failing:
            b.emit("store i64 3, ptr %p1")
        text = function_text("kernel", 2, b)
        words = (0, 8 * number, 0, 8 * (faults.start - 1))  # from the frame's second word
        fault = faults.start if number == failing else 0
        calls.append(EntryCall(entry_address(text, "kernel"), words, count, fault))
    return KernelRun(calls, 1 + len(tasks) + len(faults), faults)


def launched(run: KernelRun, kernels: int) -> tuple[int, list[int]]:
    frame = np.zeros(1 + kernels + 1 + 2 * kernels, dtype=np.int64)
    frame[0] = frame[1:].ctypes.data
    failed = run.launch(frame.ctypes.data)
    return failed, frame[1 : 1 + kernels].tolist()


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_every_task_runs_once_whatever_the_number_of_threads(count, monkeypatch):
    monkeypatch.setattr(runner, "thread_count", lambda: count)
    run = run_of(TASKS)
    for _ in range(50):
        assert launched(run, len(TASKS)) == (-1, TASKS)


def test_several_callers_have_a_team_each():
    run = run_of(TASKS)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = [pool.submit(launched, run, len(TASKS)) for _ in range(40)]
    assert all(result.result() == (-1, TASKS) for result in results)


def test_nothing_runs_after_a_kernel_that_failed():
    tasks = [4, 4, 4, 4]
    run = run_of(tasks, faults=range(5, 6), failing=1)
    failed, done = launched(run, len(tasks))
    assert failed == 1 and done == [4, 4, 0, 0]


def test_no_kernels_are_no_work():
    assert launched(run_of([]), 0) == (-1, [])


def test_a_kernel_called_by_its_own_name_is_not_taken_for_a_programs(tmp_path, monkeypatch):
    """Both are kept on disk, with functions of different names."""
    monkeypatch.setenv("LTC_CACHE_DIR", str(tmp_path))
    b = Builder(width=1)
    b.emit("store i64 20261120, ptr %p0, align 8")
    text = function_text("kernel", 1, b)
    assert entry_address(text, "kernel")
    name = kernel_cache.kernel_name(text)
    assert kernel_cache.load({name: text})[name].entry


def threads_of(run: KernelRun, tasks: int) -> set[int]:
    """The threads that took the tasks of a kernel that writes down each one's own."""
    notes, frame = np.zeros(tasks, dtype=np.int64), np.zeros(2, dtype=np.int64)
    frame[0] = notes.ctypes.data
    assert run.launch(frame.ctypes.data) == -1
    assert notes.all()
    return set(notes.tolist())


def run_that_notes_threads(tasks: int) -> KernelRun:
    b = Builder(width=1)
    b.emit("%self = call i64 @pthread_self()")
    b.emit("%place = getelementptr i64, ptr %p0, i64 %task")
    b.emit("store i64 %self, ptr %place, align 8")
    # long enough that a thread that is there gets a share
    b.emit("%slept = call i32 @usleep(i32 200)")
    text = function_text("kernel", 1, b)
    text += "declare i64 @pthread_self()\ndeclare i32 @usleep(i32)\n"
    return KernelRun([EntryCall(entry_address(text, "kernel"), ((0, 0),), tasks)], 1, range(0))


@pytest.fixture
def two_threads_on_two_processors(monkeypatch):
    if not system.has_threads():
        pytest.skip("the system's own team takes no notice")
    monkeypatch.setattr(runner, "thread_count", lambda: 2)
    monkeypatch.setattr(processors, "count", lambda: 2)
    yield
    runner.leave_processor(0)


def leave_for(nanoseconds: int) -> None:
    runner.leave_processor(time.monotonic_ns() + nanoseconds)


HOUR = 3_600_000_000_000


def two_take_part(run: KernelRun, tasks: int, before=lambda: None) -> bool:
    """Whether they do in one launch of some: a busy machine may run the second thread too late.

    before  called before each launch
    """
    for _ in range(40):
        before()
        if len(threads_of(run, tasks)) == 2:
            return True
    return False


def test_a_processor_that_is_left_is_not_used_until_it_is_given_back(two_threads_on_two_processors):
    run = run_that_notes_threads(400)
    assert two_take_part(run, 400)
    leave_for(HOUR)
    assert len(threads_of(run, 400)) == 1
    runner.leave_processor(0)
    assert two_take_part(run, 400)


def test_a_processor_is_left_for_the_time_named_and_no_longer(two_threads_on_two_processors):
    run = run_that_notes_threads(4000)
    # the launch, longer than that, gets it back
    assert two_take_part(run, 4000, before=lambda: leave_for(50_000_000))


def test_a_processor_given_back_helps_the_launch_that_is_under_way(two_threads_on_two_processors):
    run, givers = run_that_notes_threads(4000), []

    def leave_and_give_back_meanwhile() -> None:
        leave_for(HOUR)
        givers.append(threading.Timer(0.05, runner.leave_processor, (0,)))
        givers[-1].start()

    assert two_take_part(run, 4000, before=leave_and_give_back_meanwhile)
    for giver in givers:
        giver.join()


def test_more_processors_than_threads_leave_one_without_being_asked(
    two_threads_on_two_processors, monkeypatch
):
    monkeypatch.setattr(processors, "count", lambda: 3)
    leave_for(HOUR)
    run = run_that_notes_threads(400)
    assert two_take_part(run, 400)


# --- what may be switched off -------------------------------------------------------------------


def runner_text(monkeypatch, **settings: str) -> str:
    for name, setting in settings.items():
        monkeypatch.setenv(name, setting)
    return runner.runner_source()[0]


def test_kernels_may_run_on_openmps_threads_or_on_none(monkeypatch):
    text = runner_text(monkeypatch, LTC_THREADS="one")
    assert "pthread_create" not in text and "GOMP_parallel" not in text
    if symbols.has_symbol("GOMP_parallel"):
        text = runner_text(monkeypatch, LTC_THREADS="openmp")
        assert "pthread_create" not in text and "GOMP_parallel" in text


def test_openmp_where_there_is_none_is_an_error_that_names_the_other_ways(monkeypatch):
    monkeypatch.setattr(symbols, "has_symbol", lambda name: False)
    with pytest.raises(Unsupported, match="LTC_THREADS to pool or to one"):
        runner_text(monkeypatch, LTC_THREADS="openmp")


STEPS = """
import torch, ltc
import ltc.core.lazy_model as ltm
torch.set_num_threads(2)
weight = torch.ones(512, 512, device="ltc")
for _ in range(6):
    weight = (weight @ weight).clamp(max=2.0) - 1
    ltm.mark_step()
print(weight.sum().item())
"""


@pytest.mark.parametrize(
    "setting",
    [
        "LTC_THREADS=openmp", "LTC_THREADS=one", "LTC_RESERVE_CORE=0", "LTC_PREFAULT_MB=0",
    ],
)  # fmt: skip
def test_a_program_runs_without_each(setting):
    environment = dict(os.environ, **dict([setting.split("=")]))
    done = subprocess.run(
        [sys.executable, "-c", STEPS], env=environment, capture_output=True, text=True
    )
    assert done.stdout == f"{512.0 * 512}\n", done.stderr
