"""Collectives that autograd knows: what each gives back to its input in a backward.

They differ from `torch.distributed.nn`: the gradient of a sum is not summed over the replicas
again, since every replica computes the same loss from it. `AllReduceSumLayer` does sum.
"""

from __future__ import annotations

import torch

from ltc.distributed import collectives
from ltc.distributed.collectives import Groups
from ltc.tracebacks import make_entrances

__all__ = [
    "AllGather",
    "AllReduce",
    "AllReduceSumLayer",
    "SyncBatchNorm",
    "all_gather",
    "all_reduce",
    "distributed_mm",
]


class AllReduce(torch.autograd.Function):
    """`all_reduce` with the gradients that its docstring states.

    Example:
        >>> from ltc.core import functions
        >>> functions.AllReduce.apply("sum", torch.ones(2, device="ltc"), 1.0, None).tolist()
        [1.0, 1.0]
    """

    @staticmethod
    def forward(ctx, reduce_type, value, scale, groups):
        ctx.reduce_type, ctx.scale = reduce_type, scale
        output = collectives.all_reduce(reduce_type, value, scale, groups)
        ctx.save_for_backward(value, output)
        return output

    @staticmethod
    def backward(ctx, grad):
        value, output = ctx.saved_tensors
        return None, _input_gradient(ctx.reduce_type, ctx.scale, grad, value, output), None, None


def _input_gradient(reduce_type: str, scale: float, grad, value, output) -> torch.Tensor:
    if reduce_type == "sum":
        return grad * scale
    if reduce_type == "mul":
        # 1 in place of a zero divisor: the branch not taken must not make a NaN either
        divisor = torch.where(value == 0, torch.ones_like(value), value)
        return torch.where(value == 0, torch.zeros_like(grad), grad * output / divisor)
    if reduce_type in ("min", "max"):
        return torch.where(value == output, grad, torch.zeros_like(grad))
    raise RuntimeError(f"Unsupported reduce type: {reduce_type}")


def all_reduce(
    reduce_type: str, value: torch.Tensor, scale: float = 1.0, groups: Groups = None
) -> torch.Tensor:
    """Everyone's `value` reduced, then multiplied by `scale`; of `value`'s shape.

    Backward, without any exchange: of a sum, grad * scale; of a product, grad * output / value and
    0 where value is 0; of min and max, grad where value is the result. RuntimeError for others, and
    for a kind that does not exist; for groups as `ltm.all_reduce` does; PeerFailure when the step
    runs, where replicas disagree.

    Args:
        reduce_type: "sum", "mul", "min" or "max"; the others of `ltm.all_reduce` have no gradient.
        groups: Lists of ordinals that reduce among themselves; None: all together.

    Example:
        >>> from ltc.core import functions
        >>> x = torch.ones(2, device="ltc", requires_grad=True)
        >>> functions.all_reduce("sum", x).sum().backward()
        >>> x.grad.tolist()
        [1.0, 1.0]
    """
    return AllReduce.apply(reduce_type, value, scale, groups)


class AllGather(torch.autograd.Function):
    """`all_gather` with the gradient that its docstring states.

    Example:
        >>> from ltc.core import functions
        >>> functions.AllGather.apply(torch.ones(2, device="ltc"), 0).tolist()
        [1.0, 1.0]
    """

    @staticmethod
    def forward(ctx, value, dim):
        gathered = collectives.all_gather(value, dim)  # of a number as of one element
        ctx.dim, ctx.shape, ctx.extent = dim, value.shape, value.shape[dim] if value.dim() else 1
        return gathered

    @staticmethod
    def backward(ctx, grad):
        position = collectives.group_of(None).index(collectives.ordinal())
        own = grad.narrow(ctx.dim, position * ctx.extent, ctx.extent)
        return own.reshape(ctx.shape), None


