"""Products that PyTorch's kernel computes: results beside float64, and when one is called."""

import json
from dataclasses import replace

import pytest
import torch

import ltc
from ltc import config
from ltc.backends.llvm.schedule import planned_steps
from ltc.debug import metrics
from ltc.ir import ops
from ltc.ir.graph import Graph
from ltc.ir.node import make
from ltc.llvm.gemm.blocking import Matrix, Shape, stored_plain, stored_transposed
from ltc.llvm.ops import kernel_choice, product_choice
from ltc.llvm.ops.product_call import called_product, can_call
from ltc.llvm.ops.product_choice import is_call_faster
from ltc.runtime.graph_compiler import must_reproduce
from ltc.support.disk_cache import disk_cache
from tests.unit.llvm_kernels import HOST, guarded, is_untouched, run

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
ABLE = Shape((), 128, 128, 128, *[stored_plain(128, 128)] * 3)

pytestmark = pytest.mark.skipif(
    not can_call(torch.float32, ABLE), reason="this build of PyTorch exports no product for C"
)


def operand(batch, rows, columns, is_transposed, dtype):
    """A random matrix as torch sees it, its memory, and its strides."""
    memory = torch.randn(*batch, *((columns, rows) if is_transposed else (rows, columns))).to(dtype)
    stored = stored_transposed if is_transposed else stored_plain
    return memory.mT if is_transposed else memory, memory, stored(rows, columns, batch)


def check(dtype, batch, m, n, k, transposes=(False, False), change=lambda kernel: kernel):
    """Errors of at most twice those of PyTorch's own product, the same bits for any number of tasks."""
    x, left, left_matrix = operand(batch, m, k, transposes[0], dtype)
    y, right, right_matrix = operand(batch, k, n, transposes[1], dtype)
    shape = Shape(batch, m, n, k, left_matrix, right_matrix, stored_plain(m, n, batch))
    kernel = change(called_product(dtype, shape, HOST))
    result, memory = guarded((*batch, m, n), dtype)
    run(kernel, HOST, left, right, result)
    exact = x.double() @ y.double()
    most = 2 * ((x @ y).double() - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
    assert (result.double() - exact).abs().max() <= most
    assert is_untouched(memory)
    again, _ = guarded((*batch, m, n), dtype)
    run(kernel, HOST, left, right, again, tasks=1)
    assert torch.equal(result, again), "the number of tasks changed a result"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposes", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize(
    "batch, m, n, k", [((), 33, 70, 50), ((2, 3), 5, 257, 9), ((), 300, 7, 40)]
)
def test_pieces_of_any_shape(dtype, transposes, batch, m, n, k):
    check(dtype, batch, m, n, k, transposes)


@pytest.mark.parametrize("m, n, k", [(1, 600, 70), (600, 1, 70), (9, 1, 5), (1500, 321, 3)])
def test_few_rows_columns_and_steps(m, n, k):
    for transposes in ((False, False), (True, True)):
        check(torch.float32, (), m, n, k, transposes)


def test_a_call_that_fails_is_done_by_loops():
    def failing(kernel):
        called = "call i32 @aoti_torch_cpu_mm_out("
        before, _, after = kernel.text.partition(called)
        return replace(kernel, text=f"{before}add i32 0, 1 ;{after}")

    for dtype in DTYPES:
        with metrics.counted() as grown:
            check(dtype, (2,), 5, 40, 9, (False, True), failing)
        assert grown["FailedKernelCalls"] > 0


