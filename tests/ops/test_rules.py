"""Each overload's rule against torch's own kernel: pointwise exact, the rest to some roundings."""

import contextlib
import itertools
import random as random_module
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

from ltc.aten import registry
from ltc.errors import InvalidGraph
from tests.ops.harness import CheckingMode, Recording, compare, record, run_both

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "compare"))
from operator_table import op_db

aten = torch.ops.aten
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((), (0,), (5,), (3, 4), (2, 0, 3), (2, 3, 4))


def random(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).mul(3).to(dtype)


def positive(shape, dtype, seed=0):
    """Of unsigned dtypes and bool too, for which a negative number has no meaning."""
    return random(shape, torch.float64, seed).abs().to(dtype)


def exactly(made, expected):
    for mine, theirs in zip(made, expected, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


EXACT = (aten.add, aten.sub, aten.mul, aten.div, aten.lt, aten.eq, aten.maximum)


@pytest.mark.parametrize("dtype", (*FLOATS, torch.int64, torch.int32))
@pytest.mark.parametrize("packet", EXACT, ids=lambda p: str(p))
def test_arithmetic_and_comparison_are_bit_equal_to_eager(packet, dtype):
    overload = getattr(packet, "Tensor", None) if "Tensor" in packet.overloads() else packet.default
    for shape in SHAPES:
        exactly(*run_both(overload, random(shape, dtype), random(shape, dtype, 1)))
    exactly(*run_both(overload, random((3, 1), dtype), random((4,), dtype, 1)))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("number", (2, 0.1, True, -1e-3, 1e30))
def test_numbers_are_bit_equal_to_eager(dtype, number):
    x = random((257,), dtype)
    tensor_forms = [packet.Tensor for packet in (aten.add, aten.mul, aten.div)]
    if number is not True:  # torch refuses to subtract it
        tensor_forms.append(aten.sub.Tensor)
    for overload in (*tensor_forms, aten.lt.Scalar):
        exactly(*run_both(overload, x, number))
    exactly(*run_both(aten.sqrt.default, x.abs()))


ALL_DTYPES = (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool)


@pytest.mark.parametrize("second", ALL_DTYPES)
@pytest.mark.parametrize("first", ALL_DTYPES)
def test_promotion_is_torchs(first, second):
    for a, b in (((3,), (3,)), ((3,), ()), ((), (3,)), ((), ())):
        exactly(*run_both(aten.add.Tensor, positive(a, first), positive(b, second, 1)))
    for number in (True, 2, 0.5):
        exactly(*run_both(aten.mul.Tensor, positive((3,), first), number))


def test_in_place_and_out_forms_use_the_functional_rule():
    assert registry.rule_of("aten::add_.Tensor") is registry.rule_of("aten::add.Tensor")
    assert registry.rule_of("aten::add.out") is registry.rule_of("aten::add.Tensor")
    of_lists = registry.rule_of("aten::_foreach_add.List")
    assert registry.rule_of("aten::_foreach_add_.List") is of_lists is not None
    x = random((3, 4), torch.float32)
    exactly(*run_both(aten.add_.Tensor, x, random((4,), torch.float64)))
    exactly(*run_both(aten.mul_.Tensor, x, 3))
    exactly(*run_both(aten.sub.out, x, x * 2, out=torch.empty(3, 4)))


LIST = [random((3,), torch.float32), random((2, 2), torch.float32, 1), random((), torch.float32, 2)]
LISTS = [
    (aten._foreach_add.List, (LIST, LIST), {"alpha": 0.1}),
    (aten._foreach_add_.Scalar, (LIST, 0.3), {}),
    (aten._foreach_mul_.ScalarList, (LIST, [0.1, 2.0, 3.0]), {}),
    (aten._foreach_addcmul_.Scalar, (LIST, LIST, LIST, 0.1), {}),
    (aten._foreach_addcdiv_.ScalarList, (LIST, LIST, LIST, [0.1, 0.2, 0.3]), {}),
    (aten._foreach_lerp_.Scalar, (LIST, LIST[::1], 0.1), {}),
    (aten._foreach_sqrt, (LIST,), {}),
    (aten._foreach_norm.Scalar, (LIST, 2), {}),
    (aten._foreach_zero_, (LIST,), {}),
    (aten._foreach_pow.Scalar, (LIST, 2), {}),
    (aten._foreach_maximum.List, (LIST, LIST), {}),
]


@pytest.mark.parametrize("overload, args, kwargs", LISTS, ids=lambda a: str(a)[:40])
def test_lists_equal_eager(overload, args, kwargs):
    overload = overload if hasattr(overload, "_schema") else overload.default
    for mine, theirs in zip(*run_both(overload, *args, **kwargs), strict=True):
        compare(overload.name(), mine, theirs)


CHAINS = [
    [(aten.t.default, ())],
    [(aten.select.int, (0, 1))],
    [(aten.slice.Tensor, (1, 1, 6, 2))],
    [(aten.slice.Tensor, (0, -3, None))],
    [(aten.transpose.int, (0, 1)), (aten.slice.Tensor, (0, 1, 5)), (aten.select.int, (1, -1))],
    [
        (aten.view.default, ([2, 2, 6],)), (aten.permute.default, ([2, 0, 1],)),
        (aten.select.int, (0, 3)),
    ],
    [(aten.split.Tensor, (2, 1), 2)],
    [(aten.split_with_sizes.default, ([1, 2, 3], 1), 1), (aten.t.default, ())],
    [(aten.unbind.int, (0,), 2), (aten.slice.Tensor, (0, 2, 4))],
    [(aten.unsqueeze.default, (1,)), (aten.squeeze.dim, (1,)), (aten.select.int, (0, 0))],
    [(aten.diagonal.default, (1,))],
    [(aten.t.default, ()), (aten.diagonal.default, (-1, 1, 0)), (aten.slice.Tensor, (0, 1, 3))],
    [(aten.as_strided.default, ([2, 3], [6, 2], 1))],
    [(aten.unfold.default, (1, 2, 3)), (aten.select.int, (1, 0))],
    [(aten.view.dtype, (torch.int32,)), (aten.select.int, (0, 1))],
    [(aten.alias.default, ()), (aten.select.int, (0, 1))],
]  # fmt: skip


@pytest.mark.parametrize("chain", CHAINS, ids=lambda c: "-".join(s[0].name()[6:] for s in c))
def test_a_write_through_views_changes_what_they_select(chain):
    base = random((4, 6), torch.float32)
    links = tuple((s[0], s[1], {}, s[2] if len(s) > 2 else None) for s in chain)
    expected = base.clone()
    view = expected
    for overload, args, _, index in links:
        view = overload(view, *args)
        view = view if index is None else view[index]
    new = torch.arange(view.numel(), dtype=view.dtype).reshape(view.shape) + 100
    view.copy_(new)
    recording = Recording()
    (result,) = recording.call(
        "ltc::write_view", (recording.give(base), recording.give(new), links), {}, [expected]
    )
    exactly(recording.run([result]), [expected])


CASES = {
    "softmax": lambda f: f.softmax(random((3, 5), torch.float64).requires_grad_(), 1),
    "cross_entropy": lambda f: f.cross_entropy(
        random((4, 5), torch.float64).requires_grad_(), torch.tensor([1, 0, -100, 4])
    ),
    "layer_norm": lambda f: f.layer_norm(random((3, 5), torch.float64).requires_grad_(), (5,)),
    "conv": lambda f: f.conv2d(
        random((2, 4, 7, 6), torch.float64).requires_grad_(),
        random((6, 2, 3, 3), torch.float64, 1).requires_grad_(),
        random((6,), torch.float64, 2).requires_grad_(), stride=2, padding=1, groups=2,
    ),
    "conv_transpose": lambda f: f.conv_transpose2d(
        random((2, 4, 3, 3), torch.float64).requires_grad_(),
        random((4, 3, 3, 3), torch.float64, 1).requires_grad_(), stride=2, output_padding=1,
    ),
    "max_pool": lambda f: f.max_pool2d(
        random((2, 3, 7, 7), torch.float64).requires_grad_(), 3, 2, 1, ceil_mode=True
    ),
    "avg_pool": lambda f: f.avg_pool2d(
        random((2, 3, 7, 7), torch.float64).requires_grad_(), 3, 2, 1, ceil_mode=True
    ),
    "gelu": lambda f: f.gelu(random((50,), torch.float64).requires_grad_()),
    "gelu_tanh": lambda f: f.gelu(
        random((50,), torch.float64).requires_grad_(), approximate="tanh"
    ),
    "embedding": lambda f: f.embedding(
        torch.tensor([[1, 2], [2, 0]]), random((4, 3), torch.float64).requires_grad_(), 2
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_network_function_and_its_gradient_equal_eager(name):
    mode = CheckingMode(compare)
    with mode:
        CASES[name](torch.nn.functional).square().sum().backward()
    assert mode.checked and mode.failures == [] and mode.extern == set()


def test_batch_norm_updates_its_statistics():
    x, running = random((4, 3, 5), torch.float64), [torch.zeros(3), torch.ones(3)]
    weight = random((3,), torch.float64, 1)
    args = (x, weight, weight, *[r.double() for r in running], True, 0.1, 1e-5)
    for mine, theirs in zip(*run_both(aten._native_batch_norm_legit.default, *args), strict=True):
        compare("batch norm", mine, theirs)


OPTIMIZERS = [
    lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, amsgrad=True, fused=True),
    lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, fused=True),
    lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
    lambda p: torch.optim.NAdam(p, lr=0.1, foreach=True),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_an_optimizer_step_equals_eager(make):
    parameters = [random(shape, torch.float64).requires_grad_() for shape in ((3, 4), ())]
    optimizer, mode = make(parameters), CheckingMode(compare)
    for step in range(2):
        for p in parameters:
            p.grad = random(p.shape, torch.float64, step)
        with mode:
            optimizer.step()
    assert mode.checked and mode.failures == []


def drawn(overload, args, like, seed=1, **kwargs):
    recording, values = record(overload, args, kwargs, [like], seed)
    return recording.run(values)[0]


def test_random_numbers_have_their_distributions():
    like = torch.empty(100_000)
    u = drawn(aten.rand.default, ([100_000],), like)
    assert u.min() >= 0 and u.max() < 1 and abs(u.mean() - 0.5) < 0.005  # 5 sigma
    z = drawn(aten.randn.default, ([100_000],), like)
    assert abs(z.mean()) < 0.016 and abs(z.std() - 1) < 0.012  # 5 sigma
    assert abs(z.pow(4).mean() - 3) < 0.16
    n = drawn(aten.randint.low, (-3, 4, [100_000]), like.long())
    assert n.unique().tolist() == list(range(-3, 4))
    b = drawn(aten.bernoulli_.float, (like, 0.25), like)
    assert abs(b.mean() - 0.25) < 0.007


def test_a_seed_gives_one_sequence_and_another_seed_another():
    like = torch.empty(10)
    first, again, other = (drawn(aten.rand.default, ([10],), like, seed) for seed in (1, 1, 2))
    assert first.equal(again) and not first.equal(other)


def test_an_extern_random_overload_takes_its_seed_and_leaves_the_default_generator():
    rates = torch.full((50,), 4.0)
    before = torch.random.get_rng_state()
    first, again, other = (drawn(aten.poisson.default, (rates,), rates, seed) for seed in (1, 1, 2))
    assert first.equal(again) and not first.equal(other)
    assert torch.random.get_rng_state().equal(before)


def test_dropout_keeps_and_scales():
    x = torch.ones(10_000)
    recording, values = record(aten.native_dropout.default, (x, 0.25, True), {}, [x, x.bool()], 1)
    y, kept = recording.run(values)
    assert abs(kept.double().mean() - 0.75) < 0.022  # 5 sigma
    torch.testing.assert_close(y, kept.float() / 0.75)


def test_complex_numbers_are_left_to_torch():
    x = torch.randn(3, dtype=torch.complex64)
    exactly(*run_both(aten.mul.Tensor, x, x))
    exactly(*run_both(aten.abs.default, x))
    exactly(*run_both(aten.t.default, x.reshape(3, 1)))


def test_a_missing_overload_is_skipped_and_a_second_rule_refused():
    @registry.traces("aten::no_such_overload.at_all")
    def nothing(x):
        return x

    assert "aten::no_such_overload.at_all" in registry.SKIPPED
    assert "aten::no_such_overload.at_all" not in registry.RULES
    registry.SKIPPED.remove("aten::no_such_overload.at_all")
    both_places = r"aten::relu has two rules: .*activation.py:\d+ and .*test_rules"
    with pytest.raises(ValueError, match=both_places):
        registry.traces("aten::relu")(nothing)


def test_static_arguments_are_those_that_change_the_formula():
    static = registry.static_arguments
    assert static("aten::pow.Tensor_Scalar")["exponent"] >= {-1, 0.5, 2}
    assert static("aten::arange.start_step") == dict.fromkeys(("start", "end", "step"))
    assert static("aten::var.correction") == {"correction": None}
    assert static("aten::add.Tensor") == {"alpha": frozenset({1})}
    assert static("aten::mul.Tensor") == {}
    assert static("aten::pow_.Scalar") == static("aten::pow.Tensor_Scalar")


def test_a_recorded_shape_that_the_rule_does_not_give_is_refused():
    recording = Recording()
    x = recording.give(torch.ones(3))
    (wrong,) = recording.call(aten.neg.default, (x,), {}, [torch.ones(4)])
    with pytest.raises(InvalidGraph, match=r"aten::neg: its rule gives f32\[3\] where f32\[4\]"):
        recording.graph([wrong])


def test_an_index_out_of_range_raises_torchs_error():
    x, index = torch.zeros(3), torch.tensor([5])
    recording, values = record(aten.index.Tensor, (x, [index]), {}, [torch.zeros(1)])
    with pytest.raises(IndexError, match="index 5 is out of bounds for dimension 0 with size 3"):
        recording.run(values)


def test_powers_of_small_numbers_are_their_own_formulas():
    x = random((50,), torch.float32)
    for exponent in (0, 1, 2, 3, -1, -2):
        exactly(*run_both(aten.pow.Tensor_Scalar, x, exponent))
    (made,), (expected,) = run_both(aten.pow.Tensor_Scalar, x.abs(), 1.7)
    torch.testing.assert_close(made, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rounding_mode", ["floor", "trunc"])
def test_whole_quotients_of_halves_do_not_round_the_divisor(dtype, rounding_mode):
    x, rounding = random((2000,), dtype) * 9, {"rounding_mode": rounding_mode}
    for divisor in (0.1, 1.1, -3.3, torch.tensor(0.7)):
        exactly(*run_both(aten.div.Tensor_mode, x, divisor, **rounding))
    exactly(*run_both(aten.floor_divide.default, x, 0.1))


def opinfo_samples(info, dtype, count=3):
    """(sample, whether to differentiate) for the first samples of an OpInfo entry."""
    if dtype not in info.supported_dtypes("cpu"):
        return
    differentiate = dtype == torch.float64 and info.supports_autograd
    samples = info.sample_inputs("cpu", dtype, requires_grad=differentiate)
    yield from ((s, differentiate) for s in itertools.islice(samples, count))


def run_sample(info, sample, differentiate):
    out = info(sample.input, *sample.args, **sample.kwargs)
    leaves = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
    if differentiate and leaves:
        sum(t.abs().sum() for t in leaves).backward()


@pytest.mark.parametrize("part", range(4))
def test_rules_that_samples_of_torchs_own_tests_reach_equal_eager(part):
    seed = random_module.randrange(10**6)
    chosen = random_module.Random(seed).sample(op_db, 12)
    mode = CheckingMode(compare)
    for info in chosen:
        for dtype in (torch.float64, torch.float32, torch.int64, torch.bool):
            for sample, differentiate in opinfo_samples(info, dtype):
                with mode, contextlib.suppress(Exception):  # an entry that fails in eager too
                    run_sample(info, sample, differentiate)
    assert mode.failures == [], f"seed {seed}, {[info.name for info in chosen]}"


def test_a_number_for_an_optional_tensor_reaches_torchs_kernel():
    x = random((3, 3), torch.float64)
    overload, expected = aten.linalg_pinv.atol_rtol_tensor, torch.linalg.pinv(x)
    recording, values = record(overload, (x,), {"atol": 0.0, "rtol": 1e-15}, [expected])
    compare("pinv", *recording.run(values), expected)


@pytest.mark.compared
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("number", [1.5, float("inf"), float("nan")])
def test_a_share_of_one_number_is_none_where_it_is_not_finite(name, number, device):
    x = torch.tensor(number, device=device, requires_grad=True)
    y = getattr(x * 1, name)(0)
    y.backward()
    return y.detach(), x.grad


@pytest.mark.native("PyTorch leaves the rounding of a mean where ltc leaves none")
@pytest.mark.parametrize("shape", [(10, 2, 63, 2), (1260, 3), (7, 3), (64, 5, 9, 9)])
@pytest.mark.parametrize("number", [3.14159265, -1e4 / 3, 0.1])
def test_a_channel_of_equal_numbers_is_normalized_to_its_bias(shape, number):
    """However the mean is rounded: what is left of it would be multiplied by 1 / sqrt(eps)."""
    x = torch.full(shape, number).to("ltc:0").requires_grad_()
    weight, bias = (random((shape[1],), torch.float32, seed).to("ltc:0") for seed in (1, 2))
    y = torch.nn.functional.batch_norm(x, None, None, weight, bias, training=True)
    y.sum().backward()
    expected = bias.cpu().view(1, -1, *[1] * (len(shape) - 2)).expand(shape)
    assert torch.equal(y.detach().cpu(), expected)
    assert not x.grad.any()


@pytest.mark.parametrize("dim", (0, 1))
@pytest.mark.parametrize("count", (3, 7, 13, 100))
def test_equal_numbers_vary_by_nothing(count, dim):
    """The mean of equal numbers may be off by a rounding: neither std nor its gradient shows it."""
    x = torch.randn(1, 200).expand(count, 200)
    x = (x if dim == 0 else x.t()).contiguous().to("ltc").requires_grad_()
    deviation, mean = torch.std_mean(x * 1, dim)
    deviation.sum().backward()
    assert not deviation.any() and not x.grad.any()
    torch.testing.assert_close(mean, x.select(dim, 0).detach())
