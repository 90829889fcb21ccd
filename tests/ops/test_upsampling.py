"""Interpolation to other sizes and its gradients, as near to float64 as eager PyTorch's."""

import functools

import pytest
import torch
import torch.nn.functional as F

from ltc.aten.nn import resampling, upsampling
from ltc.debug import metrics
from tests.ops.against_float64 import assert_as_near_as_eager, values_and_gradients

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
NEAREST = ["nearest", "nearest-exact"]
# (mode, dimensions, options)
MODES = [
    *[(mode, rank, {}) for mode in NEAREST for rank in (1, 2, 3)],
    *[
        (mode, rank, {"align_corners": aligned})
        for mode, rank in (("linear", 1), ("bilinear", 2), ("bicubic", 2), ("trilinear", 3))
        for aligned in (False, True)
    ],
    *[
        (mode, 2, {"align_corners": aligned, "antialias": True})
        for mode in ("bilinear", "bicubic")
        for aligned in (False, True)
    ],
]
SIZES = [(8, 16), (7, 13), (5, 5), (1, 9), (9, 1), (17, 3), (4, 33), (16, 8), (3, 64)]
FACTORS = [2.0, 0.5, 1.3, 3.0, 2.6]


def drawn(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def resized(mode, options, **size):
    return lambda x: F.interpolate(x, mode=mode, **size, **options)


def images(rank, *sizes, dtype):
    """A batch whose last dimensions have these sizes, in turns."""
    return drawn(2, 3, *[sizes[k % len(sizes)] for k in range(rank)], dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(("mode", "rank", "options"), MODES, ids=str)
def test_sizes_given(mode, rank, options, dtype):
    for size, result in SIZES[:: rank if rank > 1 else 1]:
        x = images(rank, size, 6, dtype=dtype)
        results = [(result, 11)[k % 2] for k in range(rank)]
        assert_as_near_as_eager(resized(mode, options, size=results), [x])


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize(("mode", "rank", "options"), MODES, ids=str)
def test_factors_given(mode, rank, options, recomputed):
    for factor in FACTORS[:: rank if rank > 1 else 1]:
        x = images(rank, 7, 10, dtype=torch.float32)
        given = {"scale_factor": factor, "recompute_scale_factor": recomputed}
        assert_as_near_as_eager(resized(mode, options, **given), [x])


@pytest.mark.parametrize("dtype", DTYPES[2:], ids=str)
@pytest.mark.parametrize(("mode", "rank", "options"), MODES, ids=str)
def test_low_precision(mode, rank, options, dtype):
    try:
        values_and_gradients(
            resized(mode, options, scale_factor=2.0), [images(rank, 2, dtype=dtype)]
        )
    except RuntimeError as error:
        pytest.skip(str(error))
    for size in (7, 9):
        x = images(rank, size, 8, dtype=dtype)
        assert_as_near_as_eager(resized(mode, options, scale_factor=2.0), [x])


@pytest.mark.parametrize("mode", NEAREST)
def test_bytes_are_moved(mode):
    x = torch.randint(0, 255, (2, 3, 5, 9), dtype=torch.uint8)
    assert_as_near_as_eager(resized(mode, {}, size=(7, 20)), [x])


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_other_layouts(mode):
    x = drawn(2, 9, 8, 5).permute(0, 3, 1, 2)
    assert_as_near_as_eager(resized(mode, {}, size=(13, 20)), [x])
    assert_as_near_as_eager(resized(mode, {}, size=(13, 20)), [drawn(2, 4, 10, 8)[:, ::2, 1:, ::2]])


def test_a_batch_without_images():
    assert_as_near_as_eager(resized("bilinear", {}, size=(13, 20)), [drawn(0, 3, 7, 9)])


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10, 49, 64, 100, 223])
@pytest.mark.parametrize("mode", NEAREST)
def test_the_nearest_element_is_the_cpus(mode, size):
    exact = mode == "nearest-exact"
    make = upsampling.nearest_center if exact else functools.partial(upsampling.nearest, 0.0)
    x = torch.arange(float(size)).reshape(1, 1, size)
    for result in range(1, 130, 3):
        expected = F.interpolate(x, size=result, mode=mode).long().flatten().tolist()
        taps = make(torch.float32)(size, result, False, None)
        assert [first for first, _ in taps.spans] == expected


def test_the_gradient_of_an_infinite_number_stays_where_it_is():
    x = drawn(1, 1, 8, 8, dtype=torch.float32)
    found = []
    for device in ("cpu", "ltc"):
        leaf = x.to(device).detach().requires_grad_()
        result = F.interpolate(leaf, scale_factor=2.0, mode="bilinear")
        gradient = torch.zeros_like(result)
        gradient[0, 0, 9, 9] = float("inf")
        result.backward(gradient)
        found.append(leaf.grad.cpu().isfinite())
    assert torch.equal(*found)


def test_a_factor_of_two_reads_four_results_an_element():
    for size in (4, 7, 56):
        spans = upsampling.linear(size, 2 * size, False, None).spans
        assert resampling._windows(spans, size)[2] == 4


def test_another_step_compiles_nothing():
    x = drawn(2, 3, 8, 8, dtype=torch.float32).to("ltc")
    for _ in range(3):
        with metrics.counted() as grown:
            F.interpolate(x, scale_factor=2.0, mode="bilinear").cpu()
    assert not grown.get("UncachedCompile", 0) and not grown.get("extern.python", 0)
