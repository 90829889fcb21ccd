"""One team runs a list of kernels: every task once, in order, whoever takes it."""

import concurrent.futures

import numpy as np
import pytest

from ltc.llvm import loading, threads
from ltc.llvm.builder import Builder, function_text
from ltc.llvm.program import KernelCall, KernelRun, entry_address

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
        words = ((0, 8 * number), (0, 8 * (faults.start - 1)))  # from the frame's second word
        fault = faults.start if number == failing else 0
        calls.append(KernelCall(entry_address(text, "kernel"), words, count, fault))
    return KernelRun(calls, 1 + len(tasks) + len(faults), faults)


def launched(run: KernelRun, kernels: int) -> tuple[int, list[int]]:
    frame = np.zeros(1 + kernels + 1 + 2 * kernels, dtype=np.int64)
    frame[0] = frame[1:].ctypes.data
    failed = run.launch(frame.ctypes.data)
    return failed, frame[1 : 1 + kernels].tolist()


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_every_task_runs_once_whatever_the_number_of_threads(count, monkeypatch):
    monkeypatch.setattr(threads, "thread_count", lambda: count)
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
    name = loading.kernel_name(text)
    assert loading.load({name: text})[name].entry
