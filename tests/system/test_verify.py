"""LTC_VERIFY=1: what a backend computes wrong is named, and what is right passes.

The faults are put into the backend itself, one at a time, as they have been there before.
"""

import dataclasses
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.backends.interface import BackendRegistrar
from ltc.backends.llvm import compiling, plan, schedule
from ltc.backends.llvm.executable import LlvmComputation
from ltc.debug import metrics
from ltc.errors import VerificationError
from ltc.ir import ops
from ltc.ir.loop_nest import Affine, Kernel, Product
from ltc.ir.node import constant, make
from ltc.llvm.emit import elementwise
from ltc.passes.pipeline import Pass
from ltc.runtime.program_cache import PROGRAMS

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "distributed")]
from replicas import in_threads, values
from toy_vendor import ROWS as TOY_ROWS
from toy_vendor import ToyBackend

FILE = Path(__file__).name


@pytest.fixture(autouse=True)
def verifying():
    """Programs of these tests are neither found where others were kept nor kept for others.

    LTC_CHECK would find some of the faults first.
    """
    PROGRAMS.clear()
    with config.override(LTC_VERIFY=1, LTC_CHECK=0, LTC_CACHE=0, LTC_BACKEND="llvm"):
        yield
    PROGRAMS.clear()


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to("ltc")


def error_of(run) -> VerificationError:
    """The error of a function that holds its results while it marks the step."""
    with pytest.raises(VerificationError) as caught:
        held = run()
        ltm.mark_step()
        del held
    return caught.value


def line_of(function, text: str) -> str:
    """Where a line of the function stands that holds the text, as errors name it."""
    code = function.__code__
    lines = Path(__file__).read_text().splitlines()
    number = next(n for n in range(code.co_firstlineno, len(lines)) if text in lines[n - 1])
    return f"{FILE}:{number} in {code.co_name}"


def scaled(row, factor=1.01):
    """The row of an elementwise op whose results are too large."""

    def faulty(b, form, *operands):
        right = row(b, form, *operands)
        return b.binary("fmul", form.computed, right, b.constant(form.computed, factor))

    return faulty


def change_units(monkeypatch, change):
    """Have the backend compile other kernels than the passes have made."""
    fuse = schedule.fuse
    monkeypatch.setattr(schedule, "fuse", lambda *given: [change(u) for u in fuse(*given)])


# --- faults ---------------------------------------------------------------------------------------


def test_a_wrong_function_is_named_with_its_line_its_kernel_and_both_values(monkeypatch):
    monkeypatch.setitem(elementwise.ROWS, ops.TANH, scaled(elementwise.ROWS[ops.TANH]))
    x = drawn(5, 7)

    def forward():
        y = x * 2
        z = y.tanh()
        return z + 1

    error = error_of(forward)
    expected = (x.cpu() * 2).tanh()
    assert error.difference.node.op is ops.TANH
    assert line_of(forward, "y.tanh()") in error.origin.line
    text = str(error)
    assert text.startswith("tanh giving f32[5,7] is computed wrong: element [")
    assert "35 of 35 elements are wrong" in text
    assert f"aten::tanh called at {__file__}" in text
    assert "mul f32[5,7]: from " in text
    assert "LTC_BACKEND=eager" in text
    assert error.difference.expected == pytest.approx(expected[error.difference.position].item())
    assert error.difference.found == pytest.approx(1.01 * error.difference.expected)


def test_a_wrong_kernel_of_the_backward_is_named(monkeypatch):
    monkeypatch.setitem(elementwise.ROWS, ops.SIGN, scaled(elementwise.ROWS[ops.SIGN]))
    w = drawn(4, 6).requires_grad_()

    def training():
        loss = w.abs().sum()
        loss.backward()
        return loss

    error = error_of(training)
    assert error.difference.node.op is ops.SIGN
    assert line_of(training, "loss.backward()") in error.origin.line


