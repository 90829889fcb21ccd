"""What PyTorch's own kernels compute in a program of symbols, and calls whose types formulas tell."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics
from ltc.runtime.symbolic import program_of_sizes
from tests.recorders import forget_paths, process_of_one_device

SIZES = [5, 6, 9, 11, 16, 12, 23, 32, 8, 40]


@pytest.fixture(autouse=True)
def auto(monkeypatch) -> Iterator[None]:
    """As in a process of one device that was told nothing."""
    monkeypatch.setattr(program_of_sizes, "FIRST_USES", 1)
    with process_of_one_device(monkeypatch, LTC_TIER="auto", LTC_CACHE=0):
        yield


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


def called_from_c(device: str, rows: int) -> list[torch.Tensor]:
    x = numbers(device, rows, 7) * torch.arange(1, 8).to(device)
    values, places = (x * 2).topk(3, -1)
    return [values.sum(1).exp(), places + 1]


def test_a_kernel_of_torch_that_is_called_from_c_gets_the_sizes_of_this_time():
    """They stood in its text: each size was a program, and after six the path was left."""
    grown = assert_few_programs(called_from_c)
    assert grown["extern.python"] == 0


def drawn_rows(device: str, rows: int) -> list[torch.Tensor]:
    weights = numbers(device, rows, 5).abs() + 0.1
    return [torch.multinomial(weights * 2, 3) * 10, (weights + 1).sum(1)]


def drawn_of_all(device: str, rows: int) -> list[torch.Tensor]:
    weights = numbers(device, 50).abs() + 0.1
    chosen = torch.multinomial(weights * 2, 30, replacement=True)
    return [weights[chosen] * 3, numbers(device, rows, 5).exp().sum(1)]


@pytest.mark.parametrize("step", [drawn_rows, drawn_of_all])
def test_a_kernel_of_torch_that_python_calls_gets_the_sizes_of_this_time(step):
    """As for one that draws: a program with such a call was no program of symbols."""
    torch.ltc.manual_seed(7)
    with metrics.counted() as grown:
        made = at_all_sizes(step, "ltc")
    forget_paths()
    torch.ltc.manual_seed(7)
    with config.override(LTC_TIER="native", LTC_SYMBOLIC=0):
        torch.testing.assert_close(made, at_all_sizes(step, "ltc"))
    assert grown["SymbolicPrograms"] in (1, 2)
    assert grown["SymbolicSizes"] >= len(SIZES) - 4
    assert grown["extern.python::aten::multinomial"] >= len(SIZES) - 3
    assert grown["OpByOpSteps"] == 0


def test_what_such_a_kernel_refuses_at_another_size_is_its_own_error():
    def step(rows: int, least: float) -> torch.Tensor:
        weights = (numbers("ltc", rows, 5).abs() + 0.5) * 2 + least
        return torch.multinomial(weights, 3)

    for rows in SIZES:
        kept = step(rows, 0.0)
        ltm.mark_step(wait=True)
        assert kept.shape == (rows, 3)
    with pytest.raises(RuntimeError, match="probability tensor contains"):
        step(50, -5.0).cpu()
    ltm.mark_step()
    assert step(51, 0.0).cpu().max() < 5


def recognised(device: str, longest: int) -> list[torch.Tensor]:
    """Sequences of two lengths, and their targets behind one another."""
    scores = numbers(device, 2 * longest + 3, 2, 5).requires_grad_()
    inputs, wanted = [2 * longest + 3, 2 * longest], [longest, longest - 2]
    targets = (torch.arange(sum(wanted)) % 4 + 1).to(device)
    loss = F.ctc_loss((scores * 2).log_softmax(-1), targets, inputs, wanted, reduction="sum")
    loss.backward()
    return [loss, scores.grad]


def test_a_loss_over_sequences_of_other_lengths_is_part_of_one_program():
    """The lengths are tensors of the recorded call; C calls its kernel, and nothing is read."""
    grown = assert_few_programs(recognised)
    for name in ("aten::_ctc_loss", "extern.python", "MetaInference", "EarlySyncLiveTensorsCount"):
        assert grown[name] == 0, name


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


def continued_images(device: str, count: int) -> list[torch.Tensor]:
    x = numbers(device, count, 2, 6, 5).requires_grad_()
    made = F.pad(x * 2, (1, 2, 2, 1), mode="reflect") + F.pad(x, (1, 2, 2, 1), mode="replicate")
    largest = F.adaptive_max_pool2d(made, (3, 2))
    (largest * largest).sum().backward()
    return [largest, x.grad]


def spectra(device: str, size: int) -> list[torch.Tensor]:
    sound = numbers(device, 2, 40 + 3 * size)
    window = torch.hann_window(16).to(device)
    found = torch.stft(sound, 16, 8, 16, window, return_complex=True)
    return [(found * 2).abs().square().transpose(1, 2) @ numbers(device, 9, 4)]


@pytest.mark.parametrize(
    "step", [shared_heads, ragged_bags, whole_numbers, continued_images, spectra]
)
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
