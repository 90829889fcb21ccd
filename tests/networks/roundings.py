"""Ways of rounding every value of a network at random, to see what hangs on roundings."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch.optim import optimizer as optimizers
from torch.overrides import TorchFunctionMode

from tests.networks.attention_formula import ATTENTION, attended

ONE_SIDED = {6: -1, 7: 1}  # where all are rounded the same way: each sum of a softmax is below 1


class Rounding:
    """One way of rounding every value of a network.

    roundings   the unit roundoff of each value, and whether it has its memory for itself
    of_largest  each number is rounded relative to the largest of its tensor, not to itself
    """

    def __init__(
        self, seed: int, roundings: dict[str, tuple[float, bool]], of_largest: bool = False
    ) -> None:
        self.source, self.of_largest = torch.Generator().manual_seed(seed), of_largest
        self.roundings, self.side = roundings, ONE_SIDED.get(seed, 0)
        self.readers: dict[str, list[str]] = {}  # of each value, the values that are made of it
        self.gradients: dict[str, float] = {}  # of each value, the largest times what it may meet
        self.factors: dict[str, float] = {}  # of each value, its operands' largest, multiplied

    def rounded(self, name: str, x, operands: dict):
        if name not in self.roundings or not torch.is_tensor(x):
            return x
        unit, is_alone = self.roundings[name]
        for operand, value in operands.items():
            if operand not in self.readers and torch.is_tensor(value) and value.is_leaf:
                self._round_gradient(operand, value, unit)
            self.readers.setdefault(operand, []).append(name)
        self.factors[name] = math.prod(max(1.0, largest_of(v)) for v in operands.values())
        if is_alone:
            x = self._to_a_grid(x, unit) if self.of_largest else x * (1 + unit * self._normal(x))
        self._round_gradient(name, x, unit)
        return x

    def _to_a_grid(self, x: torch.Tensor, unit: float) -> torch.Tensor:
        """To one of the two next multiples of the largest number's rounding."""
        grid = max(2 * unit * largest_of(x), torch.finfo(torch.float64).tiny)
        up = torch.rand(x.shape, generator=self.source, dtype=x.dtype)
        return x + ((x.detach() / grid + up).floor() * grid - x.detach())

    def _round_gradient(self, name: str, x: torch.Tensor, unit: float) -> None:
        """What cancels to zero, as through a softmax, is as uncertain as what it was made of."""

        def rounded(gradient: torch.Tensor) -> torch.Tensor:
            made_of = [self.gradients.get(reader, 0.0) for reader in self.readers.get(name, ())]
            self.gradients[name] = largest_of(gradient) * self.factors.get(name, 1.0)
            largest = max(largest_of(gradient), *made_of, 0.0)
            return gradient + unit * largest * self._normal(gradient)

        if x.requires_grad:
            x.register_hook(rounded)

    def _normal(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(x.shape, generator=self.source, dtype=x.dtype)
        return noise.abs() * self.side if self.side else noise


class RoundedInside(TorchFunctionMode):
    """Calls of which the result can be far less than what they round before it.

    The terms of a sum, which may cancel; the mean of a row, where the row is its mean but for a
    little, which layer_norm makes large; the two gradients that these two, and attention, add up.
    """

    SUMS = frozenset({torch.sum, torch.mean, torch.Tensor.sum, torch.Tensor.mean})

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.source, self.cancels = torch.Generator().manual_seed(seed), seed % 2 == 1
        self.narrow = torch.finfo(dtype).eps / 2
        wide = dtype if dtype is torch.float64 else torch.float32  # both sum no narrower ones
        self.unit = torch.finfo(wide).eps / 2

    def __torch_function__(self, function, types, arguments=(), named=None):
        named = named or {}
        if function in self.SUMS and arguments and arguments[0].is_floating_point():
            return self._summed(function, *arguments, **named)
        if function is F.normalize:
            return self._normalized(*arguments, **named)
        if function is ATTENTION and _are_numbers(*arguments, *named.values()):
            return attended(*arguments, **named, softmax=self._weights)
        if function is F.layer_norm:
            return self._normed(*arguments, **named)
        return function(*arguments, **named)

    def _summed(self, function, x, *rest, **named):
        """In every other run what is within the roundings of nothing is nothing: it may cancel."""
        total = function(x + self._rounding(x), *rest, **named)
        if not self.cancels:
            return total
        least = self.unit * function(x.detach().abs(), *rest, **named)
        return total - total.detach().where(total.detach().abs() <= least, 0)

    def _normalized(self, x, p=2.0, dim=1, eps=1e-12, out=None):
        """x / its norm, the gradients of the two rounded before they are added, and cancel."""
        above, below = x * 1, x * 1
        self._round_gradients(above, below)
        return above / torch.linalg.vector_norm(below, p, dim, keepdim=True).clamp_min(eps)

    def _weights(self, scores):
        """Their softmax, the gradients of the two rounded before they are added, and cancel."""
        above, below = scores * 1, scores * 1
        self._round_gradients(above, below)
        return (above - below.logsumexp(-1, keepdim=True)).exp()

    def _round_gradients(self, *values: torch.Tensor) -> None:
        for x in values:
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient + self._rounding(gradient, self.narrow))

    def _normed(self, x, shape, weight=None, bias=None, eps=1e-5):
        """layer_norm where the mean of each row was rounded, and its gradient."""
        dims = tuple(range(-len(shape), 0))
        above, below = x * 1, x * 1
        self._round_gradients(above, below)
        variance, mean = torch.var_mean(below, dims, correction=0, keepdim=True)
        result = (above - mean - self._rounding(mean)) / (variance + eps).sqrt()
        result = result if weight is None else result * weight
        return result if bias is None else result + bias

    def _rounding(self, x: torch.Tensor, unit: float = 0.0) -> torch.Tensor:
        noise = torch.randn(x.shape, generator=self.source, dtype=x.dtype)
        return (
            (unit or self.unit) * x.detach().nan_to_num(0, 0, 0) * noise
        )  # what is infinite stays so


@contextmanager
def rounded_updates(seed: int, dtype: torch.dtype) -> Iterator[None]:
    """Optimizers' steps end in a sum, rounded relative to the parameter: it may cancel, too."""
    source, unit = torch.Generator().manual_seed(seed), torch.finfo(dtype).eps / 2
    before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(optimizer: torch.optim.Optimizer, *_) -> None:
        before[:] = [
            (x.detach(), x.detach().clone())
            for group in optimizer.param_groups for x in group["params"]
        ]  # fmt: skip

    def rounded(*_) -> None:
        for x, was in before:
            noise = torch.randn(x.shape, generator=source, dtype=x.dtype)
            x += unit * was.nan_to_num(0, 0, 0) * noise
            if seed % 2:
                x[x.abs() <= 2 * unit * was.abs()] = 0

    hooks = (
        optimizers.register_optimizer_step_pre_hook(keep),
        optimizers.register_optimizer_step_post_hook(rounded),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# --- what is finite ---


def _are_numbers(*values) -> bool:
    """Whether there is no infinity and no NaN among them."""
    return all(x.isfinite().all() for x in values if torch.is_tensor(x))


def finite(*values: torch.Tensor) -> list[torch.Tensor]:
    there = functools.reduce(torch.logical_and, [torch.isfinite(x) for x in values])
    return [x.double()[there] for x in values]


def largest_of(x) -> float:
    """The largest number of a tensor; 0 of what is none."""
    (x,) = finite(x) if torch.is_tensor(x) else (torch.zeros(0),)
    return float(x.abs().max()) if x.numel() else 0.0