def test_a_wrong_kernel_of_an_optimizer_is_named_and_the_parameter_is_as_it_was(monkeypatch):
    w = drawn(4, 6).requires_grad_()
    before = w.detach().cpu().clone()
    optimizer = torch.optim.Adam([w], lr=0.1)
    monkeypatch.setitem(elementwise.ROWS, ops.SQRT, scaled(elementwise.ROWS[ops.SQRT]))

    def training():
        (w * w).sum().backward()
        optimizer.step()

    error = error_of(training)
    assert error.difference.node.op is ops.SQRT
    assert line_of(training, "optimizer.step()") in error.origin.line
    assert torch.equal(w.detach().cpu(), before)


def test_a_reduction_that_leaves_out_the_last_element_is_found(monkeypatch):
    def shortened(unit):
        is_reduction = isinstance(unit, Kernel) and unit.depth < len(unit.space)
        if is_reduction and unit.writes() == tuple(n for n in unit.writes() if n.op is ops.SUM):
            return dataclasses.replace(unit, space=(*unit.space[:-1], unit.space[-1] - 1))
        return unit

    change_units(monkeypatch, shortened)
    x = drawn(5, 300)
    error = error_of(lambda: (x * x).sum(1))
    assert error.difference.node.op is ops.SUM
    assert error.difference.count == 5


def test_a_product_with_a_transposed_operand_is_found(monkeypatch):
    def transposed(unit):
        if not isinstance(unit, Product) or unit.node.op is not ops.MATMUL:
            return unit
        left, right = unit.operands
        turned = right._replace(offset=Affine(0, ((0, 1), (1, 9))))
        return dataclasses.replace(unit, operands=(left, turned))

    change_units(monkeypatch, transposed)
    x, w = drawn(9, 9), drawn(9, 9, seed=1)
    error = error_of(lambda: (x @ w).relu())
    assert error.difference.node.op is ops.MATMUL


def test_memory_that_nobody_wrote_is_found(monkeypatch):
    def shortened(unit):
        if isinstance(unit, Kernel):
            return dataclasses.replace(unit, space=(unit.space[0] - 1, *unit.space[1:]))
        return unit

    change_units(monkeypatch, shortened)
    x = drawn(6, 11)
    error = error_of(lambda: x.exp())
    assert error.difference.position[0] == 5


def test_a_wrong_kernel_that_a_convolution_shares_is_named(monkeypatch):
    """Its nodes are looked at one by one: their channels are last already."""
    monkeypatch.setitem(elementwise.ROWS, ops.SIN, scaled(elementwise.ROWS[ops.SIN]))
    x, w = drawn(2, 16, 9, 9), drawn(16, 16, 3, 3, seed=1)
    error = error_of(lambda: nn.functional.conv2d(nn.functional.conv2d(x, w).sin(), w))
    assert str(error).startswith("sin giving f32[2,7,7,16] is computed wrong")


def test_a_value_that_is_written_over_too_early_is_found(monkeypatch):
    def crowded(lifetimes, *rest):
        places, _ = planned(lifetimes, *rest)
        places = dict.fromkeys(places, (None, 0))
        return places, max((value.nbytes for value in lifetimes), default=0)

    planned = plan.memory_planner.plan
    monkeypatch.setattr(plan.memory_planner, "plan", crowded)
    x, w = drawn(8, 8), drawn(8, 8, seed=1)

    def two_values():
        a = (x @ w).exp()
        b = (w @ x).exp()
        return (a @ b) @ a

    assert "was right, and was written over before" in str(error_of(two_values))


def test_a_fault_of_the_program_as_a_whole_is_found(monkeypatch):
    """Each of its kernels is right by itself: the fault is in how they run together."""
    launch = LlvmComputation.launch

    def faulty(self, buffers, scalars, around=None):
        results = launch(self, buffers, scalars, around)
        if around is None:
            results[0].view(-1)[3] += 1
        return results

    monkeypatch.setattr(LlvmComputation, "launch", faulty)
    x = drawn(3, 4)
    error = error_of(lambda: x.cos())
    assert "wrong where they run as one program" in str(error)
    assert error.difference.position == (0, 3)


