"""The same distributed training on the lazy device and on the CPU, for tests that compare them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ltc.debug import metrics
from ltc.training_loop import steps

DEVICE = "ltc:0"
STEPS = 10
# float32, 10 steps: the same collectives and formulas; what differs is the order of some sums
TOLERANCE = 1e-6


def network(norm: Callable | None = None) -> nn.Module:
    """The same weights on every rank."""
    torch.manual_seed(0)
    between = [norm(16)] if norm else []
    return nn.Sequential(nn.Linear(8, 16), *between, nn.ReLU(), nn.Linear(16, 4))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and labels; each rank has its own."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(6, 8, generator=generator), torch.randint(0, 4, (6,), generator=generator)


def momentum(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3)


def train(
    model: nn.Module, rank: int, device: str, count: int = STEPS, optimizer: Callable = momentum
) -> list[torch.Tensor]:
    """Train in place; the parameters afterwards, whole and on the CPU."""
    chosen = optimizer(model.parameters())
    for step in range(count):
        run_step(model, chosen, batch(step, rank), device)
    return whole(model.parameters())


def run_step(model: nn.Module, optimizer, pair, device: str) -> torch.Tensor:
    images, labels = (tensor.to(device) for tensor in pair)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    if device != "cpu":
        steps.mark()
    return loss


def whole(tensors) -> list[torch.Tensor]:
    """Copies on the CPU; of sharded tensors all of them."""
    full = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]
    return [t.detach().cpu().clone() for t in full]


def assert_trains_like_the_cpu(
    wrap: Callable, rank: int, make: Callable = network, optimizer: Callable = momentum
) -> None:
    """`wrap(model, device type)` trained on both devices has the same weights, to 1e-6.

    The model is on its device when it is wrapped.
    """
    found = {
        device: train(
            wrap(make().to(device), device.partition(":")[0]), rank, device, optimizer=optimizer
        )
        for device in ("cpu", DEVICE)
    }
    worst = max((a - b).abs().max().item() for a, b in zip(found["cpu"], found[DEVICE]))
    assert worst <= TOLERANCE, worst
    before = whole(make().parameters())
    assert any((a - b).abs().max() > 1e-2 for a, b in zip(before, found[DEVICE])), "nothing learnt"


def sums_of_two_groups(rank: int) -> list[float]:
    """What a process started by ltc gets from two process groups, one after the other."""
    found = []
    for backend in ("ltc", "gloo"):
        dist.init_process_group(backend, init_method="ltc://")
        x = torch.full((2,), dist.get_rank() + 1.0, device=DEVICE)
        dist.all_reduce(x)
        found.append(x.sum().item())
        dist.destroy_process_group()
    return found


def compiles_in(count: int, model: nn.Module, rank: int, optimizer: Callable = momentum) -> int:
    """How many programs `count` steps of training on the lazy device compile."""
    steps.mark(wait=True)
    with metrics.counted() as grown:
        train(model, rank, DEVICE, count, optimizer)
    return grown.get("UncachedCompile", 0)
