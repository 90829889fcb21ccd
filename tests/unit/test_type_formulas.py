"""What the formulas tell of a call's results is what torch's kernels tell."""

import functools
import inspect
import itertools
import random
import warnings

import pytest
import torch
from torch.utils._pytree import tree_leaves

from ltc.aten.call import CallResult
from ltc.device.shapes import cpu_probe, meta
from ltc.device.shapes.formulas.operands import number_of
from ltc.device.shapes.formulas.table import FORMULAS, types_by_formula
from tests import drawn
from tests.unit.recorded_calls import (
    Tensor,
    of_lists,
    of_torchs_table,
    recorded,
    signature_of,
    varied,
)

OF_ATEN = [name for name in FORMULAS if name.startswith("aten::")]
VARIATIONS = 12 * drawn.TIMES  # of each overload


def floats(*shape: int) -> Tensor:
    return Tensor(shape, torch.float32)


def indices(*shape: int) -> Tensor:
    return Tensor(shape, torch.int64)


PLAIN = [None] * 4  # dtype, layout, device, pin_memory
# Of overloads that torch's table of operators does not come to.
OWN = {
    "aten::rand_like": [floats(2, 3), *PLAIN, None],
    "aten::fill_.Tensor": [floats(2, 3), floats()],
    "aten::norm.Scalar": [floats(2, 3), 2],
    "aten::lerp.Tensor": [floats(2, 3), floats(3), floats()],
    "aten::clamp": [floats(2, 3), 0, 1.5],
    "aten::all.dims": [floats(2, 3), [0], True],
    "aten::all.dim": [floats(2, 3), 0, True],
    "aten::amax": [floats(2, 3), [0], True],
    "aten::amin": [floats(2, 3), [], False],
    "aten::argmax": [floats(2, 3), None, False],
    "aten::argmin": [floats(2, 3), 1, True],
    "aten::scatter_.value": [floats(4, 3), 0, indices(2, 3), 1.5],
    "aten::any.dims": [floats(2, 3), [0, 1], False],
    "aten::count_nonzero.dim_IntList": [floats(2, 3), [0]],
    "aten::sort.stable": [floats(2, 3), True, -1, False],
    "aten::linear": [floats(2, 3, 4), floats(5, 4), floats(5)],
    "aten::linear_backward": [floats(2, 3, 4), floats(2, 3, 5), floats(5, 4), [True, False, True]],
    "aten::clamp_max": [floats(2, 3), 1.5],
    "aten::addcdiv_": [floats(2, 3), floats(3), floats(2, 3), 0.5],
    "aten::addcmul_": [floats(2, 3), floats(3), floats(2, 3), 0.5],
    "aten::_unsafe_index.Tensor": [floats(4, 5), [indices(2, 1), indices(3)]],
    "aten::_unsafe_index_put": [floats(4, 5), [indices(2)], floats(2, 5), False],
    "aten::_index_put_impl_": [floats(4, 5), [indices(2)], floats(5), True, True],
    "aten::_native_batch_norm_legit.no_stats": [floats(6, 3, 4), None, floats(3), True, 0.1, 1e-5],
    "aten::native_dropout": [floats(2, 3), 0.5, True],
    "aten::_fft_r2c": [floats(2, 6, 5), [1, 2], 0, True],
    "aten::_fft_c2c": [Tensor((2, 6, 5), torch.complex64), [1], 1, False],
    "aten::_fft_c2r": [Tensor((2, 6, 5), torch.complex128), [1, 2], 2, 9],
    "aten::adaptive_max_pool2d": [floats(2, 3, 5, 6), [2, 3]],
    "aten::adaptive_max_pool2d_backward": [
        floats(2, 3, 2, 3), floats(2, 3, 5, 6), indices(2, 3, 2, 3),
    ],
    "aten::bucketize.Tensor": [floats(2, 3), floats(4), False, True],
    "aten::floor_divide": [indices(2, 3), 2],
    "aten::floor_divide_.Tensor": [floats(2, 3), floats(3)],
    "aten::_is_all_true": [Tensor((2, 3), torch.bool)],
    "aten::_is_any_true": [Tensor((2, 3), torch.bool)],
    "aten::_embedding_bag": [
        floats(5, 3), indices(7), indices(4), False, 0, False, None, True, -1,
    ],
    "aten::_embedding_bag_forward_only": [
        floats(5, 3), indices(7), indices(4), False, 1, False, None, False, 2,
    ],
    "aten::_embedding_bag_backward": [
        floats(4, 3), indices(7), indices(4), indices(0), indices(4), indices(4), 5, False, 0,
        False, None, -1,
    ],
    "aten::pow_.Scalar": [floats(2, 3), 2.5],
    "aten::pow_.Tensor": [floats(2, 3), floats(3)],
    "aten::nll_loss2d_forward": [floats(2, 5, 3, 4), indices(2, 3, 4), floats(5), 1, -100],
    "aten::nll_loss2d_backward": [
        floats(), floats(2, 5, 3, 4), indices(2, 3, 4), None, 1, -100, floats(),
    ],
    "aten::softshrink": [floats(2, 3), 0.5],
    "aten::_grouped_mm": [
        Tensor((6, 8), torch.bfloat16), Tensor((2, 8, 16), torch.bfloat16),
        Tensor((2,), torch.int32), None, None,
    ],
    "aten::_amp_foreach_non_finite_check_and_unscale_": [
        [floats(2, 3), Tensor((4,), torch.float16)], floats(), floats(1),
    ],
    "aten::_amp_update_scale_": [
        floats(), Tensor((), torch.int32), floats(), 2.0, 0.5, 2000,
    ],
    "aten::fake_quantize_per_tensor_affine_cachemask": [floats(2, 3), 0.1, 0, -128, 127],
    "aten::_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": [
        floats(2, 3), floats(1), Tensor((1,), torch.int32), indices(1), 0, 255,
    ],
    "aten::fake_quantize_per_channel_affine_cachemask": [
        floats(2, 3), floats(3), Tensor((3,), torch.int32), 1, 0, 255,
    ],
    "aten::_fake_quantize_learnable_per_tensor_affine": [
        floats(2, 3), floats(1), floats(1), 0, 255, 1.0,
    ],
    "aten::_fake_quantize_learnable_per_tensor_affine_backward": [
        floats(2, 3), floats(2, 3), floats(1), floats(1), 0, 255, 1.0,
    ],
    "aten::_fake_quantize_learnable_per_channel_affine": [
        floats(2, 3), floats(3), floats(3), 1, 0, 255, 1.0,
    ],
    "aten::_fake_quantize_learnable_per_channel_affine_backward": [
        floats(2, 3), floats(2, 3), floats(3), floats(3), 1, 0, 255, 1.0,
    ],
}  # fmt: skip
for _axes, _kind in itertools.product((1, 2, 3), ("reflection", "replication")):
    _name, _padding = f"aten::{_kind}_pad{_axes}d", [1, 2] * _axes
    OWN[_name] = [floats(2, 3, *[4] * _axes), _padding]
    OWN[f"{_name}_backward"] = [floats(2, 3, *[7] * _axes), floats(2, 3, *[4] * _axes), _padding]