def test_a_pass_that_changes_a_value_is_named(monkeypatch):
    def faulty(graph):
        more = [make(ops.ADD, n, constant(1e-6, n.dtype)) for n in graph.outputs]
        return graph.with_outputs(more, graph.origins)

    monkeypatch.setattr(
        compiling, "PASSES", (*compiling.PASSES, Pass("faulty", faulty, "of this test"))
    )
    x = drawn(3, 5)

    def forward():
        return x.sin()

    error = error_of(forward)
    assert "is changed by the pass 'faulty'" in str(error)
    assert line_of(forward, "x.sin()") in error.origin.line


def test_a_number_where_there_should_be_nan_is_found(monkeypatch):
    row = elementwise.ROWS[ops.MAXIMUM]
    monkeypatch.setitem(
        elementwise.ROWS,
        ops.MAXIMUM,
        lambda b, form, *operands: row(b, form, *[without_nan(b, form, x) for x in operands]),
    )
    x = torch.tensor([1.0, torch.nan, 3.0]).to("ltc")
    error = error_of(lambda: torch.maximum(x, x * 0.5))
    assert str(error.difference.expected) == "nan"
    assert "1 NaN" in str(error)


def without_nan(b, form, x):
    zero = b.constant(form.computed, 0)
    return b.select(b.compare("uno", form.computed, x, x), form.computed, zero, x)


def test_a_vendors_fault_is_named_as_well(monkeypatch):
    def faulty(node, x):
        return TOY_ROWS["tanh"](node, x) * x.dtype.type(2)

    monkeypatch.setitem(ToyBackend.lowering.table, ops.TANH, faulty)
    with config.override(LTC_BACKEND="toy"):
        x = drawn(4, 53)  # no other test has made a program of this shape, without the fault

        def forward():
            return x.tanh().cumsum(1)  # NumPy's backend leaves the second to the reference

        error = error_of(forward)
    assert error.difference.node.op is ops.TANH
    assert "backend 'toy'" in str(error)
    assert line_of(forward, "x.tanh()") in error.origin.line


def reduced(ordinal, device):
    x = torch.full((3, 4), ordinal + 1.0).to(device)
    total = ltm.all_reduce("sum", (x * 2).sqrt()).tanh()
    ltm.mark_step(device, wait=True)
    return total.cpu()


@pytest.mark.devices(3)
def test_replicas_that_exchange_are_judged_between_and_nobody_hangs(monkeypatch):
    with metrics.counted() as grown:
        expected = sum(torch.tensor(2.0 * k) ** 0.5 for k in range(1, 4)).tanh()
        for total in values(in_threads(reduced, replicas=3)):
            assert total[2, 3].item() == pytest.approx(expected.item())
    assert grown["verify.programs"] == 3
    assert grown["verify.nodes"] >= 6
    PROGRAMS.clear()
    monkeypatch.setitem(elementwise.ROWS, ops.TANH, scaled(elementwise.ROWS[ops.TANH]))
    for error in in_threads(reduced, replicas=3):
        assert isinstance(error, RuntimeError)
        assert line_of(reduced, "tanh()") in str(error)


# --- what is right --------------------------------------------------------------------------------


def trained(model, batch, optimizer=torch.optim.Adam, autocast=False):
    """The loss after two steps, and what LTC_VERIFY has counted."""
    model, batch = model.to("ltc"), batch.to("ltc")
    chosen = optimizer(model.parameters(), lr=1e-2)
    with metrics.counted() as grown:
        for _ in range(2):
            chosen.zero_grad()
            with torch.autocast("ltc", dtype=torch.bfloat16, enabled=autocast):
                result = model(batch)
                loss = result.float().square().mean()
            loss.backward()
            chosen.step()
            ltm.mark_step()
    assert torch.isfinite(loss.cpu())
    return grown


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.last = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.cells(x)[0])


