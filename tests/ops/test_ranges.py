"""Numbers at equal steps: arange and linspace, from numbers and from tensors."""

import pytest
import torch

from ltc import config
from tests.ops.against_float64 import assert_as_near_as_eager

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
RANGES = [
    (0, 10, 1),
    (0.0, 10.0, 0.5),
    (3, -7, -2),
    (0.1, 1.7, 0.1),
    (-1.5, 40.25, 0.75),
    (0, 0, 1),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ranges_of_floats(dtype):
    def near(x):  # of the dtype that x has, so that float64's is the truth
        made = [torch.arange(*numbers, dtype=x.dtype, device=x.device) for numbers in RANGES]
        return torch.cat(made) * x

    assert_as_near_as_eager(near, [torch.ones((), dtype=dtype)])


def test_whole_numbers_are_exact():
    x = torch.arange(0.0, 70_000.0, 3, device="ltc")
    assert torch.equal(x.cpu(), torch.arange(0.0, 70_000.0, 3))


@pytest.mark.parametrize("numbers", [(9, -4, -1.0), (0.0, 5.0, 1), (2, 11, 3.0)])
def test_whole_numbers_from_floats(numbers):
    def counted(x):
        return torch.arange(*numbers, dtype=torch.int64, device=x.device) * x.long()

    assert_as_near_as_eager(counted, [torch.ones(())])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8], ids=str)
@pytest.mark.parametrize("numbers", [(0, 3.7), (0, 3.7, 2), (9.0, 2.5, -1), (1, 1.5), (4, 0.5, -2)])
@pytest.mark.parametrize("tier", ["native", "auto"])
def test_whole_numbers_up_to_a_fraction(numbers, dtype, tier):
    """Of 64 bits, the end is rounded towards 0 first; of fewer, it is not."""
    with config.override(LTC_TIER=tier):
        made = torch.arange(*numbers, dtype=dtype, device="ltc") * 3
        torch.testing.assert_close(made.cpu(), torch.arange(*numbers, dtype=dtype) * 3)


@pytest.mark.parametrize("steps", [0, 1, 2, 7, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steps_between_tensors(dtype, steps):
    def between(x, start, end):
        return x * start * end * torch.cat([
            torch.linspace(first, last, steps, dtype=x.dtype, device=x.device)
            for first in (start.detach(), 0.25)
            for last in (end.detach(), 3.0)
        ])  # fmt: skip

    numbers = [torch.tensor(n, dtype=dtype) for n in (1.0, -1.5, 7.25)]
    assert_as_near_as_eager(between, numbers)