for _axes, _mode in itertools.product((2, 3), ("upsample_nearest", "_upsample_nearest_exact")):
    _name, _small, _large = f"aten::{_mode}{_axes}d", [4] * _axes, [7] * _axes
    OWN[_name] = [floats(2, 3, *_small), _large, *[None] * _axes]
    OWN[f"{_name}_backward"] = [
        floats(2, 3, *_large), _large, [2, 3, *_small], *[None] * _axes,
    ]  # fmt: skip
OWN |= {
    "aten::_upsample_bicubic2d_aa": [floats(2, 3, 4, 5), [6, 3], False, None, None],
    "aten::_upsample_bicubic2d_aa_backward": [
        floats(2, 3, 6, 3), [6, 3], [2, 3, 4, 5], False, None, None,
    ],
    "aten::im2col": [floats(2, 3, 6, 7), [2, 3], [1, 2], [1, 0], [2, 1]],
    "aten::col2im": [floats(2, 12, 20), [5, 6], [2, 2], [1, 1], [0, 0], [1, 1]],
    "aten::median.dim": [floats(4, 3), 1, True],
    "aten::nanmedian.dim": [floats(4, 3), -2, False],
    "aten::median": [floats(4, 3)],
    "aten::nanmedian": [floats(4, 3)],
    "aten::_pdist_forward": [floats(4, 3), 1.5],
    "aten::_pdist_backward": [floats(6), floats(4, 3), 1.5, floats(6)],
    "aten::multi_margin_loss": [floats(4, 3), indices(4), 1, 0.5, None, 0],
    "aten::multi_margin_loss_backward": [floats(), floats(4, 3), indices(4), 1, 0.5, None, 1],
    "aten::normal.Tensor_float": [floats(2, 3), 0.5, None],
    "aten::normal.float_Tensor": [0.5, floats(2, 3), None],
    "aten::put_": [floats(2, 3), indices(4), floats(2, 2), True],
    "aten::_conj_physical": [Tensor((2, 3), torch.complex64)],
    "aten::conj_physical": [Tensor((2, 3), torch.complex128)],
    "aten::affine_grid_generator": [floats(2, 2, 3), [2, 4, 5, 6], True],
    "aten::native_channel_shuffle": [floats(2, 6, 4, 5), 3],
    "aten::linalg_inv_ex": [floats(2, 4, 4), False],
    "aten::linalg_cholesky_ex": [floats(2, 4, 4), False, False],
    "aten::_linalg_det": [floats(2, 4, 4)],
    "aten::_linalg_solve_ex": [floats(2, 4, 4), floats(2, 4, 3), True, False],
    "aten::_linalg_eigh": [floats(2, 4, 4), "U", True],
    "aten::_euclidean_dist": [floats(2, 4, 3), floats(2, 5, 3)],
    "aten::special_i0e": [floats(2, 3)],
    "aten::special_i1e": [floats(2, 3)],
    "aten::view_as_real_copy": [Tensor((2, 3), torch.complex64)],
    "aten::view_as_complex_copy": [floats(2, 3, 2)],
    "aten::_standard_gamma": [floats(2, 3), None],
    "aten::_standard_gamma_grad": [floats(2, 3), floats(2, 3)],
    "aten::_weight_norm_interface": [floats(4, 3), floats(4, 1), 0],
    "aten::_weight_norm_interface_backward": [
        floats(4, 3), floats(4, 3), floats(4, 1), floats(4, 1), 0,
    ],
}  # fmt: skip
for _way in ("l", "r"):
    OWN[f"aten::__{_way}shift__.Tensor"] = [indices(2, 3), indices(3)]
    OWN[f"aten::__{_way}shift__.Scalar"] = [indices(2, 3), 2]
