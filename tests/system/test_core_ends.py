"""Recordings that the core follows and ends: as on the CPU, whatever comes between two of them."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ltc
import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics
from ltc.device.recording.recorder import device_at
from ltc.errors import MemoryFault
from ltc.llvm.ops.memory_checks import LOOK, ROW_WORDS
from ltc.native.core import CORE
from ltc.runtime.account import account_of
from ltc.runtime.background import compile_behind
from tests.recorders import process_of_one_device

pytestmark = pytest.mark.skipif(CORE is None, reason="needs LTC_NATIVE and a core that is built")
STEPS, LATE = 16, 12  # from some step on each ends in the core; LATE is behind that


@contextmanager
def as_users_run(**settings: Any):
    with process_of_one_device(LTC_TIER="auto", **settings), metrics.counted() as grown:
        yield grown


class Training:
    """A loop whose steps end at a mark, a read, or both.

    Attributes:
        kept: What an event keeps for later steps, and what is compared at the end.
    """

    def __init__(self, device: str, make_optimizer: Callable[..., Any]) -> None:
        torch.manual_seed(3)
        layers = [
            nn.Embedding(11, 6),
            nn.Linear(6, 8),
            nn.Tanh(),
            nn.Linear(8, 8),
            nn.Tanh(),
            nn.Linear(8, 3),
        ]
        self.device = device
        self.net = nn.Sequential(*layers).double().to(device)
        self.optimizer = make_optimizer(self.net.parameters())
        self.rows = 5
        self.reads = self.marks = True
        self.kept: list[Any] = []
        self.losses: list[Any] = []

    def step(self, number: int) -> torch.Tensor:
        index = (torch.arange(self.rows) * (number + 1) % 11).to(self.device)
        wanted = (torch.arange(self.rows) % 3).to(self.device)
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.net(index), wanted)
        loss.backward()
        self.optimizer.step()
        if self.device != "cpu" and self.marks:
            ltm.mark_step()
        if self.reads:
            self.losses.append(loss.item())
        if self.device != "cpu":
            compile_behind.wait()
            ltm.wait_device_ops()  # behind a launch that is under way, Python makes the next one
        return loss

    def run(self, event: Callable[[Training], Any] | None = None) -> list[torch.Tensor]:
        for number in range(STEPS):
            if event is not None and number == LATE:
                event(self)
            loss = self.step(number)
        states = [one for state in self.optimizer.state.values() for one in state.values()]
        kept = [one for one in self.kept if isinstance(one, torch.Tensor)]
        tensors = [*self.net.parameters(), *states, *kept, loss]
        return [one.detach().cpu() for one in tensors if isinstance(one, torch.Tensor)]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, foreach=True)  # as on a device of PyTorch's


def check(make_optimizer=sgd, event=None, least=2, is_checked=True, **settings: Any) -> Any:
    """Compare a training with the CPU's; at least so many of its launches were the core's."""
    with as_users_run(LTC_CHECK=is_checked) as grown:
        mine = Training("ltc", make_optimizer)
        vars(mine).update(settings)
        found = mine.run(event)
    theirs = Training("cpu", make_optimizer)
    vars(theirs).update(settings)
    torch.testing.assert_close(found, theirs.run(event), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(mine.losses, theirs.losses, rtol=1e-9, atol=1e-12)
    assert grown["CoreLaunches"] >= least
    return grown


@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
@pytest.mark.parametrize(("reads", "marks"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("is_checked", [True, False])
def test_a_training_ends_in_the_core_checked_or_not(make_optimizer, reads, marks, is_checked):
    check(make_optimizer, least=5, is_checked=is_checked, reads=reads, marks=marks)


def written_over(training: Training) -> None:
    with torch.no_grad():
        training.net[1].weight.mul_(0.5)
        training.net[1].bias[2:5] = 0.25


def read(training: Training) -> None:
    training.kept += [
        float(training.net[5].weight[0, 0]),
        training.net[3].bias.detach().cpu().clone(),
    ]


def replaced(training: Training) -> None:
    training.net[3].weight.data = training.net[3].weight.data * 2


def viewed(training: Training) -> None:
    """A view that sees the steps to come."""
    training.kept.append(training.net[3].weight.detach()[1:3])


def shared(training: Training) -> None:
    training.kept.append(training.net[5].bias.detach())


def copied(training: Training) -> None:
    training.kept += [
        training.net[1].weight.detach().clone(),
        *copy.deepcopy(training.net).parameters(),
    ]


def resized(training: Training) -> None:
    training.rows = 7


def saved(training: Training) -> None:
    """And loaded again, with other values between."""
    file = io.BytesIO()
    torch.save([training.net.state_dict(), training.optimizer.state_dict()], file)
    written_over(training)
    file.seek(0)
    net, optimizer = torch.load(file, weights_only=True, map_location=training.device)
    training.net.load_state_dict(net)
    training.optimizer.load_state_dict(optimizer)


def given_another_rate(training: Training) -> None:
    training.optimizer.param_groups[0]["lr"] = 0.003


def frozen(training: Training) -> None:
    training.net[0].weight.requires_grad_(False)


def hooked(training: Training) -> None:
    training.net[1].weight.register_hook(lambda gradient: gradient * 2)


def pointed_at(training: Training) -> None:
    """Two parameters that lie in one memory."""
    training.net[3].bias.data = training.net[1].bias.data


EVENTS = [
    written_over, read, replaced, viewed, shared, copied, resized, saved, given_another_rate, frozen,
    hooked, pointed_at,
]  # fmt: skip


@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
@pytest.mark.parametrize("event", EVENTS)
def test_what_happens_between_two_steps(make_optimizer, event):
    check(make_optimizer, event)


@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
def test_what_lives_on_is_kept_at_each_step(make_optimizer):
    """Another one at each step, so that others are alive at each end."""

    def keep(training: Training) -> None:
        step = training.step

        def keeping(number: int) -> torch.Tensor:
            loss = step(number)
            training.kept.append(loss if number % 3 else training.net[1].weight.grad)
            return loss

        training.step = keeping

    check(make_optimizer, keep)


def test_an_index_that_does_not_exist_is_an_error_of_its_step():
    with as_users_run() as grown:
        training = Training("ltc", sgd)
        for number in range(LATE):
            training.step(number)
        assert grown["CoreLaunches"] >= 2
        before = [one.detach().cpu() for one in training.net.parameters()]
        training.optimizer.zero_grad()
        index = torch.tensor([1, 11, 2, 3, 4]).to("ltc")
        wanted = (torch.arange(5) % 3).to("ltc")
        nn.functional.cross_entropy(training.net(index), wanted).backward()
        training.optimizer.step()
        with pytest.raises(IndexError, match="11"):
            ltm.mark_step()
        for mine, theirs in zip(training.net.parameters(), before):
            assert torch.equal(mine.detach().cpu(), theirs)
        training.step(LATE)
    theirs = Training("cpu", sgd)
    for number in range(LATE + 1):
        theirs.step(number)
    torch.testing.assert_close(training.losses, theirs.losses, rtol=1e-9, atol=1e-12)


def test_what_a_check_finds_in_a_launch_of_the_core_is_an_error():
    with as_users_run(LTC_CHECK=True) as grown:
        training = Training("ltc", sgd)
        for number in range(LATE):
            training.step(number)
        assert grown["CoreLaunches"] >= 2
        computation = device_at(0).recorder().walk.track.end._computation()
        table = computation._constants.numpy()[-len(computation.plan.memory.rows) :]
        rows = table.view(np.int64).reshape(-1, ROW_WORDS)
        before = rows.copy()
        rows[rows[:, 0] == LOOK, 6] += 1  # what is to lie beside each value
        with pytest.raises(MemoryFault, match="it wrote beside"):
            training.step(LATE)
        rows[:] = before


def test_a_thread_that_comes_to_use_the_device():
    def begin(training: Training) -> None:
        made = []
        thread = threading.Thread(
            target=lambda: made.append((training.net[1].weight.detach() * 2).sum().item())
        )
        thread.start()
        thread.join()
        training.kept.append(made[0])

    check(sgd, begin)


@pytest.mark.parametrize("is_checked", [True, False])
def test_a_profile_shows_the_kernels_of_steps_that_end_in_the_core(tmp_path, is_checked):
    def profiled(training: Training) -> None:
        if training.device == "cpu":
            return steps(training)
        with ltc.profile(str(tmp_path / "out.json")) as profile, metrics.counted() as grown:
            steps(training)
        assert grown["CoreLaunches"] >= 1
        events = profile.trace["traceEvents"]
        launches = [event for event in events if event.get("cat") == "launch"]
        kernels = [event for event in events if event.get("cat") == "kernel"]
        assert {launch["args"]["step"] for launch in launches} == set(range(6))
        for launch in launches:
            begin, end = launch["ts"], launch["ts"] + launch["dur"]
            inside = [
                one for one in kernels if begin <= one["ts"] and one["ts"] + one["dur"] <= end
            ]
            assert any("test_core_ends.py" in str(one["args"].get("line")) for one in inside)

    def steps(training: Training) -> None:
        for number in range(6):
            training.step(number)

    check(sgd, profiled, is_checked=is_checked)


def test_graphs_that_are_saved_are_those_of_steps_that_end_in_the_core(tmp_path):
    file = tmp_path / "graphs.txt"
    with as_users_run() as grown:
        training = Training("ltc", sgd)
        for number in range(LATE):
            training.step(number)
        before = grown["CoreLaunches"]
        with config.override(LTC_SAVE_TENSORS_FILE=str(file)):
            training.step(LATE)
            training.step(LATE)
    assert grown["CoreLaunches"] > before
    assert file.read_text().count("BEGIN_GRAPH") >= 2


def predictions(device: str, is_written: bool) -> list[Any]:
    """Steps that keep views of what they make until the next one, and write through one."""
    weight = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3).to(device)
    found = []
    for number in range(STEPS):
        x = torch.linspace(0, 1, 8, dtype=torch.float64).reshape(2, 4) + number
        scores = x.to(device) @ weight
        for _ in range(20):
            scores = (scores * 0.5).tanh() + 0.1
        best, turned, halves = scores[:, 0], scores.t()[1:], scores.unbind()
        if device != "cpu":
            ltm.mark_step()
            compile_behind.wait()
        if is_written and number >= LATE:
            best.add_(1)
            halves[1].mul_(2)
        found += [float(best.sum()), float(turned[0, 1]), *[one.cpu() for one in halves]]
        weight.add_(0.01)
    return [*found, weight.cpu()]


@pytest.mark.parametrize("is_written", [False, True])
def test_views_that_are_alive_at_an_end_show_what_was_computed(is_written):
    with as_users_run() as grown:
        found = predictions("ltc", is_written)
    torch.testing.assert_close(found, predictions("cpu", is_written), rtol=1e-12, atol=1e-12)
    assert grown["CoreLaunches"] >= 2


NUMBERS = [0.5, 2, True, 1e300, -1e-300, float("inf"), float("nan"), 2**40, -(2**31) - 1, 300]


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8],
)
def test_a_number_that_changes_is_what_torch_makes_of_it(dtype):
    def steps(device: str) -> list[Any]:
        x, found = torch.arange(3).to(dtype).to(device), []
        for k in range(8 + len(NUMBERS)):
            number = NUMBERS[k - 8] if k >= 8 else k + 1
            number = float(number) if dtype.is_floating_point else number
            try:
                y = x
                for _ in range(20):
                    y = (y * 1 + number) % 7 if dtype.is_floating_point else y * 1 + number
                if device != "cpu":
                    ltm.mark_step()
                    compile_behind.wait()
                found.append(y.cpu())
            except (RuntimeError, OverflowError, TypeError) as error:
                found.append(type(error))
        return found

    with as_users_run():
        mine = steps("ltc")
    for one, other in zip(mine, steps("cpu"), strict=True):
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other, equal_nan=True)
        else:
            assert (one is other) or isinstance(one, type) == isinstance(other, type)


def test_the_memory_of_steps_that_end_in_the_core_does_not_grow():
    with as_users_run() as grown:
        training = Training("ltc", adamw)
        held = []
        for number in range(40):
            training.step(number)
            if number >= LATE:
                held.append(account_of(0).bytes)
        assert grown["CoreLaunches"] >= 20
    assert len(set(held)) == 1


def test_views_of_an_input_outlive_a_step_that_leaves_its_path():
    """They are from before the step: the core keeps them beside their base, which the step reads."""

    def run(device: str) -> list[Any]:
        given, found = torch.arange(6.0, dtype=torch.float64).to(device), []
        for number in range(STEPS):
            base = given * 1
            views = [base.view(2, 3), base.expand(2, 6)]
            found.append(base.sum().item())  # what came so far is not worth a program
            made = base
            for _ in range(20):
                made = made * 0.5 + base
            if number >= LATE:
                made = made.exp() + base.expand(2, 6)[1]
                base.add_(1)
            found.append(made.sum().item())
            found += [view.sum().item() for view in views]
            if device != "cpu":
                compile_behind.wait()
        return [found, made.cpu(), base.cpu(), *[view.cpu() for view in views]]

    with as_users_run() as grown:
        found = run("ltc")
    torch.testing.assert_close(found, run("cpu"))
    assert grown["CoreLaunches"] and grown["SideExits"]


def test_a_sum_of_gradients_that_are_views_is_followed():
    """Autograd adds in place to a view that it alone holds; the path has a new tensor there."""

    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(4)
        net = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1)).double().to(device)
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

        def loss_of(parameters: dict, x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(net, parameters, (x,)).square().mean()

        def learned(parameters: dict, x: torch.Tensor) -> torch.Tensor:
            slopes = torch.func.grad(loss_of)(parameters, x[:4])
            moved = {name: parameters[name] - 0.01 * slopes[name] for name in parameters}
            return loss_of(moved, x[4:])

        for number in range(STEPS):
            rows = torch.linspace(-1, number + 1, 48, dtype=torch.float64).view(6, 8, 1).to(device)
            parameters = dict(net.named_parameters())
            optimizer.zero_grad()
            torch.func.vmap(learned, in_dims=(None, 0))(parameters, rows).mean().backward()
            optimizer.step()
            if device != "cpu":
                ltm.mark_step()
                compile_behind.wait()
        return [one.detach().cpu() for one in net.parameters()]

    before = CORE.followed()
    with as_users_run() as grown:
        found = run("ltc")
    torch.testing.assert_close(found, run("cpu"), rtol=1e-9, atol=1e-12)
    assert CORE.followed() - before > 4 * 100
    assert not grown["SideExits"]


def test_a_program_is_followed_however_late_it_comes(monkeypatch):
    """The first call of a step, a copy to the device, is on the path wherever the step begins."""
    with as_users_run() as grown:
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to("ltc")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def train(steps: int) -> None:
            for _ in range(steps):
                rows = torch.ones(5, 6).to("ltc")
                optimizer.zero_grad()
                net(rows).square().mean().backward()
                optimizer.step()
                ltm.mark_step()

        with monkeypatch.context() as patch:
            patch.setattr(compile_behind.Request, "is_over", False)
            train(4 * STEPS)
        compile_behind.wait()
        train(STEPS)
    assert grown["CoreLaunches"]


@pytest.mark.parametrize("event", ["steady", "other view", "write to base", "write to view"])
def test_views_from_before_a_recording_are_inputs_of_its_path(event):
    """As the times of a solver's loop, which are pieces of one tensor."""

    def run(device: str) -> list[Any]:
        made, found = torch.zeros(3, dtype=torch.float64).to(device), []
        for number in range(2 * STEPS):
            times = torch.linspace(0, number + 1, 6, dtype=torch.float64).to(device)
            parts, later = times[:-1].unbind(), list(times[1:].unbind())
            found.append(times.sum().item())  # a recording ends between the views and their use
            if number >= LATE and event == "other view":
                later[2] = times[::2][1]
            for before, after in zip(parts, later):
                made = made * 0.5 + (after - before) * made.cos() + before
                if number >= LATE and event == "write to base":
                    times.mul_(1.5)
                if number >= LATE and event == "write to view":
                    after.add_(0.25)
            last = later[-1][None]
            found.append(made.sum().item())
            found += [one.cpu() for one in (last, *parts, *later, times)]
            if device != "cpu":
                compile_behind.wait()
        return [*found, made.cpu()]

    before = CORE.followed()
    with as_users_run() as grown:
        found = run("ltc")
    torch.testing.assert_close(found, run("cpu"), rtol=1e-9, atol=1e-12)
    assert CORE.followed() - before > 3 * 25
    assert grown["CoreLaunches"] >= (STEPS if event == "steady" else 1)


