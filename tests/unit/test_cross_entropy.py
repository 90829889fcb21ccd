"""A cross entropy and its gradient: one kernel reads the logits, once, and looks one element up."""

import math

import pytest
import torch
import torch.nn.functional as F

import ltc.core.lazy_model as ltm
from ltc.aten.nn.activation import log_softmax, log_softmax_backward
from ltc.aten.nn.loss import MEAN, nll_loss_backward, nll_loss_forward
from ltc.backends.llvm.backend import LlvmBackend
from ltc.backends.llvm.compiling import prepared
from ltc.backends.llvm.schedule import units_of
from ltc.ir import build, ops
from ltc.ir.graph import Graph
from ltc.ir.loop_nest import Kernel
from ltc.ir.node import make
from ltc.llvm.loops.emitter import kernel_code

IGNORED = -100


def given(*shape, index=0, dtype=torch.float32):
    return make(ops.INPUT, index=index, dtype=dtype, shape=shape)


def loss_and_gradient(x, target):
    y = log_softmax(x, 1, False)
    loss, total = nll_loss_forward(y, target, None, MEAN, IGNORED)
    flowing = build.full(loss.shape, 1.0, x.dtype)
    gradient = nll_loss_backward(flowing, y, target, None, MEAN, IGNORED, total)
    return loss, log_softmax_backward(gradient, y, 1, x.dtype)


def kernels_of(*outputs, inputs):
    return [u for u in units_of(prepared(Graph(inputs, (), outputs))) if isinstance(u, Kernel)]


@pytest.mark.parametrize("first", ["loss", "gradient"])
def test_one_kernel_reads_the_logits_for_the_loss_and_its_gradient(first):
    x, target = given(512, 1024), given(512, index=1, dtype=torch.int64)
    outputs = loss_and_gradient(x, target)
    outputs = outputs if first == "loss" else outputs[::-1]
    kernels = kernels_of(*outputs, inputs=(x, target))
    (rows,) = [kernel for kernel in kernels if x in kernel.reads()]
    exponentials = [v for v in rows.values() if v.kind == "cell" and v.op is ops.EXP]
    assert len(exponentials) == 1
    assert len(kernels) == 3  # the weights are added up before, the loss behind it


def test_a_gradient_that_waits_for_the_whole_loss_is_a_kernel_of_its_own():
    x, target = given(512, 1024), given(512, index=1, dtype=torch.int64)
    loss, gradient = loss_and_gradient(x, target)
    kernels = kernels_of(gradient * loss, inputs=(x, target))
    made = [kernel for kernel in kernels if x in kernel.reads()]
    assert len(made) == 2
    assert not set(made[0].writes()) & set(made[0].reads())


def picked(x, index, width):
    """The term of each row where its index is, as a sum of all terms but others are zero."""
    classes = make(ops.IOTA, size=width)
    is_it = build.eq(classes, build.unsqueeze(index, 1))
    return build.sum_of(build.where(is_it, x, 0), (1,))


def picked_by_kernel(x, index):
    nodes = given(*x.shape, dtype=x.dtype), given(*index.shape, index=1, dtype=index.dtype)
    graph = Graph(nodes, (), (picked(*nodes, x.shape[1]),))
    return LlvmBackend().compile(graph, 0, frozenset()).launch([x, index], [])[0]


@pytest.mark.parametrize("width", [2, 5, 16, 100, 1024, 5000])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
)
def test_a_sum_of_which_one_term_is_not_zero_is_that_term(dtype, width):
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(40, width, generator=generator) * 50).abs().to(dtype)
    index = torch.randint(width, (40,), generator=generator)
    assert torch.equal(picked_by_kernel(x, index), x.gather(1, index[:, None])[:, 0])


def test_a_row_without_the_index_sums_to_zero():
    x = torch.full((20, 64), 7.0)
    index = torch.tensor([-1, 64, 63, 2**40, -(2**63), 2**32 + 3] + 14 * [0])
    expected = torch.tensor([0.0, 0, 7, 0, 0, 0] + 14 * [7.0])
    assert torch.equal(picked_by_kernel(x, index), expected)


def test_what_is_not_picked_may_be_anything_and_what_is_keeps_its_value():
    x = torch.full((20, 64), math.nan)
    values = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan] * 4)
    index = torch.arange(20) * 3
    x[torch.arange(20), index] = values
    result = picked_by_kernel(x, index)
    assert torch.equal(result.nan_to_num(nan=5.0), values.nan_to_num(nan=5.0))
    assert not result[values == 0].signbit().any()  # as after adding zeros


@pytest.mark.parametrize("width", [2, 16, 100, 1024, 5000])
def test_a_place_in_a_row_is_found_whatever_number_is_asked_for(width):
    target, classes = given(40, dtype=torch.int64), make(ops.IOTA, size=width)
    is_it = build.eq(classes, build.unsqueeze(target, 1))
    odd = [-1, width, width - 1, 2**31, 2**32, 2**32 + 1, 2**40, -(2**31), -(2**32), -(2**63)]
    index = torch.tensor([*odd, 2**63 - 1, *[3 * k % width for k in range(29)]])
    graph = Graph((target,), (), (is_it,))
    (result,) = LlvmBackend().compile(graph, 0, frozenset()).launch([index], [])
    assert torch.equal(result, torch.arange(width) == index[:, None])
    (kernel,) = kernels_of(is_it, inputs=(target,))
    assert "icmp eq <16 x i32>" in kernel_code(kernel).text


