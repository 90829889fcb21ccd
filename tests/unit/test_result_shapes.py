"""What a rule, or a statement beside the rules, tells of the sizes of results is what PyTorch gives."""

import functools
import inspect
import itertools

import pytest
import torch

from ltc.aten.call import Call, CallResult
from ltc.aten.registry import RULES
from ltc.aten.result_shapes import result_shapes
from ltc.aten.schema import overload_named, schema_of
from ltc.aten.stated_shapes import STATED
from ltc.errors import Unsupported
from ltc.support.sizes.choices import tracing
from ltc.support.sizes.extent import SizeTrace
from tests.rule_shapes import LEFT, Compared
from tests.unit.recorded_calls import Tensor, of_lists, of_torchs_table, recorded, signature_of

OF_RULES = sorted(name for name in RULES if name.startswith("aten::"))


def floats(*shape: int) -> Tensor:
    return Tensor(shape, torch.float32)


def whole(*shape: int) -> Tensor:
    return Tensor(shape, torch.int64)


LEARNED = [floats(2, 3), floats(1), floats(1), 0, 255, 1.0]
OF_EACH = [floats(2, 3), floats(3), floats(3), 1, 0, 255, 1.0]
# Of statements that torch's table of operators does not come to.
OWN = {
    "aten::celu_": [floats(2, 3), 1.0],
    "aten::conj_physical": [Tensor((2, 3), torch.complex128)],
    "aten::_standard_gamma": [floats(2, 3), None],
    "aten::_standard_gamma_grad": [floats(2, 3), floats(2, 3)],
    "aten::_fake_quantize_learnable_per_tensor_affine": LEARNED,
    "aten::_fake_quantize_learnable_per_tensor_affine_backward": [floats(2, 3), *LEARNED],
    "aten::_fake_quantize_learnable_per_channel_affine": OF_EACH,
    "aten::_fake_quantize_learnable_per_channel_affine_backward": [floats(2, 3), *OF_EACH],
    "aten::put_": [floats(2, 3), whole(4), floats(2, 2), True],
    "aten::masked_scatter_": [floats(4, 3), Tensor((4, 3), torch.bool), floats(4, 3)],
    "aten::_weight_norm_interface": [floats(4, 3), floats(4, 1), 0],
    "aten::_weight_norm_interface_backward": [
        floats(4, 3), floats(4, 3), floats(4, 1), floats(4, 1), 0,
    ],
    "aten::view_as_real_copy": [Tensor((2, 3), torch.complex64)],
    "aten::view_as_complex_copy": [floats(5, 3, 2)],
    "aten::_is_all_true": [Tensor((2, 3), torch.bool)],
    "aten::_is_any_true": [Tensor((2, 3), torch.bool)],
    "aten::affine_grid_generator": [floats(2, 2, 3), [2, 4, 5, 6], True],
    "aten::native_channel_shuffle": [floats(2, 6, 4, 5), 3],
    "aten::_upsample_bicubic2d_aa": [floats(2, 3, 4, 5), [6, 3], False, None, None],
    "aten::_upsample_bicubic2d_aa_backward": [
        floats(2, 3, 6, 3), [6, 3], [2, 3, 4, 5], False, None, None,
    ],
    "aten::_euclidean_dist": [floats(2, 4, 3), floats(2, 5, 3)],
    "aten::_grouped_mm": [
        Tensor((6, 8), torch.bfloat16), Tensor((2, 8, 16), torch.bfloat16),
        Tensor((2,), torch.int32), None, None,
    ],
}  # fmt: skip
for _axes, _mode in itertools.product((2, 3), ("upsample_nearest", "_upsample_nearest_exact")):
    _name, _small, _large = f"aten::{_mode}{_axes}d", [4] * _axes, [7] * _axes
    OWN[_name] = [floats(2, 3, *_small), _large, *[None] * _axes]
    OWN[f"{_name}_backward"] = [
        floats(2, 3, *_large), _large, [2, 3, *_small], *[None] * _axes,
    ]  # fmt: skip


@functools.cache
def samples() -> dict[str, list]:
    calls = of_torchs_table(frozenset([*OF_RULES, *STATED]), 3)
    calls |= of_torchs_table(frozenset(STATED), 3, left_out=())
    lists = [name for name in OF_RULES if "::_foreach_" in name or "::_fused_" in name]
    for name, values in [*OWN.items(), *[(name, of_lists(name)) for name in lists]]:
        calls.setdefault(name, []).append(values)
    return calls


