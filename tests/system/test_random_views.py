"""Random programs of views, writes and reads, while values go to Python and come back: as on the CPU."""

import random
from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ltc.core.lazy_model as ltm
from ltc.device.torch_device import storage_of

STEPS, MOST = 60, 14
SHAPES = (4, 6), (3, 4), (2, 3, 4), (6,), (4, 4)


def narrowed(x: torch.Tensor, dim: int, draw: random.Random) -> torch.Tensor:
    first = draw.randrange(x.size(dim))
    return x.narrow(dim, first, draw.randrange(1, x.size(dim) - first + 1))


VIEWS: list[Callable] = [
    lambda x, dim, draw: x.select(dim, draw.randrange(x.size(dim))),
    narrowed,
    lambda x, dim, draw: x.transpose(0, dim),
    lambda x, dim, draw: x.reshape(-1),
    lambda x, dim, draw: x.reshape(-1, x.size(-1)),
    lambda x, dim, draw: x.flatten(0, dim),
    lambda x, dim, draw: x.unsqueeze(dim),
    lambda x, dim, draw: draw.choice(x.split(2, dim)),
    lambda x, dim, draw: x.diagonal() if x.dim() > 1 else x,
    lambda x, dim, draw: x.contiguous(),
    lambda x, dim, draw: x.permute(*reversed(range(x.dim()))),
    lambda x, dim, draw: x.detach(),
    lambda x, dim, draw: x.data,
]


def last_half_first(x: torch.Tensor) -> None:
    x[0] = x[-1] * 0.5


WRITES: list[Callable] = [
    lambda x, y: x.add_(1.0),
    lambda x, y: x.mul_(0.9),
    lambda x, y: x.zero_(),
    lambda x, y: x.fill_(2.0),
    lambda x, y: x.sub_(y.sum()),
    lambda x, y: x.add_(x.clone()),
    lambda x, y: x.clamp_(-3, 3),
    lambda x, y: torch._foreach_mul_([x], 0.5),
    lambda x, y: last_half_first(x) if x.dim() else None,
    lambda x, y: x.copy_(y.reshape(x.shape).clone()) if x.numel() == y.numel() else None,
]


def leave_the_core(x: torch.Tensor, draw: random.Random) -> None:
    """Nothing that a program sees: Python asks for a value, a step is marked, Python draws."""
    leave = draw.randrange(3)
    if leave == 0:
        _ = storage_of(x).lazy.value  # taken from the core, where it has it
    elif leave == 1:
        ltm.mark_step()
    else:
        torch.randn_like(x)


def run(seed: int, device: str) -> list[torch.Tensor]:
    """Return the numbers that were read, and the tensors that there are at the end."""
    draw, read = random.Random(seed), []
    torch.manual_seed(seed)
    there = [torch.randn(shape, dtype=torch.float64).to(device) for shape in SHAPES]
    for _ in range(STEPS):
        x, y, way = draw.choice(there), draw.choice(there), draw.random()
        if way < 0.35 and x.dim():
            made = draw.choice(VIEWS)(x, draw.randrange(x.dim()), draw)
            there += [made] if made.dim() < 5 else []
        elif way < 0.7:
            draw.choice(WRITES)(x, y)
        elif way < 0.78:
            there.append((x * 1.5 + y.sum()).contiguous())
        elif way < 0.84:
            read.append(torch.tensor(x.sum().item()))
        elif device != "cpu":
            leave_the_core(x, random.Random(way))
        if len(there) > MOST:
            del there[draw.randrange(len(there))]
    return read + [one.detach().cpu() for one in there]


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_random_views_are_the_cpus(first):
    for seed in range(first, first + 10):
        for ours, theirs in zip(run(seed, "ltc"), run(seed, "cpu"), strict=True):
            torch.testing.assert_close(ours, theirs, msg=lambda text: f"program {seed}: {text}")


class Passing(TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, Passing])
@pytest.mark.parametrize(
    "shaped",
    [
        lambda x: x.reshape(-1),
        lambda x: x.flatten(),
        lambda x: x.reshape_as(x.new_zeros(12)),
        lambda x: x.contiguous(),
        lambda x: x.ravel(),
    ],
)
def test_a_view_in_another_order_is_copied_in_each_mode(mode, shaped):
    with mode():
        x = torch.arange(12.0, device="ltc").view(3, 4) * 1
        copied = shaped(x.t())
        copied.add_(100)
        assert x.sum().item() == 66 and copied.sum().item() == 1266
