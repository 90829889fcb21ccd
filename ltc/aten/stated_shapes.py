"""Shapes of results that are stated beside the rules: of overloads that have none.

These run PyTorch's own kernel, and are part of a program of symbols all the same.  A statement is asked
of calls that PyTorch has taken at some sizes, and says besides what has to hold of other sizes, so that
what PyTorch refuses at these is refused where it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from ltc.errors import InvalidGraph
from ltc.ir.infer import broadcast
from ltc.support.sizes.choices import least

Shape = tuple[Any, ...]
Statement = Callable[..., Sequence[Shape]]

# Overload -> shapes of its results, from its arguments.
STATED: dict[str, Statement] = {}


def gives(*overloads: str) -> Callable[[Statement], Statement]:
    """State with the function below the result shapes of these overloads ("aten::topk").

    It is given the overload's arguments, and raises InvalidGraph for sizes that PyTorch refuses.
    """

    def register(statement: Statement) -> Statement:
        STATED.update(dict.fromkeys([f"aten::{overload}" for overload in overloads], statement))
        return statement

    return register


def _need(*conditions: bool) -> None:
    if not all(conditions):
        raise InvalidGraph("PyTorch refuses these sizes")


def _with_extent(shape: Shape, dim: int, extent: Any) -> Shape:
    axis = dim % len(shape)
    return (*shape[:axis], extent, *shape[axis + 1 :])


def _without(shape: Shape, dim: int, keepdim: bool) -> Shape:
    if not shape:
        return ()
    axis = dim % len(shape)
    return (*shape[:axis], *(1,) * keepdim, *shape[axis + 1 :])


def _full(shape: Shape) -> Shape:
    _need(*[extent > 0 for extent in shape])
    return shape


# --- as one of the operands ---------------------------------------------------------------------


@gives(
    "lift_fresh", "i0", "special_i0e", "special_i1", "special_i1e", "celu", "celu_", "_conj",
    "_conj_physical", "conj_physical", "cauchy_", "log_normal_", "geometric_", "_standard_gamma",
    "logcumsumexp", "linalg_matrix_exp", "renorm", "_fft_c2c", "bucketize.Tensor", "isin.Tensor_Tensor",
    "_fake_quantize_learnable_per_tensor_affine", "_fake_quantize_learnable_per_channel_affine",
)  # fmt: skip
def _as_first(x: Any, *rest: Any, **options: Any) -> Sequence[Shape]:
    return (x.shape,)


@gives("sort", "sort.stable", "cummax", "cummin")
def _as_first_twice(x: Any, *rest: Any, **options: Any) -> Sequence[Shape]:
    return x.shape, x.shape


@gives(
    "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward", "polygamma", "mish_backward",
    "rrelu_with_noise_backward", "multi_margin_loss_backward",
    "adaptive_max_pool2d_backward", "_cdist_backward", "_pdist_backward", "_standard_gamma_grad",
)  # fmt: skip
def _as_second(first: Any, x: Any, *rest: Any, **options: Any) -> Sequence[Shape]:
    return (x.shape,)


@gives("rrelu_with_noise")
def _leaky_by_chance(x: Any, noise: Any, *rest: Any, **options: Any) -> Sequence[Shape]:
    return noise.shape, x.shape


@gives(
    "_fake_quantize_learnable_per_tensor_affine_backward",
    "_fake_quantize_learnable_per_channel_affine_backward",
)
def _learned(gradient: Any, x: Any, scale: Any, zero_point: Any, *rest: Any) -> Sequence[Shape]:
    _need(gradient.shape == x.shape)
    return x.shape, scale.shape, zero_point.shape


@gives("_weight_norm_interface")
def _weight_norm(v: Any, g: Any, dim: int = 0) -> Sequence[Shape]:
    return v.shape, g.shape


@gives("_weight_norm_interface_backward")
def _weight_norm_gradients(gradient: Any, v: Any, g: Any, *rest: Any) -> Sequence[Shape]:
    return v.shape, g.shape


@gives("logaddexp2", "complex", "polar")
def _of_both(x: Any, y: Any) -> Sequence[Shape]:
    return (broadcast(x.shape, y.shape),)


@gives("put_")
def _put(x: Any, index: Any, source: Any, accumulate: bool = False) -> Sequence[Shape]:
    _need(prod(index.shape) == prod(source.shape))
    return (x.shape,)


@gives("take")
def _taken(x: Any, index: Any) -> Sequence[Shape]:
    return (index.shape,)


@gives("view_as_real", "view_as_real_copy")
def _parts(x: Any) -> Sequence[Shape]:
    return ((*x.shape, 2),)


@gives("view_as_complex", "view_as_complex_copy")
def _of_parts(x: Any) -> Sequence[Shape]:
    _need(x.shape[-1] == 2)
    return (x.shape[:-1],)


# --- parts, sizes that are named ----------------------------------------------------------------


@gives("topk")
def _topk(x: Any, k: Any, dim: int = -1, *rest: Any) -> Sequence[Shape]:
    if not x.shape:
        return (), ()
    _need(k <= x.shape[dim])
    return (_with_extent(x.shape, dim, k),) * 2


@gives("median.dim", "nanmedian.dim", "mode")
def _middle(x: Any, dim: int = -1, keepdim: bool = False) -> Sequence[Shape]:
    _full(x.shape)
    return (_without(x.shape, dim, keepdim),) * 2


@gives("kthvalue")
def _of_rank(x: Any, k: Any, dim: int = -1, keepdim: bool = False) -> Sequence[Shape]:
    _need(not x.shape or k <= x.shape[dim])
    return _middle(x, dim, keepdim)


@gives("median", "nanmedian", "_is_all_true", "_is_any_true", "trace")
def _one_number(x: Any) -> Sequence[Shape]:
    return ((),)


@gives("unsafe_split.Tensor")
def _split(x: Any, split_size: Any, dim: int = 0) -> Sequence[Shape]:
    whole, rest = divmod(x.shape[dim], split_size)
    extents = [split_size] * whole + [rest] * (rest > 0)
    return [_with_extent(x.shape, dim, extent) for extent in extents]


@gives("unfold")
def _unfold(x: Any, dimension: int, size: Any, step: Any) -> Sequence[Shape]:
    if not x.shape:
        return ((size,),)
    _need(size <= x.shape[dimension])
    windows = (x.shape[dimension] - size) // step + 1
    return ((*_with_extent(x.shape, dimension, windows), size),)


@gives("unfold_backward")
def _unfold_backward(
    gradient: Any, input_sizes: Sequence[Any], dim: int, size: Any, step: Any
) -> Sequence[Shape]:
    if not input_sizes:
        return ((),)
    windows = (input_sizes[dim] - size) // step + 1
    _need(gradient.shape == (*_with_extent(tuple(input_sizes), dim, windows), size))
    return (tuple(input_sizes),)


@gives("masked_scatter", "masked_scatter_")
def _masked_scatter(x: Any, mask: Any, source: Any) -> Sequence[Shape]:
    shape = broadcast(x.shape, mask.shape)
    _need(prod(source.shape) >= prod(shape))  # else there may be too few
    return (shape,)


@gives("masked_scatter_backward")
def _masked_scatter_backward(gradient: Any, mask: Any, sizes: Sequence[Any]) -> Sequence[Shape]:
    _need(broadcast(mask.shape, gradient.shape) == gradient.shape)
    _need(prod(sizes) >= prod(gradient.shape))
    return (tuple(sizes),)


@gives("rot90")
def _turned(x: Any, k: int = 1, dims: Sequence[int] = (0, 1)) -> Sequence[Shape]:
    """By quarters: after two of them the axes are where they were."""
    shape = list(x.shape)
    if k % 2:
        one, other = dims
        shape[one], shape[other] = shape[other], shape[one]
    return (tuple(shape),)


@gives("multinomial")
def _multinomial(
    x: Any, num_samples: Any, replacement: bool = False, **options: Any
) -> Sequence[Shape]:
    *rows, categories = x.shape
    _need(replacement or num_samples <= categories)
    return ((*rows, num_samples),)


@gives("logspace")
def _spaced(start: Any, end: Any, steps: Any, *rest: Any, **options: Any) -> Sequence[Shape]:
    return ((steps,),)


@gives("histc")
def _histogram(x: Any, bins: Any = 100, *rest: Any) -> Sequence[Shape]:
    return ((bins,),)


@gives("multi_margin_loss")
def _margin_loss(
    x: Any, target: Any, p: Any = 1, margin: Any = 1, weight: Any = None, reduction: int = 1
) -> Sequence[Shape]:
    _need(len(x.shape) == 1 or target.shape == x.shape[:-1])
    return (target.shape if reduction == 0 else (),)


# --- spectra ------------------------------------------------------------------------------------


@gives("_fft_r2c")
def _spectrum(x: Any, dim: Sequence[int], normalization: int, onesided: bool) -> Sequence[Shape]:
    extent = x.shape[dim[-1]]
    return (_with_extent(x.shape, dim[-1], extent // 2 + 1 if onesided else extent),)


@gives("_fft_c2r")
def _signal(x: Any, dim: Sequence[int], normalization: int, last_dim_size: Any) -> Sequence[Shape]:
    _need(last_dim_size // 2 + 1 == x.shape[dim[-1]])
    return (_with_extent(x.shape, dim[-1], last_dim_size),)


# --- images ---------------------------------------------------------------------------------------


@gives("grid_sampler_2d", "grid_sampler_3d")
def _sampled(x: Any, grid: Any, *rest: Any) -> Sequence[Shape]:
    _need(grid.shape[0] == x.shape[0], grid.shape[-1] == len(x.shape) - 2)
    return ((*x.shape[:2], *grid.shape[1:-1]),)


@gives("grid_sampler_2d_backward", "grid_sampler_3d_backward")
def _sampled_gradient(gradient: Any, x: Any, grid: Any, *rest: Any) -> Sequence[Shape]:
    _need((gradient.shape,) == _sampled(x, grid))
    return x.shape, grid.shape


@gives("affine_grid_generator")
def _affine_grid(theta: Any, size: Sequence[Any], align_corners: bool) -> Sequence[Shape]:
    _need(theta.shape[0] == size[0])
    return ((size[0], *size[2:], len(size) - 2),)


@gives("pixel_unshuffle")
def _channels_of_pixels(x: Any, far: int) -> Sequence[Shape]:
    *batch, channels, height, width = x.shape
    _need(height % far == 0, width % far == 0)
    return ((*batch, channels * far**2, height // far, width // far),)


@gives("channel_shuffle", "native_channel_shuffle")
def _channels_in_turns(x: Any, groups: int) -> Sequence[Shape]:
    _need(x.shape[1] % groups == 0)
    return (x.shape,)


@gives("max_unpool2d")
def _unpooled(x: Any, indices: Any, output_size: Sequence[Any]) -> Sequence[Shape]:
    return ((*x.shape[:-2], *output_size),)


@gives("_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
def _adaptive_pool(x: Any, output_size: Sequence[Any]) -> Sequence[Shape]:
    return ((*x.shape[: -len(output_size)], *output_size),)


@gives("adaptive_max_pool2d")
def _adaptive_max_pool(x: Any, output_size: Sequence[Any]) -> Sequence[Shape]:
    return (*_adaptive_pool(x, output_size), *_adaptive_pool(x, output_size))


_RESIZED = (
    "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_linear1d", "upsample_nearest2d",
    "_upsample_nearest_exact2d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_nearest3d",
    "_upsample_nearest_exact3d", "upsample_trilinear3d", "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
)  # fmt: skip


@gives(*_RESIZED)
def _resized(x: Any, output_size: Sequence[Any], *settings: Any) -> Sequence[Shape]:
    return ((*x.shape[:2], *output_size),)


@gives(*[f"{name}_backward" for name in _RESIZED])
def _resized_gradient(
    gradient: Any, output_size: Sequence[Any], input_size: Sequence[Any], *settings: Any
) -> Sequence[Shape]:
    _need(gradient.shape == (*input_size[:2], *output_size))
    return (tuple(input_size),)


# --- matrices -------------------------------------------------------------------------------------


@gives("linalg_inv_ex", "linalg_cholesky_ex")
def _with_info(x: Any, **options: Any) -> Sequence[Shape]:
    """Return the result's shape, and one flag for each matrix whether it could be computed."""
    return x.shape, x.shape[:-2]


