"""Large outputs are stored past the caches: the same numbers, wherever vectors are aligned."""

import pytest
import torch

from ltc.backends.eager import EagerBackend
from ltc.backends.llvm import schedule
from ltc.backends.llvm.backend import LlvmBackend
from ltc.backends.llvm.compiling import prepared
from ltc.ir import build, ops
from ltc.ir.graph import Graph
from ltc.ir.node import make

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.uint8]


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch):
    monkeypatch.setattr(schedule, "STREAMED_BYTES", 1)
    monkeypatch.setattr(schedule, "LEFT_BYTES", 1)


def given(*shape, index=0, dtype=torch.float32):
    return make(ops.INPUT, index=index, dtype=dtype, shape=shape)


def texts_of(graph, donated=frozenset()):
    steps = schedule.planned_steps(prepared(graph), donated)
    return [code.text for step in steps for code in step.codes]


def streams(graph, donated=frozenset()):
    return any("!nontemporal" in text.split("attributes")[0] for text in texts_of(graph, donated))


def agree(graph, *operands):
    native, reference = (
        backend.compile(graph, 0, frozenset()).launch([x.clone() for x in operands], [])
        for backend in (LlvmBackend(), EagerBackend())
    )
    for ours, expected in zip(native, reference):
        torch.testing.assert_close(ours, expected)


def numbers(*shape, dtype=torch.float32):
    return (torch.randn(shape) * 10).abs().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(33, 48), (7, 13), (5, 5000), (17,), (70, 64, 3)])
def test_elementwise_results_are_the_same(dtype, shape):
    x = given(*shape, dtype=dtype)
    graph = Graph((x,), (), (x + x, x * x))
    assert streams(graph)
    agree(graph, numbers(*shape, dtype=dtype))


@pytest.mark.parametrize("columns", [16, 100, 1024, 1040, 5000])
def test_rows_stream_where_every_row_is_aligned(columns):
    x = given(20, columns)
    shifted = x - build.reduce(ops.MAX, x, (1,), keepdim=True)
    graph = Graph((x,), (), (make(ops.EXP, shifted),))
    assert streams(graph) == (columns % 16 == 0)
    agree(graph, numbers(20, columns))


@pytest.mark.parametrize("shape", [(64, 48), (37, 53), (16, 1000)])
def test_transposed_results_are_the_same(shape):
    x = given(*shape)
    graph = Graph((x,), (), (make(ops.PERMUTE, x, dims=(1, 0)) * 2.0,))
    agree(graph, numbers(*shape))


def test_what_the_program_reads_again_stays_in_the_caches():
    x = given(64, 64)
    kept = make(ops.EXP, x)
    assert not streams(Graph((x,), (), (kept, make(ops.MATMUL, kept, x))))


def test_an_update_in_place_is_not_streamed():
    """Its lines are in the cache: it has just read them."""
    x = given(64, 64)
    assert not streams(Graph((x,), (), (x + 1.0,)), frozenset([0]))


def test_small_outputs_stay_in_the_caches(monkeypatch):
    monkeypatch.setattr(schedule, "STREAMED_BYTES", 64 * 64 * 4 + 1)
    x = given(64, 64)
    assert not streams(Graph((x,), (), (x + 1.0,)))


def updated(rows, columns, depth=40, dtype=torch.float32):
    """A weight, its gradient and what an update makes of them."""
    weight = given(rows, columns, dtype=dtype)
    left, right = (
        given(depth, n, index=k, dtype=dtype) for k, n in ((1, rows), (2, columns))
    )  # fmt: skip
    gradient = make(ops.MATMUL, make(ops.PERMUTE, left, dims=(1, 0)), right)
    return (weight, left, right), weight - gradient * 0.5, gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows, columns", [(64, 96), (37, 80), (30, 53), (5, 16)])
def test_a_gradient_beside_its_update_is_streamed_where_rows_are_aligned(rows, columns, dtype):
    given, new, gradient = updated(rows, columns, dtype=dtype)
    graph = Graph(given, (), (new, gradient))
    lanes = 8 if dtype is torch.float64 else 16
    assert streams(graph, frozenset([0])) == (columns % lanes == 0)
    agree(graph, *[torch.randn(x.shape).to(dtype) for x in given])


def test_a_gradient_without_an_update_stays_in_the_caches():
    """Whoever asked for it may well read it next."""
    given, _, gradient = updated(64, 64)
    assert not streams(Graph(given[1:], (), (gradient,)))


def test_a_gradient_that_the_program_reads_again_stays_in_the_caches():
    given, new, gradient = updated(64, 64)
    total = build.reduce(ops.SUM, gradient * gradient, (0, 1), keepdim=False)
    assert not streams(Graph(given, (), (new, gradient, total)), frozenset([0]))


def test_a_small_gradient_stays_in_the_caches(monkeypatch):
    monkeypatch.setattr(schedule, "LEFT_BYTES", 64 * 64 * 4 + 1)
    given, new, gradient = updated(64, 64)
    assert not streams(Graph(given, (), (new, gradient)), frozenset([0]))


def test_what_differs_from_row_to_row_is_asked_for_before_it_is_used():
    """A weight and its gradient meet when the sums are there; a bias is in the cache by then."""
    operands, new, gradient = updated(64, 64)
    bias = given(64, index=3)
    (update,) = texts_of(Graph(operands, (), (new,)), frozenset([0]))
    (sum,) = texts_of(Graph((*operands[1:], bias), (), (gradient + bias,)))
    assert "call void @llvm.prefetch" in update and "call void @llvm.prefetch" not in sum
