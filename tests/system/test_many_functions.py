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

Function = Callable[[torch.Tensor], torch.Tensor]

FIRST = [torch.sin, torch.tanh, torch.exp, torch.sigmoid, torch.cos]
LAST = [
    lambda x: x.sum(1),
    lambda x: x.softmax(1),
    lambda x: x * x.mean(1, keepdim=True),
    lambda x: (x - 1).relu().amax(1),
    lambda x: x.cumsum(1),
]
FUNCTIONS: list[Function] = [
    lambda x, first=first, last=last: last(first(x) + 0.5) for first in FIRST for last in LAST
]
BETWEEN = [torch.neg, torch.square, lambda x: x - 0.25, lambda x: x * 0.5, lambda x: x + 0.5]
MANY: list[Function] = [
    lambda x, first=first, then=then, last=last: last(then(first(x)))
    for first in [*FIRST, torch.erf, torch.atan, torch.abs]
    for then in BETWEEN
    for last in LAST
]
SIZES = (20, 9, 33, 14, 25, 48, 31, 40, 23)


pytestmark = pytest.mark.noted_at_once("it counts the sizes until a path is one of symbols")


@pytest.fixture(autouse=True)
def auto(monkeypatch) -> Iterator[None]:
    """As in a process of one device that was told nothing."""
    with process_of_one_device(LTC_TIER="auto", LTC_NUM_DEVICES=1, LTC_CACHE=0):
        yield


def step(function: Function, rows: int) -> Counter[str]:
    """Run a function at a size; return what was counted meanwhile."""
    x = torch.linspace(-2, 2, rows * 6).view(rows, 6)
    with metrics.counted() as grown:
        y = function(x.to("ltc:0"))
        ltm.mark_step(wait=True)  # a program that runs behind is counted when it is over
    torch.testing.assert_close(y.cpu(), function(x), rtol=1e-5, atol=1e-5)
    compile_behind.wait()
    return grown


def is_symbolic(grown: Counter[str]) -> bool:
    """Return True if a program of symbols ran, and nothing else."""
    return grown["SymbolicSizes"] == grown["ExecuteTime"] == 1 and not grown["ImmediateSteps"]


def in_turn(count: int) -> list[int]:
    return [number for number in range(count) for _ in SIZES]


def interleaved(count: int) -> list[int]:
    return [number for _ in SIZES for number in range(count)]


def in_rounds(count: int) -> list[int]:
    draw = random.Random(0)
    return [number for _ in SIZES for number in draw.sample(range(count), count)]


def assert_each_becomes_symbolic(functions: list[Function], order: list[int]) -> Counter[str]:
    """Run functions in that order, each at all sizes; return what was counted meanwhile."""
    seen: Counter[int] = Counter()
    asked: dict[int, int] = {}  # sizes of each function until then
    followed: dict[int, int] = {}
    with metrics.counted() as grown:
        for number in order:
            counted = step(functions[number], SIZES[seen[number]])
            seen[number] += 1
            if counted["SymbolicPaths"]:
                asked.setdefault(number, seen[number])
            if is_symbolic(counted):
                followed.setdefault(number, seen[number])
    assert len(asked) == len(followed) == len(functions)
    assert max(asked.values()) <= 4
    assert max(followed.values()) <= 8
    assert grown["SymbolicProgramsRefused"] == 0
    # What two functions have in common runs call by call where one leaves the other's path.
    assert grown["CallByCallRuns"] <= len(functions)
    for function in (functions[0], functions[-1], functions[len(functions) // 2]):
        again = [is_symbolic(step(function, 50 + k)) for k in range(3)]
        assert any(again)  # taken up again, behind others
    return grown


@pytest.mark.parametrize("order", [in_turn, interleaved, in_rounds], ids=lambda x: x.__name__)
def test_each_of_25_functions_runs_as_a_program_of_symbols_by_its_8th_size(order):
    assert_each_becomes_symbolic(FUNCTIONS, order(25))


def test_each_of_200_functions_of_one_process_runs_as_a_program_of_symbols_by_its_8th_size():
    grown = assert_each_becomes_symbolic(MANY, in_rounds(200))
    assert grown["SymbolicPrograms"] == 200  # one a function
