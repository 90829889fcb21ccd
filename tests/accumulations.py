"""Calls that add many numbers of 16 bits, and a judge of what they were added in.

Each call adds `terms`, which are positive, so that an exact sum and one that was rounded after each
addition are far apart: of ones in bfloat16 the latter never exceeds 256.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

Draw = Callable[[tuple[int, ...]], torch.Tensor]
WIDE, NARROW = "float32", "16 bits"


def ones(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.ones(shape)


class Terms:
    """Operands of a call that adds about `count` numbers.

    source  the dtype that every number is rounded to; `dtype`: in which it is computed
    """

    def __init__(
        self, count: int, source: torch.dtype, dtype: torch.dtype, device: str, draw: Draw = ones
    ) -> None:
        self.n, self._source, self._dtype, self._device, self._draw = (
            count, source, dtype, device, draw,
        )  # fmt: skip

    def terms(self, *shape: int) -> torch.Tensor:
        return self.of(self._draw(shape))

    def zeros(self, *shape: int) -> torch.Tensor:
        return self.of(torch.zeros(shape))

    def of(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.to(self._source).to(self._dtype).to(self._device)

    def at(self, *shape: int) -> torch.Tensor:
        """Indices that all name the first row."""
        return torch.zeros(shape, dtype=torch.int64).to(self._device)

    def index(self, *numbers: int) -> torch.Tensor:
        return torch.tensor(numbers).to(self._device)

    def all_true(self) -> torch.Tensor:
        return torch.ones(self.n, dtype=torch.bool).to(self._device)

    def gradient(self, function: Callable[[Any], torch.Tensor], *x: int) -> torch.Tensor:
        """That of zeros of shape `x`, each element of the result having a term for its gradient."""
        return self.gradient_at(function, self.zeros(*x))

    def gradient_at(self, function: Callable[[Any], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        y = function(x.requires_grad_())
        return torch.autograd.grad(y, [x], self.terms(*y.shape))[0]

    def one_among_zeros(self, *shape: int) -> torch.Tensor:
        """Zeros with a 1 in the middle."""
        x = torch.zeros(shape)
        x[tuple(extent // 2 for extent in shape)] = 1
        return self.of(x)


def _side(t: Terms) -> int:
    return max(2, int(t.n**0.5))


def _middle(x: torch.Tensor) -> torch.Tensor:
    return x[tuple(slice(extent // 2, extent // 2 + 1) for extent in x.shape)]


def _cube(t: Terms) -> tuple[int, int, int]:
    side = max(2, round(t.n ** (1 / 3)))
    return side, side, side


def _bag(t: Terms, mode: str, *shape: int) -> torch.Tensor:
    return t.gradient(lambda x: F.embedding_bag(t.at(*shape), x, mode=mode), 1, 4)


def _bag_of_factors(t: Terms) -> torch.Tensor:
    factors, indices = t.terms(1, t.n), t.at(1, t.n)
    return t.gradient(
        lambda x: F.embedding_bag(indices, x, mode="sum", per_sample_weights=factors), 1, 4
    )


def _of_factor(t: Terms) -> torch.Tensor:
    table, indices = t.terms(1, t.n), t.at(1, 1)
    return t.gradient(
        lambda x: F.embedding_bag(indices, table, mode="sum", per_sample_weights=x), 1, 1
    )


def _normed_bias(t: Terms, norm: Callable[..., torch.Tensor], *shape: int) -> torch.Tensor:
    x = t.of(torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape))
    return t.gradient(lambda bias: norm(x, t.of(torch.ones(2)), bias), 2)


def _grid(t: Terms, mode: str, *rest: int) -> torch.Tensor:
    grid = t.zeros(1, t.n, *[1] * len(rest), len(rest) + 1)
    options: dict[str, Any] = {"mode": mode, "align_corners": True}
    return t.gradient(lambda x: F.grid_sample(x, grid, **options), 1, 1, *[1] * (len(rest) + 1))


def _grid_itself(t: Terms) -> torch.Tensor:
    image = torch.zeros(1, t.n, 2, 2)
    image[..., 1] = 1
    image = t.of(image)
    found = t.gradient(lambda x: F.grid_sample(image, x, align_corners=True), 1, 1, 1, 2)
    return found[..., 0]


def _resized(t: Terms, mode: str, *size: int) -> torch.Tensor:
    return t.gradient(lambda x: F.interpolate(x, size, mode=mode), 1, 1, *[1] * len(size))


def _attention_value(t: Terms) -> torch.Tensor:
    q, k = t.zeros(1, 1, t.n, 4), t.zeros(1, 1, 1, 4)
    return t.gradient(lambda v: F.scaled_dot_product_attention(q, k, v), 1, 1, 1, 4)


def _convolved(t: Terms, operand: str) -> torch.Tensor:
    side = _side(t)
    x, ones_of = t.of(torch.ones(1, 1, side, side)), t.of(torch.ones(2, 1, 1, 1))
    if operand == "bias":
        return t.gradient(lambda b: F.conv2d(x, ones_of, b), 2)
    return t.gradient(lambda w: F.conv2d(x, w), 2, 1, 1, 1)


def _linear(t: Terms, operand: str) -> torch.Tensor:
    x, weight = t.of(torch.ones(t.n, 1)), t.of(torch.ones(2, 1))
    if operand == "bias":
        return t.gradient(lambda b: F.linear(x, weight, b), 2)
    return t.gradient(lambda w: F.linear(x, w), 2, 1)


SUMS: dict[str, Callable[[Terms], torch.Tensor]] = {
    # where an index says
    "scatter_add": lambda t: t.zeros(1).scatter_add(0, t.at(t.n), t.terms(t.n)),
    "scatter_add of rows": lambda t: t.zeros(1, 4).scatter_add(0, t.at(t.n, 4), t.terms(t.n, 4)),
    "scatter_add of columns": lambda t: t.zeros(4, 1).scatter_add(1, t.at(4, t.n), t.terms(4, t.n)),
    "scatter_add by an expanded index": lambda t: t.zeros(1, 4).scatter_add(
        0, t.at(t.n)[:, None].expand(t.n, 4), t.terms(t.n, 4)
    ),
    "scatter_reduce, sum": lambda t: t.zeros(1).scatter_reduce(
        0, t.at(t.n), t.terms(t.n), "sum"
    ),
    "index_add": lambda t: t.zeros(1).index_add(0, t.at(t.n), t.terms(t.n)),
    "index_add of rows": lambda t: t.zeros(1, 4).index_add(0, t.at(t.n), t.terms(t.n, 4)),
    "index_add of columns": lambda t: t.zeros(4, 1).index_add(1, t.at(t.n), t.terms(4, t.n)),
    "index_add in the middle": lambda t: t.zeros(2, 1, 3).index_add(
        1, t.at(t.n), t.terms(2, t.n, 3)
    ),
    "index_add_ with alpha": lambda t: t.zeros(1).index_add_(
        0, t.at(t.n), t.terms(t.n), alpha=0.5
    ),
    "index_put, accumulate": lambda t: t.zeros(1).index_put(
        (t.at(t.n),), t.terms(t.n), accumulate=True
    ),
    "index_put_ of rows, accumulate": lambda t: t.zeros(1, 4).index_put_(
        (t.at(t.n),), t.terms(t.n, 4), accumulate=True
    ),
    "put_, accumulate": lambda t: t.zeros(1).put_(t.at(t.n), t.terms(t.n), accumulate=True),
    "gradient of gather": lambda t: t.gradient(lambda x: x.gather(0, t.at(t.n)), 1),
    "gradient of gather of rows": lambda t: t.gradient(lambda x: x.gather(0, t.at(t.n, 4)), 1, 4),
    "gradient of index_select": lambda t: t.gradient(lambda x: x.index_select(0, t.at(t.n)), 1),
    "gradient of index_select of rows": lambda t: t.gradient(
        lambda x: x.index_select(0, t.at(t.n)), 1, 4
    ),
    "gradient of x[index]": lambda t: t.gradient(lambda x: x[t.at(t.n)], 1),
    "gradient of x[index] of rows": lambda t: t.gradient(lambda x: x[t.at(t.n)], 1, 4),
    "gradient of x[:, index]": lambda t: t.gradient(lambda x: x[:, t.at(t.n)], 3, 1),
    "gradient of take": lambda t: t.gradient(lambda x: x.take(t.at(t.n)), 1),
    "gradient of take_along_dim": lambda t: t.gradient(
        lambda x: x.take_along_dim(t.at(t.n, 4), 0), 1, 4
    ),
    "gradient of embedding": lambda t: t.gradient(lambda x: F.embedding(t.at(t.n), x), 1, 4),
    "embedding_bag, sum": lambda t: F.embedding_bag(t.at(1, t.n), t.terms(1, 4), mode="sum"),
    "gradient of embedding_bag, one bag": lambda t: _bag(t, "sum", 1, t.n),
    "gradient of embedding_bag, many bags": lambda t: _bag(t, "sum", t.n, 1),
    "gradient of embedding_bag, mean": lambda t: _bag(t, "mean", t.n, 1),
    "gradient of embedding_bag, max": lambda t: _bag(t, "max", t.n, 1),
    "gradient of embedding_bag with factors": _bag_of_factors,
    "gradient of a factor of embedding_bag": _of_factor,
    "segment_reduce, sum": lambda t: torch.segment_reduce(
        t.terms(t.n), "sum", lengths=t.index(t.n)
    ),
    "histc": lambda t: torch.histc(t.zeros(t.n), 1, -1, 1),
    # what was repeated
    "gradient of expand": lambda t: t.gradient(lambda x: x.expand(t.n, 4), 1, 4),
    "gradient of broadcasting": lambda t: t.gradient(lambda x: x + t.zeros(t.n, 4), 4),
    "gradient of a 0-dim operand": lambda t: t.gradient(lambda x: x * t.terms(t.n)),
    "gradient of where": lambda t: t.gradient(
        lambda x: torch.where(t.all_true(), x, t.zeros(t.n))
    ),
    "gradient of masked_fill": lambda t: t.gradient(
        lambda x: t.zeros(t.n).masked_fill(t.all_true(), x)
    ),
    "gradient of repeat": lambda t: t.gradient(lambda x: x.repeat(t.n, 1), 1, 4),
    "gradient of repeat_interleave": lambda t: t.gradient(
        lambda x: x.repeat_interleave(t.n, 0), 1, 4
    ),
    "gradient of repeat_interleave by a tensor": lambda t: t.gradient(
        lambda x: x.repeat_interleave(t.index(t.n), 0), 1, 4
    ),
    "gradient of unfold": lambda t: _middle(
        t.gradient(lambda x: x.unfold(0, t.n, 1), 3 * t.n)
    ),
    "gradient of nn.functional.unfold": lambda t: _middle(
        t.gradient(lambda x: F.unfold(x, (t.n, 1)), 1, 1, 3 * t.n, 1)
    ),
    "fold": lambda t: _middle(F.fold(t.terms(1, t.n, t.n + 1), (2 * t.n, 1), (t.n, 1))),
    "gradient of as_strided": lambda t: t.gradient(lambda x: x.as_strided((t.n,), (0,)), 1),
    "gradient of replication padding": lambda t: t.gradient(
        lambda x: F.pad(x, (t.n, 0), "replicate"), 1, 1, 3
    )[..., :1],
    "gradient of replication padding, 2d": lambda t: t.gradient(
        lambda x: F.pad(x, (t.n, 0, 0, 0), "replicate"), 1, 1, 3, 3
    )[..., :1],
    "gradient of replication padding, 3d": lambda t: t.gradient(
        lambda x: F.pad(x, (t.n, 0, 0, 0, 0, 0), "replicate"), 1, 1, 3, 3, 3
    )[..., :1],
    # along dimensions
    "sum": lambda t: t.terms(t.n).sum(),
    "sum over rows": lambda t: t.terms(t.n, 3).sum(0),
    "sum of a transposed one": lambda t: t.terms(3, t.n).t().sum(0),
    "nansum": lambda t: t.terms(t.n).nansum(),
    "mean": lambda t: t.terms(t.n).mean() * t.n,
    "mean over rows": lambda t: t.terms(t.n, 3).mean(0) * t.n,
    "norm of order 1": lambda t: t.terms(t.n).norm(1),
    "norm": lambda t: t.terms(t.n).norm(),
    "cumsum": lambda t: t.terms(t.n).cumsum(0)[-1:],
    "cumsum over rows": lambda t: t.terms(t.n, 3).cumsum(0)[-1:],
    "gradient of cumsum": lambda t: t.gradient(lambda x: x.cumsum(0), t.n)[:1],
    "logcumsumexp": lambda t: t.terms(t.n).logcumsumexp(0)[-1:],
    "logsumexp": lambda t: t.terms(t.n).logsumexp(0),
    "trace": lambda t: t.terms(1, 1).expand(t.n, t.n).trace(),
    "trapezoid": lambda t: torch.trapezoid(t.terms(t.n)),
    "sum_to_size": lambda t: t.terms(t.n, 3).sum_to_size(1, 3),
    "norms of a list": lambda t: torch._foreach_norm([t.terms(t.n), t.terms(t.n)], 1)[0],
    # products
    "matmul": lambda t: t.terms(2, t.n) @ t.terms(t.n, 3),
    "mv": lambda t: t.terms(2, t.n) @ t.terms(t.n),
    "dot": lambda t: t.terms(t.n) @ t.terms(t.n),
    "bmm": lambda t: torch.bmm(t.terms(2, 2, t.n), t.terms(2, t.n, 2)),
    "addmm": lambda t: torch.addmm(t.terms(2, 2), t.terms(2, t.n), t.terms(t.n, 2)),
    "addmv": lambda t: torch.addmv(t.terms(2), t.terms(2, t.n), t.terms(t.n)),
    "baddbmm": lambda t: torch.baddbmm(t.terms(2, 2, 2), t.terms(2, 2, t.n), t.terms(2, t.n, 2)),
    "addbmm": lambda t: torch.addbmm(t.zeros(2, 2), t.terms(t.n, 2, 1), t.terms(t.n, 1, 2)),
    "einsum": lambda t: torch.einsum("ij,ij->j", t.terms(t.n, 3), t.terms(t.n, 3)),
    "cosine_similarity": lambda t: F.cosine_similarity(t.terms(1, t.n), t.terms(1, t.n)),
    "pairwise_distance": lambda t: F.pairwise_distance(t.zeros(1, t.n), t.terms(1, t.n)),
    "gradient of a linear layer's bias": lambda t: _linear(t, "bias"),
    "gradient of a linear layer's weight": lambda t: _linear(t, "weight"),
    "convolution": lambda t: F.conv1d(t.terms(1, t.n, 1), t.terms(1, t.n, 1)),
    "gradient of a convolution's bias": lambda t: _convolved(t, "bias"),
    "gradient of a convolution's weight": lambda t: _convolved(t, "weight"),
    "gradient of attention's values": _attention_value,
    # windows and images
    "avg_pool1d": lambda t: F.avg_pool1d(t.terms(1, 1, t.n), t.n) * t.n,
    "avg_pool2d": lambda t: F.avg_pool2d(t.terms(1, 1, _side(t), _side(t)), _side(t)),
    "adaptive_avg_pool2d": lambda t: F.adaptive_avg_pool2d(t.terms(1, 1, _side(t), _side(t)), 1),
    "adaptive_avg_pool3d": lambda t: F.adaptive_avg_pool3d(t.terms(1, 1, *_cube(t)), (1, 2, 1)),
    "gradient of avg_pool2d": lambda t: _middle(
        t.gradient(lambda x: F.avg_pool2d(x, (t.n, 1), 1, divisor_override=1), 1, 1, 3 * t.n, 1)
    ),
    "gradient of adaptive_avg_pool1d": lambda t: t.gradient(
        lambda x: F.adaptive_avg_pool1d(x, t.n), 1, 1, 1
    ),
    "gradient of adaptive_avg_pool2d": lambda t: t.gradient(
        lambda x: F.adaptive_avg_pool2d(x, (t.n, 1)), 1, 1, 1, 1
    ),
    "gradient of adaptive_avg_pool3d": lambda t: t.gradient(
        lambda x: F.adaptive_avg_pool3d(x, (t.n, 1, 1)), 1, 1, 1, 1, 1
    ),
    "gradient of max_pool1d": lambda t: _middle(
        t.gradient_at(lambda x: F.max_pool1d(x, t.n, 1), t.one_among_zeros(1, 1, 3 * t.n))
    ),
    "gradient of max_pool2d": lambda t: _middle(
        t.gradient_at(lambda x: F.max_pool2d(x, (t.n, 1), 1), t.one_among_zeros(1, 1, 3 * t.n, 1))
    ),
    "gradient of max_pool3d": lambda t: _middle(
        t.gradient_at(
            lambda x: F.max_pool3d(x, (t.n, 1, 1), 1), t.one_among_zeros(1, 1, 3 * t.n, 1, 1)
        )
    ),
    "gradient of adaptive_max_pool2d": lambda t: t.gradient(
        lambda x: F.adaptive_max_pool2d(x, (t.n, 1)), 1, 1, 1, 1
    ),
    "gradient of adaptive_max_pool3d": lambda t: t.gradient(
        lambda x: F.adaptive_max_pool3d(x, (t.n, 1, 1)), 1, 1, 1, 1, 1
    ),
    "gradient of resizing, nearest": lambda t: _resized(t, "nearest", _side(t), _side(t)),
    "gradient of resizing, linear": lambda t: _resized(t, "linear", t.n),
    "gradient of resizing, bilinear": lambda t: _resized(t, "bilinear", _side(t), _side(t)),
    "gradient of resizing, trilinear": lambda t: _resized(t, "trilinear", *_cube(t)),
    "gradient of resizing, area": lambda t: _resized(t, "area", _side(t), _side(t)),
    "gradient of grid_sample": lambda t: _grid(t, "bilinear", 1),
    "gradient of grid_sample, nearest": lambda t: _grid(t, "nearest", 1),
    "gradient of grid_sample, 3d": lambda t: _grid(t, "bilinear", 1, 1),
    "gradient of the grid of grid_sample": _grid_itself,
    # norms and losses
    "gradient of batch_norm's bias": lambda t: _normed_bias(
        t, lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), t.n, 2
    ),
    "gradient of layer_norm's bias": lambda t: _normed_bias(
        t, lambda x, w, b: F.layer_norm(x, (2,), w, b), t.n, 2
    ),
    "gradient of group_norm's bias": lambda t: _normed_bias(
        t, lambda x, w, b: F.group_norm(x, 1, w, b), 1, 2, t.n
    ),
    "mse_loss": lambda t: F.mse_loss(t.zeros(t.n), t.terms(t.n), reduction="sum"),
    "l1_loss": lambda t: F.l1_loss(t.zeros(t.n), t.terms(t.n), reduction="sum"),
    "nll_loss": lambda t: F.nll_loss(-t.terms(t.n, 2), t.at(t.n), reduction="sum"),
    "nll_loss of images": lambda t: F.nll_loss(
        -t.terms(1, 2, t.n, 1), t.at(1, t.n, 1), reduction="sum"
    ),
    "kl_div": lambda t: F.kl_div(-t.of(torch.ones(t.n)), t.terms(t.n), reduction="sum"),
    "gradient of prelu's weight": lambda t: t.gradient(
        lambda w: F.prelu(-t.of(torch.ones(t.n)), w), 1
    ).abs(),
}  # fmt: skip

# Of as many terms as squared: their windows overlap, or they are a diagonal.
OF_SQUARES = frozenset(
    {
        "fold", "trace", "gradient of unfold", "gradient of nn.functional.unfold",
        "gradient of avg_pool2d", "gradient of max_pool1d", "gradient of max_pool2d",
        "gradient of max_pool3d",
    }
)  # fmt: skip


def is_exact(found: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether each number is the sum, but for the roundings of terms, of a product, and of itself."""
    bound = 4 * torch.finfo(dtype).eps
    return torch.allclose(found.detach().cpu().double(), exact.detach(), rtol=bound, atol=0)


def exact_sum(name: str, count: int, source: torch.dtype, draw: Draw = ones) -> torch.Tensor:
    return SUMS[name](Terms(count, source, torch.float64, "cpu", draw))


def added_in(name: str, count: int, dtype: torch.dtype) -> str:
    """What eager PyTorch adds that many ones in on the CPU: `WIDE` or `NARROW`."""
    found = SUMS[name](Terms(count, dtype, dtype, "cpu"))
    return WIDE if is_exact(found, exact_sum(name, count, dtype), dtype) else NARROW