# What Meta refuses though the CPU computes it: it knows the dtypes of another device, or has no kernel.
COMPUTED_BY_THE_CPU = frozenset(
    {
        "aten::_grouped_mm",
        "aten::_standard_gamma_grad",
        "aten::multi_margin_loss_backward",
        *(name for name in OF_ATEN if "fake_quantize" in name),
    }
)


def functional(name: str) -> str:
    """aten::add.Tensor for aten::add_.Tensor."""
    base, dot, overload = name.partition(".")
    return base.removesuffix("_") + dot + overload


@functools.cache
def samples() -> dict[str, list]:
    """Overload -> arguments of calls, for every overload of aten that has a formula."""
    calls = of_torchs_table(frozenset(OF_ATEN), 2)
    for name in OF_ATEN:
        if "::_foreach_" in name or "::_fused_" in name:
            calls[name] = [of_lists(name)]
        elif name in OWN:
            calls.setdefault(name, []).append(OWN[name])
    for name in OF_ATEN:
        if name not in calls and functional(name) in calls:
            calls[name] = calls[functional(name)]
        elif name not in calls:  # .Scalar for .Tensor
            like = calls[functional(name).replace(".Scalar", ".Tensor")]
            calls[name] = [[values[0], 3, *values[2:]] for values in like]
    return calls


def on_the_cpu(overload, args) -> tuple | str:
    """What the call gives of zeros."""
    zeros = [
        torch.zeros(a.shape, dtype=a.dtype) if isinstance(a, CallResult) else number_of(a)
        for a in args
    ]
    try:
        made = overload(*zeros)
    except RuntimeError as error:
        return f"refused: {error}"
    return tuple((tuple(x.shape), x.dtype) for x in tree_leaves(made))


def told_wrong(name: str, values: list) -> str | None:
    """How the formula differs from torch's kernels, asked with and without the CPU's own."""
    overload, args, kwargs, mutated, returned = recorded(name, values)
    found = types_by_formula(overload, args, kwargs)
    if found is None:
        return None
    for few_bytes in (1 << 16, -1):
        with warnings.catch_warnings(record=True) as warned, pytest.MonkeyPatch.context() as patch:
            warnings.simplefilter("always")
            warnings.filterwarnings(
                "ignore", "ComplexHalf"
            )  # torch 2.11 says it of each such tensor
            patch.setattr(cpu_probe, "FEW_BYTES", few_bytes)
            try:
                expected = meta._infer(overload, args, kwargs, mutated, returned)
            except meta.NoTypes as refusal:
                expected = f"refused: {refusal}"
                if name in COMPUTED_BY_THE_CPU:
                    expected = on_the_cpu(overload, args)
        if found != expected or warned:
            return f"{name}{values}: {found}, not {expected} {[str(w.message) for w in warned]}"
    return None


