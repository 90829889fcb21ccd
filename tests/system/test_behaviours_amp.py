"""Section 6.15 of the parity inventory: mixed precision on the device."""

import threading

import pytest
import torch

import ltc  # noqa: F401
import ltc.core.lazy_model as ltm
from ltc.amp import GradScaler, autocast, custom_bwd, custom_fwd, syncfree
from ltc.debug import metrics


def test_204_a_product_is_lower_and_a_loss_is_full_precision():
    x = torch.randn(4, 4, device=ltm.lazy_device())
    with autocast(ltm.lazy_device()):
        y = x @ x
        loss = torch.nn.functional.mse_loss(y, x)
    assert y.dtype is torch.bfloat16 and loss.dtype is torch.float32
    with autocast(ltm.lazy_device(), dtype=torch.float16):
        assert (x @ x).dtype is torch.float16
    with autocast(ltm.lazy_device(), enabled=False):
        assert (x @ x).dtype is torch.float32


def test_204_operands_of_two_precisions_meet_in_the_wider():
    device = ltm.lazy_device()
    with autocast():
        joined = torch.cat([torch.ones(2, device=device), torch.ones(2, device=device).bfloat16()])
    assert joined.dtype is torch.float32


def dtypes_of_autocast() -> list:
    x = torch.ones(2, 2, device="ltc")
    with torch.autocast("ltc"):
        inside, product = torch.get_autocast_dtype("ltc"), x @ x
    with torch.autocast("ltc", dtype=torch.float16):
        chosen, shorter = torch.get_autocast_dtype("ltc"), x @ x
    return [torch.get_autocast_dtype("ltc"), inside, product.dtype, chosen, shorter.dtype]


def in_a_new_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def enabled_by_hand():
    torch.set_autocast_enabled("ltc", True)
    try:
        x = torch.ones(2, 2, device="ltc")
        return (x @ x).dtype
    finally:
        torch.set_autocast_enabled("ltc", False)


def chosen_first():
    torch.set_autocast_dtype("ltc", torch.float16)
    with torch.autocast("ltc"):
        return torch.get_autocast_dtype("ltc"), torch.get_autocast_dtype("cpu")


def test_autocast_means_bfloat16_in_every_thread_unless_chosen():
    expected = [torch.bfloat16] * 3 + [torch.float16] * 2
    assert dtypes_of_autocast() == expected
    assert in_a_new_thread(dtypes_of_autocast) == expected
    assert in_a_new_thread(enabled_by_hand) is torch.bfloat16
    assert in_a_new_thread(chosen_first) == (torch.float16, torch.bfloat16)
    assert torch.get_autocast_dtype("ltc") is torch.bfloat16


def test_autocast_for_another_device_is_refused():
    with pytest.raises(ValueError, match="takes a lazy device, not 'cpu'"):
        autocast("cpu")


def test_a_custom_function_casts_its_inputs():
    seen = []

    class Square(torch.autograd.Function):
        @staticmethod
        @custom_fwd(cast_inputs=torch.float32)
        def forward(ctx, x):
            ctx.save_for_backward(x)
            seen.append(x.dtype)
            return x * x

        @staticmethod
        @custom_bwd
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return 2 * x * gradient

    x = torch.ones(2, device=ltm.lazy_device(), requires_grad=True)
    with autocast():
        Square.apply(x.bfloat16()).sum().backward()
    assert seen == [torch.float32] and x.grad.cpu().tolist() == [2, 2]


@pytest.mark.parametrize("optimizers", [torch.optim, syncfree], ids=["torch", "syncfree"])
def test_206_an_infinite_gradient_skips_the_step_and_halves_the_scale(optimizers):
    p = torch.nn.Parameter(torch.ones(2, device=ltm.lazy_device()))
    optimizer = optimizers.SGD([p], lr=0.5)
    scaler = GradScaler(init_scale=8.0)
    for factor, expected, scale in ((1.0, 0.5, 8.0), (float("inf"), 0.5, 4.0), (1.0, 0.0, 4.0)):
        optimizer.zero_grad()
        scaler.scale((p * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        ltm.mark_step()
        assert p.tolist() == [expected] * 2 and scaler.get_scale() == scale


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_205_a_scaled_step_reads_nothing_from_the_device(name):
    model = torch.nn.Linear(3, 2).to(ltm.lazy_device())
    optimizer = getattr(syncfree, name)(model.parameters(), lr=0.01)
    scaler = GradScaler()
    with metrics.counted() as grown:
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(4, 3, device=ltm.lazy_device())).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            ltm.mark_step()
    assert grown["aten::_local_scalar_dense"] == 0
    assert grown["TransferFromDeviceTime"] == 0


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_205_ten_steps_equal_torchs_on_the_cpu(name):
    torch.manual_seed(0)
    here = torch.nn.Linear(3, 2).double()
    there = torch.nn.Linear(3, 2).double()
    there.load_state_dict(here.state_dict())
    there.to(ltm.lazy_device())
    reference = getattr(torch.optim, name)(here.parameters(), lr=0.01)
    optimizer = getattr(syncfree, name)(there.parameters(), lr=0.01)
    found = torch.zeros((), device=ltm.lazy_device())
    for _ in range(10):
        x = torch.randn(4, 3, dtype=torch.float64)
        for model, opt, keywords, data in (
            (here, reference, {}, x),
            (there, optimizer, {"found_inf": found}, x.to(ltm.lazy_device())),
        ):
            opt.zero_grad()
            model(data).square().sum().backward()
            opt.step(**keywords)
        ltm.mark_step()
    for p, q in zip(here.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(q.detach().cpu(), p.detach(), rtol=1e-9, atol=1e-12)
