"""Rows that are reduced where they lie apart in memory: their lanes are neighbouring rows."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from ltc.backends.llvm import schedule
from ltc.backends.llvm.compiling import prepared
from ltc.debug import metrics
from ltc.ir import build, ops
from ltc.ir.graph import Graph
from ltc.ir.node import make
from tests.drawn import drawn

SHAPES = [
    (3, 4, 5), (5, 7), (1, 33, 1), (2, 40, 65), (2, 3, 17, 16), (0, 4, 5), (4, 130, 64),
    (33, 1100), (6000, 17),
]  # fmt: skip

# From rows of `x` along its last dimension to as many elements: each is stored where its row lies.
FUNCTIONS = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "centered": lambda x: x - x.mean(-1, keepdim=True),
    "two results": lambda x: torch.cat([x / x.abs().sum(-1, keepdim=True), x * 2]),
}


@pytest.fixture(autouse=True)
def llvm(monkeypatch):
    monkeypatch.setenv("LTC_BACKEND", "llvm")


def close(ours, exact, dtype):
    scale = max(1.0, float(exact.abs().max())) if exact.numel() else 1.0
    assert ours.dtype == dtype and ours.shape == exact.shape
    assert torch.all((ours.double() - exact).abs() <= 64 * torch.finfo(dtype).eps * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_of_a_transposed_operand_have_their_results_in_order(name, shape, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = metrics.counter_value("extern.python") or 0
    ours = FUNCTIONS[name](x.to("ltc").mT).cpu()
    close(ours, FUNCTIONS[name](x.double().mT), dtype)
    if name != "two results":
        back = FUNCTIONS[name](x.to("ltc").mT).mT.contiguous().cpu()
        close(back, FUNCTIONS[name](x.double().mT).mT, dtype)
    by_python = (metrics.counter_value("extern.python") or 0) - before
    assert not by_python or not x.numel()


def text_of_rows_less_their_sums(rows, elements):
    """The kernel that stores [rows, elements] in order, of what lies with its rows apart."""
    x = make(ops.INPUT, index=0, dtype=torch.float32, shape=(elements, rows))
    turned = build.transpose(x, 0, 1)
    graph = Graph((x,), (), (turned - build.sum_of(turned, 1, keepdim=True),))
    (step,) = schedule.planned_steps(prepared(graph), frozenset())
    (code,) = step.codes
    return code.text


def test_rows_that_lie_apart_are_turned_in_registers():
    text = text_of_rows_less_their_sums(64, 200)
    assert "shufflevector" in text
    assert "masked.gather" not in text and "masked.scatter" not in text


@pytest.mark.parametrize("rows, elements", [(15, 200), (64, 15), (64, 1 << 20)])
def test_what_turning_does_not_pay_for_is_scattered(rows, elements):
    """Too few rows or elements for a vector, and rows of which no vector fits in a cache."""
    assert "masked.scatter" in text_of_rows_less_their_sums(rows, elements)


@pytest.mark.parametrize("shape, asks", [
    ((128, 1 << 14), True), ((1 << 14, 128), False), ((32, 1 << 16), False), ((128, 1024), False),
])  # fmt: skip
def test_many_rows_far_apart_of_a_large_operand_are_asked_for_before_they_are_added(shape, asks):
    x = make(ops.INPUT, index=0, dtype=torch.float32, shape=shape)
    graph = Graph((x,), (), (build.sum_of(x, 0),))
    steps = schedule.planned_steps(prepared(graph), frozenset())
    texts = [code.text for step in steps for code in step.codes]
    assert any("call void @llvm.prefetch" in text for text in texts) == asks


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.uint8, torch.int16, torch.int64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_narrow_results_do_not_touch_their_neighbours(shape, dtype):
    x = torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(0))

    def result(x):
        rows = x.mT
        total = rows.sum(-1, keepdim=True)
        return rows > total if dtype is torch.bool else (rows - total).to(dtype)

    assert torch.equal(result(x.to("ltc")).cpu(), result(x))


@drawn(40)
@given(st.data())
def test_reductions_of_permuted_operands_in_any_order(data):
    """Sums over some dimensions, taken from what was summed, and the result permuted again."""
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 5, 8, 17, 40]), min_size=2, max_size=4))
    order = data.draw(st.permutations(range(len(shape))))
    back = data.draw(st.permutations(range(len(shape))))
    dims = data.draw(st.sets(st.sampled_from(range(len(shape))), min_size=1))
    masked = data.draw(st.booleans())
    x = torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape)))
    y = torch.randn(shape[::-1], generator=torch.Generator().manual_seed(1))

    def result(x, y):
        x = x.permute(order)
        x = x + y.permute(*range(len(shape))[::-1]).permute(order)
        total = x.sum(tuple(dims), keepdim=True)
        kept = torch.where(x > 0, x, total) if masked else x * 0.5 - total
        return kept.permute(back), total

    exact = result(x.double(), y.double())
    for mine, theirs in zip(result(x.to("ltc"), y.to("ltc")), exact):
        close(mine.cpu(), theirs, torch.float32)
