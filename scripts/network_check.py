"""Whether ltc trains a network as rightly as eager PyTorch does, judged by float64.

One training step gives a loss, outputs, a gradient for each parameter and new buffers. Each of
them is computed three times: by eager PyTorch in float64, which counts as the truth; by eager
PyTorch in float32; and by ltc in float32. Distances are Euclidean norms of differences. ltc is
right where its distance from the truth is at most ten times eager's own distance, or 1e-5 of the
truth's norm.

A relu, a maximum or a choice of experts can make a network jump: where a value lies closer to the
border than rounding is exact, two right programs fall on different sides. Whether such a border is
near is asked of float64. Every parameter and every floating input is moved by 2**-20 of itself, 16
units in the last place of float32, up or down at random, and then by as much the other way. Where
the network is smooth, the mean of the two gradients is the gradient itself, up to terms of 2**-40.
By how much it misses is the height of the borders in between. A quantity passes "near a jump"
where its distance exceeds the bound by no more than that height, the largest of some directions.

Networks are made without dropout: the CPU and ltc draw different numbers for one seed, by design.
The truth is computed twice with different seeds; a network that draws all the same is an error.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import ltc.core.lazy_model as ltm
from ltc.debug import metrics

TIMES_EAGER, RELATIVE = 10, 1e-5
STEP, DIRECTIONS = 2.0**-20, 2


@dataclass(frozen=True)
class Network:
    """What is to be trained.

    model      makes it, with the weights that the seed gives
    batch      makes its input: tensors in a dictionary
    loss_of    (loss, outputs) of a model and a batch; outputs may be nested
    optimizer  of an iterable of parameters
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], dict]
    loss_of: Callable[[nn.Module, dict], tuple]
    optimizer: Callable


@dataclass(frozen=True)
class Compared:
    """One quantity: its norm, how far eager and ltc are from it, and the height of jumps nearby."""

    name: str
    norm: float
    eager: float
    ltc: float
    jump: float

    @property
    def bound(self) -> float:
        return max(TIMES_EAGER * self.eager, RELATIVE * self.norm)

    @property
    def share(self) -> float:
        """Of what is allowed without a jump; one or less passes."""
        return self.ltc / self.bound if self.bound else float(self.ltc > 0)

    @property
    def is_right(self) -> bool:
        return self.ltc <= self.bound + self.jump  # False for NaN


class InFloat64(TorchFunctionMode):
    """Networks that ask for float32 in so many words get float64: the truth is not rounded."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        function = WIDER.get(getattr(function, "__name__", ""), function)
        args = [wider(argument) for argument in args]
        return function(*args, **{n: wider(value) for n, value in (kwargs or {}).items()})


def products_of_groups(rows, matrices, *, offs, **defaults):
    """torch's grouped_mm, which has no kernel for float64: group i of the rows ends at offs[i]."""
    *groups, unused = rows.tensor_split(offs.tolist())
    products = [group @ matrix for group, matrix in zip(groups, matrices)]
    return torch.cat([*products, unused.new_zeros(len(unused), matrices.shape[2])])


WIDER = {"float": torch.Tensor.double, "_grouped_mm": products_of_groups}


def wider(argument):
    return torch.float64 if argument is torch.float32 else argument


def in_float64(compute: Callable, *arguments):
    torch.set_default_dtype(torch.float64)
    try:
        with InFloat64():
            return compute(*arguments)
    finally:
        torch.set_default_dtype(torch.float32)


def widened(batch: dict) -> dict:
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, batch
    )


def moved(model: nn.Module, batch: dict, signs_seed: int, step: float) -> tuple[nn.Module, dict]:
    """A copy in which every parameter and floating input is larger or smaller by that share."""
    generator = torch.Generator().manual_seed(signs_seed)

    def move(value):
        if not value.is_floating_point():
            return value
        signs = torch.randint(0, 2, value.shape, generator=generator) * 2 - 1
        return value * (1 + step * signs)

    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(move(parameter))
    return model, pytree.tree_map_only(torch.Tensor, move, batch)


def backward(model: nn.Module, batch: dict, loss_of: Callable) -> dict[str, torch.Tensor]:
    """Runs forward and backward; returns loss and outputs, and leaves the gradients."""
    loss, outputs = loss_of(model, batch)
    loss.backward()
    tensors = [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor)]
    named = {f"output {i}": t.detach() for i, t in enumerate(tensors) if t.is_floating_point()}
    return {"loss": loss.detach(), **named}


