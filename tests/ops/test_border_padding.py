"""Padding by what is at the border, mirrored or repeated, and its gradients."""

import pytest
import torch
import torch.nn.functional as F

from tests.ops.against_float64 import assert_as_near_as_eager, launched

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
MODES = ["reflect", "replicate"]
AMOUNTS = {
    1: [(1, 2), (0, 3), (4, 0), (0, 0), (6, 6), (-2, 1), (2, -3), (-1, -1)],
    2: [(1, 2, 3, 0), (0, 0, 2, 2), (6, 6, 4, 4), (-1, 2, 0, -2)],
    3: [(1, 2, 3, 0, 1, 1), (0, 0, 2, 2, 0, 2), (-1, 2, 0, 1, -1, 0)],
}


def drawn(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def padded(mode, amounts):
    return lambda x: F.pad(x, amounts, mode=mode)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_padding_and_its_gradient(mode, rank, dtype):
    sizes = {1: [(7,), (31,)], 2: [(5, 7), (9, 16)], 3: [(3, 5, 8)]}[rank]
    for number, amounts in enumerate(AMOUNTS[rank]):
        # Amounts decide the loops, the dtype what is loaded: every pair of them at one of the sizes.
        for size in sizes if dtype is torch.float64 else [sizes[number % len(sizes)]]:
            assert_as_near_as_eager(padded(mode, amounts), [drawn(2, 3, *size, dtype=dtype)])


@pytest.mark.parametrize("mode", MODES)
def test_other_layouts_and_no_batch(mode):
    assert_as_near_as_eager(padded(mode, (1, 2, 3, 0)), [drawn(2, 9, 8, 5).permute(0, 3, 1, 2)])
    assert_as_near_as_eager(padded(mode, (1, 2, 3, 0)), [drawn(4, 9, 8)])
    assert_as_near_as_eager(padded(mode, (1, 2)), [drawn(4, 9)])


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_without_images(mode):
    x = drawn(0, 3, 5, 7)
    *_, (found, _) = launched(padded(mode, (1, 2, 3, 0)), [x])
    assert found[0].shape == (0, 3, 8, 10) and found[1].shape == x.shape


def test_one_element_is_repeated():
    assert_as_near_as_eager(padded("replicate", (3, 2, 1, 0)), [drawn(2, 3, 1, 1)])


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_other_numbers(mode, dtype):
    x = drawn(2, 3, 5, 7).mul(9).to(dtype)
    expected = outcome(lambda: F.pad(x, (1, 2, 3, 0), mode=mode))
    found = outcome(lambda: F.pad(x.to("ltc"), (1, 2, 3, 0), mode=mode).cpu())
    if isinstance(expected, str):
        assert found == expected
    else:
        assert torch.equal(found, expected)


def outcome(call):
    try:
        return call()
    except RuntimeError as error:
        return str(error)
