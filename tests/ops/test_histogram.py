"""torch.histc: of floats what the CPU gives, of integers what CUDA gives."""

import pytest
import torch

from ltc.debug import metrics

pytestmark = pytest.mark.also_native

INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
RANGES = [(0, 0), (0, 3), (-2, 5), (2, 2), (1, 100), (3, 1)]
INF, NAN = float("inf"), float("nan")


def outcome(call):
    try:
        return call().cpu()
    except RuntimeError as error:
        return str(error).split(",")[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("values", [
    [0.0, 1.5, 3.0, 3.0, 7.0], [2.0, 2.0], [], [1.0, NAN], [1.0, INF], [-0.0],
    [float(n % 17) for n in range(40_000)],
], ids=len)  # fmt: skip
def test_floats_are_counted_and_refused_as_on_the_cpu(values, dtype, equal):
    """In bfloat16 the CPU counts to 256, then each thread for itself; ltc counts in float32."""
    x = torch.tensor(values, dtype=dtype)
    counted_in = torch.float32 if dtype is torch.bfloat16 else dtype
    for (low, high), bins in [
        *[(r, 4) for r in RANGES],
        ((0, 3), 0),
        ((0, INF), 3),
        ((0.5, 2.5), 7),
    ]:
        expected = outcome(lambda: torch.histc(x.to(counted_in), bins, low, high).to(dtype))
        found = outcome(lambda: torch.histc(x.to("ltc"), bins, low, high))
        equal(found, expected)


def counted(values, bins, low, high):
    """The same by whole numbers alone, element by element."""
    if low == high and values:
        low, high = min(values), max(values)
    if low == high:
        low, high = low - 1, high + 1
    counts = [0] * bins
    for value in values:
        if low <= value <= high:
            counts[min((value - low) * bins // (high - low), bins - 1)] += 1
    return counts


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("bins", [1, 4, 7])
def test_integers_are_counted_in_their_own_dtype(bins, dtype):
    signed = dtype is not torch.uint8
    for values in ([], [2], [2, 2, 2], [0, 3, 1, 5, 5, -4 if signed else 9, 100], [127, 0]):
        x = torch.tensor(values, dtype=dtype)
        for low, high in RANGES[:-1]:
            found = torch.histc(x.to("ltc"), bins, low, high)
            assert found.dtype is dtype and found.shape == (bins,)
            assert found.tolist() == counted(values, bins, low, high), (values, low, high)


@pytest.mark.parametrize("experts", [1, 2, 8, 60, 128])
def test_tokens_of_each_expert_are_counted_without_a_read(experts):
    chosen = torch.randint(experts, (300, 4), dtype=torch.int32)
    with metrics.counted() as grown:
        found = torch.histc(chosen.to("ltc"), bins=experts, min=0, max=experts - 1)
        assert not grown["ExecuteTime"] and not grown["aten::histc"]
    assert found.tolist() == torch.bincount(chosen.flatten(), minlength=experts).tolist()


def test_what_has_no_meaning_is_refused():
    x = torch.arange(4).to("ltc")
    with pytest.raises(RuntimeError, match="max must be larger than min"):
        torch.histc(x, 4, 3, 1)
    with pytest.raises(RuntimeError, match="bins must be > 0, but got 0"):
        torch.histc(x, 0)
    with pytest.raises(RuntimeError):
        torch.histc(x > 1, 4).cpu()


def test_into_a_given_tensor():
    x, out = torch.arange(4).to("ltc"), torch.zeros(2, dtype=torch.int64, device="ltc")
    assert torch.histc(x, 2, 0, 3, out=out) is out
    assert out.tolist() == [2, 2]
    with pytest.raises(RuntimeError, match="same dtype"):
        torch.histc(x, 2, 0, 3, out=torch.zeros(2, device="ltc"))
    floats = torch.zeros(2, device="ltc")
    assert torch.histc(x.float(), 2, 0, 3, out=floats).tolist() == [2, 2]
