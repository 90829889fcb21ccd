"""Torch's kernels called through its C functions: values, errors, and what is left to Python."""

import pytest
import torch

from ltc.debug import metrics


@pytest.mark.parametrize("call", [
    lambda x: x.sort(1, descending=True), lambda x: x.topk(3, 1), lambda x: x.sort(1).indices,
    lambda x: torch.cummax(x, 0), lambda x: torch.kthvalue(x, 2, 1),
    lambda x: torch.logcumsumexp(x, 1), lambda x: torch.linalg.qr(x).R.abs(),
    lambda x: torch.searchsorted(x[0].sort().values, x[1], right=True),
    lambda x: torch.cholesky_solve(x[:, :2], torch.eye(7, device=x.device, dtype=x.dtype) * 2),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_call_gives_what_the_cpu_gives_without_python(call, dtype):
    x = torch.randn(7, 9, dtype=dtype)
    expected = call(x)
    moved = x.to("ltc")
    with metrics.counted() as grown:
        found = call(moved)
        pairs = [(found, expected)] if isinstance(found, torch.Tensor) else zip(found, expected)
        for mine, theirs in pairs:
            torch.testing.assert_close(mine.cpu(), theirs)
    assert not grown.get("extern.python", 0)


def test_what_is_computed_around_a_call_is_one_program():
    x = torch.randn(7, 9)
    moved = x.to("ltc")
    with metrics.counted() as grown:
        found = ((moved * 2).sort(1).values + 1).sum(0).cpu()
    torch.testing.assert_close(found, ((x * 2).sort(1).values + 1).sum(0))
    assert grown["ExecuteTime"] == 1 and not grown.get("extern.python", 0)


def test_a_call_that_fails_raises_torchs_own_error_at_the_users_line():
    x = torch.ones(5).to("ltc")
    with pytest.raises(IndexError, match="tried to access index 9 on a tensor of 5") as raised:
        x.take(torch.tensor([9]).to("ltc")).cpu()
    assert any("test_llvm_shim.py" in note for note in raised.value.__notes__)
    assert x.take(torch.tensor([1]).to("ltc")).item() == 1  # and the device goes on


def test_what_the_c_functions_do_not_take_is_counted_by_name():
    x = torch.randn(1, 1, 5, 5).to("ltc")
    with metrics.counted() as grown:
        torch.fft.fft(x).abs().cpu()
    assert grown["extern.python::aten::_fft_r2c"] == 1