def quantities(model: nn.Module, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All that is compared after a step, on the CPU and in float64."""
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    buffers = {n: b for n, b in model.named_buffers() if b.is_floating_point()}
    found = named | gradients | buffers
    return {n: t.detach().to("cpu", torch.float64, copy=True) for n, t in found.items()}


def first_step(model: nn.Module, batch: dict, loss_of: Callable, seed: int = 0) -> dict:
    torch.manual_seed(seed)
    return quantities(model, backward(model, batch, loss_of))


def train(model: nn.Module, batch: dict, network: Network, steps: int, mark: Callable) -> tuple:
    """(quantities of the first step, loss of every step, processor seconds of the first step)."""
    optimizer = network.optimizer(model.parameters())
    losses, start = [], time.process_time()
    for step in range(steps):
        torch.manual_seed(0)
        optimizer.zero_grad()
        named = backward(model, batch, network.loss_of)
        optimizer.step()
        mark()
        losses.append(named["loss"])
        if step == 0:
            ltm.wait_device_ops()
            seconds = time.process_time() - start
            first = quantities(model, named)
    return first, [loss.cpu().double() for loss in losses], seconds


@dataclass(frozen=True)
class Checked:
    """What became of a network."""

    parameters: int
    compared: list[Compared]
    losses: list[Compared]  # of the steps after the first one
    programs: int
    on_torch: list[str]
    seconds: float  # of processors, for the first step


def check(network: Network, steps: int = 3) -> Checked:
    """Train it in all three ways, and compare."""
    torch.manual_seed(0)
    model, batch = network.model().train(), network.batch()
    wide, wide_batch = copy.deepcopy(model).double(), widened(batch)
    start = copy.deepcopy(wide)
    on_ltc = copy.deepcopy(model).to("ltc")
    lazy_batch = pytree.tree_map_only(torch.Tensor, lambda t: t.to("ltc"), batch)

    truth, true_losses, _ = in_float64(train, wide, wide_batch, network, steps, nothing)
    eager, eager_losses, _ = train(model, batch, network, steps, nothing)
    ltm.mark_step(wait=True)
    with metrics.counted() as grown:
        lazy, lazy_losses, seconds = train(on_ltc, lazy_batch, network, steps, ltm.mark_step)
        ltm.wait_device_ops()
    if truth.keys() != lazy.keys():
        raise ValueError(f"ltc gives {sorted(truth.keys() ^ lazy.keys())} where float64 does not")
    jumps = in_float64(heights, start, wide_batch, network.loss_of, truth)

    return Checked(
        parameters=sum(p.numel() for p in model.parameters()),
        compared=[compare(n, truth[n], eager[n], lazy[n], jumps[n]) for n in truth],
        losses=[
            compare(f"loss of step {i + 1}", *values, torch.zeros(()))
            for i, values in enumerate(zip(true_losses, eager_losses, lazy_losses))
            if i
        ],
        programs=grown["UncachedCompile"],
        on_torch=sorted(
            name for name in grown if name.startswith(("aten::", "torchvision::", "extern."))
        ),
        seconds=seconds,
    )


def nothing() -> None:
    """Eager PyTorch has run already: there is no step to end."""


def compare(name: str, truth, eager, lazy, jump) -> Compared:
    norms = [truth.norm(), (eager - truth).norm(), (lazy - truth).norm(), jump.norm()]
    return Compared(name, *(norm.item() for norm in norms))


def heights(model: nn.Module, batch: dict, loss_of: Callable, truth: dict) -> dict:
    """How far each quantity jumps near here: the largest of some directions, as vectors."""
    again = first_step(copy.deepcopy(model), batch, loss_of, seed=1)
    drawn = [name for name in truth if not torch.equal(truth[name], again[name])]
    if drawn:
        raise ValueError(f"{drawn[0]} depends on the seed: switch off what draws in the network")
    found = {name: torch.zeros(()) for name in truth}
    for seed in range(DIRECTIONS):
        sides = [first_step(*moved(model, batch, seed, h), loss_of) for h in (STEP, -STEP)]
        for name, value in truth.items():
            miss = (sides[0][name] + sides[1][name]) / 2 - value
            found[name] = max(found[name], miss, key=torch.linalg.vector_norm)
    return found