def test_an_epilogue_sees_every_element_once():
    m, n, k = 300, 333, 20
    x, left, left_matrix = operand((2,), m, k, False, torch.float32)
    y, right, right_matrix = operand((2,), k, n, False, torch.float32)
    residual, result = torch.randn(2, m, n), torch.empty(2, m, n)

    def epilogue(b, value, row, column, mask):
        at = b.address("%p3", row * n + column, "float")
        vector, lanes = b.of("float"), b.of("i1")
        name = f"llvm.masked.load.v{b.width}f32.p0"
        b.declare(name, vector, "ptr", "i32", lanes, vector)
        term = b.effect(
            f"call {vector} @{name}(ptr {at}, i32 4, {lanes} {mask or 'splat (i1 true)'}, "
            f"{vector} zeroinitializer)"
        )
        return b.binary("fadd", "float", value, term)

    shape = Shape((2,), m, n, k, left_matrix, right_matrix, stored_plain(m, n, (2,)))
    kernel = called_product(torch.float32, shape, HOST, epilogue, operands=1)
    run(kernel, HOST, left, right, result, residual)
    assert torch.allclose(result, x @ y + residual, atol=1e-4)


def test_any_number_of_rows_has_one_text():
    texts = set()
    for m in range(300, 800, 50):
        shape = Shape((), m, 90, 66, stored_plain(m, 66), stored_plain(66, 90), stored_plain(m, 90))
        texts.add(called_product(torch.float32, shape, HOST).text)
    assert len(texts) == 1


# --- the choice ----------------------------------------------------------------------------------


@pytest.fixture
def seconds(monkeypatch, tmp_path):
    """The seconds that trials seem to take, [generated, called], and a count of trials."""
    found = {"trials": 0, "takes": [2.0, 1.0]}

    def fastest(ways):
        found["trials"] += 1
        for way in ways:
            way()
        return found["takes"]

    monkeypatch.setattr(kernel_choice, "_fastest", fastest)
    kernel_choice._ratios.clear()
    with config.override(LTC_CACHE_DIR=str(tmp_path), LTC_CACHE="1"):
        yield found
    kernel_choice._ratios.clear()


def is_called(m=128, n=128, k=128, dtype=torch.float32):
    strides = stored_plain(m, k), stored_plain(k, n), stored_plain(m, n)
    return is_call_faster(dtype, Shape((), m, n, k, *strides), HOST)


def test_a_class_of_shapes_is_tried_once_on_a_machine(seconds):
    assert is_called() and is_called(m=255) and seconds["trials"] == 1
    kernel_choice._ratios.clear()  # as in another process
    seconds["takes"] = [1.0, 2.0]
    assert is_called() and seconds["trials"] == 1
    assert not is_called(m=256) and not is_called(n=136) and seconds["trials"] == 3
    assert not is_called(dtype=torch.float64) and seconds["trials"] == 4


def test_a_gain_of_three_hundredths_is_none(seconds):
    seconds["takes"] = [1.03, 1.0]
    assert not is_called()


def test_small_products_are_generated_untried(seconds):
    assert not is_called(m=64, n=64, k=64) and seconds["trials"] == 0


def test_so_are_those_of_a_lesser_processor(seconds):
    with config.override(LTC_ISA="avx2"):
        assert not is_called() and seconds["trials"] == 0


@pytest.mark.filterwarnings("ignore:ltc's cache")
@pytest.mark.parametrize("damage", ["of the file", "of its content"])
def test_a_damaged_ratio_is_measured_again(seconds, damage, tmp_path):
    assert is_called()
    (name,) = kernel_choice._ratios
    path, disk = tmp_path / name, disk_cache()
    assert disk.read(name) == json.dumps(2.0).encode()
    if damage == "of its content":
        disk.write(name, b"fast")
    else:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    kernel_choice._ratios.clear()
    assert is_called() and seconds["trials"] == 2
    kernel_choice._ratios.clear()
    assert is_called() and seconds["trials"] == 2


def test_a_large_trial_takes_a_part_of_the_product():
    strides = stored_plain(9000, 5000), stored_transposed(5000, 7000), stored_plain(9000, 7000)
    part = product_choice._for_trial(Shape((), 9000, 7000, 5000, *strides))
    assert part.m * part.n * part.k <= kernel_choice.MOST_WORK < 8 * part.m * part.n * part.k
    assert part.left == strides[0] and part.right == strides[1], "rows are as far apart"
    assert part.result == Matrix(part.n, 1)


