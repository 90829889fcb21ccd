"""`p.data = …` moves a parameter to or from the lazy device and keeps it the same object."""

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.also_native


def moved_by_hand(module: nn.Module, device: str) -> nn.Module:
    for parameter in module.parameters():
        parameter.data = parameter.data.to(device)
    return module


def test_parameters_stay_the_same_objects():
    layer = nn.Linear(3, 3)
    before, optimizer = list(layer.parameters()), torch.optim.SGD(layer.parameters(), lr=0.1)
    moved_by_hand(layer, "ltc")
    assert all(a is b for a, b in zip(layer.parameters(), before))
    assert all(p.device.type == "ltc" and p.is_leaf and p.requires_grad for p in before)
    old = layer.weight.detach().cpu()
    layer(torch.ones(2, 3, device="ltc")).sum().backward()
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach().cpu(), old - 0.2)


def test_a_gradient_moves_along():
    layer = nn.Linear(3, 3)
    layer(torch.ones(2, 3)).sum().backward()
    moved_by_hand(layer, "ltc")
    assert layer.weight.grad.device.type == "ltc" and layer.weight.grad.sum().item() == 18
    moved_by_hand(layer, "cpu")
    assert layer.weight.grad.device.type == "cpu"


def test_assignments_within_a_kind_of_device_are_torchs_own():
    for device in ("cpu", "ltc"):
        x, y = torch.ones(3, device=device), torch.zeros(3, device=device)
        x.data = y
        x.add_(1)
        assert y.tolist() == [1, 1, 1]
    with pytest.raises(TypeError, match="has to be a tensor"):
        torch.ones(3).data = 3


def test_what_autograd_computed_is_not_cut_off_by_an_assignment():
    y = torch.ones(3, requires_grad=True) * 2
    with pytest.raises(RuntimeError, match=r"move it with \.to\('ltc:0'\), which autograd follows"):
        y.data = torch.zeros(3, device="ltc")
    assert y.device.type == "cpu" and y.grad_fn is not None


def test_attributes_and_hooks_of_a_parameter_stay(equal):
    for device in ("cpu", "ltc"):
        layer, seen = nn.Linear(3, 1), []
        layer.weight.note = "kept"
        layer.weight.register_hook(lambda gradient: gradient * 2)
        layer.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight))
        moved_by_hand(layer, device)
        layer(torch.ones(2, 3, device=device)).sum().backward()
        assert layer.weight.note == "kept" and seen[0] is layer.weight
        equal(layer.weight.grad, torch.full((1, 3), 4.0))


@pytest.mark.devices(2)
def test_gradients_of_graphs_from_before_a_move_reach_the_parameter(equal):
    layer, x = nn.Linear(3, 1), torch.ones(2, 3)
    on_cpu = layer(x).sum()
    layer.to("ltc")
    on_ltc = layer(x.to("ltc")).sum()
    layer.to("ltc:1")
    on_cpu.backward()
    on_ltc.backward()
    assert layer.weight.grad.device == torch.device("ltc:1")
    equal(layer.weight.grad, torch.full((1, 3), 4.0))