@gives("linalg_lu_factor_ex")
def _factors(x: Any, **options: Any) -> Sequence[Shape]:
    return x.shape, (*x.shape[:-2], least(*x.shape[-2:])), x.shape[:-2]


@gives("_linalg_det")
def _determinant(x: Any) -> Sequence[Shape]:
    return x.shape[:-2], x.shape, x.shape[:-1]


@gives("_linalg_slogdet")
def _log_determinant(x: Any) -> Sequence[Shape]:
    return x.shape[:-2], x.shape[:-2], x.shape, x.shape[:-1]


@gives("_linalg_solve_ex")
def _solution(a: Any, b: Any, **options: Any) -> Sequence[Shape]:
    """Return the shapes for right sides of the matrices' own batch."""
    vectors = b.shape == a.shape[:-1] if len(b.shape) == len(a.shape) - 1 else False
    _need(vectors or (len(b.shape) == len(a.shape) and b.shape[:-1] == a.shape[:-1]))
    return b.shape, a.shape, a.shape[:-1], a.shape[:-2]


@gives("linalg_solve_triangular")
def _triangular_solution(
    a: Any, b: Any, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Sequence[Shape]:
    _need(b.shape[-2 if left else -1] == a.shape[-1])
    return ((*broadcast(a.shape[:-2], b.shape[:-2]), *b.shape[-2:]),)


@gives("linalg_lu_solve")
def _solution_by_factors(
    factors: Any, pivots: Any, b: Any, *, left: bool = True, adjoint: bool = False
) -> Sequence[Shape]:
    return _triangular_solution(factors, b, upper=True, left=left)


@gives("linalg_qr")
def _orthogonal_factors(x: Any, mode: str = "reduced") -> Sequence[Shape]:
    _need(mode == "reduced")
    *batch, rows, columns = x.shape
    rank = least(rows, columns)
    return (*batch, rows, rank), (*batch, rank, columns)


@gives("_linalg_svd")
def _singular_values(
    x: Any, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> Sequence[Shape]:
    _need(compute_uv)
    *batch, rows, columns = x.shape
    rank = least(rows, columns)
    sides = (rows, columns) if full_matrices else (rank, rank)
    return (*batch, rows, sides[0]), (*batch, rank), (*batch, sides[1], columns)


@gives("_linalg_eigh")
def _eigenvalues(x: Any, UPLO: str = "L", compute_v: bool = True) -> Sequence[Shape]:
    _need(compute_v)
    return x.shape[:-1], x.shape


@gives("linalg_cross")
def _cross_product(x: Any, y: Any, *, dim: int = -1) -> Sequence[Shape]:
    shape = broadcast(x.shape, y.shape)
    _need(shape[dim] == 3)
    return (shape,)


@gives("_cdist_forward", "_euclidean_dist")
def _distances(x: Any, y: Any, *rest: Any) -> Sequence[Shape]:
    return ((*broadcast(x.shape[:-2], y.shape[:-2]), x.shape[-2], y.shape[-2]),)


@gives("_pdist_forward")
def _distances_within(x: Any, *rest: Any) -> Sequence[Shape]:
    return ((x.shape[0] * (x.shape[0] - 1) // 2,),)


@gives("_grouped_mm")
def _grouped_mm(x: Any, y: Any, ends: Any = None, *rest: Any) -> Sequence[Shape]:
    """Products of groups of rows, or of columns; rows are aligned to 16 bytes."""
    aligned = [one.shape[-1] * one.dtype.itemsize % 16 == 0 for one in (x, y)]
    _need(x.shape[-1] == y.shape[-2], *aligned)
    if len(x.shape) == len(y.shape) == 2:
        return ((ends.shape[0], x.shape[0], y.shape[1]),)
    groups = {one.shape[0] for one in (x, y) if len(one.shape) == 3}
    _need(all(n == (ends or x).shape[0] for n in groups))
    batch = x.shape[:1] if ends is None else ()
    return ((*batch, x.shape[-2], y.shape[-1]),)
