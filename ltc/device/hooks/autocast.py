"""Autocast for ltc tensors, with the op lists of the CPU's autocast; free where it is off.

torch has no autocast kernels for an outside device at all, so everything falls through but the
overloads listed here, which cast their operands first.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ltc.support.torch_private import AUTOCAST_KEYS, DEVICE_TYPE, exclude_dispatch_keys
from ltc.tracebacks import shorten

# Source: aten/src/ATen/autocast_mode.cpp, what is registered for AutocastCPU. CUDA's list holds
# einsum, mv and others besides: of those, what is made of listed ones is lower.
LOWER_PRECISION = """
    conv1d conv2d conv3d conv1d.padding conv2d.padding conv3d.padding conv_tbc bmm mm linalg_vecdot
    baddbmm addmm _addmm_activation addbmm linear _convolution.deprecated matmul conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input scaled_dot_product_attention
    _native_multi_head_attention prelu
""".split()
FLOAT32 = """
    avg_pool3d binary_cross_entropy _grid_sampler_2d_cpu_fallback grid_sampler grid_sampler_2d
    grid_sampler_3d polar prod prod.dim_int quantile quantile.scalar nanquantile
    nanquantile.scalar stft stft.center cdist trace view_as_complex cholesky cholesky_inverse
    cholesky_solve inverse lu_solve orgqr ormqr pinverse max_pool3d max_unpool2d max_unpool3d
    adaptive_avg_pool3d reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d
    replication_pad3d mse_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss
    poisson_nll_loss smooth_l1_loss cross_entropy_loss l1_loss huber_loss margin_ranking_loss
    soft_margin_loss triplet_margin_loss multi_margin_loss ctc_loss.IntList ctc_loss.Tensor
    kl_div multilabel_margin_loss binary_cross_entropy_with_logits fft_fft fft_ifft fft_fft2
    fft_ifft2 fft_fftn fft_ifftn fft_rfft fft_irfft fft_rfft2 fft_irfft2 fft_rfftn fft_irfftn
    fft_hfft fft_ihfft linalg_cond linalg_cond.p_str linalg_matrix_rank
    linalg_matrix_rank.tol_tensor linalg_matrix_rank.atol_rtol_float
    linalg_matrix_rank.atol_rtol_tensor linalg_solve linalg_cholesky linalg_svdvals
    linalg_eigvals linalg_eigvalsh linalg_inv linalg_householder_product linalg_tensorinv
    linalg_tensorsolve fake_quantize_per_tensor_affine geqrf _lu_with_info qr svd
    triangular_solve fractional_max_pool2d fractional_max_pool3d adaptive_max_pool3d
    multilabel_margin_loss_forward linalg_qr linalg_cholesky_ex linalg_svd linalg_eig
    linalg_eigh linalg_lstsq linalg_inv_ex linalg_matrix_sqrth
""".split()
WIDEST = "stack cat index_copy".split()


def install(library: torch.library.Library, fallback_library: torch.library.Library) -> list[str]:
    """Register the autocast kernels; returns the listed names that this torch lacks."""
    _choose_default_dtype()
    fallback_library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    absent = []
    for names, dtype_for in ((LOWER_PRECISION, _lower), (FLOAT32, _float32), (WIDEST, _widest)):
        for name in names:
            base, _, overload = name.partition(".")
            packet = getattr(torch.ops.aten, base, None)
            target = getattr(packet, overload or "default", None) if packet else None
            if target is None:
                absent.append(name)
            else:
                library.impl(name, _kernel(target, dtype_for), "AutocastPrivateUse1")
    return absent


class _Thread(threading.local):
    has_default = False


_this_thread = _Thread()


def _choose_default_dtype() -> None:
    """Let autocast mean bfloat16, as on the CPU, in every thread that chooses no other dtype.

    torch keeps the dtype by thread, and begins each with float16 for an outside device.
    """
    choose = torch.set_autocast_dtype

    def with_default(function: Callable[..., Any]):
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any):
            if not _this_thread.has_default:
                _this_thread.has_default = True
                choose(DEVICE_TYPE, torch.bfloat16)
            return function(*args, **kwargs)

        return wrapped

    torch.get_autocast_dtype = with_default(torch.get_autocast_dtype)
    torch.set_autocast_dtype = with_default(choose)


def _kernel(overload: Any, dtype_for: Callable[..., torch.dtype]):
    def kernel(*args: Any, **kwargs: Any):
        try:
            with exclude_dispatch_keys(AUTOCAST_KEYS):
                dtype = dtype_for([*args, *kwargs.values()])
                return overload(
                    *[_cast(a, dtype) for a in args],
                    **{name: _cast(a, dtype) for name, a in kwargs.items()},
                )
        except BaseException as error:
            shorten(error)
            raise

    return kernel


def _lower(operands: Sequence[Any]) -> torch.dtype:
    return torch.get_autocast_dtype(DEVICE_TYPE)


def _float32(operands: Sequence[Any]) -> torch.dtype:
    return torch.float32


def _widest(operands: Sequence[Any]) -> torch.dtype:
    """float32 where an operand is; refused, as on the CPU, where one before it is narrow otherwise."""
    lower = torch.get_autocast_dtype(DEVICE_TYPE)
    for dtype in [tensor.dtype for operand in operands for tensor in _eligible(operand)]:
        if dtype is torch.float32:
            return dtype
        if dtype is not lower:
            raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
    return lower


def _eligible(operand: Any) -> list[torch.Tensor]:
    """Tensors that autocast may touch: floating point on an ltc device, but not float64."""
    if isinstance(operand, (list, tuple)):
        return [tensor for part in operand for tensor in _eligible(part)]
    fits = (
        isinstance(operand, torch.Tensor)
        and operand.device.type == DEVICE_TYPE
        and operand.is_floating_point()
        and operand.dtype != torch.float64
    )
    return [operand] if fits else []


def _cast(operand: Any, dtype: torch.dtype):
    if isinstance(operand, (list, tuple)):
        return type(operand)(_cast(part, dtype) for part in operand)
    return operand.to(dtype) if _eligible(operand) else operand
