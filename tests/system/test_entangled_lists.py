"""Calls that write to lists in which one memory lies at several places: one place after the other."""

import pytest
import torch

pytestmark = pytest.mark.compared


def two(device: str) -> list[torch.Tensor]:
    return [torch.arange(4.0).to(device) + 1, torch.linspace(-1, 2, 4).to(device)]


def test_a_tensor_that_is_written_to_twice(device):
    x, y = two(device)
    torch._foreach_add_([x, x, y], [y, x, x])
    torch._foreach_mul_([x, y, x], [2.0, 3.0, 0.5])
    torch._foreach_sub_([y, y], 1.5)
    return x, y


def test_a_place_that_reads_what_an_earlier_one_writes(device):
    x, y = two(device)
    torch._foreach_add_([x, y], [y, x])
    torch._foreach_addcmul_([y, x], [x, y], [y, y], [0.5, 2.0])
    torch._foreach_lerp_([x, y], [y, x], 0.25)
    return x, y


def test_a_view_beside_its_base(device):
    x, y = two(device)
    torch._foreach_add_([x, x[1:3]], [y, y[:2]])
    torch._foreach_div_([y[::2], y], [x[:2], x])
    return x, y


def test_numbers_that_lie_in_a_tensor(device):
    x, y = two(device)
    torch._foreach_addcmul_([x, x], [y, x], [y, y], torch.tensor([0.5, 3.0]).to(device))
    return x


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_parameters_in_one_memory(device, kind):
    """On a device of PyTorch's, each operation of an optimizer takes all parameters in turn."""
    x, y = two(device)
    first, second = torch.nn.Parameter(x), torch.nn.Parameter(y)
    second.data = first.data
    optimizer = kind([first, second], lr=0.1, foreach=True)
    for _ in range(3):
        optimizer.zero_grad()
        (first * first + second * y).sum().backward()
        optimizer.step()
    return first.detach(), second.detach()
