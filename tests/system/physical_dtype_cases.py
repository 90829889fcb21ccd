"""What holds where tensors are kept in a narrower type; run by test_physical_dtypes.py.

The variable is read at the first use of a device, so this file runs in processes of its own.
"""

import gc
import io
import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ltc
import ltc.core.lazy_model as ltm
import ltc.utils.serialization as xser
from tests.training_loop import train

D = "ltc"
DOWNCAST = os.environ.get("LTC_DOWNCAST_BF16") == "1"
DOUBLE = torch.float32 if DOWNCAST else torch.bfloat16


def kept(x: torch.Tensor) -> torch.Tensor:
    """The CPU tensor with the values that the device keeps of it."""
    if x.dtype == torch.float64:
        return x.to(DOUBLE).double()
    return x.bfloat16().float() if x.dtype == torch.float32 else x


def near(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the rounding of results and of what products read and give."""
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got.cpu(), expected, rtol=2**-6, atol=2**-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_reported_dtype_is_torchs_and_the_physical_one_is_narrow(dtype):
    x = torch.randn(6, 5, dtype=dtype)
    lazy = x.to(D)
    assert lazy.dtype == lazy.cpu().dtype == (lazy * 2).dtype == dtype
    expected = torch.bfloat16 if dtype == torch.float32 else DOUBLE
    assert ltc.physical_dtype(lazy) == ltc.physical_dtype(lazy * 2) == expected
    assert torch.equal(lazy.cpu(), kept(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_other_dtypes_stay_as_they_are(dtype):
    x = torch.randint(0, 2, (40,)).to(dtype)
    assert ltc.physical_dtype(x.to(D)) == dtype
    assert torch.equal(x.to(D).cpu(), x)
    assert ltc.physical_dtype(torch.ones(3)) == torch.float32  # a CPU tensor


def test_memory_is_what_the_physical_dtype_takes():
    gc.collect()  # what earlier cases left in cycles
    before = torch.ltc.memory_allocated()
    x = torch.ones(1000, dtype=torch.float64).to(D)
    assert torch.ltc.memory_allocated() - before == x.numel() * DOUBLE.itemsize


def test_a_chain_is_computed_in_float32_and_rounded_once():
    x, y = torch.randn(1000), torch.rand(1000) + 0.5
    got = ((x.to(D) * 1.1 + 0.3) / y.to(D) - 0.2).sqrt().nan_to_num()
    expected = ((kept(x) * 1.1 + 0.3) / kept(y) - 0.2).sqrt().nan_to_num()
    assert torch.equal(got.cpu(), kept(expected))


def test_sums_accumulate_in_float32():
    x = torch.full((5000,), 1.0)
    assert x.to(D).sum().item() == 4992.0  # in bfloat16 it ends at 256
    assert x.double().to(D).cumsum(0)[4095].item() == 4096.0


def test_products_read_and_give_narrow_values():
    x, w = torch.randn(33, 70), torch.randn(20, 70)
    near(x.to(D) @ w.t().to(D), kept(x) @ kept(w).t())
    image, kernel = torch.randn(2, 3, 9, 9), torch.randn(4, 3, 3, 3)
    near(F.conv2d(image.to(D), kernel.to(D)), F.conv2d(kept(image), kept(kernel)))
    near(F.max_pool2d(image.to(D), 2), F.max_pool2d(kept(image), 2))
    near(F.avg_pool2d(image.to(D), 2), F.avg_pool2d(kept(image), 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_and_its_gradients(dtype, masked):
    plain = [kept(torch.randn(2, 3, 9, 8, dtype=dtype)) for _ in range(3)]
    bias = kept(torch.randn(9, 9, dtype=dtype)) if masked else None
    results = []
    for device in ("cpu", D):
        operands = [x.clone().to(device).requires_grad_() for x in plain]
        mask = bias.to(device) if masked else None
        y = F.scaled_dot_product_attention(*operands, attn_mask=mask, is_causal=not masked)
        y.square().sum().backward()
        results.append([y.detach(), *[x.grad for x in operands]])
    for exact, got in zip(*results):
        torch.testing.assert_close(got.cpu(), exact, rtol=2**-5, atol=2**-4)


def test_a_view_written_in_place_changes_its_base():
    x = torch.zeros(4, 4).to(D)
    x[1:3, 1] = 2.5
    x.view(-1).add_(1)
    expected = torch.ones(4, 4)
    expected[1:3, 1] = 3.5
    assert torch.equal(x.cpu(), expected)
    ltm.mark_step()
    x.t()[0] -= 1
    expected.t()[0] -= 1
    assert torch.equal(x.cpu(), expected)


@pytest.mark.parametrize("pair", [(torch.float32, torch.int32), (torch.float64, torch.int64)])
def test_bits_are_those_of_the_reported_dtype(pair):
    dtype, integer = pair
    x = torch.randn(6, dtype=dtype)
    assert torch.equal(x.to(D).view(integer).cpu(), kept(x).view(integer))
    bits = kept(x).view(integer)
    assert torch.equal(bits.to(D).view(dtype).cpu(), kept(x))


def test_casts_between_the_dtypes():
    x = torch.randn(50) * 10
    assert torch.equal(x.to(D).bfloat16().cpu(), x.bfloat16())
    assert torch.equal(x.to(D).half().cpu(), kept(x).half())
    assert torch.equal(x.to(D).long().cpu(), kept(x).long())
    assert torch.equal(x.to(D).double().float().cpu(), kept(x))
    assert torch.equal(x.bfloat16().to(D).float().cpu(), kept(x))


def test_rows_taken_by_index_and_their_gradient():
    table, index = torch.randn(10, 4), torch.tensor([1, 7, 1, 1, 0])
    mine = kept(table).to(D).requires_grad_()
    exact = kept(table).requires_grad_()
    for t, i in ((mine, index.to(D)), (exact, index)):
        (F.embedding(i, t) * 3).square().sum().backward()
    near(mine.grad, exact.grad)
    assert torch.equal(mine[index.to(D)].cpu(), kept(table)[index])


def test_what_no_kernel_computes_sees_the_reported_dtype():
    x = torch.randn(5, 5, dtype=torch.float64)
    torch.testing.assert_close(
        torch.linalg.svdvals(x.to(D)).cpu(), torch.linalg.svdvals(kept(x)), rtol=1e-2, atol=1e-2
    )
    assert torch.fft.fft(x.to(D)).dtype == torch.complex128
    values, _ = torch.sort(x.to(D), dim=1)
    assert torch.equal(values.cpu(), torch.sort(kept(x), dim=1).values)


def trained(device: str, steps: int = 12) -> tuple[list[float], nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    batch = torch.randn(32, 8).to(device), torch.randint(3, (32,)).to(device)
    losses = [loss.item() for loss in train(model, optimizer, [batch] * steps)]
    return losses, model, optimizer


def test_training_follows_float32():
    mine, model, optimizer = trained(D)
    exact, _, _ = trained("cpu")
    assert mine[-1] < 0.9 * mine[0]
    torch.testing.assert_close(torch.tensor(mine), torch.tensor(exact), rtol=0.05, atol=0.03)
    state = [t for s in optimizer.state.values() for t in s.values() if t.device.type == D]
    assert state and all(ltc.physical_dtype(t) == torch.bfloat16 for t in state)
    assert all(ltc.physical_dtype(p.grad) == torch.bfloat16 for p in model.parameters())


def test_files_hold_the_reported_dtype(tmp_path):
    state = {"w": torch.randn(4, 3).to(D), "d": torch.randn(3, dtype=torch.float64).to(D)}
    plain = {name: t.cpu() for name, t in state.items()}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    ltm.save(state, tmp_path / "ltm")
    xser.save(state, tmp_path / "xser")
    found = {
        "torch": torch.load(buffer, map_location="cpu"),
        "ltm": torch.load(tmp_path / "ltm"),
        "xser": xser.load(tmp_path / "xser"),
    }
    for name, loaded in found.items():
        for key, value in plain.items():
            assert loaded[key].dtype == value.dtype, (name, key)
            assert torch.equal(loaded[key].cpu(), value), (name, key)


def test_autocast_and_checkpoints_work():
    from torch.utils.checkpoint import checkpoint

    def gradient(wrapped):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to(D)
        x = torch.randn(4, 8).to(D).requires_grad_()
        with torch.autocast("ltc", dtype=torch.bfloat16):
            y = model(x)
        assert y.dtype == torch.bfloat16
        out = checkpoint(model, x, use_reentrant=False) if wrapped else model(x)
        out.square().mean().backward()
        return x.grad.cpu()

    near(gradient(True), gradient(False))


def test_a_finfo_is_of_the_reported_dtype():
    assert torch.finfo(torch.ones(1).to(D).dtype).eps == torch.finfo(torch.float32).eps


@pytest.mark.devices(2)
def test_two_devices_exchange_sums_of_float32():
    x, y = torch.tensor([1.0, 257.0]), torch.tensor([2.0, 3.0])
    moved = x.to("ltc:0").to("ltc:1")
    near(moved + y.to("ltc:1"), kept(x) + y)
