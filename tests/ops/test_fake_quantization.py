"""Rounding to the steps of integers gives the CPU's bits, recorded, with its gradients."""

import math

import pytest
import torch

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics
from tests.drawn import seeds

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
RANGES = ((-128, 127), (0, 15), (5, 9), (0, 65535), (-(2**31), 2**31 - 1))
SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e30, -1e30)
_SAME_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: torch.Tensor) -> torch.Tensor:
    x = x.cpu().contiguous()
    return x.view(_SAME_SIZE[x.element_size()]) if x.dtype.is_floating_point else x


def drawn(seed: int, shape: tuple, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Values in and out of the range, some half way between two steps, and special ones."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 10
    x = torch.where(torch.rand(shape, generator=generator) < 0.3, (x.round() + 0.5) * scale, x)
    x.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL, dtype=torch.float64)[: x.numel()]
    return x.to(dtype)


def assert_recorded_bits(call, *arguments) -> None:
    """On both tiers, within the step."""
    wanted = call(*arguments)
    moved = [a.to("ltc") if isinstance(a, torch.Tensor) else a for a in arguments]
    for tier in ("auto", "native"):
        with config.override(LTC_TIER=tier), metrics.counted() as grown:
            found = call(*moved)
            ltm.mark_step()
            for mine, theirs in zip(found, wanted, strict=True):
                assert mine.dtype is theirs.dtype and mine.shape == theirs.shape
                assert torch.equal(bits(mine), bits(theirs))
        assert not [name for name in grown if name.startswith(("aten::", "extern"))]


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("limits", RANGES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_steps_of_a_tensor_are_the_bits_of_the_cpu(dtype, limits, seed):
    low, high = limits
    x = drawn(seed, (9, 33), dtype, 0.1)
    for scale, zero in ((0.1, low), (1 / 3, high), (1e-6, (low + high) // 2)):
        call = aten.fake_quantize_per_tensor_affine_cachemask
        assert_recorded_bits(call, x, scale, zero, low, high)
        assert_recorded_bits(call, x[:, 1::2].t(), scale, zero, low, high)
        call = aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams
        for shape, enabled in (((), 1), ((1,), 1), ((1,), 0)):
            operands = torch.full(shape, scale), torch.full(shape, zero), torch.full(shape, enabled)
            assert_recorded_bits(call, x, *operands, low, high)


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("limits", RANGES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_steps_of_each_channel_are_the_bits_of_the_cpu(dtype, limits, seed):
    low, high = limits
    x = drawn(seed, (3, 4, 17), dtype, 0.1)
    call = aten.fake_quantize_per_channel_affine_cachemask
    for axis, channels in enumerate(x.shape):
        scale = torch.linspace(0.02, 0.4, channels)
        whole = torch.linspace(max(low, -999), min(high, 999), channels).int()
        for zero in (whole, whole / 7, (whole / 7).half()):
            assert_recorded_bits(call, x, scale, zero, axis, low, high)


def test_nothing_is_rounded_to_nothing():
    for shape in ((0,), (3, 0)):
        x = torch.empty(shape)
        for device in ("cpu", "ltc"):
            y, mask = aten.fake_quantize_per_tensor_affine_cachemask(x.to(device), 0.1, 0, 0, 255)
            assert (y.shape, mask.shape, mask.dtype) == (shape, shape, torch.bool)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, one: torch.fake_quantize_per_tensor_affine(x, 0.1, 3, 0, 255),
        lambda x, one: torch.fake_quantize_per_tensor_affine(x, one / 10, one.int(), 0, 255),
        lambda x, one: torch.fake_quantize_per_channel_affine(
            x, one.expand(4) / 10, one.int().expand(4), 1, 0, 255
        ),
    ],
)
def test_the_gradient_is_left_out_where_the_range_ends(call):
    values = torch.linspace(-9, 40, 12).view(3, 4)
    gradients = []
    for device in ("cpu", "ltc"):
        x = values.clone().to(device).requires_grad_()
        (
            call(x, torch.ones(1).to(device)) * torch.arange(12.0).view(3, 4).to(device)
        ).sum().backward()
        gradients.append(x.grad.cpu())
    assert torch.equal(*gradients)


def learned(device: str) -> list[torch.Tensor]:
    x = torch.linspace(-3, 5, 24).view(4, 6).to(device).requires_grad_()
    of_all = torch.tensor([0.1]).to(device).requires_grad_(), torch.tensor([2.4]).to(device)
    of_each = torch.linspace(0.02, 0.3, 4).to(device).requires_grad_(), torch.ones(4).to(device)
    y = torch._fake_quantize_learnable_per_tensor_affine(x, *of_all, 0, 31, 0.5)
    z = torch._fake_quantize_learnable_per_channel_affine(x, *of_each, 0, -8, 7, 0.5)
    (y * z).sum().backward()
    return [y.detach(), z.detach(), x.grad, of_all[0].grad, of_each[0].grad]


def test_steps_that_are_learned_are_recorded():
    with metrics.counted() as grown:
        found = learned("ltc")
        ltm.mark_step()
    for mine, theirs in zip(found, learned("cpu"), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs)
    assert not [name for name in grown if name.startswith("aten::")]


def test_another_scale_is_no_other_program():
    x = torch.linspace(-9, 40, 12)
    lazy = x.to("ltc")
    for step in range(6):
        with metrics.counted() as grown:
            found = torch.fake_quantize_per_tensor_affine(lazy, 0.1 + step, 0, -128, 127) + 1
            ltm.mark_step()
            wanted = torch.fake_quantize_per_tensor_affine(x, 0.1 + step, 0, -128, 127) + 1
            assert torch.equal(found.cpu(), wanted)
    assert grown["RecordedEntries"] == grown["UncachedCompile"] == 0


@pytest.mark.parametrize("zero", [-1, 256])
def test_a_zero_point_beyond_the_range_is_refused_as_on_the_cpu(zero):
    x = torch.ones(2, 3)
    texts = []
    for device in ("cpu", "ltc"):
        of_each = torch.ones(3).to(device), torch.tensor([0, 0, zero], dtype=torch.int32).to(device)
        for call in (
            lambda x, *_: torch.fake_quantize_per_tensor_affine(x, 0.1, zero, 0, 255),
            lambda x, *own: torch.fake_quantize_per_channel_affine(x, *own, 1, 0, 255),
        ):
            with pytest.raises(RuntimeError, match="must be between") as error:
                call(x.to(device), *of_each).cpu()
            texts.append(str(error.value))
    assert texts[:2] == texts[2:]
