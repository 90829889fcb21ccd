"""Sums over rows in the kernel that makes them: nothing is read twice, no bit depends on threads."""

import pytest
import torch
import torch.nn.functional as F

import ltc.core.lazy_model as ltm
from ltc.backends.llvm.compiling import prepared
from ltc.backends.llvm.schedule import units_of
from ltc.ir import build, ops
from ltc.ir.graph import Graph
from ltc.ir.loop_nest import Kernel
from ltc.ir.node import make

SHAPES = [
    (512, 64), (8, 128, 48), (1000, 100), (16, 16, 17), (3, 700, 5), (9, 3), (2048, 1040),
    (2, 4, 64, 32), (300, 1),
]  # fmt: skip


def given(*shape, index=0, dtype=torch.float32):
    return make(ops.INPUT, index=index, dtype=dtype, shape=shape)


def norm_gradients(x, gradient):
    """(of x, of the weight, of the bias) as sums over the rows of two dimensions."""
    distance = x - build.mean_of(x, (1,), keepdim=True)
    inverse = 1.0 / build.sqrt(build.mean_of(distance * distance, (1,), keepdim=True))
    y = distance * inverse
    inner = build.mean_of(gradient * y, (1,), keepdim=True)
    of_x = (gradient - build.mean_of(gradient, (1,), keepdim=True) - y * inner) * inverse
    return of_x, build.sum_of(gradient * y, (0,)), build.sum_of(gradient, (0,))


def kernels_of(*outputs, inputs):
    return [u for u in units_of(prepared(Graph(inputs, (), outputs))) if isinstance(u, Kernel)]


def test_the_gradients_of_a_norm_read_its_rows_once():
    x, gradient = given(2048, 128), given(2048, 128, index=1)
    kernels = kernels_of(*norm_gradients(x, gradient), inputs=(x, gradient))
    assert sum(x in kernel.reads() for kernel in kernels) == 1
    assert sum(gradient in kernel.reads() for kernel in kernels) == 1
    (rows,) = [kernel for kernel in kernels if x in kernel.reads()]
    assert sum(store.sums is ops.SUM for store in rows.stores) == 2
    assert len(rows.stores) == 3  # the statistics of the rows are not stored


def test_what_needs_the_totals_is_no_part_of_the_kernel_that_adds_them_up():
    x = given(2048, 128)
    shifted = x - build.max_of(x, (1,), keepdim=True)
    total = build.sum_of(shifted, (0,), keepdim=True)
    result = shifted * total - build.max_of(shifted * total, (1,), keepdim=True)
    for kernel in kernels_of(result, inputs=(x,)):
        sums = {store.node for store in kernel.stores if store.sums}
        assert not sums.intersection(kernel.reads())


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_as_near_to_the_exact_ones_as_eager(monkeypatch, shape):
    monkeypatch.setenv("LTC_BACKEND", "llvm")
    torch.manual_seed(0)
    operands = [torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape[-1])]
    flowing = torch.randn(shape)

    def gradients(device, dtype):
        own = [x.to(dtype).to(device).requires_grad_() for x in operands]
        y = F.layer_norm(own[0], own[1].shape, own[1], own[2])
        return [g.cpu() for g in torch.autograd.grad(y, own, flowing.to(dtype).to(device))]

    exact = gradients("cpu", torch.float64)
    single = [gradients(device, torch.float32) for device in ("ltc", "cpu")]
    for ours, eager, right in zip(*single, exact):
        smallest = torch.finfo(torch.float32).eps * right.abs().max()  # of the result's rounding
        error = (ours.double() - right).abs().max()
        assert error <= 2 * smallest + (eager.double() - right).abs().max()


