"""Windows as columns, their sums, and means over windows of different sizes."""

import pytest
import torch
import torch.nn.functional as F

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
