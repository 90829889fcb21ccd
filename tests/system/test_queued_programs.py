"""Programs that a device's thread runs from its queue, without Python, as they would run here."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import ltc
import ltc.core.lazy_model as ltm
from ltc import config
from ltc.llvm.emit.builder import Builder, function_text
from ltc.llvm.native.kernel_run import KernelCall, KernelRun, entry_address
from ltc.runtime import program
from ltc.runtime.buffer import Execution
from ltc.runtime.core_reservation import Waits
from ltc.runtime.executor import Executor, executor_of

pytestmark = pytest.mark.skipif(
    config.value("LTC_BACKEND") != "llvm" or not sys.platform.startswith("linux"),
    reason="only this backend has a queue, and it needs futexes",
)


@pytest.fixture(autouse=True)
def every_program_is_long(monkeypatch):
    monkeypatch.setattr(program, "SHORT_SECONDS", -1)


def queued() -> int:
    """Launches that the first device's queue has run."""
    ltm.wait_device_ops()
    queue = executor_of(0)._queued.queue
    return 0 if queue is None else queue.done


class Training:
    """A small network, its optimizer and batches that differ from step to step."""

    def __init__(self, device: str):
        torch.manual_seed(1)
        self.device = device
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
        ).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.batches = [(torch.randn(5, 6), torch.randint(3, (5,))) for _ in range(4)]
        self.gradients: list[list[torch.Tensor]] = []
        self.losses: list[torch.Tensor] = []

    def step(self, number: int, keeps_gradients: bool = False) -> None:
        x, y = (part.to(self.device) for part in self.batches[number % 4])
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        if keeps_gradients:
            self.gradients.append([p.grad for p in self.model.parameters()])
        self.losses.append(loss.detach())
        if self.device != "cpu":
            ltc.sync()


def test_steps_that_follow_one_another_are_queued_and_equal_eager():
    lazy, plain = Training("ltc"), Training("cpu")
    for number in range(3):
        lazy.step(number)
    before = queued()
    for number in range(3, 40):
        lazy.step(number)
    assert queued() == before + 37
    for number in range(40):
        plain.step(number)
    torch.testing.assert_close([x.cpu() for x in lazy.losses], plain.losses)
    torch.testing.assert_close(
        [p.cpu() for p in lazy.model.parameters()], list(plain.model.parameters())
    )


def test_gradients_that_somebody_keeps_lend_their_memory_to_no_later_step():
    lazy, plain = Training("ltc"), Training("cpu")
    for training in (lazy, plain):
        for number in range(24):
            training.step(number, keeps_gradients=number % 3 == 0)
    for kept, expected in zip(lazy.gradients, plain.gradients, strict=True):
        torch.testing.assert_close([g.cpu() for g in kept], expected)


def test_what_needs_python_keeps_its_place_between_queued_programs():
    x = torch.zeros(4, device="ltc")
    ltc.sync()
    before = queued()
    for _ in range(20):
        x += 1
        ltc.sync()
        shared = x.clone()  # both hold one buffer: the next program copies it first
        ltc.sync()
        x *= 2
        ltc.sync()
        assert shared.shape == (4,)
    assert x.tolist() == [2.0**21 - 2] * 4
    assert queued() > before


def embedded(table: torch.Tensor, row: int) -> torch.Tensor:
    return F.embedding(torch.tensor([row], device="ltc"), table)


class UntilTold:
    """A work that needs Python, and lasts until it is told to end."""

    needs_python = True
    usual_seconds = 0.0

    def __init__(self) -> None:
        self.execution, self.may_end, self.waits = Execution(), threading.Event(), Waits()

    def __call__(self) -> None:
        self.may_end.wait()
        self.execution.finish()


@contextmanager
def behind_python():
    """What is started meanwhile waits, outside of the queue, for a work that needs Python."""
    work = UntilTold()
    executor_of(0).run(work, long=True)
    try:
        yield
    finally:
        work.may_end.set()


def waiting_kernel() -> KernelRun:
    """Sleeps until the word whose address is the frame's first is no longer 0."""
    b = Builder(width=1)
    b.emit("br label %look")
    b.label("look")
    b.emit("%slept = call i32 @usleep(i32 200)")
    b.emit("%word = load atomic i64, ptr %p0 seq_cst, align 8")
    b.emit("%told = icmp ne i64 %word, 0")
    b.emit("br i1 %told, label %over, label %look")
    b.label("over")
    text = function_text("kernel", 1, b) + "declare i32 @usleep(i32)\n"
    return KernelRun([KernelCall(entry_address(text, "kernel"), ((0, 0),), 1)], 1)


@contextmanager
def behind_a_launch():
    """What is started meanwhile is in the queue, behind a launch that has not ended."""
    queued()
    ring, run = executor_of(0)._queued.queue._ring, waiting_kernel()
    told = np.zeros(1, dtype=np.int64)
    frame = np.array([told.ctypes.data, 0], dtype=np.int64)
    number = ring.give(run.address, frame.ctypes.data, 1)
    try:
        yield
    finally:
        told[0] = 1
        while ring.done < number:
            ring.sleep_until_done(number)


