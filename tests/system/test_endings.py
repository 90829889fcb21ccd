"""The end of a step that was recorded before: what is alive is seen each time, whoever holds it."""

import os
import random
import subprocess
import sys

import pytest
import torch

import ltc
import ltc.core.lazy_model as ltm
from ltc.debug import metrics
from ltc.device.recording import exit_liveness
from ltc.device.recording.tensors import state_of


def lazy(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to("ltc")


@pytest.fixture
def looks(monkeypatch) -> list:
    """Grows by one whenever the end of a recording is looked at state by state."""
    found, look = [], exit_liveness._looked_at
    monkeypatch.setattr(
        exit_liveness, "_looked_at", lambda recorder: found.append(1) or look(recorder)
    )
    return found


def test_a_steady_step_is_not_looked_at_anew(looks):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    model = model.to("ltc")
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), lazy(3, 4)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        ltc.sync()

    for _ in range(4):
        step()
    looks.clear()
    for _ in range(5):
        step()
    assert not looks


def test_a_replaced_tensor_stays_in_its_buffer():
    value = torch.randn(3)
    x = value.to("ltc")
    before = state_of(x).buffer
    for _ in range(3):
        x.add_(1)
        ltc.sync()
    assert state_of(x).buffer is before
    torch.testing.assert_close(x.cpu(), value + 1 + 1 + 1)


READ_AFTER_A_THREAD = """
import threading, torch, ltc
from ltc.device.recording.tensors import state_of
thread = threading.Thread(target=lambda: torch.ones(3, device="ltc").cpu())
thread.start()
thread.join()
x = torch.randn(3).to("ltc")
before = state_of(x).buffer
x.cpu()
x.add_(1)
ltc.sync()
assert state_of(x).buffer is before
"""


def test_a_tensor_read_between_steps_stays_in_its_buffer_once_other_threads_have_ended():
    # in a process of its own: here threads of earlier tests may still run; without the core, which
    # has values and no buffers
    environment = {**os.environ, "LTC_NATIVE": "0"}
    subprocess.run([sys.executable, "-c", READ_AFTER_A_THREAD], check=True, env=environment)


def test_what_shares_a_replaced_tensors_buffer_keeps_the_old_value():
    x, y = lazy(3), lazy(3)
    y.copy_(x)
    ltc.sync()
    old = x.cpu().clone()
    x.mul_(2)
    ltc.sync()
    assert torch.equal(y.cpu(), old)
    assert torch.equal(x.cpu(), old * 2)


def test_a_list_that_holds_one_tensor_twice_binds_it_once():
    x, y = lazy(3), lazy(3)
    for pair in ([x, y], [x, y], [x, x]):
        sums = torch._foreach_add(pair, 1.0)
        ltc.sync()
        for a, b in zip(sums, pair):
            assert torch.equal(a.cpu(), b.cpu() + 1)
    x.add_(1)
    ltc.sync()
    assert len(state_of(x).device.recorder().inputs) == 0


def test_a_tensor_that_is_dropped_in_some_steps_is_computed_in_the_others():
    x, kept = lazy(4), {}
    for step in range(6):
        y = x + 1
        z = y * 2
        if step % 2:
            kept[step] = y
        del y
        ltc.sync()
        assert torch.equal(z.cpu(), (x.cpu() + 1) * 2)
    for y in kept.values():
        assert torch.equal(y.cpu(), x.cpu() + 1)


@pytest.mark.native("an error of a call is known at the mark")
def test_a_parameter_that_its_step_did_not_reach_keeps_its_value():
    table, x = lazy(4, 2), lazy(2)
    value = x.cpu()
    for wrong in (0, 0, 9):
        index = torch.tensor([wrong]).to("ltc")
        x.add_(table[index].sum() * 0 + 1)
        if wrong:
            with pytest.raises(IndexError):
                ltc.sync(wait=True)
        else:
            ltc.sync(wait=True)
    torch.testing.assert_close(x.cpu(), value + 1 + 1)
    x.add_(1)  # and further steps work
    ltc.sync(wait=True)
    torch.testing.assert_close(x.cpu(), value + 1 + 1 + 1)