class Looked(nn.Module):
    """Embedded, written to in place, sorted, and looked up by numbers that it computes."""

    def __init__(self):
        super().__init__()
        self.rows, self.last = nn.Embedding(30, 8), nn.Linear(8, 5)

    def forward(self, indices):
        x = self.rows(indices).mean(1)
        x[:, 2:5].mul_(2)
        y = self.last(x).relu_()
        places = (y * 3).long() % 5
        best, order = y.topk(2, dim=1)
        return y.gather(1, places) + best.sum(1, keepdim=True) * (order[:, :1] // 2)


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 6, 3, groups=2),
        nn.GroupNorm(2, 6),
        nn.GELU(),
        nn.Flatten(),
    )


def encoder(dropout=0.0):
    return nn.TransformerEncoderLayer(16, 2, 24, dropout, batch_first=True, activation="gelu")


NETWORKS = {
    "convolutions": lambda: trained(convolutions(), torch.randn(2, 3, 11, 11)),
    "transformer": lambda: trained(encoder(), torch.randn(2, 7, 16), torch.optim.AdamW),
    "dropout": lambda: trained(encoder(0.2), torch.randn(2, 7, 16), torch.optim.SGD),
    "recurrent": lambda: trained(Recurrent(), torch.randn(2, 4, 6)),
    "autocast": lambda: trained(encoder(), torch.randn(2, 7, 16), autocast=True),
    "bfloat16": lambda: trained(encoder().bfloat16(), torch.randn(2, 7, 16).bfloat16()),
    "float64": lambda: trained(convolutions().double(), torch.randn(2, 3, 11, 11).double()),
    "looked up": lambda: trained(Looked(), torch.randint(30, (5, 4)), torch.optim.SGD),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_right_network_raises_nothing(name):
    torch.manual_seed(0)
    grown = NETWORKS[name]()
    assert grown["verify.programs"] == 2
    assert grown["verify.nodes"] > 40
    assert grown["verify.findings"] == grown["verify.passes_unjudged"] == 0


def sparse(x: torch.Tensor, every: int) -> torch.Tensor:
    """Zeros but at some positions."""
    kept = torch.zeros_like(x)
    kept[:, :, 1::every, 1::every] = x[:, :, 1::every, 1::every]
    return kept


@pytest.mark.parametrize("operand", ["dense", "sparse"])
@pytest.mark.parametrize("weight", ["dense", "one tap"])
@pytest.mark.parametrize("gradient", ["dense", "sparse", "large at one place"])
def test_tiles_that_add_up_what_lies_side_by_side_are_right(operand, weight, gradient):
    """What is large is added to what is small and taken away again: the rest is rounded as the sum was."""
    torch.manual_seed(0)
    x, g = torch.randn(2, 4, 48, 14, 14)
    w = torch.randn(48, 48, 3, 3) / 20
    w = nn.init.dirac_(w) if weight == "one tap" else w
    x, g = (
        (sparse(x, 5) if operand == "sparse" else x),
        (sparse(g, 4) if gradient == "sparse" else g),
    )
    if gradient == "large at one place":
        g[:, :, 5, 6] *= 1e4
    x, w = x.to("ltc").requires_grad_(), w.to("ltc").requires_grad_()
    nn.functional.conv2d(x, w, padding=1).backward(g.to("ltc"))
    with metrics.counted() as grown:
        ltm.mark_step()
    assert grown["verify.programs"] == 1 and grown["verify.findings"] == 0


@pytest.mark.parametrize("number", [torch.inf, torch.nan, 1e38])
def test_tiles_that_overflow_on_the_way_are_right(number):
    torch.manual_seed(0)
    x, w = torch.randn(4, 48, 14, 14), torch.randn(48, 48, 3, 3) / 20
    for operand in x[0, 3, 5, 6:7], w[3, 5, 1, 2:3]:
        before = operand.clone()
        operand.fill_(number)
        with metrics.counted() as grown:
            nn.functional.conv2d(x.to("ltc"), w.to("ltc"), padding=1).cpu()
        assert grown["verify.programs"] == 1 and grown["verify.findings"] == 0
        operand.copy_(before)


def test_values_that_are_no_numbers_are_right():
    x = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, 3e38]).to("ltc")
    results = [x / 0, x * 2, x - x, x.sqrt(), x.log(), x.clamp(min=0), x.exp(), (x > 0).sum(), -x]
    ltm.mark_step()
    expected = (x.cpu() / 0).tolist()
    assert str(results[0].tolist()) == str(expected)


