"""The table of programs, and what they are made of: drawn tensors, modules, whole cases."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

FEATURES: dict[str, dict[str, Callable]] = {}


def feature(group: str) -> Callable:
    """Adds a program to a group, under its own name."""

    def add(program: Callable) -> Callable:
        FEATURES.setdefault(group, {})[program.__name__.strip("_").replace("_", " ")] = program
        return program

    return add


def table(group: str, **programs: Callable) -> None:
    """Adds programs that are one expression each."""
    for name, program in programs.items():
        FEATURES.setdefault(group, {})[name.strip("_").replace("_", " ")] = program


def drawn(device, *shape, seed: int = 0) -> torch.Tensor:
    """Normal numbers, the same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def integers(device, high: int, *shape, seed: int = 0) -> torch.Tensor:
    """Integers below `high`, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(high, shape, generator=generator).to(device)


def positive(device, n: int) -> torch.Tensor:
    """A symmetric matrix with positive eigenvalues."""
    a = drawn(device, n, n)
    return a @ a.mT + n * torch.eye(n, device=device)


def made(module: Callable, device) -> nn.Module:
    """The module with the same weights on every device."""
    torch.manual_seed(0)
    return module().to(device)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def gradients(function: Callable, *inputs: torch.Tensor) -> tuple:
    """The value, and the gradient of its sum with respect to each input."""
    inputs = tuple(x.detach().requires_grad_() for x in inputs)
    value = function(*inputs)
    return (value.detach(), *torch.autograd.grad(value.sum(), inputs))


def trained(module: nn.Module, optimizer: torch.optim.Optimizer, device, schedule=None) -> tuple:
    """Losses of four steps and the parameters after them."""
    losses = []
    for step in range(4):
        x, y = drawn(device, 8, 4, seed=step), integers(device, 3, 8, seed=step)

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(module(x), y)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).detach())
        if schedule is not None:
            schedule.step(*([losses[-1].item()] if takes_metrics(schedule) else []))
    return losses, list(module.parameters())


def takes_metrics(schedule) -> bool:
    return isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)


def optimizer_case(name: str, **options) -> Callable:
    def run(device):
        module = made(perceptron, device)
        parameters = list(module.parameters())
        if name == "Muon":  # of matrices alone
            parameters = [p for p in parameters if p.dim() == 2]
        return trained(module, getattr(torch.optim, name)(parameters, **options), device)

    return run


def schedule_case(name: str, **options) -> Callable:
    def run(device):
        module = made(perceptron, device)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        schedule = getattr(torch.optim.lr_scheduler, name)(optimizer, **options)
        return trained(module, optimizer, device, schedule), optimizer.param_groups[0]["lr"]

    return run


def module_case(module: Callable, *shapes) -> Callable:
    """A module's outputs, and the gradients of its inputs and parameters."""

    def run(device):
        one = made(module, device)
        inputs = [drawn(device, *shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
        outputs = pytree.tree_leaves(one(*inputs))
        sum(o.square().sum() for o in outputs).backward()
        return outputs, [x.grad for x in inputs], [p.grad for p in one.parameters()]

    return run


def loss_case(name: str, *inputs: Callable, **options) -> Callable:
    """The loss of those inputs, with the gradient of the first."""

    def run(device):
        first, *rest = (make(device) for make in inputs)
        loss = getattr(nn, name)(**options)
        return gradients(lambda x: loss(x, *rest), first)

    return run


def distribution_case(name: str, *arguments, **options) -> Callable:
    """Density, entropy and moments of a distribution; samples by their shape."""

    def run(device):
        def there(value):
            return torch.tensor(value, device=device) if isinstance(value, (float, list)) else value

        one = getattr(torch.distributions, name)(
            *map(there, arguments), **{n: there(v) for n, v in options.items()}
        )
        torch.manual_seed(0)
        sample = one.sample((5,))
        told = [sample.shape, sample.device.type == torch.device(device).type]
        values = one.support.check(sample).all()
        fixed = one.sample() * 0 + one.mean if name not in CLASSES else torch.zeros_like(sample[0])
        for get in (lambda: one.log_prob(fixed), one.entropy, lambda: one.variance):
            try:
                told.append(get())
            except NotImplementedError:
                told.append("none")
        return [*told, values]

    return run


CLASSES = ("Categorical", "OneHotCategorical")