def recorded(device: str, seed: int) -> list[torch.Tensor]:
    """What is left of thirty steps that record the same calls and keep now this, now that."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    pool = [torch.randn(2, 3).to(device) for _ in range(3)]
    kept: dict[str, torch.Tensor] = {}
    for _ in range(30):
        a, b, c = pool
        made = {"sum": a + b, "row": a[0], "turned": b.t(), "scaled": c * 0.5}
        made["deep"] = made["sum"].t()[1:]
        made["copy"] = torch.zeros_like(c).copy_(c)
        a.mul_(0.9).add_(made["scaled"])
        torch._foreach_add_([b, c], [a, a], alpha=0.1)
        if choose.random() < 0.5:
            made["row"].add_(0.25)
        if choose.random() < 0.3:
            pool[choose.randrange(3)] = made["copy"]
        for name, tensor in made.items():
            draw = choose.random()
            if draw < 0.3:
                kept[name] = tensor
            elif draw < 0.5:
                kept.pop(name, None)
        del made, a, b, c, tensor
        if device == "ltc":
            ltc.sync()
    return [*pool, *[kept[name] for name in sorted(kept)]]


@pytest.mark.parametrize("seed", range(12))
def test_any_choice_of_what_is_kept_gives_what_eager_gives(seed):
    for ours, eagers in zip(recorded("ltc", seed), recorded("cpu", seed), strict=True):
        torch.testing.assert_close(ours.cpu(), eagers)


@pytest.mark.native("the lists of a recording are looked at")
def test_one_comparison_binds_a_list_that_was_bound_before():
    values = [lazy(3) for _ in range(5)]
    for _ in range(2):
        torch._foreach_mul_(values, 2.0)
        ltc.sync()
    with metrics.counted() as grown:
        torch._foreach_mul_(values, 2.0)
        recorder = state_of(values[0]).device.recorder()
        assert [state_of(x) for x in values] == recorder.bound
        ltc.sync()
    assert "RecordedEntries" not in grown


class Seen(torch.overrides.TorchFunctionMode):
    """Notes what torch is asked for while it is switched on."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.functions.append(function)
        return function(*args, **(kwargs or {}))


def test_a_launch_asks_a_users_modes_for_nothing():
    x = lazy(3)
    y = x + 1
    ltc.sync(wait=True)  # compiled
    y = x + 1
    with Seen() as seen:
        ltc.sync(wait=True)
    assert not seen.functions
    assert torch.equal(y.cpu(), x.cpu() + 1)


def test_what_is_computed_in_inference_mode_can_be_trained_with():
    x = lazy(3)
    y = x + 1
    with torch.inference_mode():
        ltc.sync(wait=True)
    weight = torch.ones(3, device="ltc", requires_grad=True)
    (weight * y).sum().backward()
    assert torch.equal(weight.grad.cpu(), y.cpu())


def test_outputs_without_elements_and_of_every_kind_come_out():
    for dtype in (torch.float64, torch.bfloat16, torch.int32, torch.bool):
        for shape in ((0, 3), (), (2, 0, 4), (5, 2)):
            x = torch.ones(shape, dtype=dtype)
            y = x.to("ltc").clone().cpu()
            assert y.shape == x.shape and y.dtype == x.dtype and torch.equal(y, x)


@pytest.mark.native("the lists of a recording are looked at")
def test_who_lets_go_of_a_tensor_while_a_walk_ends_spoils_no_later_walk(monkeypatch):
    """Another thread may: the references count as they were when the signature was taken."""
    held, signs = [], exit_liveness._exit_signature

    def let_go_after(recorder):
        taken = signs(recorder)
        held.clear()
        return taken

    monkeypatch.setattr(exit_liveness, "_exit_signature", let_go_after)
    x = torch.ones(3, device="ltc")
    ltm.mark_step(wait=True)

    def step():
        return x + 1, x * 2, x * 3

    tensors = step()
    held.extend(state_of(t) for t in tensors)
    del tensors
    ltm.mark_step(wait=True)
    assert not held
    kept = step()  # has as many references as what was held
    ltm.mark_step(wait=True)
    assert [state_of(t).value for t in kept] == [None] * 3
    assert [t.cpu().tolist() for t in kept] == [[2.0] * 3, [2.0] * 3, [3.0] * 3]
