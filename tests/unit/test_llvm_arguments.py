"""What a kernel's text leaves open: batch sizes, slice offsets and counts compile nothing new."""

import math

import pytest
import torch

from ltc.backends.eager import EagerBackend
from ltc.backends.llvm.backend import LlvmBackend
from ltc.debug import metrics
from ltc.ir import build, ops
from ltc.ir.graph import Graph
from ltc.ir.node import constant, make


def given(*shape, index=0, dtype=torch.float32):
    return make(ops.INPUT, index=index, dtype=dtype, shape=shape)


def compiled_by(graph) -> int:
    before = metrics.counter_value("llvm.compiled") or 0
    LlvmBackend().compile(graph, 0, frozenset())
    return (metrics.counter_value("llvm.compiled") or 0) - before


def assert_like_the_reference(graph, *buffers, atol=1e-5):
    mine, theirs = (
        backend().compile(graph, 0, frozenset()).launch(list(buffers), [])
        for backend in (LlvmBackend, EagerBackend)
    )
    for x, y in zip(mine, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=atol)


def loss_and_gradients(batch: int, width: int = 70) -> Graph:
    """A bias, an activation, a norm of rows, their mean, and sums over the batch."""
    x, bias = given(batch, width), given(width, index=1)
    y = build.maximum(x + bias, constant(0.0, torch.float32))
    mean = build.mean_of(y, 1, True)
    distance = y - mean
    normal = distance / build.sqrt(build.mean_of(distance * distance, 1, True) + 1e-5)
    loss = build.mean_of(normal * normal * y)
    return Graph((x, bias), (), (normal, loss, build.sum_of(normal * x, 0), build.sum_of(y)))


def test_other_batch_sizes_use_the_kernels_of_the_first():
    first = compiled_by(loss_and_gradients(21, width=71))
    others = sum(compiled_by(loss_and_gradients(batch, width=71)) for batch in range(22, 41))
    assert first > 0
    assert others == 0


@pytest.mark.parametrize("batch", [2, 3, 15, 16, 17, 40, 63, 64, 65, 300, 1100, 4099])
def test_every_batch_size_is_computed_as_the_reference_does(batch):
    generator = torch.Generator().manual_seed(batch)
    x, bias = (torch.randn(shape, generator=generator) for shape in [(batch, 70), (70,)])
    # What a sum of `batch` numbers may differ by when they are added in another order.
    assert_like_the_reference(loss_and_gradients(batch), x, bias, atol=1e-6 * max(10, batch))


def slice_of(x, start: int, length: int, dim: int):
    starts = tuple(start * (d == dim) for d in range(len(x.shape)))
    limits = tuple(start + length if d == dim else n for d, n in enumerate(x.shape))
    return make(ops.SLICE, x, starts=starts, limits=limits, steps=(1,) * len(limits))


@pytest.mark.parametrize("dim", [0, 1])
def test_slices_at_other_offsets_use_one_kernel(dim):
    x, kept = given(60, 90), [5, 90] if dim == 0 else [60, 5]
    y = given(*kept, index=1)

    def sliced(start):
        return Graph((x, y), (), (build.exp(slice_of(x, start, 5, dim)) * y,))

    assert compiled_by(sliced(1)) == 1
    assert sum(compiled_by(sliced(start)) for start in range(2, 22)) == 0
    generator = torch.Generator().manual_seed(0)
    buffers = [torch.randn(n.shape, generator=generator) for n in (x, y)]
    for start in (0, 1, 7, 55):
        assert_like_the_reference(sliced(start), *buffers)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_part_written_at_another_offset_uses_the_same_kernel(dim):
    x, part = given(40, 50), given(*((3, 50) if dim == 0 else (40, 3)), index=1)

    def written(start):
        starts = tuple(start * (d == dim) for d in range(2))
        return Graph((x, part), (), (make(ops.INSERT, x, part, starts=starts, steps=(1, 1)),))

    compiled_by(written(1))
    assert sum(compiled_by(written(start)) for start in range(2, 22)) == 0
    generator = torch.Generator().manual_seed(0)
    buffers = [torch.randn(n.shape, generator=generator) for n in (x, part)]
    for start in (0, 1, 9, 37):
        assert_like_the_reference(written(start), *buffers)


def test_a_stencil_reads_its_neighbours_wherever_it_is():
    x = given(4, 300)

    def stencil(start):
        left, here, right = (slice_of(x, start + k, 100, 1) for k in range(3))
        return Graph((x,), (), (left - 2.0 * here + right,))

    compiled_by(stencil(0))
    assert compiled_by(stencil(91)) == 0
    buffer = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    assert_like_the_reference(stencil(0), buffer)
    assert_like_the_reference(stencil(198), buffer)


def test_constants_of_another_size_are_arguments():
    x = given(50)
    compiled_by(Graph((x,), (), (x / 33.0 + 7.5,)))
    assert compiled_by(Graph((x,), (), (x / 35.0 + 9.25,))) == 0
    buffer = torch.randn(50, generator=torch.Generator().manual_seed(0))
    for number in (3.1, -math.pi, 1e-30, 1e30):
        assert_like_the_reference(Graph((x,), (), (x * number,)), buffer)
