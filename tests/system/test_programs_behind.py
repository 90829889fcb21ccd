"""Programs that a device's thread runs behind their caller give what they would give in it."""

import os
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F

import ltc
import ltc.core.lazy_model as ltm
from ltc.device.recording import core_ends
from ltc.runtime import program
from ltc.runtime.buffer import Execution
from ltc.runtime.core_reservation import Waits
from ltc.runtime.executor import Executor, executor_of

pytestmark = pytest.mark.native("programs that are compiled run behind their caller")


@pytest.fixture(autouse=True)
def every_program_is_long(monkeypatch):
    monkeypatch.setattr(program, "SHORT_SECONDS", -1)
    monkeypatch.setattr(core_ends, "_longest", lambda *_: -1)


@pytest.fixture
def handed_over(monkeypatch) -> list:
    """One element for each program that its caller hands over."""
    works, run = [], Executor.run

    def noted(executor, work, long):
        if long:
            works.append(work)
        run(executor, work, long)

    monkeypatch.setattr(Executor, "run", noted)
    return works


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


def test_steps_that_run_behind_their_caller_equal_eager(handed_over):
    lazy, plain = Training("ltc"), Training("cpu")
    for number in range(40):
        lazy.step(number)
    assert len(handed_over) >= 37
    for number in range(40):
        plain.step(number)
    torch.testing.assert_close([x.cpu() for x in lazy.losses], plain.losses)
    torch.testing.assert_close(
        [p.cpu() for p in lazy.model.parameters()], list(plain.model.parameters())
    )


def test_gradients_that_somebody_keeps_stay_as_they_are_in_later_steps():
    lazy, plain = Training("ltc"), Training("cpu")
    for training in (lazy, plain):
        for number in range(24):
            training.step(number, keeps_gradients=number % 3 == 0)
    for kept, expected in zip(lazy.gradients, plain.gradients, strict=True):
        torch.testing.assert_close([g.cpu() for g in kept], expected)


def test_a_buffer_that_two_tensors_share_is_copied_between_programs_that_run_behind(handed_over):
    x = torch.zeros(4, device="ltc")
    ltc.sync()
    for _ in range(20):
        x += 1
        ltc.sync()
        shared = x.clone()  # both hold one buffer: the next program copies it first
        ltc.sync()
        x *= 2
        ltc.sync()
        assert shared.shape == (4,)
    assert x.tolist() == [2.0**21 - 2] * 4
    assert handed_over


def embedded(table: torch.Tensor, row: int) -> torch.Tensor:
    return F.embedding(torch.tensor([row], device="ltc"), table)


class UntilTold:
    """A work that lasts until it is told to end."""

    usual_seconds = 0.0

    def __init__(self) -> None:
        self.execution, self.may_end, self.waits = Execution(), threading.Event(), Waits()

    def __call__(self) -> None:
        self.may_end.wait()
        self.execution.finish()


@contextmanager
def behind_another():
    """Programs started meanwhile wait for a work before them."""
    work = UntilTold()
    executor_of(0).run(work, long=True)
    try:
        yield
    finally:
        work.may_end.set()


def test_a_program_that_fails_behind_its_caller_names_its_line_and_fails_its_readers():
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
    with behind_another():
        good, bad, needs_it = three_programs(9)
    with pytest.raises(IndexError) as caught:
        ltm.wait_device_ops()
    assert "test_programs_behind.py" in "".join(caught.value.__notes__)
    for lost in (bad, needs_it):
        with pytest.raises(IndexError):
            lost.cpu()
    assert good.tolist() == [[2.0] * 5] * 7
    assert (embedded(table, 2) + 1).tolist() == [[2.0] * 5]


def test_a_parameter_that_a_failed_program_did_not_reach_keeps_its_value():
    table, x = torch.ones(4, 2).to("ltc"), torch.zeros(2).to("ltc")
    with pytest.raises(IndexError):  # at the last mark, where it is known so soon
        for row in (0, 0, 9):
            index = torch.tensor([row]).to("ltc")
            x.add_(table[index].sum() * 0 + 1)
            ltc.sync()
        ltm.wait_device_ops()
    assert x.tolist() == [2.0, 2.0]


def test_programs_behind_a_failure_that_do_not_need_it_are_run():
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
    with behind_another():
        bad, good = two_programs(far)
    with pytest.raises(IndexError):
        ltm.wait_device_ops()
    with pytest.raises(IndexError):
        bad.cpu()
    assert good.tolist() == [[1.0] * 5]
    assert counter.tolist() == [10.0, 10.0]


def test_a_child_is_told_what_was_under_way_at_the_fork():
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
