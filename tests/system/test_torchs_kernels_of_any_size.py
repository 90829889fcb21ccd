"""What PyTorch's own kernels compute in a program of symbols, and calls whose types formulas tell."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics
from ltc.device.op_by_op import forks
from ltc.runtime import tiers
from ltc.runtime.symbolic import program_of_sizes
from tests.recorders import forget_paths

SIZES = [5, 6, 9, 11, 16, 12, 23, 32, 8, 40]


@pytest.fixture(autouse=True)
def auto(monkeypatch) -> Iterator[None]:
    """As in a process of one device that was told nothing."""
    monkeypatch.setattr(tiers, "_has_replicas", lambda: False)
    monkeypatch.setattr(forks, "_has_peers", lambda: False)
    monkeypatch.setattr(program_of_sizes, "FIRST_USES", 1)
    ltm.mark_step()
    with config.override(LTC_TIER="auto", LTC_CACHE=0, LTC_BACKEND="llvm"):
        forget_paths()
        yield
        ltm.mark_step()
    forget_paths()


def at_all_sizes(step: Callable[[str, int], list[torch.Tensor]], device: str) -> list:
    made = []
    for size in SIZES:
        made.append(step(device, size))
        ltm.mark_step()
    return [[one.detach().cpu() for one in several] for several in made]


def assert_few_programs(step: Callable[[str, int], list[torch.Tensor]]) -> dict:
    """One at most sizes, and it gives what the CPU gives; what was counted."""
    with metrics.counted() as grown:
        made = at_all_sizes(step, "ltc")
    torch.testing.assert_close(made, at_all_sizes(step, "cpu"), rtol=2e-4, atol=2e-4)
    assert grown["SymbolicPrograms"] in (1, 2)
    assert grown["SymbolicSizes"] >= len(SIZES) - 4
    assert grown["OpByOpSteps"] == grown["SymbolicProgramsRefused"] == 0
    return grown


def numbers(device: str, *shape: int) -> torch.Tensor:
    return torch.linspace(-2, 2, torch.Size(shape).numel()).reshape(shape).cos().to(device)


def shared_heads(device: str, length: int) -> list[torch.Tensor]:
    query, key, value = (
        (numbers(device, 2, heads, length, 8) * factor).requires_grad_()
        for heads, factor in ((4, 1.0), (2, 2.0), (2, 1.5))
    )
    made = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    (made * made).sum().backward()
    return [made, query.grad, key.grad, value.grad]


def ragged_bags(device: str, count: int) -> list[torch.Tensor]:
    bags = [nn.EmbeddingBag(20, 4, mode=mode) for mode in ("sum", "mean")]
    for bag in bags:
        bag.weight.data = numbers("cpu", 20, 4)
    indices = (torch.arange(3 * count) * 7 % 20).to(device)
    offsets = torch.tensor([0, 2, 5, 9]).to(device)
    made = []
    for bag in bags:
        bag.to(device)
        result = bag(indices, offsets)
        result.square().sum().backward()
        made += [result, bag.weight.grad]
    return made


def whole_numbers(device: str, rows: int) -> list[torch.Tensor]:
    x = torch.arange(rows * 4).to(device).reshape(rows, 4)
    places = (x > 3).cumsum(0, dtype=torch.int32)
    return [x // 3 + places, (x / 5 - 2).logaddexp(x / 7)]


@pytest.mark.parametrize("step", [shared_heads, ragged_bags, whole_numbers])
def test_calls_whose_types_a_formula_tells_need_no_program_for_each_size(step):
    grown = assert_few_programs(step)
    assert grown["MetaInference"] == 0


def test_a_whole_quotient_by_a_number_is_recorded_the_quick_way():
    x = torch.arange(12).to("ltc")
    for _ in range(4):
        kept = x // 5
        ltm.mark_step()
    with metrics.counted() as grown:
        kept = x // 5
        ltm.mark_step()
    assert grown["LazyTracing"] == 0
    assert torch.equal(kept.cpu(), torch.arange(12) // 5)