def test_gradients_in_double_precision(monkeypatch):
    monkeypatch.setenv("LTC_BACKEND", "llvm")
    torch.manual_seed(0)
    x, flowing = torch.randn(2, 512, 33, dtype=torch.float64)
    results = []
    for device in ("ltc", "cpu"):
        own = x.to(device).requires_grad_()
        weight = torch.ones(33, dtype=torch.float64).to(device).requires_grad_()
        y = F.layer_norm(own, (33,), weight)
        gradients = torch.autograd.grad(y, [own, weight], flowing.to(device))
        results.append([g.cpu() for g in gradients])
    for ours, eager in zip(*results):
        torch.testing.assert_close(ours, eager, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_no_bit_depends_on_the_number_of_threads(monkeypatch, shape):
    monkeypatch.setenv("LTC_BACKEND", "llvm")
    torch.manual_seed(0)
    x, flowing = torch.randn(shape).to("ltc"), torch.randn(shape).to("ltc")
    weight = torch.randn(shape[-1]).to("ltc")
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            own = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
            y = F.layer_norm(own[0], weight.shape, own[1])
            results.append([g.cpu() for g in torch.autograd.grad(y, own, flowing)])
            ltm.mark_step()
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


def test_a_sum_over_one_element_beside_rows_that_are_reduced():
    """Totals that nothing adds up would never be cleared."""
    x = torch.randn(1, 7, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def step(device):
        given = x.to(device).requires_grad_()
        rows, rolled = given.var([3], correction=0), given.roll(2, 2)
        factor = rolled.mean(0).mean([-1, -2, -3], keepdim=True)
        y = torch.addcmul(rows, rows, factor.expand_as(rows), value=0.1)
        return y.detach(), torch.autograd.grad(y.sin().sum(), given)[0]

    for _ in range(2):  # the second time memory is not new
        for mine, theirs in zip(step("ltc"), step("cpu")):
            torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-12, atol=1e-12)


ROWS = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "layer_norm of two dimensions": lambda x: F.layer_norm(x, x.shape[-2:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "normalize": lambda x: F.normalize(x, dim=-1),
}
ORDERS = [(0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("shape", [(4, 16, 32), (3, 9, 17), (5, 40, 7), (2, 70, 1)], ids=str)
def test_totals_lie_in_any_order_of_dimensions(monkeypatch, rows, shape):
    """The columns of the totals need not be neighbours in memory."""
    monkeypatch.setenv("LTC_BACKEND", "llvm")
    x = torch.randn(shape, dtype=torch.float64)

    def sums(device):
        made = rows(x.to(device) + 1)
        results = [made]  # stored as well as added up
        for order in ORDERS:
            results += [made.permute(order).sum(k) for k in range(3)]
        return [y.cpu() for y in results]

    right = sums("cpu")
    rounding = 1e-15 * right[0].abs().sum(dtype=torch.float64)  # no sum has more terms than that
    for ours, exact in zip(sums("ltc"), right):
        assert (ours - exact).abs().max() <= rounding


@pytest.mark.parametrize("length", [5, 16, 33])
def test_the_gradient_of_repeated_positions_is_that_of_the_cpu(monkeypatch, length):
    monkeypatch.setenv("LTC_BACKEND", "llvm")
    batch, width = 4, 32
    shapes = (batch, length, width), (1, width, length), (batch, length, width)
    x, positions, weights = (torch.randn(shape, dtype=torch.float64) for shape in shapes)

    def gradient(device):
        leaf = positions.clone().to(device).requires_grad_()
        repeated = leaf.repeat(batch, 1, 1).permute(0, 2, 1)
        normal = F.layer_norm(x.to(device) + repeated, (width,))
        (normal * weights.to(device)).sum().backward()
        return leaf.grad.cpu()

    exact = gradient("cpu")
    assert (gradient("ltc") - exact).abs().max() <= 1e-12 * exact.abs().max()


@pytest.mark.parametrize("length, rest", [(23, (23, 33)), (24, (700,)), (17, (4, 9, 40))], ids=str)
def test_rows_that_are_cut_to_one_element_keep_their_variables(monkeypatch, length, rest):
    """A sum over dimensions of which one has one element left, beside a sum over repeats."""
    monkeypatch.setenv("LTC_BACKEND", "llvm")
    shape, whole = (length, *rest), (2 * length, *rest)
    x, target = torch.randn(shape, dtype=torch.float64), torch.randn(whole, dtype=torch.float64)

    def results(device):
        leaf = x.to(device).requires_grad_()
        loss = F.mse_loss(leaf.repeat(2, *[1] * len(rest)), target.to(device))
        loss.backward()
        return loss.detach().cpu(), leaf.grad.cpu()

    for ours, exact in zip(results("ltc"), results("cpu")):
        torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("times", [(1, 2, 3, 1), (1, 3, 2, 1), (2, 1, 4, 1)], ids=str)
def test_rows_of_what_was_repeated_are_read_as_they_lie_in_memory(monkeypatch, rows, times):
    """Beside the sum over the repeats there are views of which the rows' kernel knew nothing."""
    monkeypatch.setenv("LTC_BACKEND", "llvm")
    x = torch.randn(1, 1, 5, 6, dtype=torch.float64)
    weights = torch.randn(times[0], times[1], 25 * times[2], 6, dtype=torch.float64)

    def results(device):
        leaf = x.to(device).requires_grad_()
        once = leaf.repeat(1, 1, 5, 1)
        twice = (once + once).repeat(times)
        normal = rows(twice + twice)
        (normal * weights.to(device)).sum().backward()
        return normal.detach().cpu(), leaf.grad.cpu()

    for ours, exact in zip(results("ltc"), results("cpu")):
        torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("times", [(4, 2, 1), (2, 3, 1), (1, 4, 1)], ids=str)
def test_a_lookup_in_what_was_repeated_reads_it_as_it_lies_in_memory(monkeypatch, times):
    monkeypatch.setenv("LTC_BACKEND", "llvm")
    x = torch.randn(1, 50, 8, dtype=torch.float64)
    added = torch.randn(1, 50, 6, dtype=torch.float64)
    chosen = torch.tensor([3, 1, 7, 3, 0, 5])
    weights = torch.randn(times[0], 50 * times[1], 6, dtype=torch.float64)

    def results(device):
        leaf = added.to(device).requires_grad_()
        found = (-x.to(device)).repeat(times).index_select(2, chosen.to(device))
        rows = (found + leaf.repeat(times)).softmax(-1)
        (rows * weights.to(device)).sum().backward()
        return rows.detach().cpu(), leaf.grad.cpu()

    for ours, exact in zip(results("ltc"), results("cpu")):
        torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-12)
