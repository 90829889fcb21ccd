"""Images sampled at points of a grid, and the gradients of both."""

import pytest
import torch
import torch.nn.functional as F

from tests.ops.against_float64 import assert_as_near_as_eager

PADDINGS = ["zeros", "border", "reflection"]


def drawn(*shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("padding", PADDINGS)
def test_bilinear_sampling(padding, aligned, dtype):
    def sampled(x, grid):
        return F.grid_sample(x, grid, padding_mode=padding, align_corners=aligned)

    for shape, points in (((2, 3, 5, 7), (4, 6)), ((1, 8, 1, 9), (1, 1)), ((3, 1, 17, 8), (16, 5))):
        grid = drawn(shape[0], *points, 2, dtype=dtype) * 1.7  # some points are outside
        assert_as_near_as_eager(sampled, [drawn(*shape, dtype=dtype), grid])


def test_a_gradient_of_the_grid_alone():
    x = drawn(2, 3, 5, 7, dtype=torch.float64)

    def sampled(grid):
        return F.grid_sample(x.to(grid.device, grid.dtype), grid, align_corners=True)

    assert_as_near_as_eager(sampled, [drawn(2, 4, 6, 2, dtype=torch.float32)])


def test_many_points_of_one_pixel_are_added():
    x = drawn(1, 4, 6, 6, dtype=torch.float32)
    grid = torch.zeros(1, 64, 64, 2) + 0.01
    assert_as_near_as_eager(lambda x, g: F.grid_sample(x, g, align_corners=False), [x, grid])
