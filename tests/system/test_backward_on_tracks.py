"""Views that a backward makes, in steps that the core follows: as on the CPU, and independent behind it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch

import ltc.core.lazy_model as ltm
from ltc.native.core import CORE
from ltc.runtime.background import compile_behind
from tests.recorders import process_of_one_device

pytestmark = pytest.mark.skipif(CORE is None, reason="needs LTC_NATIVE and a core that is built")
STEPS, LATE = 16, 12  # from LATE on each step is followed
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(3, 4).t()


class Arranges(torch.autograd.Function):
    """The product of two, the second of which lies in another order."""

    @staticmethod
    def forward(ctx, p, q):
        ctx.save_for_backward(p, q)
        return p * q.t().reshape(12)

    @staticmethod
    def backward(ctx, grad):
        p, q = ctx.saved_tensors
        arranged = transposed(grad * p)  # by a function that the body calls
        return (grad * q.t().reshape(12)).view(2, 6).view(12), arranged.reshape(4, 3)


def by_formulas(p, q, w):
    return ((p.reshape(12) + q.t().reshape(12)).exp() * w).sum()


def by_a_function(p, q, w):
    return (Arranges.apply(p.reshape(12), q).exp() * w).sum()


def through_an_expansion(p, q, w):
    return (
        Arranges.apply((p.sum() * 0.1).expand(12), q).sum()
        + (p.mean(1).repeat_interleave(4) * w).sum()
    )


def trained(device: str, loss: Loss, reads_in_hook: Callable[[int], bool]) -> list[torch.Tensor]:
    """Return what the gradients were in each step, one of them added to behind its backward."""
    torch.manual_seed(0)
    draw = [torch.randn(3, 4), torch.randn(4, 3), torch.randn(12)]
    p, q, w = (one.double().to(device).requires_grad_() for one in draw)
    found, looked = [], []
    step = 0
    w.register_hook(lambda grad: looked.append(grad.sum().item()) if reads_in_hook(step) else None)
    for step in range(STEPS):
        p.grad = q.grad = w.grad = None
        value = loss(p, q, w * 1.5)
        value.backward()
        if device != "cpu":
            ltm.mark_step()
            compile_behind.wait()
            ltm.wait_device_ops()
        with torch.no_grad():
            p.grad.add_(1)
            q.grad.mul_(2)
        found += [one.grad.cpu() for one in (p, q, w)]
    return [*found, torch.tensor(looked)]


@contextmanager
def followed_calls():
    """Yield a list; behind the block it has how many calls the core followed."""
    found: list[int] = []
    before = CORE.followed()
    yield found
    found.append(CORE.followed() - before)


@pytest.mark.parametrize("loss", [by_formulas, by_a_function, through_an_expansion])
@pytest.mark.parametrize("read", ["never", "late", "in the last step"])
def test_gradients_are_independent_of_each_other(loss, read, equal):
    reads = {
        "never": lambda step: False,
        "late": lambda step: step >= LATE and step % 2 == 1,
        "in the last step": lambda step: step == STEPS - 1,
    }[read]
    expected = trained("cpu", loss, reads)
    with process_of_one_device(LTC_TIER="auto"), followed_calls() as followed:
        found = trained("ltc:0", loss, reads)
    equal(found, expected)
    assert followed[0] > 20


def test_a_hook_whose_call_python_runs_shares_no_gradient(quick_calls, equal):
    """It takes the whole family of the view from the core, while the backward is under way."""

    def gradients(device):
        draw = torch.Generator().manual_seed(0)
        drawn = [
            torch.randn(shape, generator=draw).double().to(device) for shape in [(3, 4), (4, 3)]
        ]
        p, q = (one.requires_grad_() for one in drawn)
        p.register_hook(lambda grad: looked.append(torch.fft.fft(grad).abs().sum().item()))
        looked, found = [], []
        for _ in range(5):
            p.grad = q.grad = None
            (p.reshape(12) + q.t().reshape(12)).exp().sum().backward()
            p.grad.add_(1)
            q.grad.mul_(2)
            found += [p.grad.cpu(), q.grad.cpu()]
        return [*found, torch.tensor(looked)]

    with process_of_one_device(LTC_TIER="auto"):
        equal(gradients("ltc:0"), gradients("cpu"))
