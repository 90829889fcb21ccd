"""Embedding bags of every size: values, gradients, and what is noted for the backward."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import ltc.core.lazy_model as ltm
from ltc.debug import metrics
from ltc.device.shapes import cpu_probe, meta
from ltc.support.bounded_table import BoundedTable

pytestmark = pytest.mark.also_native

MODES = {"sum": 0, "mean": 1, "max": 2}
# Sizes of [indices, table]: the CPU's kernel was asked directly about the first alone.
SIZES = {"small": ((6, 5), (30, 3)), "large": ((1024, 5), (20000, 32))}


def drawn(shape, high):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(0))


def table_of(shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=dtype)


def values_and_gradients(device, indices, table, offsets=None, factors=None, **options):
    table = table.to(device).requires_grad_()
    leaves = [table]
    if factors is not None:
        factors = factors.to(device).requires_grad_()
        leaves.append(factors)
    offsets = None if offsets is None else offsets.to(device)
    result = F.embedding_bag(
        indices.to(device), table, offsets, per_sample_weights=factors, **options
    )
    cotangent = torch.linspace(0.5, 1.5, result.numel(), dtype=torch.float64)
    cotangent = cotangent.reshape(result.shape).to(result.dtype).to(device)
    return [result.detach(), *torch.autograd.grad(result, leaves, cotangent)]


@pytest.mark.compared
@pytest.mark.parametrize("padding_idx", [None, 2, -1])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", SIZES)
def test_bags_of_one_length(device, size, mode, padding_idx):
    indices, table = SIZES[size]
    return values_and_gradients(
        device, drawn(indices, table[0]), table_of(table), mode=mode, padding_idx=padding_idx
    )


@pytest.mark.compared
@pytest.mark.parametrize("include_last_offset", [False, True])
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("mode", MODES)
def test_bags_of_many_lengths(device, mode, index_dtype, include_last_offset):
    found = []
    for lengths in ([3, 0, 2, 0], [0, 4], [0, 0], [7] * 300 + [0] * 9):
        offsets = torch.tensor([0, *lengths]).cumsum(0).to(index_dtype)
        indices = drawn((int(offsets[-1]),), 40).to(index_dtype)
        found += values_and_gradients(
            device, indices, table_of((40, 20)), offsets if include_last_offset else offsets[:-1],
            mode=mode, include_last_offset=include_last_offset, padding_idx=3,
        )  # fmt: skip
    ltm.mark_step()
    return found


@pytest.mark.compared
@pytest.mark.parametrize("padding_idx", [None, 1])
@pytest.mark.parametrize("size", SIZES)
def test_a_factor_for_each_row_has_a_gradient(device, size, padding_idx):
    indices, table = SIZES[size]
    factors = table_of(indices)
    return values_and_gradients(
        device, drawn(indices, table[0]), table_of(table), factors=factors, mode="sum",
        padding_idx=padding_idx,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", SIZES)
def test_narrow_bags_are_as_near_to_the_exact_sums_as_their_dtype_can_say(size, mode, dtype):
    indices, table = SIZES[size]
    indices, table = drawn(indices, table[0]), table_of(table, dtype)
    exact = values_and_gradients("cpu", indices, table.double(), mode=mode)
    found = values_and_gradients("ltc", indices, table, mode=mode)
    # Cotangents are rounded to the dtype, products and sums once each.
    bound = 4 * torch.finfo(dtype).eps
    for mine, theirs in zip(found, exact, strict=True):
        assert mine.dtype is dtype
        torch.testing.assert_close(mine.cpu().double(), theirs, rtol=bound, atol=4 * bound)


@pytest.mark.compared
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_noted_is_what_the_cpu_notes(device, mode, dtype):
    noted = []
    for (length, rows), padding_idx, include_last_offset, keeps in itertools.product(
        ((4, 5), (3000, 700)), (None, 1), (False, True), (False, True)
    ):
        table = table_of((rows, 8), dtype).to(device).requires_grad_(keeps)
        offsets = torch.tensor([0, 2, 2, length]).to(device)
        found = torch.embedding_bag(
            table, drawn((length,), rows).to(device), offsets, False, MODES[mode], False, None,
            include_last_offset, padding_idx,
        )  # fmt: skip
        noted += found[1:]
    ltm.mark_step()
    return noted


@pytest.mark.native("it counts programs, and calls that run when made are none")
def test_training_a_table_compiles_one_program_without_python():
    table = torch.nn.EmbeddingBag(20000, 32, mode="mean").to("ltc")
    with metrics.counted() as grown:
        table(drawn((1024, 5), 20000).to("ltc")).sum().backward()
        table.weight.grad.cpu()
    assert grown["ExecuteTime"] == 1 and not grown.get("extern.python", 0)


@pytest.mark.parametrize(
    ("indices", "offsets", "message"),
    [
        ([0, 7], [0], "Expected idx >= 0 && idx < num_embeddings but found idx to be 7"),
        ([0, 1], [1], "offsets.0. has to be 0.*However, got 1"),
        ([0, 1], [0, 3], "can not be greater than input's length 2 but got offsets.-1. of 3"),
    ],
)
def test_what_no_bag_can_hold_raises_torchs_error(indices, offsets, message):
    table = torch.ones(3, 2, dtype=torch.float64)
    for device in ("cpu", "ltc"):
        with pytest.raises(RuntimeError, match=message):
            F.embedding_bag(
                torch.tensor(indices, device=device), table.to(device),
                torch.tensor(offsets, device=device), mode="sum",
            ).cpu()  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_nothing_has_to_be_asked_of_the_cpus_kernel(mode, monkeypatch, equal):
    monkeypatch.setattr(cpu_probe, "FEW_BYTES", -1)
    monkeypatch.setattr(meta, "_known", BoundedTable("ResultTypes", 100))
    indices, table = drawn((6, 5), 30), table_of((30, 3), torch.float32)
    equal(
        values_and_gradients("ltc", indices, table, mode=mode),
        values_and_gradients("cpu", indices, table, mode=mode),
    )