every_way_to_wait = pytest.mark.parametrize("behind", [behind_python, behind_a_launch])


@every_way_to_wait
def test_a_program_that_fails_in_the_queue_names_its_line_and_fails_what_needs_it(behind):
    table = torch.ones(7, 5, device="ltc")

    def three_programs(row: int) -> list[torch.Tensor]:
        doubled = table * 2
        ltc.sync()
        rows = embedded(table, row)
        ltc.sync()
        more = rows + 1
        ltc.sync()
        return [doubled, rows, more]

    three_programs(1)
    ltm.wait_device_ops()
    with behind():
        good, bad, needs_it = three_programs(9)
    with pytest.raises(IndexError) as caught:
        ltm.wait_device_ops()
    assert "test_queued_programs.py" in "".join(caught.value.__notes__)
    for lost in (bad, needs_it):
        with pytest.raises(IndexError):
            lost.cpu()
    assert good.tolist() == [[2.0] * 5] * 7
    before = queued()
    assert (embedded(table, 2) + 1).tolist() == [[2.0] * 5]
    assert queued() > before


def test_a_parameter_that_a_queued_program_did_not_reach_keeps_its_value():
    table, x = torch.ones(4, 2).to("ltc"), torch.zeros(2).to("ltc")
    with pytest.raises(IndexError):  # at the last mark, where it is known so soon
        for row in (0, 0, 9):
            index = torch.tensor([row]).to("ltc")
            x.add_(table[index].sum() * 0 + 1)
            ltc.sync()
        ltm.wait_device_ops()
    assert x.tolist() == [2.0, 2.0]


@every_way_to_wait
def test_works_behind_a_failure_that_do_not_need_it_are_done(behind):
    table, counter = torch.ones(7, 5, device="ltc"), torch.zeros(2, device="ltc")
    near, far = (torch.tensor([row], device="ltc") for row in (1, 9))
    ltc.sync()

    def two_programs(row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = F.embedding(row, table)
        ltc.sync()
        second = F.embedding(near, table)
        counter.add_(5)
        ltc.sync()
        return first, second

    two_programs(near)
    ltm.wait_device_ops()
    with behind():
        bad, good = two_programs(far)
    with pytest.raises(IndexError):
        ltm.wait_device_ops()
    with pytest.raises(IndexError):
        bad.cpu()
    assert good.tolist() == [[1.0] * 5]
    assert counter.tolist() == [10.0, 10.0]


def test_results_that_no_tensor_has_yet_lend_no_memory_to_another_threads_launch(monkeypatch):
    a, b = (torch.full((4,), number, device="ltc") for number in (1.0, 2.0))
    ltc.sync()

    def doubled(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        ltc.sync()
        return y

    doubled(a)
    ltm.wait_device_ops()
    run, elsewhere = Executor.run, []

    def run_before_another_threads(executor, work, long):
        run(executor, work, long)
        if not elsewhere:
            elsewhere.append(None)
            with ThreadPoolExecutor(1) as pool:
                elsewhere[0] = pool.submit(doubled, b).result()

    with behind_a_launch():
        monkeypatch.setattr(Executor, "run", run_before_another_threads)
        here = doubled(a)
    assert (here.tolist(), elsewhere[0].tolist()) == ([2.0] * 4, [4.0] * 4)


def test_a_program_is_queued_though_what_it_needs_has_ended_meanwhile(monkeypatch):
    """It was under way where it was looked up, and is over where the program is given to the queue."""

    def doubled(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        ltc.sync()
        return y

    ones = torch.ones(4, device="ltc")
    ltc.sync()
    for _ in range(2):
        doubled(ones)
    run, needed = Executor.run, []

    def run_once_that_is_over(executor, work, long):
        needed.extend(work.dependencies)
        blocked.close()
        executor._queued.come_to_last()
        run(executor, work, long)

    with ExitStack() as blocked:
        blocked.enter_context(behind_a_launch())
        first, before = doubled(ones), executor_of(0)._queued.queue.given
        monkeypatch.setattr(Executor, "run", run_once_that_is_over)
        second = doubled(first)
    assert needed and executor_of(0)._queued.queue.given == before + 1
    assert second.tolist() == [4.0] * 4


def test_a_child_is_told_what_was_queued_at_the_fork():
    lines = """
import os, torch, ltc
from ltc.runtime import program
program.SHORT_SECONDS = -1
x = torch.randn(700, 700, device="ltc")
for _ in range(6):
    x = (x @ x) * 1e-3
    ltc.sync()
child = os.fork()
if not child:
    try:
        x.cpu()
        said = 0
    except RuntimeError as error:
        said = 0 if "forked" in str(error) else 1
    y = (torch.ones(3, device="ltc") + 1)
    ltc.sync()
    os._exit(said if y.tolist() == [2.0] * 3 else 2)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert x.isfinite().all().item()
"""
    quiet = "-Wignore:This process:DeprecationWarning"  # has threads, says Python from 3.12 on
    command = [sys.executable, quiet, "-c", lines]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert (done.returncode, done.stderr) == (0, "")
