"""A loop without step marks: its steps are not recorded one behind the other."""

import gc
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ltc
import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics
from ltc.device.hooks import unmarked_loops
from ltc.device.recording.recorder import device_at


@pytest.fixture
def recorder():
    """That of a thread which has never marked a step."""
    ltm.mark_step(wait=True)
    recorder = device_at(0).recorder()
    recorder.has_marks = False
    yield recorder
    ltm.mark_step(wait=True)


class Loop:
    def __init__(self, device: str = "ltc:0", optimizers: int = 1) -> None:
        torch.manual_seed(0)
        self.models = [nn.Linear(4, 3).to(device) for _ in range(optimizers)]
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in self.models]
        self.x = torch.ones(5, 4).to(device)

    def step(self) -> torch.Tensor:
        for model, optimizer in zip(self.models, self.optimizers):
            optimizer.zero_grad()
            loss = F.mse_loss(model(self.x), self.x[:, :3])
            loss.backward()
            optimizer.step()
        return loss

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().cpu() for model in self.models for p in model.parameters()]


@pytest.mark.parametrize("optimizers", [1, 3])
def test_a_loop_without_marks_is_cut_where_one_would_stand(recorder, optimizers):
    loop, on_cpu = Loop(optimizers=optimizers), Loop("cpu", optimizers)
    for _ in range(4):
        loop.step()
        on_cpu.step()
    with metrics.counted() as grown:
        for _ in range(20):
            loop.step()
            on_cpu.step()
            assert recorder.last.depth < 60 * optimizers
    assert grown["ImpliedMark"] == 20
    assert grown["RecordedEntries"] == grown["UncachedCompile"] == grown["TrimIrGraph"] == 0
    for ours, theirs in zip(loop.weights(), on_cpu.weights(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_loop_with_marks_is_left_alone():
    loop = Loop(optimizers=2)
    with metrics.counted() as grown:
        for _ in range(3):
            for _ in range(5):  # a critic's steps
                loop.step()
            ltm.mark_step()
    assert grown["ImpliedMark"] == 0


def test_too_many_steps_between_two_marks_are_cut():
    loop = Loop()
    ltm.mark_step()
    with metrics.counted() as grown:
        for _ in range(unmarked_loops.STEPS_BETWEEN_MARKS + 3):
            loop.step()
    assert grown["ImpliedMark"] == 3
    ltm.mark_step()
    with metrics.counted() as grown:
        for _ in range(3):
            loop.step()
            ltm.mark_step()
    assert grown["ImpliedMark"] == 0


def test_an_optimizer_of_another_device_marks_nothing(recorder):
    on_cpu, pending = Loop("cpu"), torch.ones(3).to("ltc:0") + 1
    with metrics.counted() as grown:
        for _ in range(3):
            on_cpu.step()
    assert grown["ImpliedMark"] == 0
    assert pending.tolist() == [2.0] * 3


def test_a_step_that_is_compiled_later_is_replayed(recorder):
    """The optimizer that has marked its steps before marks none within a call that is watched."""
    loop, state = Loop(), torch.zeros(5, 4).to("ltc:0")

    def step(x: torch.Tensor) -> torch.Tensor:
        x = x * 2 + state
        loss = loop.models[0](x).square().mean()
        loss.backward()
        loop.optimizers[0].step()
        return loss

    for _ in range(4):
        step(loop.x)
    assert recorder.marked_by is not None
    replayed = ltc.compile(step)
    with metrics.counted() as grown, config.override(LTC_CHECK=0):
        for _ in range(8):
            replayed(loop.x)
    assert grown["ImpliedMark"] == 0
    assert grown["ReplayedCalls"] > 0


def test_an_optimizer_that_is_gone_marks_for_no_other(recorder):
    loop = Loop()
    for _ in range(4):
        loop.step()
    assert recorder.marked_by() is loop.optimizers[0]
    loop.optimizers.clear()
    gc.collect()
    assert recorder.marked_by() is None


def test_each_thread_has_its_own_loop(recorder):
    grown = []

    def train() -> None:
        loop = Loop()
        for _ in range(6):
            loop.step()
        grown.append(device_at(0).recorder().marked_by)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert grown != [None]
    assert recorder.marked_by is None


def test_shapes_that_change_are_cut_as_well(recorder):
    with config.override(LTC_TIER="op_by_op"):
        loop = Loop()
        for _ in range(5):
            loop.step()
            loop.x = torch.cat([loop.x, loop.x[:1]])
    assert all(weight.isfinite().all() for weight in loop.weights())
