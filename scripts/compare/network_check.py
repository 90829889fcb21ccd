"""Check that ltc trains a network as rightly as eager PyTorch does, judged by float64.

One training step gives a loss, outputs, a gradient for each parameter and new buffers. Each of them
is computed three times: by eager PyTorch in float64, which counts as the truth; by eager PyTorch in
float32; and by ltc in float32. Distances are Euclidean norms of differences. ltc is right where its
distance from the truth is at most ten times eager's own distance, or 1e-5 of the truth's norm. Of a
zero each order of adding leaves something else, so a running mean counts as large as what it
averages, which its running variance tells, and a bias that has no gradient as its weight.

A relu, a maximum or a choice of experts can make a network jump: where a value lies closer to the
border than rounding is exact, two right programs fall on different sides. Whether such a border is
near is asked of float64. Every parameter and every floating input is moved by 2**-20 of itself, 16
units in the last place of float32, up or down at random, and then by as much the other way. Where
the network is smooth, the mean of the two gradients is the gradient itself, up to terms of 2**-40.
A border that one of the two crosses moves the mean by half of its height. A quantity passes "near a
jump" where its distance exceeds the bound by no more than twice what the mean misses, the largest
of some directions; where a quantity is beyond it, of some more, since one direction may cross
several borders whose jumps partly cancel. The losses of the steps that follow the first one are
judged in the same way.

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
STEPS, MOVE = 3, 2.0**-20
DIRECTIONS, MORE_DIRECTIONS = range(2), range(2, 8)
ZERO = 1e-12  # of a number beside it: less is what float64 leaves of a sum that is 0


@dataclass(frozen=True)
class Network:
    """A network to train.

    Attributes:
        model: Makes it, with the weights that the seed gives.
        batch: Makes its input: tensors in a dictionary.
        loss_of: (loss, outputs) of a model and a batch; outputs may be nested.
        optimizer: Makes the optimizer of an iterable of parameters.
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
        """Return the share of the bound without a jump; one or less passes."""
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


def moved(model: nn.Module, batch: dict, signs_seed: int, share: float) -> tuple[nn.Module, dict]:
    """A copy in which every parameter and floating input is larger or smaller by that share."""
    generator = torch.Generator().manual_seed(signs_seed)

    def move(value):
        if not value.is_floating_point():
            return value
        signs = torch.randint(0, 2, value.shape, generator=generator) * 2 - 1
        return value * (1 + share * signs)

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


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.float64, copy=True)


def quantities(model: nn.Module, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All that is compared after a step, on the CPU and in float64."""
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    buffers = {n: b for n, b in model.named_buffers() if b.is_floating_point()}
    return {name: on_host(tensor) for name, tensor in (named | gradients | buffers).items()}


def train(model: nn.Module, batch: dict, network: Network, mark: Callable, seed: int = 0) -> tuple:
    """(quantities of the first step and losses of the others, processor seconds of the first)."""
    optimizer = network.optimizer(model.parameters())
    losses, start = {}, time.process_time()
    for step in range(STEPS):
        torch.manual_seed(seed)
        optimizer.zero_grad()
        named = backward(model, batch, network.loss_of)
        optimizer.step()
        mark()
        if step == 0:
            ltm.wait_device_ops()
            seconds = time.process_time() - start
            found = quantities(model, named)
        else:
            losses[f"loss of step {step + 1}"] = named["loss"]
    return found | {name: on_host(loss) for name, loss in losses.items()}, seconds


@dataclass(frozen=True)
class Checked:
    """The result of checking a network."""

    parameters: int
    compared: list[Compared]
    programs: int
    on_torch: list[str]
    seconds: float  # of processors, for the first step


def check(network: Network) -> Checked:
    """Train it in all three ways, and compare."""
    torch.manual_seed(0)
    model, batch = network.model().train(), network.batch()
    wide, wide_batch = copy.deepcopy(model).double(), widened(batch)
    on_ltc = copy.deepcopy(model).to("ltc")
    lazy_batch = pytree.tree_map_only(torch.Tensor, lambda t: t.to("ltc"), batch)

    truth = in_float64(true_quantities, wide, wide_batch, network)
    jumps = in_float64(jumps_near, truth, wide, wide_batch, network, DIRECTIONS)
    eager, _ = train(model, batch, network, nothing)
    ltm.mark_step(wait=True)
    with metrics.counted() as grown:
        lazy, seconds = train(on_ltc, lazy_batch, network, ltm.mark_step)
    if truth.keys() != lazy.keys():
        raise ValueError(f"ltc gives {sorted(truth.keys() ^ lazy.keys())} where float64 does not")

    found = compared(truth, eager, lazy, jumps)
    if not all(one.is_right for one in found):
        more = in_float64(jumps_near, truth, wide, wide_batch, network, MORE_DIRECTIONS)
        found = compared(truth, eager, lazy, {n: max(jumps[n], more[n]) for n in truth})
    return Checked(
        parameters=sum(p.numel() for p in model.parameters()),
        compared=found,
        programs=grown["UncachedCompile"],
        on_torch=sorted(
            name for name in grown if name.startswith(("aten::", "torchvision::", "extern."))
        ),
        seconds=seconds,
    )


def compared(truth: dict, eager: dict, lazy: dict, jumps: dict) -> list[Compared]:
    """Each quantity of a network, by its name."""
    return [
        Compared(n, size(truth, n), distance(eager, truth, n), distance(lazy, truth, n), jumps[n])
        for n in truth
    ]


def nothing() -> None:
    """Eager PyTorch has run already: there is no step to end."""


def distance(found: dict, truth: dict, name: str) -> float:
    return (found[name] - truth[name]).norm().item()


def size(truth: dict, name: str) -> float:
    """Return the scale of a quantity's rounding: its norm, or that of the terms it is a zero of.

    A running mean is as large as the numbers whose mean it is. A bias whose gradient is nothing in
    float64 either, as softmax does not see what is added to all scores, is as large as its
    weight's.
    """
    norm = truth[name].norm().item()
    module, _, kind = name.rpartition(".")
    variance, weight = (truth.get(f"{module}.{other}") for other in ("running_var", "weight"))
    if kind == "running_mean" and variance is not None:
        return (truth[name].square() + variance).sqrt().norm().item()
    if kind == "bias" and weight is not None and norm < ZERO * weight.norm().item():
        return weight.norm().item()
    return norm


def true_quantities(model: nn.Module, batch: dict, network: Network) -> dict:
    """Return the quantities of training in float64."""
    truth, again = [
        train(copy.deepcopy(model), batch, network, nothing, seed)[0] for seed in range(2)
    ]
    drawn = [name for name in truth if not torch.equal(truth[name], again[name])]
    if drawn:
        raise ValueError(
            f"{drawn[0]} depends on the seed: switch off the random parts of the network"
        )
    return truth


def jumps_near(
    truth: dict, model: nn.Module, batch: dict, network: Network, directions: range
) -> dict[str, float]:
    """The height of the jumps near each quantity, the largest of these directions."""
    jumps = dict.fromkeys(truth, 0.0)
    for seed in directions:
        one, other = [
            train(*moved(model, batch, seed, move), network, nothing)[0] for move in (MOVE, -MOVE)
        ]
        for name, value in truth.items():
            jumps[name] = max(jumps[name], (one[name] + other[name] - 2 * value).norm().item())
    return jumps