@pytest.mark.parametrize(
    "generated, called, rounds",
    [
        ((1.0, 1.1), (2.0, 1.9), 2),  # far apart
        ((2.0, 1.9), (1.0, 1.1), 2),
        ((1.0, 1.3, 1.0, 1.0, 1.0, 1.0), (1.2,) * 6, 6),  # one sample says otherwise
    ],
)
def test_a_trial_ends_once_any_samples_give_the_same_choice(monkeypatch, generated, called, rounds):
    left = {"generated": iter((1.0, *generated)), "called": iter((1.0, *called))}
    asked = []

    def seconds_of(way, repeats):
        asked.append(way)
        return next(left[way])

    monkeypatch.setattr(kernel_choice, "_seconds", seconds_of)
    expected = [min(generated), min(called)]
    assert kernel_choice._fastest(["generated", "called"]) == expected
    assert len(asked) == 2 * (1 + rounds)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_without_an_epilogue_share_one_text(dtype):
    def text(m, n, k):
        strides = (
            stored_plain(m, k),
            stored_transposed(k, n),
            stored_plain(m, n),
        )
        return called_product(dtype, Shape((), m, n, k, *strides), HOST).text

    assert text(128, 256, 512) == text(600, 70, 9) == text(1, 2000, 3000)


def test_a_trial_draws_no_random_numbers(seconds):
    before = torch.get_rng_state()
    assert is_called()
    assert torch.equal(torch.get_rng_state(), before)


# --- in programs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("reproducible", [False, True])
def test_a_reproducible_graph_calls_nothing(seconds, reproducible):
    x, y = (make(ops.INPUT, index=i, dtype=torch.float32, shape=(128, 128)) for i in range(2))
    graph = Graph((x, y), (), (make(ops.MATMUL, x, y),), reproducible=reproducible)
    (step,) = planned_steps(graph, frozenset())
    assert [code.is_call for code in step.codes] == [not reproducible]
    assert seconds["trials"] == (0 if reproducible else 1)


@pytest.mark.parametrize(
    "settings", [{"LTC_TIER": "native"}, {"XRT_SHARD_WORLD_SIZE": 2}, {"LTC_NUM_DEVICES": 2}]
)
def test_the_same_bits_everywhere_are_asked_for(settings):
    with config.override(LTC_TIER="auto", XRT_SHARD_WORLD_SIZE=1, LTC_NUM_DEVICES=1):
        assert not must_reproduce()
        with config.override(**settings):
            assert must_reproduce()


def updated(steps):
    """A weight after some steps of training, with an epilogue behind each of its products."""
    torch.manual_seed(0)
    device = torch.device("ltc")
    x, weight = torch.randn(128, 150), torch.randn(150, 140)
    given, trained = x.to(device), weight.to(device).requires_grad_()
    optimizer = torch.optim.SGD([trained], 0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        (given @ trained).tanh().square().mean().backward()
        optimizer.step()
        ltc.sync()
    exact = weight.double().requires_grad_()
    optimizer = torch.optim.SGD([exact], 0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        (x.double() @ exact).tanh().square().mean().backward()
        optimizer.step()
    return trained.detach().cpu(), exact.detach()


def test_calls_are_counted_and_deterministic_algorithms_make_none(seconds):
    with config.override(LTC_TIER="auto", LTC_COMPILE_BEHIND=0):
        with metrics.counted() as grown:
            found, exact = updated(8)
        assert grown["CalledProducts"] >= 2
        assert (found - exact).abs().max() < 1e-5
        torch.use_deterministic_algorithms(True)
        try:
            with metrics.counted() as grown:
                found, exact = updated(8)
        finally:
            torch.use_deterministic_algorithms(False)
        assert "CalledProducts" not in grown
        assert (found - exact).abs().max() < 1e-5