def test_a_copy_of_what_is_computed_is_followed():
    """The target has a known value from then on: no call is recorded."""

    def run(device: str) -> list[Any]:
        torch.manual_seed(5)
        found = []
        for number in range(STEPS):
            made = torch.full((4,), number + 0.5, dtype=torch.float64).to(device)
            kept = torch.zeros_like(made)
            shown = kept[1:]
            for k in range(20):
                made = made.sin() + k
            kept.copy_(made)
            made.add_(1)
            for _ in range(5):
                made = made * kept
            found.append(made.sum().item())
            found += [made.cpu(), kept.cpu(), shown.cpu()]
            if device != "cpu":
                compile_behind.wait()
        return found

    before = CORE.followed()
    with as_users_run():
        found = run("ltc")
    torch.testing.assert_close(found, run("cpu"), rtol=1e-9, atol=1e-12)
    assert CORE.followed() - before > 5 * 40


@pytest.mark.parametrize("event", [
    "steady", "base gone", "view of a view", "write to base", "write to view", "view made again", "base read",
])  # fmt: skip
def test_a_step_that_reads_views_from_before_the_loop_is_followed(event):
    """The core was given none of their bases: it has the views alone."""

    def run(device: str) -> list[Any]:
        torch.manual_seed(6)
        table, labels = (
            torch.randn(8, 4, 6).double().to(device),
            torch.randn(8, 4).double().to(device),
        )
        weight = torch.randn(6, 1).double().to(device).requires_grad_()
        x, y = table.reshape(32, 6), labels.view(-1, 1)
        if event == "view of a view":
            x, y = x[4:], y[4:].view(28, 1)
        if event == "base gone":
            del table, labels
        found = []
        for number in range(STEPS):
            h = x @ weight
            for _ in range(6):
                h = (h * 1.1).tanh() + 0.1 * y
            loss = (h - y).square().mean()
            loss.backward()
            with torch.no_grad():
                weight -= 0.1 * weight.grad
                weight.grad.zero_()
                if event == "write to view":
                    x.mul_(0.99)
                if number >= LATE and number % 3 == 0:
                    if event == "write to base":
                        table[0].add_(1)
                    if event == "view made again":
                        x = y = None
                        x, y = table.reshape(32, 6), labels.view(-1, 1)
                    if event == "base read":
                        found.append(table.sum().item())
            if device != "cpu":
                ltm.mark_step()
                compile_behind.wait()
            found.append(loss.item())
        found += [weight.detach().cpu(), x.cpu()]
        if event not in ("base gone", "view of a view"):
            del x, y
            found += [table.cpu(), labels.cpu()]  # the core had these with the views
        return found

    before = CORE.followed()
    with as_users_run() as grown:
        found = run("ltc")
    torch.testing.assert_close(found, run("cpu"), rtol=1e-9, atol=1e-12)
    assert CORE.followed() - before > 5 * 20
    assert grown["TracksLearned"]


