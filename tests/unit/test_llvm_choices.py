"""Many parts joined: at each point only the part that it lies in is read."""

import pytest
import torch

from ltc.backends.eager import EagerBackend
from ltc.backends.llvm.backend import LlvmBackend
from ltc.ir import build, ops
from ltc.ir.graph import Graph
from ltc.ir.node import make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("count", [2, 9, 30])
def test_many_parts_joined_along_any_dimension(count, dim, dtype):
    torch.manual_seed(0)
    shapes = [[3, 5, 37] for _ in range(count)]
    for k, shape in enumerate(shapes):
        shape[dim] = 1 + k % 4
    parts = [
        make(ops.INPUT, index=k, dtype=dtype, shape=tuple(shape)) for k, shape in enumerate(shapes)
    ]
    joined = build.concat(parts, dim)
    outputs = (joined, build.flip(joined, [dim]))
    if dtype.is_floating_point:
        outputs += (build.sum_of(make(ops.EXP, joined), (2,)),)
    graph = Graph(tuple(parts), (), outputs)
    operands = [(torch.randn(shape) * 2).to(dtype) for shape in shapes]
    ours, expected = (
        backend.compile(graph, 0, frozenset()).launch([x.clone() for x in operands], [])
        for backend in (LlvmBackend(), EagerBackend())
    )
    for a, b in zip(ours, expected):
        torch.testing.assert_close(a, b, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("row", [2, 16, 37, 200])
def test_a_function_made_for_one_part_is_not_kept_for_the_others(row):
    """`tanh` is chosen for all rows but the first, and its derivative is made for each.

    A row of it that was kept for a later pass began in the first row as memory that nobody wrote.
    """
    torch.manual_seed(0)
    numbers = torch.randn(2, 5, row, dtype=torch.float64)

    def gradient(device: str) -> torch.Tensor:
        x, weight = numbers.to(device).unbind()
        x.requires_grad_()
        y = x.clone()
        y.mul_(x.tanh())
        y[0].zero_()
        (torch.nn.functional.rms_norm(y, (row,), eps=1e-6) * weight).sum().backward()
        return x.grad.cpu()

    torch.testing.assert_close(gradient("ltc"), gradient("cpu"))