@pytest.mark.parametrize("part", range(6))
def test_sizes_are_told_as_torchs_kernels_tell_them_also_as_expressions(part):
    compared = [
        Compared(name, v) for name, calls in sorted(samples().items())[part::6] for v in calls
    ]
    assert [one.wrong for one in compared if one.wrong] == []
    assert [one for one in compared if one.kind == "fails"] == []
    equal = [one for one in compared if one.kind == "equal"]
    assert len(equal) > 0.9 * len(compared)
    assert sum(one.moved for one in equal) > len(equal)


def test_each_statement_takes_its_overloads_arguments_and_tells_the_sizes_of_a_sample():
    for name, statement in STATED.items():
        arguments = signature_of(name).arguments
        positional = [None for a in arguments if not a.keyword_only]
        keywords = {a.name: None for a in arguments if a.keyword_only}
        inspect.signature(statement).bind(*positional, **keywords)
        assert any(Compared(name, values).kind == "equal" for values in samples()[name]), name


def test_a_rule_that_leaves_a_call_to_torchs_kernel_tells_nothing_and_its_statement_does():
    """An average of whole numbers has no rule."""
    whole_numbers = Compared(
        "aten::avg_pool2d", [whole(2, 3, 4, 4), [2, 2]] + [[], [0, 0], False, True, None]
    )
    assert whole_numbers.kind == LEFT
    shape = Compared("aten::topk", [floats(5, 7), 3, -1, True, True])
    assert shape.kind == "equal" and shape.moved


def call_of(name: str, *values) -> Call:
    overload, args, kwargs, mutated, returned = recorded(name, list(values))
    return Call(overload, args, kwargs, mutated, returned)


def test_what_has_neither_rule_nor_statement_is_not_told():
    assert "aten::geqrf" not in STATED
    with pytest.raises(Unsupported, match="no rule gives the sizes of the results of aten::geqrf"):
        result_shapes(call_of("aten::geqrf", floats(3, 3)), [torch.float32] * 2)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("aten::mm", [floats(2, 3), floats(4, 5)]),
        ("aten::add.Tensor", [floats(2, 3), floats(4), 1]),
        ("aten::view", [floats(2, 3), [7]]),
        ("aten::select.int", [floats(2, 3), 0, 2]),
        ("aten::glu", [floats(3), 0]),
        ("aten::split_with_sizes", [floats(5), [2, 2], 0]),
        ("aten::topk", [floats(3), 4, 0, True, True]),
        ("aten::kthvalue", [floats(3), 4, 0, False]),
        ("aten::multinomial", [floats(3), 4, False, None]),
        ("aten::linalg_cross", [floats(4), floats(4), 0]),
    ],
)
def test_sizes_that_torch_refuses_are_not_told(name, values):
    dtypes = [torch.float32] * len(schema_of(name).returns)
    with pytest.raises(Unsupported):
        result_shapes(call_of(name, *values), dtypes)


def test_complex_numbers_have_the_sizes_of_real_ones():
    x = Tensor((4, 3), torch.complex64)
    assert result_shapes(call_of("aten::mm", x, Tensor((3, 2), x.dtype)), [x.dtype]) == ((4, 2),)


def test_an_undefined_result_has_no_sizes():
    grads = [floats(2, 4, 6), floats(2, 3, 8), floats(4, 3, 3)]
    geometry = [[0], [1], [0], [1], False, [0], 1, [False, True, False]]
    call = call_of("aten::convolution_backward", *grads, *geometry)
    assert result_shapes(call, [None, torch.float32, None]) == (None, (4, 3, 3), None)


def test_what_two_sizes_have_in_common_is_a_guard():
    trace = SizeTrace()
    rows, others = trace.symbol(5), trace.symbol(5)
    values = [CallResult(None, None, 0, (n, 3), torch.float32) for n in (rows, others)]  # type: ignore[arg-type]
    with tracing(trace):
        call = Call(overload_named("aten::add.Tensor"), values, {})
        ((first, _),) = result_shapes(call, [torch.float32])
    assert first is rows or first is others
    fits = trace.function(" and ".join(f"({guard})" for guard in trace.guards))
    assert fits(7, 7) and not fits(7, 8)
