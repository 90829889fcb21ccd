"""Many small functions in one process, each at sizes that change, run as programs of symbols."""

import random
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch

import ltc.core.lazy_model as ltm
from ltc.debug import metrics
from ltc.runtime.background import compile_behind
from tests.recorders import process_of_one_device

FIRST = [torch.sin, torch.tanh, torch.exp, torch.sigmoid, torch.cos]
LAST = [
    lambda x: x.sum(1),
    lambda x: x.softmax(1),
    lambda x: x * x.mean(1, keepdim=True),
    lambda x: (x - 1).relu().amax(1),
    lambda x: x.cumsum(1),
]
FUNCTIONS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x, first=first, last=last: last(first(x) + 0.5) for first in FIRST for last in LAST
]
SIZES = (20, 9, 33, 14, 25, 48, 31, 40, 23)


@pytest.fixture(autouse=True)
def auto(monkeypatch) -> Iterator[None]:
    """As in a process of one device that was told nothing."""
    with process_of_one_device(LTC_TIER="auto", LTC_NUM_DEVICES=1, LTC_CACHE=0):
        yield


def step(number: int, rows: int) -> bool:
    """Run a function at a size; return True if a program of symbols ran, and nothing else."""
    x = torch.linspace(-2, 2, rows * 6).view(rows, 6)
    with metrics.counted() as grown:
        y = FUNCTIONS[number](x.to("ltc:0"))
        ltm.mark_step(wait=True)  # a program that runs behind is counted when it is over
    torch.testing.assert_close(y.cpu(), FUNCTIONS[number](x), rtol=1e-5, atol=1e-5)
    compile_behind.wait()
    return grown["SymbolicSizes"] == grown["ExecuteTime"] == 1 and not grown["ImmediateSteps"]


def in_turn() -> list[int]:
    return [number for number in range(25) for _ in SIZES]


def interleaved() -> list[int]:
    return [number for _ in SIZES for number in range(25)]


def in_rounds() -> list[int]:
    draw = random.Random(0)
    return [number for _ in SIZES for number in draw.sample(range(25), 25)]


@pytest.mark.parametrize("order", [in_turn, interleaved, in_rounds], ids=lambda x: x.__name__)
def test_each_of_25_functions_runs_as_a_program_of_symbols_by_its_8th_size(order):
    seen: Counter[int] = Counter()
    first: dict[int, int] = {}
    with metrics.counted() as grown:
        for number in order():
            is_symbolic = step(number, SIZES[seen[number]])
            seen[number] += 1
            if is_symbolic:
                first.setdefault(number, seen[number])
    assert len(first) == 25
    assert max(first.values()) <= 8
    assert grown["SymbolicProgramsRefused"] == 0
    assert (
        grown["CallByCallRuns"] <= 25
    )  # what two have in common, where one leaves the other's path
    again = [sum(step(number, 50 + k) for k in range(3)) for number in (0, 24, 12)]
    assert min(again) >= 1  # each taken up again, behind others
