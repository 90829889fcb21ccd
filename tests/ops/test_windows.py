"""Windows as columns, their sums, means over windows of different sizes, and where maxima lay."""

import pytest
import torch
import torch.nn.functional as F

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics
from tests.ops.against_float64 import assert_as_near_as_eager

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
# kernel, dilation, padding, stride
WINDOWS = [
    (3, 1, 1, 1), (2, 1, 0, 2), ((2, 3), (2, 1), (1, 2), (3, 2)), (1, 1, 0, 1), (4, 2, 3, 3),
]  # fmt: skip


def drawn(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_unfold(window, dtype):
    for shape in ((2, 3, 7, 9), (1, 1, 16, 17), (3, 8, 8)):
        assert_as_near_as_eager(lambda x: F.unfold(x, *window), [drawn(*shape, dtype=dtype)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_fold(window, dtype):
    for size in ((7, 9), (16, 17)):
        columns = F.unfold(torch.zeros(2, 3, *size), *window).shape
        x = drawn(*columns, dtype=dtype)
        assert_as_near_as_eager(lambda x: F.fold(x, size, *window), [x])


POOLINGS = [
    (F.adaptive_avg_pool1d, (2, 3, 17)),
    (F.adaptive_avg_pool2d, (2, 3, 13, 16)),
    (F.adaptive_avg_pool2d, (3, 13, 16)),
    (F.adaptive_avg_pool3d, (2, 3, 5, 8, 7)),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pooling", POOLINGS, ids=lambda p: p[0].__name__ + str(p[1]))
@pytest.mark.parametrize("size", [1, 2, 4, 5, 20])
def test_means_over_windows(size, pooling, dtype):
    pool, shape = pooling
    x = drawn(*shape, dtype=dtype)
    try:
        pool(x, size)
    except RuntimeError as error:
        pytest.skip(str(error))
    assert_as_near_as_eager(lambda x: pool(x, size), [x])


def test_means_over_windows_of_different_sizes():
    for sizes in ((3, 8), (13, 5), (None, 6)):
        x = drawn(2, 3, 13, 16, dtype=torch.float32)
        assert_as_near_as_eager(lambda x: F.adaptive_avg_pool2d(x, sizes), [x])


MAXIMA = {
    "2d": (lambda x: F.max_pool2d(x, 2), (2, 3, 6, 8)),
    "overlapping": (lambda x: F.max_pool2d(x, 3, 2, 1), (2, 3, 7, 9)),
    "without a batch": (lambda x: F.max_pool2d(x, 2), (3, 6, 8)),
    "1d": (lambda x: F.max_pool1d(x, 3, 2), (2, 3, 11)),
    "3d": (lambda x: F.max_pool3d(x, 2), (2, 3, 4, 6, 8)),
    "of any size": (lambda x: F.adaptive_max_pool2d(x, (3, 2)), (2, 3, 7, 9)),
    "behind a convolution": (
        lambda x: F.max_pool2d(F.conv2d(x, torch.ones(16, 16, 3, 3).to(x)), 2),
        (2, 16, 8, 10),
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pooling", MAXIMA)
def test_a_step_that_is_read_between_a_maximum_and_its_gradient(pooling, dtype):
    """The gradient is told where the maxima lay by another program: it has a kernel nevertheless."""
    pool, shape = MAXIMA[pooling]

    def operand(*shape):
        x = drawn(*shape, dtype=dtype)
        # Sums of signs have no rounding, in whatever order a processor adds.
        return x.sign() if "convolution" in pooling else x

    gradients = []
    for device in ("cpu", "ltc"):
        x = operand(*shape).to(device).requires_grad_()
        with config.override(LTC_TIER="native"), metrics.counted() as grown:
            made = pool(x)
            made.sum().item()
            (made * operand(*made.shape).to(device)).sum().backward()
            ltm.mark_step()
        gradients.append(x.grad.cpu())
    assert grown["extern.python::max_pool_gradient"] == 0
    torch.testing.assert_close(gradients[1], gradients[0])


def test_a_place_outside_of_what_was_pooled_is_refused():
    gradient, places = torch.ones(1, 1, 2, 1).to("ltc"), torch.tensor([[[[3], [4]]]]).to("ltc")
    x = torch.zeros(1, 1, 2, 2).to("ltc")
    with config.override(LTC_TIER="native"):
        made = torch.ops.aten.max_pool2d_with_indices_backward(
            gradient, x, [1, 2], [1, 2], [0, 0], [1, 1], False, places
        )
        with pytest.raises(RuntimeError, match="index 4 is out of bounds"):
            made.cpu()
    ltm.mark_step()