@pytest.fixture
def every_warning():
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


@pytest.mark.parametrize("first", range(8))
def test_a_formula_tells_what_torchs_kernels_tell(first, every_warning):
    wrong = []
    for name in OF_ATEN[first::8]:
        source = random.Random(f"{name} {drawn.seeds(1)[0]}")
        calls = samples()[name]
        calls = calls + [varied(name, source.choice(calls), source) for _ in range(VARIATIONS)]
        wrong += filter(None, (told_wrong(name, values) for values in calls))
    assert wrong == []


def test_a_formula_tells_the_types_of_some_sample():
    silent = []
    for name in OF_ATEN:
        questions = (recorded(name, values)[:3] for values in samples()[name])
        if not any(types_by_formula(*question) for question in questions):
            silent.append(name)
    assert silent == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shapes", [((6, 8), (2, 8, 4)), ((2, 4, 8), (8, 4)), ((4, 8), (8, 4))])
def test_products_of_groups_are_told_as_the_cpu_computes_them(shapes, dtype):
    operands = [Tensor(shape, dtype) for shape in shapes]
    values = [*operands, Tensor((2,), torch.int32), None, None]
    assert told_wrong("aten::_grouped_mm", values) is None
    overload, args, kwargs, *_ = recorded("aten::_grouped_mm", values)
    # rows of four numbers have 16 bytes in float32; float64 is refused
    assert (types_by_formula(overload, args, kwargs) is not None) == (dtype is torch.float32)


def test_a_formula_takes_the_arguments_of_its_overload():
    for name, formula in FORMULAS.items():
        arguments = signature_of(name).arguments
        positional = [None for a in arguments if not a.keyword_only]
        keywords = {a.name: None for a in arguments if a.keyword_only}
        inspect.signature(formula).bind(*positional, **keywords)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [None, (5, 7), (2, 1, 1, 7)])
@pytest.mark.parametrize("shared", [6, 3, 1])
def test_attention_is_told_as_its_kernels_tell_it(bias, dtype, shared):
    query = Tensor((2, 6, 5, 4), dtype)
    key, value = (Tensor((2, shared, 7, width), dtype) for width in (4, 6))
    result, sums = Tensor((2, 6, 5, 6), dtype), Tensor((2, 6, 5), torch.float32)
    if dtype is torch.float64:
        sums = Tensor(sums.shape, dtype)
    operands = [query, key, value, bias and Tensor(bias, dtype)]
    forward = [*operands, False, None]
    backward = [result, *operands, result, sums, None, False, None, None]
    kept = [*backward[:7], indices(), False, None, 0.5]
    calls = [("", forward), (".dropout", [*forward, 0.5])]
    for suffix, values in [*calls, ("_gradient", backward), ("_gradient", kept)]:
        name = f"ltc::attention{suffix}"
        assert types_by_formula(*recorded(name, values)[:3]) is not None
        assert told_wrong(name, values) is None


def test_what_some_kernels_refuse_for_its_dimensions_has_no_formula():
    """More than 64: the kernel says so in its own words."""
    x = torch.zeros([1] * 65, device="ltc:0")
    with pytest.raises(RuntimeError, match="up to 64 dims"):
        x.amax(dim=0)


@pytest.mark.parametrize(
    ("shapes", "dim"),
    [
        ([(0,), (2, 3, 4)], 1),
        ([(2, 3), (0,), (2, 1), (0,)], -1),
        ([(0,), (0,)], 0),
        ([(0,), (5,)], 0),
        ([(0, 4), (3, 4)], 0),
        ([(0,), (0, 4), (3, 4)], 0),
    ],
)
def test_what_has_no_elements_is_joined_to_any(shapes, dim):
    """As keys of a cache are to the first that come."""
    parts = [CallResult(None, None, 0, shape, torch.float32) for shape in shapes]
    expected = torch.cat([torch.empty(shape) for shape in shapes], dim)
    (found,) = types_by_formula(torch.ops.aten.cat.default, (parts, dim), {})
    assert found == (tuple(expected.shape), torch.float32)
