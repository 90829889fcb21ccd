"""Types of results, by the CPU's kernels or by torch's Meta kernels, are those that the CPU gives."""

import gc
import itertools
import weakref

import pytest
import torch

from ltc import config
from ltc.aten.call import Call, CallResult, Scalar
from ltc.debug import metrics
from ltc.device.shapes import cpu_probe, meta
from ltc.errors import InvalidGraph


def types_of(call) -> list:
    return [(tuple(r.shape), r.dtype) for r in call]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_lists_of_equal_float_types_keep_them(dtype):
    xs = [torch.ones(shape, dtype=dtype).to("ltc") for shape in ((3,), (2, 3), ())]
    ys = [torch.ones(shape, dtype=dtype).to("ltc") for shape in ((3,), (2, 3), ())]
    torch._foreach_mul_(xs, 0.5)
    torch._foreach_addcdiv_(xs, ys, ys, [0.1, 0.2, 0.3])
    results = [torch._foreach_add(xs, ys), torch._foreach_sqrt(xs), torch._foreach_div(xs, 2)]
    total = xs[1] / ys[1]
    for result in results:
        assert types_of(result) == types_of(xs)
    assert [tuple(r.cpu().shape) for r in results[0]] == [(3,), (2, 3), ()]
    assert total.cpu().shape == (2, 3)


@pytest.mark.parametrize(
    "call",
    [
        lambda d: torch.ones(2, 3, device=d) + torch.ones(3, device=d),
        lambda d: torch.ones(3, device=d) * torch.ones(3, dtype=torch.float64, device=d),
        lambda d: torch.ones(3, dtype=torch.int64, device=d) / torch.full((3,), 2, device=d),
        lambda d: torch._foreach_add([torch.ones(3, device=d)], [torch.ones(1, device=d)])[0],
        lambda d: torch._foreach_mul([torch.ones(3, dtype=torch.int64, device=d)], 0.5)[0],
        lambda d: torch.ones(3, dtype=torch.bool, device=d) ** True,
        lambda d: torch.ones(3, dtype=torch.bool, device=d) ** 1,
        lambda d: torch._foreach_pow([torch.ones(3, dtype=torch.bool, device=d)], [False])[0],
        lambda d: torch._foreach_pow([torch.ones(3, dtype=torch.int8, device=d)], True)[0],
    ],
)
def test_what_promotes_or_broadcasts_is_as_on_the_cpu(call, equal):
    equal(call("ltc"), call("cpu"))


def test_what_no_kernel_tells_is_asked_once():
    """Of an operation without a Meta kernel, and of one that refuses the values it is tried with."""
    library = torch.library.Library("ltc_untold", "FRAGMENT")
    library.define("halved(Tensor x) -> Tensor")
    library.impl("halved", lambda x: x / 2, "CPU")
    targets = torch.tensor([[1, 2]]).to("ltc"), torch.tensor([4]).to("ltc")

    def each() -> list[torch.Tensor]:
        scores = torch.ones(4, 1, 3, device="ltc").log_softmax(2)
        lost = torch.nn.functional.ctc_loss(scores, *targets, torch.tensor([2]).to("ltc"))
        return [torch.ops.ltc_untold.halved(torch.full((3,), 4.0, device="ltc")), lost]

    each()
    with metrics.counted() as grown:
        found = each()
    assert grown["MetaInference"] == 0
    assert found[0].tolist() == [2.0, 2.0, 2.0]
    assert found[1].item() > 0


def test_torchs_default_dtype_is_part_of_the_question():
    operand = CallResult(None, None, 0, (3,), torch.int64)
    quotient = Call(torch.ops.aten.div.Tensor, (operand, operand), {})
    assert meta.result_types(quotient) == (((3,), torch.float32),)
    torch.set_default_dtype(torch.float64)
    try:
        assert meta.result_types(quotient) == (((3,), torch.float64),)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_kernel_still_refuses_what_is_wrong():
    xs = [torch.ones(3, device="ltc")]
    with pytest.raises(RuntimeError):
        torch._foreach_add(xs, [torch.ones(3, device="ltc")] * 2)
    with pytest.raises(RuntimeError, match="must match the size"):
        torch.ones(3, device="ltc") + torch.ones(4, device="ltc")