def all_gather(value: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Join the `value` of all replicas along `dim` in ordinal order; a number counts as one element.

    Backward, without any exchange: this replica's slice of the gradient.

    Returns:
        A tensor of `value`'s shape, with `dim` as many times as long as there are replicas.

    Raises:
        IndexError: For a `dim` that `value` lacks.
        PeerFailure: When the step runs, if replicas disagree.

    Example:
        >>> from ltc.core import functions
        >>> x = torch.ones(2, device="ltc", requires_grad=True)
        >>> functions.all_gather(x).sum().backward()
        >>> x.grad.tolist()
        [1.0, 1.0]
    """
    return AllGather.apply(value, dim)


class AllReduceSumLayer(torch.autograd.Function):
    """Sum over the replicas, and sum the gradient over them too: for models cut in shards.

    Raises:
        PeerFailure: When the step runs, if replicas disagree.

    Example:
        >>> from ltc.core.functions import AllReduceSumLayer
        >>> AllReduceSumLayer.apply(torch.ones(2, device="ltc")).tolist()  # of two replicas: [2.0, 2.0]
        [1.0, 1.0]
    """

    @staticmethod
    def forward(ctx, value):
        return collectives.all_reduce("sum", value)

    @staticmethod
    def backward(ctx, grad):
        return collectives.all_reduce("sum", grad)


def distributed_mm(w: torch.Tensor, x: torch.Tensor, split: int = 1) -> torch.Tensor:
    """Multiply a weight whose columns are spread over the replicas with each one's own input.

    Args:
        w: [N, K], this replica's columns of the whole weight [N, K * replicas].
        x: [K * replicas, M], this replica's own input, M equal everywhere.
        split: Pieces of M that are exchanged one after another: bounds the memory.

    Returns:
        [N, M], the whole weight times this replica's `x`.

    Raises:
        AssertionError: If `x` does not fit `w`, or M is no multiple of `split`.
        PeerFailure: When the step runs, if replicas disagree.

    Example:
        >>> from ltc.core.functions import distributed_mm
        >>> w, x = torch.ones(2, 3, device="ltc"), torch.ones(3, 4, device="ltc")
        >>> distributed_mm(w, x).tolist()  # of two replicas, x is [6, 4]
        [[3.0, 3.0, 3.0, 3.0], [3.0, 3.0, 3.0, 3.0]]
    """
    replicas, ordinal = collectives.replica_count(), collectives.ordinal()
    assert x.size(0) // replicas == w.size(1), f"{list(x.shape)} does not fit {list(w.shape)}"
    assert x.size(1) % split == 0, f"{x.size(1)} columns cannot be cut into {split}"
    return torch.cat([_product(w, part, replicas, ordinal) for part in x.chunk(split, 1)], 1)


def _product(w: torch.Tensor, x: torch.Tensor, replicas: int, ordinal: int) -> torch.Tensor:
    everyone = all_gather(x, dim=1)  # [K * replicas, M * replicas]
    rows = everyone.narrow(0, ordinal * w.size(1), w.size(1))
    whole = all_reduce("sum", w @ rows)  # [N, M * replicas]
    return whole.narrow(1, ordinal * x.size(1), x.size(1))


class SyncBatchNorm(torch.nn.Module):
    """Batch normalisation over the batches of all replicas together.

    Outputs and gradients are those of torch.nn.BatchNorm on the joined batch, where the replicas'
    batches are of one size. `running_var` accumulates the biased variance.

    Args:
        num_features: C of a batch [N, C, ...] of two to five dimensions; the result has its shape.

    Raises:
        AssertionError: For a batch of other dimensions or channels.

    Example:
        >>> from ltc.core.functions import SyncBatchNorm
        >>> norm = SyncBatchNorm(1, eps=0.0).to("ltc")
        >>> norm(torch.tensor([[-1.0], [1.0]]).to("ltc")).tolist()
        [[-1.0], [1.0]]
    """

    running_mean: torch.Tensor
    running_var: torch.Tensor

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.weight = torch.nn.Parameter(torch.ones(num_features))
        self.bias = torch.nn.Parameter(torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """batch [N, C, ...] of two to five dimensions."""
        assert 2 <= batch.dim() <= 5, f"a batch of {batch.dim()} dimensions"
        assert batch.size(1) == self.num_features, f"{batch.size(1)} channels"
        mean, variance = (
            self._statistics(batch) if self.training else (self.running_mean, self.running_var)
        )
        shape = [1, self.num_features] + [1] * (batch.dim() - 2)
        scale = self.weight * torch.rsqrt(variance + self.eps)
        return (batch - mean.view(shape)) * scale.view(shape) + self.bias.view(shape)

    def _statistics(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and variance of each channel over all replicas; the running ones follow them."""
        dims = [d for d in range(batch.dim()) if d != 1]
        replicas = collectives.replica_count()
        mean = AllReduceSumLayer.apply(batch.mean(dims)) / replicas
        shape = [1, self.num_features] + [1] * (batch.dim() - 2)
        # of the differences, not mean(x * x) - mean * mean, which cancels
        squares = (batch - mean.view(shape)).square().mean(dims)
        variance = AllReduceSumLayer.apply(squares) / replicas
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance, self.momentum)
        return mean, variance


make_entrances(globals(), __all__)