def test_no_pass_over_a_row_looks_for_the_one_term():
    x, index = given(40, 1024), given(40, index=1, dtype=torch.int64)
    (kernel,) = kernels_of(picked(x, index, 1024), inputs=(x, index))
    assert "icmp eq <" not in kernel_code(kernel).text
    (kernel,) = kernels_of(build.sum_of(x, (1,)), inputs=(x, index))
    assert "x float>" in kernel_code(kernel).text  # a sum of all terms is one of vectors


def test_a_term_may_be_a_function_that_another_pass_keeps():
    x, index = given(40, 300), given(40, index=1, dtype=torch.int64)
    z = build.exp(x - build.max_of(x, (1,), keepdim=True))
    share = z / build.sum_of(z, (1,), keepdim=True)
    graph = Graph((x, index), (), (share, picked(z, index, 300), picked(share, index, 300)))
    logits = torch.randn(40, 300, generator=torch.Generator().manual_seed(0))
    at = torch.arange(40) * 7
    shares, first, second = LlvmBackend().compile(graph, 0, frozenset()).launch([logits, at], [])
    exact = (logits - logits.amax(1, keepdim=True)).double().exp()
    chosen = torch.arange(40), at
    torch.testing.assert_close(first.double(), exact[chosen], rtol=1e-6, atol=0)
    torch.testing.assert_close(second, shares[chosen], rtol=1e-6, atol=0)


OPTIONS = {
    "plain": {},
    "ignored": {"ignore_index": 1},
    "weights": {"weight": True},
    "smooth": {"label_smoothing": 0.1},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "all": {"weight": True, "ignore_index": 0, "label_smoothing": 0.2},
}
SHAPES = [(64, 1024), (37, 1000), (128, 10), (20, 5000), (16, 17, 6), (5, 3), (40, 1)]
EPSILONS = {torch.float32: 1e-6, torch.float64: 1e-13, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", EPSILONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_losses_and_gradients_equal_the_cpu_with_any_number_of_threads(option, shape, dtype):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(shape, generator=generator) * 4).to(dtype)
    target = torch.randint(shape[1], (shape[0], *shape[2:]), generator=generator)
    weight = torch.rand(shape[1], generator=generator).to(dtype)

    def computed(device):
        options = dict(OPTIONS[option])
        if "weight" in options:
            options["weight"] = weight.to(device)
        x = logits.to(device).requires_grad_()
        loss = F.cross_entropy(x, target.to(device), **options)
        (gradient,) = torch.autograd.grad(loss.sum(), [x])
        return loss.detach().cpu(), gradient.cpu()

    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results.append(computed(ltm.lazy_device()))
    finally:
        torch.set_num_threads(before)
    for ours, other, exact in zip(results[0], results[1], computed("cpu")):
        assert torch.equal(ours.nan_to_num(), other.nan_to_num())
        eps = EPSILONS[dtype]
        torch.testing.assert_close(ours, exact, rtol=8 * eps, atol=eps, equal_nan=True)
    assert torch.equal(results[1][1].nan_to_num(), results[2][1].nan_to_num())


def test_the_gradient_is_as_near_to_the_exact_one_as_eager():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(256, 1024, generator=generator) * 5
    target = torch.randint(1024, (256,), generator=generator)

    def gradient(x):
        x = x.requires_grad_()
        loss = F.cross_entropy(x, target.to(x.device), reduction="sum")
        return torch.autograd.grad(loss, [x])[0].cpu().double()

    exact = gradient(logits.double())
    others = exact.abs() > 1e-30  # below, both round to few bits
    ours, theirs = (
        ((gradient(x) - exact) / exact)[others].square().mean().sqrt()
        for x in (logits.to("ltc"), logits.clone())
    )
    assert ours <= theirs


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan, 3e38, -3e38])
def test_odd_logits_have_the_gradients_of_the_cpu(odd):
    logits = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    logits[::2, 5] = odd
    logits[1] = odd
    target = torch.arange(20)

    def gradient(device):
        x = logits.to(device).requires_grad_()
        return torch.autograd.grad(F.cross_entropy(x, target.to(device)), [x])[0].cpu()

    torch.testing.assert_close(gradient("ltc"), gradient("cpu"), equal_nan=True)


def test_a_gradient_of_a_log_softmax_of_another_step_is_that_of_its_result():
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    y, flowing = x.log_softmax(1), torch.ones(20, 64)
    backward = torch.ops.aten._log_softmax_backward_data
    ours = backward(flowing.to("ltc"), y.to("ltc"), 1, torch.float32).cpu()
    torch.testing.assert_close(ours, backward(flowing, y, 1, torch.float32))
    mixed = backward(flowing.to("ltc"), x.to("ltc").log_softmax(1), 0, torch.float32).cpu()
    torch.testing.assert_close(mixed, backward(flowing, y, 0, torch.float32))
