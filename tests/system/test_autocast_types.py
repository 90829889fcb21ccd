"""Autocast gives every operation that it concerns, and what is made of them, the CPU's dtypes.

In the tables x(2, 3) is a tensor of that shape, whose last two dimensions are those of a regular
matrix where they are equal; whole(…) is a vector of integers.
"""

import functools

import pytest
import torch
import torch.nn.functional as F

from ltc.device.hooks import autocast

pytestmark = pytest.mark.also_native

OF_ITS_LIBRARY = "aten::mkldnn_rnn_layer"  # which no ltc tensor reaches
LISTED = {
    "_addmm_activation": lambda x, whole: (x(3), x(2, 3), x(3, 3)),
    "_convolution.deprecated": lambda x, whole: (
        x(1, 2, 5), x(2, 2, 3), None, [1], [0], [1], False, [0], 1, False, False, False,
    ),
    "_grid_sampler_2d_cpu_fallback": lambda x, whole: (
        x(1, 1, 4, 4), x(1, 2, 2, 2), 0, 0, False,
    ),
    "_lu_with_info": lambda x, whole: (x(3, 3),),
    "_native_multi_head_attention": lambda x, whole: (
        x(1, 2, 4), x(1, 2, 4), x(1, 2, 4), 4, 2, x(12, 4), x(12), x(4, 4), x(4),
    ),
    "adaptive_avg_pool3d": lambda x, whole: (x(1, 2, 4, 4, 4), [2, 2, 2]),
    "adaptive_max_pool3d": lambda x, whole: (x(1, 2, 4, 4, 4), [2, 2, 2]),
    "addbmm": lambda x, whole: (x(3, 5), x(2, 3, 4), x(2, 4, 5)),
    "addmm": lambda x, whole: (x(3, 5), x(3, 4), x(4, 5)),
    "avg_pool3d": lambda x, whole: (x(1, 2, 4, 4, 4), [2]),
    "baddbmm": lambda x, whole: (x(2, 3, 5), x(2, 3, 4), x(2, 4, 5)),
    "binary_cross_entropy": lambda x, whole: (x(2, 3).sigmoid(), x(2, 3).sigmoid()),
    "binary_cross_entropy_with_logits": lambda x, whole: (x(2, 3), x(2, 3).sigmoid()),
    "bmm": lambda x, whole: (x(2, 3, 4), x(2, 4, 5)),
    "cat": lambda x, whole: ([x(2, 3), x(2, 3)],),
    "cdist": lambda x, whole: (x(3, 4), x(2, 4)),
    "cholesky": lambda x, whole: (x(3, 3),),
    "cholesky_inverse": lambda x, whole: (x(3, 3),),
    "cholesky_solve": lambda x, whole: (x(3, 2), x(3, 3)),
    "conv1d": lambda x, whole: (x(1, 2, 5), x(2, 2, 3)),
    "conv1d.padding": lambda x, whole: (x(1, 2, 5), x(2, 2, 3), None, [1], "same"),
    "conv2d": lambda x, whole: (x(1, 2, 5, 4), x(2, 2, 3, 1)),
    "conv2d.padding": lambda x, whole: (x(1, 2, 5, 4), x(2, 2, 3, 1), None, [1], "same"),
    "conv3d": lambda x, whole: (x(1, 2, 5, 4, 3), x(2, 2, 3, 1, 2)),
    "conv3d.padding": lambda x, whole: (x(1, 2, 5, 4, 3), x(2, 2, 3, 1, 1), None, [1], "same"),
    "conv_tbc": lambda x, whole: (x(4, 1, 2), x(3, 2, 5), x(5)),
    "conv_transpose1d": lambda x, whole: (x(1, 2, 5), x(2, 2, 3)),
    "conv_transpose2d.input": lambda x, whole: (x(1, 2, 5, 4), x(2, 2, 3, 1)),
    "conv_transpose3d.input": lambda x, whole: (x(1, 2, 5, 4, 3), x(2, 2, 3, 1, 2)),
    "cosine_embedding_loss": lambda x, whole: (x(2, 3), x(2, 3), whole(1, 1)),
    "cross_entropy_loss": lambda x, whole: (x(2, 3), whole(1, 2)),
    "ctc_loss.IntList": lambda x, whole: (x(4, 1, 3), whole(1, 2).reshape(1, 2), [4], [2]),
    "ctc_loss.Tensor": lambda x, whole: (x(4, 1, 3), whole(1, 2).reshape(1, 2), whole(4), whole(2)),
    "fake_quantize_per_tensor_affine": lambda x, whole: (x(2, 3), 0.1, 0, 0, 255),
    **dict.fromkeys(
        ("fft_fft", "fft_fft2", "fft_fftn", "fft_hfft", "fft_ifft", "fft_ifft2", "fft_ifftn",
         "fft_ihfft", "fft_irfft", "fft_irfft2", "fft_irfftn", "fft_rfft", "fft_rfft2",
         "fft_rfftn"),
        lambda x, whole: (x(4, 8),),
    ),
    "fractional_max_pool2d": lambda x, whole: (x(1, 2, 5, 4), [2, 2], [2, 2], x(1, 2, 2) / 8),
    "fractional_max_pool3d": lambda x, whole: (
        x(1, 2, 5, 4, 4), [2, 2, 2], [2, 2, 2], x(1, 2, 3) / 8,
    ),
    "geqrf": lambda x, whole: (x(3, 3),),
    "grid_sampler": lambda x, whole: (x(1, 1, 4, 4), x(1, 2, 2, 2), 0, 0, False),
    "grid_sampler_2d": lambda x, whole: (x(1, 1, 4, 4), x(1, 2, 2, 2), 0, 0, False),
    "grid_sampler_3d": lambda x, whole: (x(1, 1, 4, 4, 4), x(1, 2, 2, 2, 3), 0, 0, False),
    "hinge_embedding_loss": lambda x, whole: (x(2), whole(1, 1)),
    "index_copy": lambda x, whole: (x(2, 3), 0, whole(1), x(1, 3)),
    "kl_div": lambda x, whole: (x(2, 3), x(2, 3)),
    "linalg_cond": lambda x, whole: (x(3, 3),),
    "linalg_cond.p_str": lambda x, whole: (x(3, 3), "fro"),
    "linalg_householder_product": lambda x, whole: (x(3, 2), x(2)),
    "linalg_lstsq": lambda x, whole: (x(3, 3), x(3, 2)),
    "linalg_matrix_sqrth": lambda x, whole: (x(3, 3),),
    "linalg_matrix_rank": lambda x, whole: (x(3, 3), 0.1),
    "linalg_matrix_rank.atol_rtol_float": lambda x, whole: (x(3, 3),),
    "linalg_matrix_rank.atol_rtol_tensor": lambda x, whole: (x(3, 3),),
    "linalg_matrix_rank.tol_tensor": lambda x, whole: (x(3, 3), x(1)),
    "linalg_solve": lambda x, whole: (x(3, 3), x(3, 2)),
    "linalg_tensorinv": lambda x, whole: (x(3, 3), 1),
    "linalg_tensorsolve": lambda x, whole: (x(3, 3), x(3)),
    "linalg_vecdot": lambda x, whole: (x(2, 3), x(2, 3)),
    **dict.fromkeys(
        ("inverse", "linalg_cholesky", "linalg_cholesky_ex", "linalg_eig", "linalg_eigh",
         "linalg_eigvals", "linalg_eigvalsh", "linalg_inv", "linalg_inv_ex", "linalg_qr",
         "linalg_svd", "linalg_svdvals", "pinverse", "qr", "svd", "trace"),
        lambda x, whole: (x(3, 3),),
    ),
    "linear": lambda x, whole: (x(2, 3), x(4, 3), x(4)),
    "lu_solve": lambda x, whole: (x(3, 2), x(3, 3), whole(1, 2, 3).int()),
    "margin_ranking_loss": lambda x, whole: (x(2), x(2), x(2)),
    "matmul": lambda x, whole: (x(2, 3), x(3)),
    "max_pool3d": lambda x, whole: (x(1, 2, 4, 4, 4), [2]),
    "max_unpool2d": lambda x, whole: (x(1, 1, 2), whole(0, 3).reshape(1, 1, 2), [2, 3]),
    "max_unpool3d": lambda x, whole: (
        x(1, 1, 1, 2), whole(0, 3).reshape(1, 1, 1, 2), [1, 2, 3], [1, 1, 1], [0, 0, 0],
    ),
    "mm": lambda x, whole: (x(2, 3), x(3, 4)),
    "multi_margin_loss": lambda x, whole: (x(2, 3), whole(1, 2)),
    "multilabel_margin_loss": lambda x, whole: (x(2, 3), whole(1, 2, 0, 0, 1, 2).reshape(2, 3)),
    "multilabel_margin_loss_forward": lambda x, whole: (
        x(2, 3), whole(1, 2, 0, 0, 1, 2).reshape(2, 3), 1,
    ),
    "nll_loss": lambda x, whole: (x(2, 3), whole(1, 2)),
    "nll_loss2d": lambda x, whole: (x(1, 3, 1, 2), whole(1, 2).reshape(1, 1, 2)),
    "orgqr": lambda x, whole: (x(3, 2), x(2)),
    "ormqr": lambda x, whole: (x(3, 2), x(2), x(3, 4)),
    "poisson_nll_loss": lambda x, whole: (x(2), x(2), True, False, 1e-8, 1),
    "polar": lambda x, whole: (x(2, 3), x(2, 3)),
    "prelu": lambda x, whole: (x(2, 3), x(3)),
    "prod": lambda x, whole: (x(2, 3),),
    "prod.dim_int": lambda x, whole: (x(2, 3), 0),
    **dict.fromkeys(("nanquantile", "quantile"), lambda x, whole: (x(2, 3), x(1) / 8)),
    **dict.fromkeys(("nanquantile.scalar", "quantile.scalar"), lambda x, whole: (x(2, 3), 0.5)),
    **dict.fromkeys(("reflection_pad1d", "replication_pad1d"), lambda x, whole: (x(1, 2, 3), [1] * 2)),
    **dict.fromkeys(
        ("reflection_pad2d", "replication_pad2d"), lambda x, whole: (x(1, 2, 3, 4), [1] * 4)
    ),
    "replication_pad3d": lambda x, whole: (x(1, 2, 3, 4, 5), [1] * 6),
    "scaled_dot_product_attention": lambda x, whole: (x(1, 2, 3, 4), x(1, 2, 3, 4), x(1, 2, 3, 4)),
    **dict.fromkeys(
        ("huber_loss", "l1_loss", "mse_loss", "smooth_l1_loss", "soft_margin_loss"),
        lambda x, whole: (x(2, 3), x(2, 3)),
    ),
    "stack": lambda x, whole: ([x(2, 3), x(2, 3)],),
    "stft": lambda x, whole: (x(16), 4, None, None, None, False, True, True),
    "stft.center": lambda x, whole: (
        x(16), 4, None, None, None, True, "reflect", False, True, True,
    ),
    "triangular_solve": lambda x, whole: (x(3, 2), x(3, 3)),
    "triplet_margin_loss": lambda x, whole: (x(2, 3), x(2, 3), x(2, 3)),
    "view_as_complex": lambda x, whole: (x(3, 2),),
}  # fmt: skip
MADE_OF_THEM = {
    "einsum of one": lambda x: torch.einsum("ij->ji", x(2, 3)),
    "einsum of a diagonal": lambda x: torch.einsum("ii", x(3, 3)),
    "einsum, an outer product": lambda x: torch.einsum("i,j->ij", x(3), x(4)),
    "einsum over 1": lambda x: torch.einsum("i...,j...->ij", x(3, 1), x(4, 1)),
    "einsum over 2": lambda x: torch.einsum("i...,j...->ij", x(3, 2), x(4, 2)),
    "einsum with a matrix of 1": lambda x: torch.einsum("...k,nk->...n", x(5, 1), x(1, 1)),
    "einsum, elementwise": lambda x: torch.einsum("ij,ij->ij", x(2, 3), x(2, 3)),
    "einsum of three": lambda x: torch.einsum("bij,bjk,bkl->bil", x(2, 3, 4), x(2, 4, 5), x(2, 5, 6)),
    "tensordot": lambda x: torch.tensordot(x(2, 3), x(3, 4), 1),
    "tensordot over 1": lambda x: torch.tensordot(x(2, 1), x(1, 4), 1),
    "tensordot over none": lambda x: torch.tensordot(x(2), x(4), 0),
    "bilinear": lambda x: F.bilinear(x(5, 2), x(5, 3), x(4, 2, 3), x(4)),
    "matmul of vectors": lambda x: x(3) @ x(3),
    "matmul of stacks": lambda x: x(2, 3, 4) @ x(4, 5),
    "inner": lambda x: torch.inner(x(2, 3), x(4, 3)),
    "inner of vectors": lambda x: torch.inner(x(3), x(3)),
    "outer": lambda x: torch.outer(x(3), x(4)),
    "dot": lambda x: torch.dot(x(3), x(3)),
    "vdot": lambda x: torch.vdot(x(3), x(3)),
    "mv": lambda x: torch.mv(x(2, 3), x(3)),
    "addmv": lambda x: torch.addmv(x(2), x(2, 3), x(3)),
    "addr": lambda x: torch.addr(x(2, 3), x(2), x(3)),
    "kron": lambda x: torch.kron(x(2, 3), x(2, 3)),
    "chain_matmul of one": lambda x: torch.chain_matmul(x(2, 3)),
    "chain_matmul of two": lambda x: torch.chain_matmul(x(2, 3), x(3, 4)),
    "chain_matmul of three": lambda x: torch.chain_matmul(x(2, 3), x(3, 4), x(4, 5)),
    "multi_dot of two": lambda x: torch.linalg.multi_dot([x(2, 3), x(3, 4)]),
    "multi_dot of three": lambda x: torch.linalg.multi_dot([x(2, 3), x(3, 4), x(4, 5)]),
    "multi_dot of four": lambda x: torch.linalg.multi_dot([x(2), x(2, 3), x(3, 4), x(4)]),
    "matrix_power": lambda x: torch.matrix_power(x(3, 3), 3),
    "linalg.norm": lambda x: torch.linalg.norm(x(3, 3)),
    "pairwise_distance": lambda x: F.pairwise_distance(x(2, 3), x(2, 3)),
    "convolution": lambda x: torch.convolution(x(1, 2, 5), x(2, 2, 3), None, [1], [0], [1], False, [0], 1),
    "_convolution": lambda x: torch._convolution(
        x(1, 2, 5), x(2, 2, 3), None, [1], [0], [1], False, [0], 1, False, False, False, False
    ),
    "grid_sample": lambda x: F.grid_sample(x(1, 1, 4, 4), x(1, 2, 2, 2), align_corners=False),
    "lstm_cell": lambda x: torch.lstm_cell(x(2, 3), [x(2, 4), x(2, 4)], x(16, 3), x(16, 4), x(16), x(16)),
    "gru": lambda x: torch.gru(
        x(2, 2, 3), x(1, 2, 4), [x(12, 3), x(12, 4), x(12), x(12)], True, 1, 0.0, False, False, False
    ),
    "cat, a wide one first": lambda x: torch.cat([x(2).float(), x(2)]),
    "cat, a wide one last": lambda x: torch.cat([x(2), x(2).float()]),
    "stack of doubles as well": lambda x: torch.stack([x(2).double(), x(2)]),
    "layer_norm": lambda x: F.layer_norm(x(2, 3), [3], x(3)),
    "softmax": lambda x: F.softmax(x(2, 3), -1),
    "gelu": lambda x: F.gelu(x(2, 3)),
}  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def numbers(device, dtype, *shape):
    x = torch.arange(torch.Size(shape).numel()).remainder(7).div(8).add(0.25).reshape(shape)
    if len(shape) > 1 and shape[-1] == shape[-2]:
        x = x + 2 * torch.eye(shape[-1])
    return x.to(dtype).to(device)


