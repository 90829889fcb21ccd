"""The whole product in one page: what ltc promises, smallest form first."""

import pytest
import torch
from torch import nn

import ltc
import ltc.core.lazy_model as ltm
from ltc.debug import metrics


def test_a_tensor_prints_its_values_and_its_device():
    x = torch.arange(3.0, device="ltc")
    assert str(x) == "tensor([0., 1., 2.], device='ltc:0')"


def test_nothing_runs_before_a_value_is_needed():
    ltm.mark_step()
    ltm.wait_device_ops()
    with metrics.counted() as grown:
        y = torch.ones(4, device="ltc") * 2 + 1
    assert grown["ExecuteTime"] == 0
    assert y.sum().item() == 12


@pytest.mark.native("it counts programs, and calls that run when made are none")
def test_a_step_runs_as_one_program():
    x = torch.ones(4, device="ltc")
    ltm.mark_step()
    ltm.wait_device_ops()
    with metrics.counted() as grown:
        y = (x * 2 + 1).exp().sum()
        z = x.cos()
        ltm.mark_step()
        ltm.wait_device_ops()
        assert y.item() > 0 and z.sum() is not None
    assert grown["MarkStep"] == 1 and grown["ExecuteTime"] == 1


@pytest.mark.native("it counts programs, and calls that run when made are none")
def test_the_same_step_compiles_once():
    def step(x):
        y = (x @ x).relu()
        ltm.mark_step()
        return y

    step(torch.randn(5, 5).to("ltc"))
    with metrics.counted() as grown:
        step(torch.randn(5, 5).to("ltc"))
    assert grown["UncachedCompile"] == 0 and grown["CachedCompile"] == 1


def test_a_write_through_a_view_reaches_its_base():
    x = torch.zeros(2, 3, device="ltc")
    x[0].add_(1)
    assert x.cpu().tolist() == [[1, 1, 1], [0, 0, 0]]


def test_a_model_trains_as_on_the_cpu(equal):
    def losses(device):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).double().to(device)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        x = torch.randn(32, 8, dtype=torch.double).to(device)
        seen = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            if device != "cpu":
                ltm.mark_step()
            seen.append(loss.detach())
        assert seen[-1] < seen[0]
        return seen

    equal(losses("ltc"), losses("cpu"))


def test_a_model_moves_to_the_device_and_back():
    model = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    expected = model(x)
    on_device = model.to(ltm.lazy_device())(x.to(ltm.lazy_device()))
    torch.testing.assert_close(on_device.cpu(), expected)
    torch.testing.assert_close(model.cpu()(x), expected)


def test_tensors_of_two_devices_do_not_mix(error_of):
    text = error_of(lambda: nn.Linear(10, 20)(torch.randn(10, device="ltc")))
    assert text.startswith("Input tensor is not a lazy tensor: torch.FloatTensor")


@pytest.mark.devices(4)
def test_every_device_has_its_own_tensors():
    made = [torch.full((2,), float(i), device=f"ltc:{i}") for i in range(4)]
    moved = [x.to("ltc:0") for x in made]
    assert torch.stack(moved).sum().item() == 12


def test_the_shortcuts_do_what_the_long_names_do():
    assert ltc.device() == ltm.lazy_device()
    x = torch.ones(2, device=ltc.device())
    with metrics.counted() as grown:
        ltc.sync()
        with ltc.step():
            x.add_(1)
    assert grown["MarkStep"] == 3  # a step begins and ends with a mark
    assert x.tolist() == [2, 2]
