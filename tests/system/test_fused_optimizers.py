"""Fused optimizers on lists of parameters: like eager's, and without work that nobody asked for."""

import pytest
import torch

import ltc
from ltc.device.recording.signature import Signature
from ltc.device.recording.tensors import state_of

pytestmark = pytest.mark.also_native

FORMS = {
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adagrad": {},
}


def trained(device: str, name: str, steps: int) -> tuple[list, list]:
    torch.manual_seed(0)
    parameters = [torch.randn(n).to(device).requires_grad_() for n in (5, 0, 100, 3000)]
    optimizer = getattr(torch.optim, name)(parameters, lr=0.01, fused=True, **FORMS[name])
    for step in range(steps):
        for parameter in parameters:
            parameter.grad = torch.sin(parameter.detach() * step)
        optimizer.step()
        if device == "ltc":
            ltc.sync()
    return parameters, [parameter.grad for parameter in parameters]


@pytest.mark.parametrize("name", FORMS)
def test_a_fused_optimizer_trains_as_eager_does(name):
    for ours, eagers in zip(trained("ltc", name, 4), trained("cpu", name, 4)):
        for a, b in zip(ours, eagers):
            # the same formula in another order of roundings
            torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FORMS)
def test_a_gradient_that_lies_in_another_order_is_read_in_its_own(name):
    """Fused kernels go through memory as it lies, and autograd gives gradients as their formulas lay them."""

    def trained(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        weight = torch.randn(3, 5).to(device).requires_grad_()
        optimizer = getattr(torch.optim, name)([weight], lr=0.01, fused=True, **FORMS[name])
        for _ in range(6):
            optimizer.zero_grad()
            (weight.t() * torch.randn(5, 3).to(device)).sum().backward()
            optimizer.step()
            if device == "ltc":
                ltc.sync()
        return [weight.detach().cpu(), weight.grad.cpu()]

    torch.testing.assert_close(trained("ltc"), trained("cpu"), rtol=1e-5, atol=1e-6)


def test_gradients_are_written_to_only_where_they_are_scaled():
    signature = Signature(torch.ops.aten._fused_adamw_.default)
    values = [object()] * len(signature.arguments)
    names = [argument.name for argument in signature.arguments]
    assert names.index("grads") in signature.written_by(values)
    values[names.index("grad_scale")] = None
    assert names.index("grads") not in signature.written_by(values)


def test_a_fused_step_leaves_the_memory_of_its_gradients_alone():
    parameter = torch.randn(8).to("ltc").requires_grad_()
    parameter.grad = torch.randn(8).to("ltc")
    before = state_of(parameter.grad).buffer
    if before is None:
        pytest.skip("the core has the value, and no buffer is there")
    torch.optim.AdamW([parameter], fused=True).step()
    ltc.sync()
    assert state_of(parameter.grad).buffer is before
    assert not before.shared


def test_scaled_gradients_come_out_unscaled():
    parameter = torch.randn(8).to("ltc").requires_grad_()
    parameter.grad = torch.full((8,), 6.0).to("ltc")
    optimizer = torch.optim.SGD([parameter], lr=0.1, fused=True)
    optimizer.grad_scale = torch.tensor(2.0).to("ltc")
    optimizer.found_inf = torch.tensor(0.0).to("ltc")
    optimizer.step()
    assert parameter.grad.cpu().tolist() == [3.0] * 8
