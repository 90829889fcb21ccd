"""Sums of numbers of 16 bits are made in float32, whichever way a program runs."""

import re
from pathlib import Path

import pytest
import torch

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.aten.wide_sums import ADD_IN_16_BITS, cpu_function_of
from ltc.debug import metrics
from ltc.support.torch_private import function_of
from tests.accumulations import (
    NARROW,
    OF_SQUARES,
    SUMS,
    WIDE,
    Terms,
    added_in,
    exact_sum,
    is_exact,
)
from tests.recorders import in_a_new_thread, process_of_one_device

HALF, BRAIN = torch.float16, torch.bfloat16
COUNT = {BRAIN: 1000, HALF: 5000}  # more than each counts up to by ones: 256, 2048
CASES = [
    (name, dtype) for name in SUMS for dtype in COUNT if dtype is BRAIN or name not in OF_SQUARES
]
PAGE = Path(__file__).parents[2] / "docs" / "accumulation.md"


@pytest.fixture(autouse=True)
def one_device():
    """As in a process that was told nothing."""
    with process_of_one_device(LTC_TIER="auto", LTC_CACHE=0):
        yield


def found(name, dtype, count):
    """What ltc computes, as it is after a step of its own."""
    result = SUMS[name](Terms(count, dtype, dtype, "ltc")).detach().clone()
    ltm.mark_step(wait=True)
    return result


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_every_tier_adds_in_float32(name, dtype):
    exact = exact_sum(name, COUNT[dtype], dtype)
    with metrics.counted() as grown:
        for run in range(4):
            assert is_exact(found(name, dtype, COUNT[dtype]), exact, dtype), run
        with config.override(LTC_TIER="op_by_op"):
            assert is_exact(found(name, dtype, COUNT[dtype]), exact, dtype)
    assert grown["CallByCallRuns"] + grown["ImmediateSteps"]
    for backend in ("llvm", "eager"):
        with config.override(LTC_TIER="native", LTC_BACKEND=backend):
            assert is_exact(found(name, dtype, COUNT[dtype]), exact, dtype), backend


@pytest.mark.parametrize("dtype", COUNT, ids=str)
@pytest.mark.parametrize(
    "name",
    ["scatter_add", "index_add", "index_add of rows", "gradient of gather", "gradient of embedding",
     "gradient of x[index]", "sum", "gradient of expand", "cumsum"],
)  # fmt: skip
def test_programs_of_any_size_add_in_float32(name, dtype):
    def add():
        for count in range(COUNT[dtype], COUNT[dtype] + 9):
            assert is_exact(found(name, dtype, count), exact_sum(name, count, dtype), dtype), count

    with metrics.counted() as grown:
        in_a_new_thread(add)
    assert grown["SymbolicSizes"], "no program of symbols has run"


def test_ten_thousand_ones_are_as_many_whenever_they_are_added():
    ones = torch.ones(10_000, dtype=BRAIN).to("ltc")
    index = torch.zeros(10_000, dtype=torch.int64).to("ltc")
    for _ in range(10):
        added = torch.zeros(1, dtype=BRAIN, device="ltc").scatter_add(0, index, ones)
        ltm.mark_step()
        assert added.item() == 9984  # the bfloat16 next to it


def _product(name, dtype, device, computed):
    factors = torch.full((600,), 1 + 2**-7).to(dtype).to(computed).to(device)
    start, index = factors[:1] * 0 + 1, torch.zeros(600, dtype=torch.int64).to(device)
    return {
        "prod": lambda: factors.prod(),
        "prod of rows": lambda: factors[:, None].expand(600, 3).prod(0),
        "cumprod": lambda: factors.cumprod(0)[-1:],
        "scatter_reduce": lambda: start.scatter_reduce(0, index, factors, "prod"),
        "index_reduce": lambda: start.index_reduce(0, index, factors, "prod"),
        "prod as another dtype": lambda: factors.float().prod(dtype=computed),
    }[name]()


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("dtype", COUNT, ids=str)
@pytest.mark.parametrize(
    "name",
    ["prod", "prod of rows", "cumprod", "scatter_reduce", "index_reduce", "prod as another dtype"],
)
def test_products_are_made_in_float32_too(name, dtype):
    exact = _product(name, dtype, "cpu", torch.float64)
    for tier in ("auto", "auto", "auto", "op_by_op", "native"):
        with config.override(LTC_TIER=tier):
            result = _product(name, dtype, "ltc", dtype).clone()
            ltm.mark_step(wait=True)
            assert result.dtype is dtype
            assert is_exact(result, exact, dtype), tier


# --- torch's own kernels ---------------------------------------------------------------------------


def test_only_what_the_cpu_adds_in_16_bits_is_given_float32():
    x, index = torch.zeros(1, dtype=BRAIN), torch.zeros(1000, dtype=torch.int64)
    ones = torch.ones(1000, dtype=BRAIN)
    overload = torch.ops.aten.index_add.default
    assert function_of(overload)(x, 0, index, ones).item() == 256
    assert cpu_function_of(overload)(x, 0, index, ones).item() == 1000
    scatter = torch.ops.aten.scatter_add.default
    assert cpu_function_of(scatter) is function_of(scatter)


def test_a_kernel_that_writes_gives_back_what_it_wrote_to():
    x, index = torch.zeros(3, dtype=HALF), torch.zeros(5000, dtype=torch.int64)
    ones = torch.ones(5000, dtype=HALF)
    made = cpu_function_of(torch.ops.aten.index_put_.default)(x, [index], ones, True)
    assert made is x
    assert x.tolist() == [5000, 0, 0]
    cpu_function_of(torch.ops.aten.index_put_.default)(x, [torch.arange(3)], ones[:3] * 2, False)
    assert x.tolist() == [2, 2, 2]


def test_a_result_that_is_named_is_given_its_size():
    out = torch.empty(0, dtype=BRAIN)
    made = cpu_function_of(torch.ops.aten.prod.int_out)(
        torch.full((2, 600), 1 + 2**-7, dtype=BRAIN), 1, out=out
    )
    assert made is out
    assert out.tolist() == [106.5, 106.5]


@pytest.mark.parametrize(
    ("self", "source"), [(BRAIN, torch.float32), (torch.float32, BRAIN), (BRAIN, HALF)]
)
def test_operands_of_several_dtypes_are_refused_as_on_the_cpu(self, source):
    def added(device):
        x, new = torch.zeros(2, dtype=self, device=device), torch.ones(3, dtype=source).to(device)
        x.index_add(0, torch.zeros(3, dtype=torch.int64).to(device), new).cpu()

    texts = []
    for device in ("cpu", "ltc"):
        with pytest.raises(RuntimeError) as caught:
            added(device)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


def test_every_listed_operation_is_one_of_torchs():
    known = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    missing = {name for name in ADD_IN_16_BITS if not {name, name + "_"} & known}
    assert not missing


# --- what the page says ----------------------------------------------------------------------------


def test_the_page_says_what_the_cpu_adds_in():
    """A failure prints the two lists as they are to be."""
    text = PAGE.read_text()
    measured = {WIDE: [], NARROW: []}
    for name in SUMS:
        measured[added_in(name, 1000, BRAIN)].append(name)
    for heading, names in measured.items():
        section = text.partition(f"## The CPU adds in {heading}\n")[2].partition("\n## ")[0]
        listed = re.findall(r"^- (.*)$", section, re.MULTILINE)
        assert listed == names, "\n".join(f"- {name}" for name in names)