@pytest.mark.parametrize("kind", ["chosen", "written", "summed into", "several", "mask"])
def test_a_step_whose_indices_are_on_the_cpu_is_followed(kind):
    """As where batches are drawn by torch.randperm: they come to the device as its other inputs do."""

    def run(device: str) -> list[Any]:
        torch.manual_seed(7)
        table, total = (
            torch.randn(40, 6).double().to(device),
            torch.zeros(40, 6).double().to(device),
        )
        found = []
        for number in range(STEPS):
            order = torch.randperm(40)
            chosen = torch.zeros(40, dtype=torch.bool)
            chosen[order[:9]] = True
            if kind == "several":
                made = table[order[:9], order[:9] % 6]
            else:
                made = table[chosen if kind == "mask" else order[:9]]
            for _ in range(20):
                made = (made * 1.01).sin() + 0.1
            if kind == "written":
                total[order[:9]] = made
            if kind == "summed into":
                total.index_put_((order[:9] // 2,), made, accumulate=True)
            if device != "cpu":
                ltm.mark_step()
                compile_behind.wait()
            found.append(made.cpu())
        with pytest.raises(IndexError, match="out of (bounds|range)"):
            table[torch.tensor([3, 40])].cpu()
        return [*found, total.cpu()]

    before = CORE.followed()
    with as_users_run() as grown:
        found = run("ltc")
    torch.testing.assert_close(found, run("cpu"), rtol=1e-9, atol=1e-12)
    if kind != "mask":  # where the size of what is chosen is Python's to find out
        assert CORE.followed() - before > 5 * 20
        assert grown["TracksLearned"]


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "added"])
def test_a_step_with_attention_is_followed(mask):
    """Its gradient is one call of the core's, as the attention itself."""

    def run(device: str) -> list[Any]:
        torch.manual_seed(11)
        made = nn.Linear(16, 48).double().to(device)
        bias = {"bool": torch.ones(6, 6).tril().bool(), "added": torch.randn(6, 6).double()}.get(
            mask
        )
        bias = None if bias is None else bias.to(device)
        found = []
        for number in range(STEPS):
            x = torch.linspace(-1, 1, 2 * 6 * 16).double().reshape(2, 6, 16).to(device)
            q, k, v = [part.reshape(2, 6, 2, 8).transpose(1, 2) for part in made(x).chunk(3, -1)]
            loss = F.scaled_dot_product_attention(q, k, v, bias, is_causal=mask == "causal")
            for _ in range(10):
                loss = (loss * 1.01).sin()
            made.zero_grad()
            loss.square().sum().backward()
            with torch.no_grad():
                for one in made.parameters():
                    one -= 0.01 * one.grad
            if device != "cpu":
                ltm.mark_step()
                compile_behind.wait()
            found.append(loss.sum().item())
        return [*found, *[one.detach().cpu() for one in made.parameters()]]

    before = CORE.followed()
    with as_users_run() as grown:
        found = run("ltc")
    torch.testing.assert_close(found, run("cpu"), rtol=1e-9, atol=1e-12)
    assert CORE.followed() - before > 5 * 20
    assert grown["TracksLearned"]
