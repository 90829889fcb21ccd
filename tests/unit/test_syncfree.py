"""The formulas of ltc.amp.syncfree, on the CPU, where torch's own are."""

import copy

import pytest
import torch

from ltc.amp import syncfree
from ltc.errors import Unsupported

CASES = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "maximize": True}),
    ("Adam", {}),
    ("Adam", {"weight_decay": 0.1, "amsgrad": True}),
    ("Adam", {"maximize": True, "betas": (0.8, 0.9), "eps": 1e-3}),
    ("AdamW", {}),
    ("AdamW", {"weight_decay": 0.3, "amsgrad": True}),
]
YES, NO = torch.ones(()), torch.zeros(())


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(3, 2, dtype=torch.float64, generator=generator))
        for _ in range(2)
    ]


def give_gradients(ps, step):
    generator = torch.Generator().manual_seed(100 + step)
    for p in ps:
        p.grad = torch.randn(p.shape, dtype=p.dtype, generator=generator)


def tensors_of(optimizer):
    return copy.deepcopy([list(state.values()) for state in optimizer.state.values()])


@pytest.mark.parametrize("name,options", CASES)
def test_205_ten_steps_equal_torchs_whichever_steps_are_skipped(name, options):
    ours, theirs = parameters(), parameters()
    optimizer = getattr(syncfree, name)(ours, lr=0.01, **options)
    reference = getattr(torch.optim, name)(theirs, lr=0.01, **options)
    for step in range(10):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        skipped = step in (0, 1, 4)
        if skipped:
            ours[0].grad[0, 0] = float("nan")
        optimizer.step(found_inf=YES if skipped else NO)
        if not skipped:
            reference.step()
        # The order of the same few operations differs: a few units in the last place a step.
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name,options", CASES)
def test_205_a_skipped_step_leaves_every_bit(name, options):
    ps = parameters()
    optimizer = getattr(syncfree, name)(ps, lr=0.01, **options)
    give_gradients(ps, 0)
    optimizer.step()
    before, state = copy.deepcopy(ps), tensors_of(optimizer)
    give_gradients(ps, 1)
    optimizer.step(found_inf=torch.tensor([3.0]))
    assert all(torch.equal(a, b) for a, b in zip(ps, before, strict=True))
    for now, then in zip(tensors_of(optimizer), state, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(now, then, strict=True))


@pytest.mark.parametrize("name,options", CASES)
def test_a_state_of_torchs_optimizer_goes_on(name, options):
    ours, theirs = parameters(), parameters()
    reference = getattr(torch.optim, name)(theirs, lr=0.01, **options)
    give_gradients(theirs, 0)
    reference.step()
    optimizer = getattr(syncfree, name)(ours, lr=0.5, **options)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    with torch.no_grad():
        for p, q in zip(ours, theirs, strict=True):
            p.copy_(q)
    for ps, opt in ((ours, optimizer), (theirs, reference)):
        give_gradients(ps, 1)
        opt.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_205_found_inf_is_one_number():
    optimizer = syncfree.SGD(parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"found_inf has the shape \[2\]"):
        optimizer.step(found_inf=torch.zeros(2))


def test_the_closure_is_called_with_gradients_on():
    (p, _) = ps = parameters()
    optimizer = syncfree.SGD(ps, lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    before = p.detach().clone()
    loss = optimizer.step(closure)
    assert torch.equal(loss, (before * before).sum())
    torch.testing.assert_close(p.detach(), 0.8 * before)


def test_206_a_scaler_skips_on_the_device_and_halves_its_scale():
    ps = [torch.nn.Parameter(torch.ones(2))]
    optimizer = syncfree.SGD(ps, lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for factor, expected, scale in ((1.0, 0.5, 8.0), (float("inf"), 0.5, 4.0), (1.0, 0.0, 4.0)):
        optimizer.zero_grad()
        scaler.scale((ps[0] * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert ps[0].tolist() == [expected] * 2 and scaler.get_scale() == scale


def test_complex_parameters_are_refused():
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    p.grad = torch.zeros_like(p)
    with pytest.raises(Unsupported, match="no formula for complex parameters"):
        syncfree.SGD([p], lr=0.1).step()