def integers(device, *values):
    return torch.tensor(values).to(device)


def types(device, lower, call):
    """The dtypes of what a call gives under autocast, or the class of its error."""
    try:
        with torch.autocast(device, dtype=lower):
            found = call()
    except RuntimeError:
        return [RuntimeError]
    return [x.dtype for x in (found if isinstance(found, tuple) else [found])]


def overload_of(name):
    """None where this torch has none: 2.14 removed cholesky and qr, and added linalg_matrix_sqrth."""
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base, None), overload or "default", None)


def test_the_lists_are_those_of_this_torch():
    registered = set(torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU"))
    of_names = {name for name in registered if "dimname" in name.lower()}  # until torch 2.12
    listed = autocast.LOWER_PRECISION + autocast.FLOAT32 + autocast.WIDEST
    absent = {name for name in listed if not overload_of(name)}
    assert absent <= {"cholesky", "qr", "linalg_matrix_sqrth"}
    here = {f"aten::{name}" for name in listed if name not in absent}
    assert here == registered - of_names - {OF_ITS_LIBRARY}
    assert set(LISTED) == set(listed)


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", list(filter(overload_of, LISTED)))
@pytest.mark.filterwarnings("ignore")
def test_a_listed_operation(name, lower):
    operation = overload_of(name)

    def found(device, dtype):
        x, whole = (functools.partial(f, device) for f in (numbers, integers))
        operands = LISTED[name](functools.partial(x, dtype), whole)
        return types(device, lower, lambda: operation(*operands))

    for dtype in DTYPES:
        assert found("ltc", dtype) == found("cpu", dtype), dtype


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MADE_OF_THEM)
@pytest.mark.filterwarnings("ignore")
def test_what_is_made_of_them(name, lower):
    def found(device, dtype):
        x = functools.partial(numbers, device, dtype)
        return types(device, lower, lambda: MADE_OF_THEM[name](x))

    for dtype in DTYPES:
        assert found("ltc", dtype) == found("cpu", dtype), dtype
