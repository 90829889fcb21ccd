"""Complex tensors: gradients are those of PyTorch, which conjugates, whatever runs the step."""

import pytest
import torch
import torch.nn.functional as F

import ltc.core.lazy_model as ltm
from ltc import config

TIERS = pytest.mark.parametrize("tier", ["native", "op_by_op", "auto"])


def gradients(device: str, compute, *values: torch.Tensor) -> list[torch.Tensor]:
    """Of |compute(*values)|, in the fourth of equal steps: then every tier has had its turn."""
    tensors = [value.to(device).requires_grad_() for value in values]
    for _ in range(4):
        for tensor in tensors:
            tensor.grad = None
        compute(*tensors).abs().sum().backward()
        if device == "ltc":
            ltm.mark_step(wait=True)
    return [tensor.grad.cpu() for tensor in tensors]


def assert_equal_to_cpu(tier, compute, *values):
    with config.override(LTC_TIER=tier):
        found = gradients("ltc", compute, *values)
    for mine, expected in zip(found, gradients("cpu", compute, *values), strict=True):
        torch.testing.assert_close(mine, expected)


@TIERS
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("rows", [(2,), (2, 3), ()], ids=str)
def test_gradients_of_a_linear_layer_are_conjugated(tier, dtype, rows):
    torch.manual_seed(0)
    shapes = (*rows, 5), (4, 5), (4,)
    values = [torch.randn(shape, dtype=dtype) for shape in shapes]
    assert_equal_to_cpu(tier, F.linear, *values)


@TIERS
def test_gradients_of_a_linear_layer_in_parts_are_conjugated(tier):
    torch.manual_seed(0)
    x, weight = torch.randn(3, 5, dtype=torch.complex128), torch.randn(4, 5, dtype=torch.complex128)

    def mapped(x, weight):
        return torch.func.vmap(lambda v: F.linear(v, weight))(x)

    assert_equal_to_cpu(tier, mapped, x, weight)


@TIERS
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize(
    "compute",
    [
        lambda z: z * (1 + 2j),
        lambda z: z / (1 + 2j),
        lambda z: (1 + 1j) / z,
        lambda z: z * torch.tensor(2j, dtype=torch.complex128),
        lambda z: z * 2.5 / (1 - 1j) + 3 * z * (2 + 1j),  # words of one and of two, in turns
    ],
    ids=["times", "over", "under", "tensor", "several"],
)
def test_complex_numbers_among_the_operands(tier, dtype, compute):
    assert_equal_to_cpu(tier, compute, torch.tensor([1 + 2j, 3 - 1j], dtype=dtype))
