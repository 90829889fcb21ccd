"""Types of results, by formulas or by torch's Meta kernels, are those that the CPU gives."""

import gc
import itertools
import weakref

import pytest
import torch

from ltc import config
from ltc.aten.call import CallResult
from ltc.debug import metrics
from ltc.device.shapes import cpu_probe, meta
from ltc.errors import InvalidGraph


def types_of(call) -> list:
    return [(tuple(r.shape), r.dtype) for r in call]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_lists_of_equal_float_types_need_no_kernel(dtype):
    meta._known.clear()
    xs = [torch.ones(shape, dtype=dtype).to("ltc") for shape in ((3,), (2, 3), ())]
    ys = [torch.ones(shape, dtype=dtype).to("ltc") for shape in ((3,), (2, 3), ())]
    before = metrics.counter_value("MetaInference") or 0
    torch._foreach_mul_(xs, 0.5)
    torch._foreach_addcdiv_(xs, ys, ys, [0.1, 0.2, 0.3])
    results = [torch._foreach_add(xs, ys), torch._foreach_sqrt(xs), torch._foreach_div(xs, 2)]
    total = xs[1] / ys[1]
    assert (metrics.counter_value("MetaInference") or 0) == before
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


def test_a_refusal_keeps_nothing_of_the_caller_alive():
    """The frames of an error's traceback hold the user's tensors: they go without the collector."""

    class Held:
        pass

    def ask() -> weakref.ref:
        held = Held()
        x = CallResult(None, None, 0, (2, 3), torch.float32)
        try:
            cpu_probe.run_on_stand_ins(torch.ops.aten.mm.default, [x, x], {}, ())
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
        meta.result_types(overload, (values,), {})


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
            meta.result_types(torch.ops.aten._ctc_loss_backward.default, args, {})

    ask(4)
    with metrics.counted() as grown:
        for longest in (3, 2, 4, 3):
            ask(longest)
    assert grown["MetaInference"] == 0
