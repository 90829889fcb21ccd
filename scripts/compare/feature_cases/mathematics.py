"""Transforms, matrices, reductions."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from feature_cases.programs import drawn, gradients, integers, positive, table

table(
    "fft",
    fft=lambda d: torch.fft.fft(drawn(d, 3, 8)),
    rfft_and_back=lambda d: torch.fft.irfft(torch.fft.rfft(drawn(d, 9)), 9),
    fft2=lambda d: torch.fft.fft2(drawn(d, 2, 4, 6)),
    rfftn_with_gradients=lambda d: gradients(lambda x: torch.fft.rfftn(x).abs(), drawn(d, 4, 6)),
    shifts_and_frequencies=lambda d: torch.fft.fftshift(torch.fft.fftfreq(8, device=d)),
    hfft=lambda d: torch.fft.hfft(torch.fft.ihfft(drawn(d, 8))),
    stft_and_back=lambda d: torch.istft(
        torch.stft(
            drawn(d, 64), 16, window=torch.hann_window(16, device=d), return_complex=True
        ),
        16, window=torch.hann_window(16, device=d),
    ),
    complex_arithmetic=lambda d: (
        torch.view_as_complex(drawn(d, 3, 2)).exp() * 1j,
        torch.polar(drawn(d, 3).abs(), drawn(d, 3, seed=1)).conj().angle(),
    ),
)  # fmt: skip

table(
    "linalg",
    solve=lambda d: gradients(torch.linalg.solve, positive(d, 4), drawn(d, 4, 2)),
    inv=lambda d: gradients(torch.linalg.inv, positive(d, 4)),
    det=lambda d: torch.linalg.slogdet(positive(d, 4)),
    cholesky=lambda d: gradients(torch.linalg.cholesky, positive(d, 4)),
    qr=lambda d: torch.linalg.qr(drawn(d, 5, 3)).R.abs(),
    svd=lambda d: torch.linalg.svdvals(drawn(d, 5, 3)),
    eigh=lambda d: torch.linalg.eigvalsh(positive(d, 4)),
    eig=lambda d: torch.linalg.eigvals(drawn(d, 4, 4)).abs().sort().values,
    lstsq=lambda d: torch.linalg.lstsq(drawn(d, 6, 3), drawn(d, 6, 2, seed=1)).solution,
    lu=lambda d: torch.linalg.lu(drawn(d, 4, 4)),
    pinv=lambda d: torch.linalg.pinv(drawn(d, 5, 3)),
    matrix_exp=lambda d: torch.linalg.matrix_exp(drawn(d, 3, 3)),
    matrix_power=lambda d: torch.linalg.matrix_power(drawn(d, 3, 3), 5),
    norms=lambda d: (
        torch.linalg.norm(drawn(d, 3, 4), "nuc"), torch.linalg.vector_norm(drawn(d, 3, 4), 3, 1),
        torch.linalg.cond(positive(d, 3)),
    ),
    einsum=lambda d: gradients(
        lambda a, b: torch.einsum("bij,bjk->bk", a, b), drawn(d, 2, 3, 4), drawn(d, 2, 4, 5)
    ),
    triangular=lambda d: torch.linalg.solve_triangular(
        positive(d, 3).triu(), drawn(d, 3, 2), upper=True
    ),
    kron_and_products=lambda d: (
        torch.kron(drawn(d, 2, 2), drawn(d, 3, 1)), torch.linalg.multi_dot(
            [drawn(d, 2, 3), drawn(d, 3, 4), drawn(d, 4, 2)]), torch.cross(
            drawn(d, 4, 3), drawn(d, 4, 3, seed=1), dim=-1),
    ),
    cdist=lambda d: gradients(torch.cdist, drawn(d, 4, 3), drawn(d, 5, 3, seed=1)),
    tensordot=lambda d: torch.tensordot(drawn(d, 2, 3, 4), drawn(d, 4, 3), dims=([1, 2], [1, 0])),
)  # fmt: skip

table(
    "special functions and reductions",
    special=lambda d: [
        getattr(torch.special, n)(drawn(d, 5).abs() + 0.5)
        for n in ("digamma", "gammaln", "erfcx", "i0e", "bessel_j0", "ndtri", "log_ndtr", "entr")
    ],
    cumulative=lambda d: (
        drawn(d, 4, 3).cumsum(0), drawn(d, 4, 3).cummax(1), drawn(d, 4, 3).logcumsumexp(0),
    ),
    sorting=lambda d: (
        drawn(d, 4, 5).sort(stable=True), drawn(d, 9).topk(3), drawn(d, 9).kthvalue(2),
        drawn(d, 9).median(), integers(d, 3, 9).mode(), drawn(d, 4, 5).argsort(1),
    ),
    quantiles=lambda d: torch.quantile(drawn(d, 4, 9), torch.tensor([0.1, 0.5], device=d), dim=1),
    unique=lambda d: torch.unique(integers(d, 4, 12), return_inverse=True, return_counts=True),
    unique_consecutive=lambda d: torch.unique_consecutive(integers(d, 2, 12)),
    nonzero_and_masks=lambda d: (
        drawn(d, 4, 3).gt(0).nonzero(), drawn(d, 9)[drawn(d, 9) > 0],
        drawn(d, 9).masked_select(drawn(d, 9) > 0), torch.where(drawn(d, 9) > 0),
    ),
    histograms=lambda d: (
        torch.bincount(integers(d, 5, 20)), torch.histc(drawn(d, 50), 6, -2, 2),
        torch.histogram(drawn(d, 50), 4, range=(-2.0, 2.0)), torch.bucketize(
            drawn(d, 6), torch.tensor([-1.0, 0.0, 1.0], device=d)),
    ),
    scatter_and_gather=lambda d: (
        torch.zeros(3, 4, device=d).scatter_add_(0, integers(d, 3, 2, 4), drawn(d, 2, 4)),
        drawn(d, 3, 4).gather(1, integers(d, 4, 3, 2)),
        torch.zeros(5, device=d).index_add(0, integers(d, 5, 7), drawn(d, 7)),
        torch.ones(5, device=d).scatter_reduce(0, integers(d, 5, 7), drawn(d, 7), "amax"),
        torch.zeros(4, device=d).index_put((integers(d, 4, 6),), drawn(d, 6), accumulate=True),
    ),
    segment_reduce=lambda d: torch.segment_reduce(
        drawn(d, 6), "mean", lengths=torch.tensor([2, 0, 4], device=d)
    ),
    bits=lambda d: (
        integers(d, 99, 5) << 2, integers(d, 99, 5) ^ 7, ~integers(d, 99, 5),
        drawn(d, 3).view(torch.int32), torch.bitwise_right_shift(integers(d, 99, 5), 1),
    ),
    interpolation=lambda d: [
        gradients(
            partial(F.interpolate, size=(7, 5), mode=m, antialias=a), drawn(d, 1, 2, 4, 4)
        )
        for m, a in (("nearest", False), ("bilinear", True), ("bicubic", False), ("area", False))
    ],
    grid_sample=lambda d: gradients(
        lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False),
        drawn(d, 1, 2, 4, 4), drawn(d, 1, 3, 3, 2),
    ),
    affine_grid=lambda d: F.affine_grid(drawn(d, 1, 2, 3), (1, 1, 4, 4), align_corners=True),
    padding=lambda d: [
        F.pad(drawn(d, 1, 2, 4), (2, 1), mode=m) for m in ("reflect", "replicate", "circular")
    ],
    combinatorics=lambda d: (
        torch.combinations(torch.arange(4, device=d)), torch.cartesian_prod(
            torch.arange(2, device=d), torch.arange(3, device=d)), torch.vander(drawn(d, 3)),
        torch.block_diag(drawn(d, 2, 2), drawn(d, 1, 3)),
    ),
    statistics=lambda d: (
        torch.corrcoef(drawn(d, 3, 9)), torch.cov(drawn(d, 3, 9)), torch.std_mean(drawn(d, 3, 9), 1),
        torch.trapezoid(drawn(d, 9)), torch.nanmedian(drawn(d, 9)), drawn(d, 9).logsumexp(0),
    ),
    windows=lambda d: (
        torch.kaiser_window(8, device=d), torch.signal.windows.gaussian(8, std=2.0, device=d),
        torch.blackman_window(8, device=d),
    ),
    low_precision=lambda d: (
        drawn(d, 4, 4).bfloat16() @ drawn(d, 4, 4).bfloat16(), drawn(d, 4).half().exp(),
        drawn(d, 4).to(torch.float8_e4m3fn).float(),
    ),
    in_place_and_out=lambda d: (
        torch.add(drawn(d, 3), 1, out=torch.empty(3, device=d)), drawn(d, 3).clamp_(-0.5, 0.5),
        drawn(d, 4).resize_(2, 2), drawn(d, 4).set_(drawn(d, 2)),
    ),
    foreach=lambda d: torch._foreach_add([drawn(d, 2), drawn(d, 3)], 1.0),
    nested_pytrees=lambda d: pytree.tree_map(torch.neg, {"a": [drawn(d, 2)], "b": (drawn(d, 1),)}),
)  # fmt: skip