def norms(x, parameter, running):
    """Every forward norm of x [N, 4, 5] with parameters and running statistics of 4 channels."""
    aten, vectors = torch.ops.aten, (parameter, parameter)
    rates = (0.1, 1e-5)
    yield aten.native_layer_norm(x, [5], None, None, 1e-5)
    yield aten.native_layer_norm(x.mT.contiguous(), [4], *vectors, 1e-5)
    yield aten.native_group_norm(x, *vectors, x.shape[0], 4, 5, 2, 1e-5)
    yield aten._native_batch_norm_legit.no_stats(x, None, None, True, *rates)
    for training in (True, False):
        call = (x, *vectors, running.clone(), running.clone(), training, *rates)
        yield aten.native_batch_norm(*call)
        yield aten._native_batch_norm_legit(*call)
        yield aten._native_batch_norm_legit_functional(*call)
    yield aten._native_batch_norm_legit_no_training(x, *vectors, running, running, *rates)
    yield aten._batch_norm_no_update(x, *vectors, running, running, *rates)
    yield aten._batch_norm_with_update(x, *vectors, running.clone(), running.clone(), *rates)


@pytest.mark.parametrize("size", [3, 4000])  # the CPU's kernel is asked about the first alone
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parameters", ["as x", "float32"])
def test_a_norm_keeps_its_statistics_as_the_cpu_does(dtype, parameters, size):
    if parameters == "float32" and dtype is torch.float64:
        return  # the CPU takes no such mixture
    vector = torch.ones(4, dtype=dtype if parameters == "as x" else torch.float32)
    x = torch.randn(size, 4, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    ours = norms(x.to("ltc"), vector.to("ltc"), vector.to("ltc"))
    for mine, theirs in zip(ours, norms(x, vector, vector), strict=True):
        assert types_of(mine) == types_of(theirs)
        for m, t in zip(mine, theirs):
            torch.testing.assert_close(m.cpu(), t, rtol=0.02, atol=0.02)


@pytest.mark.compared
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("wanted", list(itertools.product([True, False], repeat=3))[:-1])
def test_a_batch_norm_makes_only_the_gradients_that_are_wanted(training, wanted, device):
    """Its Meta kernel makes the input's in any case; a first layer's input wants none."""
    x, weight, bias = (
        torch.randn(6, 3).to(device),
        torch.rand(3).to(device),
        torch.zeros(3).to(device),
    )
    leaves = [t.requires_grad_() for t, is_wanted in zip((x, weight, bias), wanted) if is_wanted]
    mean, variance = torch.zeros(3).to(device), torch.ones(3).to(device)
    y = torch.nn.functional.batch_norm(x, mean, variance, weight, bias, training=training)
    return torch.autograd.grad(y.sin().sum(), leaves)


_library = torch.library.Library("ltc_tests", "FRAGMENT")  # unregisters its kernels when freed
_library.define("halves(Tensor x) -> (Tensor, Tensor)")
_library.impl("halves", lambda x: (x[::2].clone(), x[:1].clone()), "CPU")
_library.impl("halves", lambda x: (x[::2].clone(), x.clone()), "Meta")  # wrong of the second


@pytest.mark.parametrize("backend", ["llvm", "eager"])
def test_a_result_that_is_not_as_recorded_harms_nobody_who_does_not_read_it(backend, equal):
    x = torch.arange(100_000.0)
    with config.override(LTC_BACKEND=backend):
        first = torch.ops.ltc_tests.halves(x.to("ltc"))[0]
        equal((first + 1).cpu(), x[::2] + 1)
        second = torch.ops.ltc_tests.halves(x.to("ltc"))[1]
        with pytest.raises(InvalidGraph, match="LTC_FORCE_FALLBACK=ltc_tests::halves"):
            (second + 1).cpu()


def test_a_small_call_is_asked_of_the_cpus_kernel_itself(equal):
    x = torch.arange(8.0)
    equal(torch.ops.ltc_tests.halves(x.to("ltc")), (x[::2], x[:1]))


def test_a_call_without_a_rule_is_asked_about_as_the_cpu_has_it():
    """torch's kernel for the Meta device refuses this layout, which only CUDA's does."""
    x = torch.randn(300, 64).to(torch.float8_e4m3fn)
    y, one = x[:160].clone(), torch.ones(())
    with metrics.counted() as grown:
        found = torch._scaled_mm(
            x.to("ltc"), y.to("ltc").t(), one.to("ltc"), one.to("ltc"), out_dtype=torch.float32
        )
        assert not grown["aten::_scaled_mm"]
    torch.testing.assert_close(
        found.cpu(), torch._scaled_mm(x, y.t(), one, one, out_dtype=torch.float32)
    )


def test_a_refusal_is_of_the_number_that_was_refused():
    """A remainder by 0 has no type; one by 2, asked for next, has.  No other test asks for this shape."""

    def remainder(number: int):
        divisor = Scalar(0, number, torch.int64, True, "other")
        x = of(3, 61, dtype=torch.int64)
        return meta.result_types(Call(torch.ops.aten.remainder.Scalar, (x, divisor), {}))

    with pytest.raises(meta.NoTypes):
        remainder(0)
    assert remainder(2) == (((3, 61), torch.int64),)


def test_a_refusal_keeps_nothing_of_the_caller_alive():
    """The frames of an error's traceback hold the user's tensors: they go without the collector."""

    class Held:
        pass

    def ask() -> weakref.ref:
        held = Held()
        x = CallResult(None, None, 0, (2, 3), torch.float32)
        try:
            cpu_probe.run_on_stand_ins(Call(torch.ops.aten.mm.default, [x, x], {}))
        except cpu_probe.Refused as error:
            assert "cannot be multiplied" in str(error)
        return weakref.ref(held)

    gc.disable()
    try:
        assert ask()() is None
    finally:
        gc.enable()


def test_a_call_that_torch_refuses_is_logged_by_nobody(caplog):
    x = torch.ones(3).to("ltc")
    with pytest.raises(RuntimeError):
        torch.cholesky_solve(x, x)
    assert not caplog.records


@pytest.mark.parametrize("count", [1, 200])
def test_elements_of_an_empty_dimension_are_refused_at_the_call(count):
    """Also where nobody reads the result, and the result is too large to ask the CPU's kernel."""
    x, rows = (
        torch.zeros(0, 32, 4, device="ltc"),
        torch.zeros(count, dtype=torch.long, device="ltc"),
    )
    with pytest.raises(IndexError, match="out of bounds for dimension with size 0"):
        x[rows]
    assert x[rows[:0]].shape == (0, 32, 4)


@pytest.mark.parametrize("name", ["bincount", "_unique2", "unique_consecutive", "nonzero"])
def test_a_call_whose_shape_values_decide_asks_no_kernel(name, monkeypatch):
    """The first such call of a process took a second, for what fake tensors import."""
    monkeypatch.setattr(meta, "FakeTensorMode", None)
    overload = getattr(torch.ops.aten, name).default
    values = CallResult(None, None, 0, (7,), torch.int64)
    with pytest.raises(meta.NoTypes, match="depends on data"):
        meta.result_types(Call(overload, (values,), {}))


def test_stand_in_values_do_not_tell_how_many_elements_there_are(equal):
    """Where values decide the shape no small call is tried: zeros would say that nothing is left."""
    x, times = torch.arange(3.0), torch.tensor([3, 0, 2])
    equal(torch.repeat_interleave(x.to("ltc"), times.to("ltc")), torch.repeat_interleave(x, times))
    equal(torch.repeat_interleave(times.to("ltc")), torch.repeat_interleave(times))


def test_a_call_whose_numbers_may_be_large_extents_is_not_tried():
    x = CallResult(None, None, 0, (4, 4), torch.float32)
    assert cpu_probe.makes_little([x, [2, 2]]) and cpu_probe.makes_little([5, 5])
    assert not cpu_probe.makes_little([x, [1000, 1000]])
    assert not cpu_probe.makes_little([1000, 1000])  # as of tril_indices, which is given no tensor


def test_a_call_without_a_meta_kernel_is_asked_of_once_however_its_lengths_change():
    """A loss over sequences (CTC) has the lengths among its arguments: each batch asked anew."""
    log_probs = CallResult(None, None, 0, (9, 2, 5), torch.float32)
    losses = CallResult(None, None, 0, (2,), torch.float32)
    targets = CallResult(None, None, 0, (2, 4), torch.int64)

    def ask(longest: int) -> None:
        alphas = CallResult(None, None, 0, (2, 9, 2 * longest + 1), torch.float32)
        lengths = [9, 9], [longest, 1]
        args = (losses, log_probs, targets, *lengths, losses, alphas, 0)
        with pytest.raises(meta.NoTypes):
            meta.result_types(Call(torch.ops.aten._ctc_loss_backward.default, args, {}))

    ask(4)
    with metrics.counted() as grown:
        for longest in (3, 2, 4, 3):
            ask(longest)
    assert grown["MetaInference"] == 0


def of(*shape: int, dtype: torch.dtype = torch.float32) -> CallResult:
    return CallResult(None, None, 0, shape, dtype)


@pytest.mark.parametrize("few", [True, False])
def test_a_small_call_imports_nothing_of_torchs_meta_kernels_and_a_large_one_has_the_same_types(
    few,
):
    """Written in Python, they take a second to import."""
    rows = 4 if few else 4000
    x, weight = of(rows, 32, dtype=torch.bfloat16), of(32)
    with pytest.MonkeyPatch.context() as patch:
        if few:
            patch.setattr(meta, "_asked", lambda *question: pytest.fail("Meta is asked"))
        args = x, [32], weight, weight, 1e-5
        types = meta._infer(Call(torch.ops.aten.native_layer_norm.default, args, {}))
        added = meta._infer(Call(torch.ops.aten.add.Tensor, (x, weight), {}))
    statistics = (rows, 1), torch.float32
    assert types == ((x.shape, x.dtype), statistics, statistics)
    assert added == (((rows, 32), torch.float32),)


SGD = {
    "weight_decay": 0.0, "momentum": 0.9, "lr": 0.1, "dampening": 0.0, "nesterov": False,
    "maximize": False, "is_first_step": False,
}  # fmt: skip


@pytest.mark.parametrize("rows", [3, 70_000])
def test_what_no_meta_kernel_knows_is_told_by_its_rule(rows):
    ops, x = torch.ops.aten, of(rows, 8)
    one, zero = of(1), of(1, dtype=torch.int32)
    overload = ops._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default
    args = x, one, zero, of(1, dtype=torch.int64), 0, 255
    quantized = meta._infer(Call(overload, args, {}))
    assert quantized == (((rows, 8), torch.float32), ((rows, 8), torch.bool))
    learned = (x, one, one, 0, 255, 1.0)
    overload = ops._fake_quantize_learnable_per_tensor_affine.default
    assert meta._infer(Call(overload, learned, {})) == (((rows, 8), torch.float32),)
    overload = ops._fused_sgd_.default
    types = meta._infer(Call(overload, ([x], [x], [x]), SGD, (0, 2), False))
    assert types == (((rows, 8), torch.float32),) * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_groups_are_told_as_the_cpu_computes_them(dtype):
    """torch's Meta kernel knows bfloat16 alone; rows of four numbers have 16 bytes in float32."""
    ends = of(4, dtype=torch.int32)
    for rows, columns in ((6, 8), (600, 800)):
        x, y = of(rows, columns, dtype=dtype), of(4, columns, 2 * columns, dtype=dtype)
        found = meta._infer(Call(torch.ops.aten._grouped_mm.default, (x, y, ends), {}, (), True))
        assert found == (((rows, 2 * columns), dtype),)
    with pytest.raises(meta.NoTypes):
        wrong = of(4, columns + 8, 8, dtype=dtype)
        meta._infer(Call(torch.ops.aten._grouped_mm.default, (x, wrong, ends), {}, (), True))


def test_a_wrong_call_of_what_no_meta_kernel_knows_has_no_types():
    x, other = of(70_000, 8), of(70_001, 8)
    overload = torch.ops.aten._fused_sgd_.default
    with pytest.raises(meta.NoTypes):
        meta._infer(Call(overload, ([x], [other], [x]), SGD, (0, 2), False))
    learned = torch.ops.aten._fake_quantize_learnable_per_tensor_affine_backward.default
    with pytest.raises(meta.NoTypes):
        meta._infer(Call(learned, (other, x, of(1), of(1), 0, 255, 1.0), {}, (), True))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.normal_(0.0, 2.0), lambda x: x.uniform_(), lambda x: x.exponential_(),
        lambda x: x.bernoulli(), lambda x: torch.rand_like(x), lambda x: torch.multinomial(x, 2),
        lambda x: torch.nn.functional.dropout(x, 0.5), lambda x: x.cauchy_(),
        lambda x: torch.randn(3, 5, device="ltc"),
    ],
)  # fmt: skip
def test_to_ask_for_the_types_of_a_draw_leaves_the_cpus_stream_as_it_was(call):
    meta._known.clear()
    before = torch.default_generator.get_state()
    call(torch.full((4, 3), 0.5, device="ltc")).cpu()
    assert torch.equal(torch.default_generator.get_state(), before)
