"""A function on ltc, beside eager PyTorch: both as near to float64, and ltc without Python."""

import torch

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics
from tests import states
from tests.compared import MOST_RUNS

TIMES_EAGER = 4  # ltc may add up in another order
PLACES = 32  # units in the last place of the largest number: where eager happens to be exact


def values_and_gradients(function, tensors, device="cpu"):
    """What the function makes of the tensors, and the gradients of those that are floating."""
    given = [t.to(device) for t in tensors]
    leaves = [t.detach().requires_grad_() for t in given if t.is_floating_point()]
    taken = iter(leaves)
    result = function(*[next(taken) if t.is_floating_point() else t for t in given])
    if not result.requires_grad:
        return [result]
    cotangent = torch.linspace(0.5, 1.5, result.numel(), dtype=torch.float64)
    cotangent = cotangent.reshape(result.shape).to(result.dtype).to(device)
    return [result.detach(), *torch.autograd.grad(result, leaves, cotangent)]


def launched(function, tensors):
    """Yield what ltc computes, and the steps it left to Python, until it follows a program.

    What it does not follow runs with LTC_TIER=native at last.
    """
    made = [t.to("ltc") for t in tensors]
    ltm.mark_step(wait=True)
    for tier in [*["auto"] * MOST_RUNS, "native", "native"]:
        with config.override(LTC_TIER=tier), metrics.counted() as grown:
            found = values_and_gradients(function, made, "ltc")
            ltm.mark_step(wait=True)
        states.wait_for_the_compiler()
        by_python = {name: n for name, n in grown.items() if name.startswith("extern.python::")}
        yield [t.cpu() for t in found], by_python
        if states.FOLLOWED in states.states_of(grown):
            break


def assert_as_near_as_eager(function, tensors):
    """Values and gradients are as near to float64's as eager's are, and no step needs Python."""
    eager = values_and_gradients(function, tensors)
    wide = [t.double() if t.is_floating_point() else t for t in tensors]
    truth = values_and_gradients(function, wide)
    for found, by_python in launched(function, tensors):
        assert_near(found, eager, truth)
        assert not by_python, by_python


def assert_near(found, eager, truth):
    """Each of `found` is as near to `truth` as that of `eager` is."""
    for one, usual, true in zip(found, eager, truth, strict=True):
        assert one.dtype == usual.dtype and one.shape == usual.shape
        if not one.is_floating_point():
            assert torch.equal(one, usual)
        elif one.numel():
            room = PLACES * torch.finfo(one.dtype).eps * true.abs().max().item()
            allowed = TIMES_EAGER * (usual.double() - true).abs().max().item() + room
            distance = (one.double() - true).abs().max().item()
            assert distance <= allowed, f"{distance} from float64, where {allowed} is allowed"
