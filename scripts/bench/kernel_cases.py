"""Single layers and formulas for `bench.py --kernels`: built and run like the workloads.

Matrix products and convolutions have a bench of their own: kernel_bench.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from workloads import Way

ROWS, COLUMNS = 4096, 1024


def _forward(function: Callable, *shapes: tuple[int, ...]) -> Callable:
    """A workload that computes function(*tensors) and nothing else."""

    def build(device, way: Way = Way()) -> Callable:
        tensors = [torch.randn(shape).to(device) for shape in shapes]
        run = way.compile_model(function)

        def step():
            with torch.no_grad():
                result = run(*tensors)
            way.mark()
            return result.flatten()[0]

        return step

    return build


def _with_gradient(function: Callable, *shapes: tuple[int, ...]) -> Callable:
    """A workload that computes function(*tensors) and the gradients of all its operands."""

    def build(device, way: Way = Way()) -> Callable:
        tensors = [torch.randn(shape).to(device).requires_grad_() for shape in shapes]
        with torch.no_grad():
            flowing = torch.randn_like(function(*tensors))
        run = way.compile_model(function)
        kept: list = []  # results live as long as a step of training keeps them

        def step():
            gradients = torch.autograd.grad(run(*tensors), tensors, flowing)
            kept[:] = gradients
            way.mark()
            return gradients[0].flatten()[0]

        return step

    return build


def _cross_entropy(device, way: Way = Way()) -> Callable:
    logits = torch.randn(ROWS, COLUMNS).to(device).requires_grad_()
    targets = torch.randint(COLUMNS, (ROWS,)).to(device)
    run = way.compile_model(F.cross_entropy)
    kept: list = []

    def step():
        loss = run(logits, targets)
        kept[:] = torch.autograd.grad(loss, [logits])
        way.mark()
        return loss.detach()

    return step


def _layer_norm(x, weight, bias):
    return F.layer_norm(x, weight.shape, weight, bias)


def _norm_of_columns(x):
    return F.layer_norm(x.t(), (ROWS,)).contiguous()


CASES = {
    "softmax": _forward(lambda x: x.softmax(-1), (ROWS, COLUMNS)),
    "log_softmax": _forward(lambda x: x.log_softmax(-1), (ROWS, COLUMNS)),
    "layer norm": _forward(_layer_norm, (ROWS, COLUMNS), (COLUMNS,), (COLUMNS,)),
    "softmax of columns": _forward(lambda x: x.softmax(0), (ROWS, COLUMNS)),
    "softmax of columns, turned": _forward(
        lambda x: x.t().softmax(-1).contiguous(), (ROWS, COLUMNS)
    ),
    "layer norm of columns, turned": _forward(_norm_of_columns, (ROWS, COLUMNS)),
    "layer norm, gradients": _with_gradient(_layer_norm, (ROWS, COLUMNS), (COLUMNS,), (COLUMNS,)),
    "cross entropy, gradient": _cross_entropy,
    "gelu, gradient": _with_gradient(lambda x: F.gelu(x, approximate="tanh"), (ROWS, COLUMNS)),
    "relu(x * w + b)": _forward(lambda x, w, b: (x * w + b).relu(), *[(ROWS, COLUMNS)] * 3),
    "dropout": _forward(lambda x: F.dropout(x, 0.1), (ROWS, COLUMNS)),
    "sum": _forward(lambda x: x.sum(), (ROWS, COLUMNS)),
    "sum of rows": _forward(lambda x: x.sum(1), (ROWS, COLUMNS)),
    "sum of columns": _forward(lambda x: x.sum(0), (ROWS, COLUMNS)),
}
