"""A function on ltc, beside eager PyTorch: both as near to float64, and ltc without Python."""

import torch

import ltc.core.lazy_model as ltm
from ltc.debug import metrics

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


def launched_twice(function, tensors):
    """(what ltc computes, steps that the second launch left to Python)."""
    made = [t.to("ltc") for t in tensors]
    ltm.mark_step(wait=True)
    for _ in range(2):
        with metrics.counted() as grown:
            found = values_and_gradients(function, made, "ltc")
            ltm.mark_step(wait=True)
    by_python = {name: n for name, n in grown.items() if name.startswith("extern.python::")}
    return [t.cpu() for t in found], by_python


def assert_as_near_as_eager(function, tensors):
    """Values and gradients are as near to float64's as eager's are, and no step needs Python."""
    eager = values_and_gradients(function, tensors)
    wide = [t.double() if t.is_floating_point() else t for t in tensors]
    truth = values_and_gradients(function, wide)
    found, by_python = launched_twice(function, tensors)
    for one, usual, true in zip(found, eager, truth, strict=True):
        assert one.dtype == usual.dtype and one.shape == usual.shape
        if not one.is_floating_point():
            assert torch.equal(one, usual)
        elif one.numel():
            room = PLACES * torch.finfo(one.dtype).eps * true.abs().max().item()
            allowed = TIMES_EAGER * (usual.double() - true).abs().max().item() + room
            distance = (one.double() - true).abs().max().item()
            assert distance <= allowed, f"{distance} from float64, where {allowed} is allowed"
    assert not by_python, by_python
