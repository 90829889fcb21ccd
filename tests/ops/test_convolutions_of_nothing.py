"""Convolutions where an operand or the result has no element: an error exactly where the CPU has one."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.also_native

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
CASES = list(itertools.product((1, 2), (0, 2), (0, 2), (0, 2), (0, 2), (1, 3), (0, 2)))


def outcome(call, device, operands, with_bias):
    """The result and its gradients, or the class of the error."""
    leaves = [x.detach().to(device).requires_grad_() for x in operands]
    try:
        y = call(*leaves) if with_bias else call(*leaves[:2], None)
        y.backward(torch.ones_like(y))
        found = [y.detach(), *[x.grad for x in leaves]]
        return [None if x is None else x.cpu() for x in found]
    except (IndexError, RuntimeError) as error:
        return type(error)


def agree(on_ltc, on_cpu) -> bool:
    if isinstance(on_ltc, type) or isinstance(on_cpu, type):
        return on_ltc is on_cpu
    return all(map(are_same, on_ltc, on_cpu))


def are_same(x, y) -> bool:
    if x is None or y is None:
        return x is y
    return (x.dtype, x.shape) == (y.dtype, y.shape) and x.equal(y)


def has_nothing(transposed, x, weight, padding) -> bool:
    kernel, extent = weight.shape[2], x.shape[2]
    reach = kernel - 1 - 2 * padding
    return extent + (reach if transposed else -reach) <= 0 or 0 in (x.numel(), weight.numel())


def disagreements(rank, transposed, dtype, case):
    """What both devices say of one case, with and without a bias, where that is not the same."""
    groups, batch, inputs, outputs, extent, kernel, padding = case
    x = torch.ones(batch, inputs, extent, *(3,) * (rank - 1), dtype=dtype)
    channels = (inputs, outputs // groups) if transposed else (outputs, inputs // groups)
    weight = torch.ones(*channels, kernel, *(1,) * (rank - 1), dtype=dtype)
    if not has_nothing(transposed, x, weight, padding):
        return
    function = getattr(F, f"conv_transpose{rank}d" if transposed else f"conv{rank}d")

    def call(x, weight, bias):
        return function(x, weight, bias, padding=(padding, *(0,) * (rank - 1)), groups=groups)

    for with_bias in (False, True):
        operands = (x, weight, torch.ones(outputs, dtype=dtype))
        on_cpu = outcome(call, "cpu", operands, with_bias)
        on_ltc = outcome(call, "ltc", operands, with_bias)
        if not agree(on_ltc, on_cpu):
            shapes = f"{tuple(x.shape)}, {tuple(weight.shape)}, {groups=}, {padding=}, {with_bias=}"
            yield f"{shapes}: {on_ltc}, the CPU {on_cpu}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["ordinary", "transposed"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_with_gradients_as_on_the_cpu(rank, transposed, dtype):
    wrong = [text for case in CASES for text in disagreements(rank, transposed, dtype, case)]
    assert not wrong, f"{len(wrong)}, the first: {wrong[0]}"


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_of_operands_too_many_to_ask_the_cpu_about(dtype):
    case = (3, 64, 2, 97)
    x, weight = torch.ones(case, dtype=dtype), torch.ones(64, 16, 3, 1, dtype=dtype)
    assert math.prod(case) * dtype.itemsize > 1 << 16

    def call(x, weight, bias):
        return F.conv_transpose2d(x, weight, bias, padding=(2, 0))

    operands = (x, weight, torch.ones(16, dtype=dtype))
    assert agree(outcome(call, "ltc", operands, True), outcome(call, "cpu", operands, True))