OTHER_TYPES = [torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64, torch.float16]


@pytest.mark.parametrize("dtype", OTHER_TYPES, ids=str)
def test_other_types_are_judged(dtype):
    x = (torch.arange(12).reshape(3, 4) * 37).to(dtype).to("ltc")
    results = [x == x.flip(0), x.sum(1), x.t().reshape(-1), x[:0].sum(), torch.where(x != 0, x, x)]
    with metrics.counted() as grown:
        ltm.mark_step()
    assert grown["verify.programs"] == 1
    assert torch.equal(results[1].cpu(), x.cpu().sum(1))


def test_the_error_of_a_program_stays_what_it_is():
    w = drawn(4, 3).requires_grad_()
    before = w.detach().cpu().clone()

    def training():
        w[torch.tensor([1, 7]).to("ltc")].sum().backward()
        with torch.no_grad():
            w.sub_(w.grad)

    with pytest.raises(IndexError, match="index 7 is out of bounds"):
        training()
        ltm.mark_step()
    assert torch.equal(w.detach().cpu(), before)


@pytest.mark.native("the bits with and without a judge are compared")
def test_what_an_update_replaces_is_replaced_as_without():
    def trained_for(steps):
        torch.manual_seed(0)
        w, x = drawn(6, 6).requires_grad_(), drawn(3, 6, seed=1)
        optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9)
        for _ in range(steps):
            optimizer.zero_grad()
            (x @ w).square().sum().backward()
            optimizer.step()
            ltm.mark_step()
        return w.detach().cpu()

    verified = trained_for(5)
    with config.override(LTC_VERIFY=0):
        assert torch.equal(trained_for(5), verified)


@pytest.mark.devices(3)
def test_threads_are_verified_each_by_itself():
    errors = []

    def train(number):
        try:
            with torch.random.fork_rng(devices=[]):
                ltm.lazy_device(number)
                x = torch.randn(8, 8).to(f"ltc:{number}")
                for _ in range(4):
                    x = (x @ x).tanh()
                    ltm.mark_step(f"ltc:{number}")
                x.cpu()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(k,)) for k in range(3)]
    with metrics.counted() as grown:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    assert grown["verify.programs"] == 12


@pytest.mark.native("a program has to be compiled before it is on the disk")
def test_a_program_from_the_disk_is_judged_as_it_is(tmp_path):
    x = drawn(3, 4)
    with config.override(LTC_CACHE=1, LTC_CACHE_DIR=tmp_path):
        with config.override(LTC_VERIFY=0):
            (x * 3).atan().cpu()
        PROGRAMS.clear()
        with metrics.counted() as grown:
            (x * 3).atan().cpu()
    assert grown["RecalledPrograms"] == grown["verify.programs"] == 1


def test_the_reference_is_not_judged_by_itself():
    with config.override(LTC_BACKEND="eager"), metrics.counted() as grown:
        y = drawn(3, 3).exp()
        ltm.mark_step()
    assert y.cpu().shape == (3, 3)
    assert grown["verify.programs"] == 0


def test_nothing_is_judged_where_nobody_asks():
    with config.override(LTC_VERIFY=0), metrics.counted() as grown:
        y = drawn(3, 3).exp()
        ltm.mark_step()
    assert y.cpu().shape == (3, 3)
    assert grown["verify.programs"] == 0


def test_a_vendors_right_backend_raises_nothing():
    BackendRegistrar.get("toy")
    with config.override(LTC_BACKEND="toy"), metrics.counted() as grown:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 2)).to("ltc")
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        x = drawn(6, 4)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
            ltm.mark_step()
    assert grown["verify.findings"] == 0
    assert grown["verify.programs"] == 2
