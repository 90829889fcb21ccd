"""Random programs of views, writes and reads, while values go to Python and come back: as on the CPU."""

import copy
import pickle
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

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


def in_a_thread(call: Callable, *args) -> torch.Tensor:
    """What a call gives in a thread of its own, which has ended by then."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, *args).result()


def data_set(x: torch.Tensor) -> torch.Tensor:
    held = torch.nn.Parameter(torch.zeros_like(x))
    held.data = x
    return held.data


# Ways to another tensor, which may share memory with its original, or is written to elsewhere. Copies of what is
# not contiguous would have its strides on the CPU alone.
MOVES: list[Callable] = [
    lambda x: copy.deepcopy(x.contiguous()),
    lambda x: pickle.loads(pickle.dumps(x.contiguous())),
    lambda x: x.new_empty(0).set_(x),
    data_set,
    lambda x: in_a_thread(x.add_, 1.0),
    lambda x: in_a_thread(lambda: x[..., :1] if x.dim() else x.view(1)),
    lambda x: in_a_thread(lambda: x * 0.5),
]


def run(seed: int, device: str, moves: float = 0.0) -> list[torch.Tensor]:
    """Return the numbers that were read, and the tensors that there are at the end.

    Args:
        moves: how many of the steps are one of MOVES; by how much each step changes versions is read, too.
    """
    draw, read = random.Random(seed), []
    torch.manual_seed(seed)
    there = [torch.randn(shape, dtype=torch.float64).to(device) for shape in SHAPES]
    for _ in range(STEPS):
        x, y, way = draw.choice(there), draw.choice(there), draw.random()
        versions = torch.tensor([one._version for one in there])
        if moves and draw.random() < moves:
            there.append(draw.choice(MOVES)(x))
        elif way < 0.35 and x.dim():
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
        if moves:
            read.append(torch.tensor([one._version for one in there[: len(versions)]]) - versions)
        if len(there) > MOST:
            del there[draw.randrange(len(there))]
    return read + [one.detach().cpu() for one in there]


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_random_views_are_the_cpus(first):
    for seed in range(first, first + 10):
        for ours, theirs in zip(run(seed, "ltc"), run(seed, "cpu"), strict=True):
            torch.testing.assert_close(ours, theirs, msg=lambda text: f"program {seed}: {text}")


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_copies_threads_and_other_storages_among_random_views_are_the_cpus(first):
    for seed in range(first, first + 10):
        ours, theirs = run(seed, "ltc", 0.25), run(seed, "cpu", 0.25)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, msg=lambda text: f"program {seed}: {text}")


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
