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
    recorder.steps_between_marks, recorder.steps_since_mark = ({}, {}), {}
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


@pytest.mark.native("it counts the programs that are compiled")
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


def implied(run, times: int) -> list[int]:
    """How many marks were implied in each call."""
    found = []
    for _ in range(times):
        with metrics.counted() as grown:
            run()
        found.append(grown["ImpliedMark"])
    return found


def steps(loop: Loop, count: int):
    """Makes that many steps, then marks."""

    def run() -> None:
        for _ in range(count):
            loop.step()
        ltm.mark_step()

    return run


@pytest.mark.parametrize("count", [2, 5, unmarked_loops.MAX_STEPS_OF_A_PROGRAM])
def test_a_loop_with_marks_after_equally_many_steps_is_left_alone(recorder, count):
    loop = Loop()
    assert implied(steps(loop, count), 6) == [count - 1] * 2 + [0] * 4
    on_cpu = Loop("cpu")
    for _ in range(6 * count):
        on_cpu.step()
    torch.testing.assert_close(loop.weights(), on_cpu.weights())


@pytest.mark.parametrize("optimizers", [1, 2])
def test_a_loop_that_marks_each_step_is_left_alone(recorder, optimizers):
    assert implied(steps(Loop(optimizers=optimizers), 1), 5) == [0] * 5


def test_a_critic_with_several_steps_is_left_alone(recorder):
    critic, generator = Loop(), Loop()

    def run() -> None:
        for _ in range(5):
            critic.step()
        generator.step()
        ltm.mark_step()

    assert implied(run, 5) == [4, 4, 0, 0, 0]


def test_marks_after_other_numbers_of_steps_each_time_are_not_awaited(recorder):
    loop = Loop()
    assert [implied(steps(loop, count), 1)[0] for count in (3, 5, 4, 6, 5)] == [2, 4, 3, 5, 4]


def test_an_evaluation_that_marks_leaves_the_loop_around_it_unmarked(recorder):
    loop, count = Loop(), unmarked_loops.MAX_STEPS_OF_A_PROGRAM + 4
    assert implied(steps(loop, count), 4) == [count - 1] * 4


def test_marks_of_the_setup_say_nothing_of_the_loop(recorder):
    loop = Loop()
    ltm.mark_step()

    def ten_steps_and_a_read() -> None:
        for _ in range(10):
            loss = loop.step()
        loss.item()

    assert implied(ten_steps_and_a_read, 3) == [9, 10, 10]


def test_a_marked_loop_says_nothing_of_an_unmarked_one_behind_it(recorder):
    for made in (1, 4):
        implied(steps(Loop(), made), 4)
        loop = Loop()
        assert implied(loop.step, 6) == [0, 1, 1, 1, 1, 1]
        ltm.mark_step()


def test_the_same_optimizer_without_its_marks_is_cut_once_they_are_missed(recorder):
    loop = Loop()
    implied(steps(loop, 4), 4)
    with metrics.counted() as grown:
        assert implied(loop.step, 7) == [0, 0, 0, 0, 1, 1, 1]
    assert grown["TrimIrGraph"] == 0


def test_marks_that_are_missed_are_noticed_across_reads(recorder):
    loop = Loop()
    implied(steps(loop, 4), 4)

    def three_steps_and_a_read() -> None:
        for _ in range(3):
            loss = loop.step()
        loss.item()

    assert implied(three_steps_and_a_read, 3) == [0, 2, 3]


@pytest.mark.native("it looks at the calls that are recorded")
def test_a_read_in_each_step_ends_recordings_alone(recorder):
    loop = Loop()
    assert implied(lambda: loop.step().item(), 4) == [0] * 4


def test_gradients_that_are_accumulated_over_marks_are_left_alone(recorder):
    loop = Loop()
    model, optimizer = loop.models[0], loop.optimizers[0]

    def run() -> None:
        for _ in range(3):
            F.mse_loss(model(loop.x), loop.x[:, :3]).backward()
            ltm.mark_step()
        optimizer.step()
        optimizer.zero_grad()

    assert implied(run, 4) == [0] * 4


def test_optimizer_step_marks(recorder):
    loop = Loop()

    def run() -> None:
        F.mse_loss(loop.models[0](loop.x), loop.x[:, :3]).backward()
        ltm.optimizer_step(loop.optimizers[0], barrier=True)

    assert implied(run, 4) == [0] * 4


@pytest.mark.native("immediate steps behind replayed ones are marked one step later")
def test_replayed_steps_say_nothing_of_a_loop_behind_them(recorder):
    loop = Loop()
    replayed = ltc.compile(loop.step)
    for _ in range(5):
        replayed()
    assert implied(loop.step, 4) == [0, 1, 1, 1]


def test_marks_of_another_thread_say_nothing_of_this_ones_loop(recorder):
    thread = threading.Thread(target=lambda: implied(steps(Loop(), 4), 4))
    thread.start()
    thread.join()
    assert implied(Loop().step, 4) == [0, 1, 1, 1]


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
