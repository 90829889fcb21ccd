"""Sums of generated code against exact ones: no further away than eager's, for any thread count."""

import itertools
import re

import pytest
import torch

from ltc.backends.llvm.backend import LlvmBackend
from ltc.backends.llvm.schedule import is_native
from ltc.ir import build, ops
from ltc.ir.graph import Graph
from ltc.ir.node import make
from ltc.llvm.loops.emitter import kernel_code
from ltc.passes.fusion.fuse import fuse

CASES = [
    ((100_003,), (0,)), ((300, 700), (0, 1)), ((4, 40_000), (1,)), ((40_000, 4), (0,)),
    ((1000, 130), (0,)), ((257, 64), (0,)), ((5000, 17), (0,)), ((64, 1024), (1,)),
    ((30, 40, 50), (0, 2)), ((30, 40, 50), (1,)), ((8, 16, 33, 33), (0, 2, 3)), ((9, 10), (1,)),
]  # fmt: skip


def summed(shape, dims, dtype):
    x = make(ops.INPUT, index=0, dtype=dtype, shape=shape)
    graph = Graph((x,), (), (build.sum_of(x, dims),))
    return LlvmBackend().compile(graph, 0, frozenset())


def numbers(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype)


def distance(result, exact) -> float:
    """Root of the mean square of the relative errors."""
    return ((result.double() - exact) / exact).square().mean().sqrt().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape, dims", CASES)
def test_sums_are_no_further_from_the_exact_ones_than_eager(shape, dims, dtype):
    program = summed(shape, dims, dtype)
    mine = theirs = 0.0
    for seed in range(5):
        x = numbers(shape, dtype, seed)
        exact = x.double().sum(dims)
        if exact.abs().max() > torch.finfo(dtype).max:
            pytest.skip("the exact sum is no number of this dtype")
        mine += distance(program.launch([x], [])[0], exact)
        theirs += distance(x.sum(dims), exact)
    # Errors below half a unit in the last place are luck, of the one as of the other.
    assert mine / 5 <= max(theirs / 5, torch.finfo(dtype).eps / 2)


@pytest.mark.parametrize("shape, dims", CASES)
def test_sums_have_the_same_bits_with_any_number_of_threads(shape, dims):
    program, x = summed(shape, dims, torch.float32), numbers(shape, torch.float32)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            results.append(program.launch([x], [])[0])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
@pytest.mark.parametrize("shape", [(9, 2, 2, 300), (40, 3, 50, 7)])
def test_equal_numbers_in_any_order_of_dimensions_are_added_exactly(shape, order):
    """Each addition to a chain of them is rounded the same way: errors of a long one add up."""
    x = make(ops.INPUT, index=0, dtype=torch.float32, shape=shape)
    graph = Graph((x,), (), (build.sum_of(build.permute(x, order), range(4)),))
    given = torch.full(shape, 0.3).sqrt()
    (result,) = LlvmBackend().compile(graph, 0, frozenset()).launch([given], [])
    assert distance(result, given.double().sum()) <= 16 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("width", [5, 64, 1000, 1024, 1100, 5000])
def test_a_function_that_several_passes_over_a_row_read_is_computed_once(width, dtype):
    x = make(ops.INPUT, index=0, dtype=dtype, shape=(37, width))
    z = build.exp(x - build.max_of(x, 1, keepdim=True))
    graph = Graph((x,), (), (z / build.sum_of(z, 1, keepdim=True),))
    given = numbers((37, width), dtype) * 5
    (result,) = LlvmBackend().compile(graph, 0, frozenset()).launch([given], [])
    exact = torch.softmax(given.double(), 1)
    torch.testing.assert_close(
        result.double(), exact, rtol=8 * torch.finfo(dtype).eps, atol=0, check_dtype=False
    )


@pytest.mark.parametrize("dtype, align", [(torch.float32, 4), (torch.float64, 8)], ids=str)
def test_a_row_that_is_kept_is_read_and_written_as_it_is_aligned(dtype, align):
    x = make(ops.INPUT, index=0, dtype=dtype, shape=(37, 64))
    z = build.exp(x - build.max_of(x, 1, keepdim=True))
    (kernel,) = fuse(Graph((x,), (), (z / build.sum_of(z, 1, keepdim=True),)), is_native)
    text = kernel_code(kernel).text
    (row,) = re.findall(r"(%\w+) = alloca", text)
    addresses = re.findall(rf"(%\w+) = getelementptr inbounds \w+, ptr {row},", text)
    found = {re.search(rf"ptr {address}, align (\d+)", text)[1] for address in addresses}
    assert found == {str(align)}
