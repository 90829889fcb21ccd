"""Dropout of sizes that change: one program, the same numbers on every tier, nothing compiled twice."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics
from ltc.device.recording import exit_liveness
from tests.recorders import forget_paths, process_of_one_device

pytestmark = pytest.mark.noted_at_once("it counts steps until they are followed")

LENGTHS = [5, 6, 9, 11, 16, 12, 23, 32, 8, 40, 17, 130, 64, 33]


@pytest.fixture(autouse=True)
def auto() -> Iterator[None]:
    """As in a process of one device that was told nothing."""
    with process_of_one_device(LTC_CACHE=0):
        yield


class Never:
    """A program that nobody compiles."""

    is_ready, is_kept = False, True


def attended(dropout: float, causal: bool) -> list[list[torch.Tensor]]:
    """Attention and its gradients over sequences of every length, with dropout."""
    torch.ltc.manual_seed(3)
    made = []
    for length in LENGTHS:
        x = torch.linspace(-2, 2, 2 * 3 * length * 8).reshape(2, 3, length, 8)
        query, key, value = (
            (x * factor).cos().to("ltc").requires_grad_() for factor in (1.0, 3.0, 7.0)
        )
        result = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=causal
        )
        (result * result).sum().backward()
        made.append([result.detach(), query.grad, key.grad, value.grad])
        ltm.mark_step()
    return [[one.cpu() for one in several] for several in made]


def on_each_tier(function, *arguments):
    found = []
    for tier in ("native", "auto"):
        with config.override(LTC_TIER=tier):
            forget_paths()
            with metrics.counted() as grown:
                found.append(function(*arguments))
    return *found, grown


@pytest.mark.parametrize("causal", [False, True])
def test_attention_keeps_the_same_weights_at_any_length(causal):
    native, auto, grown = on_each_tier(attended, 0.3, causal)
    torch.testing.assert_close(auto, native, rtol=1e-4, atol=1e-5)
    assert grown["SymbolicPrograms"] == 1
    assert grown["SymbolicSizes"] >= len(LENGTHS) - 3


def test_attention_whose_rows_begin_anywhere_in_a_block_of_random_bits_is_that_of_the_reference():
    """Of lengths that are no multiple of four, whose programs are of that size alone."""
    lazy = attended(0.5, False)
    with config.override(LTC_BACKEND="eager"):
        reference = attended(0.5, False)
    torch.testing.assert_close(lazy, reference, rtol=1e-4, atol=1e-5)


def encoded(forward=lambda layer, x: layer(x)) -> list[torch.Tensor]:
    torch.manual_seed(0)
    torch.ltc.manual_seed(5)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True).to("ltc")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    losses = []
    for length in LENGTHS:
        optimizer.zero_grad()
        x = torch.linspace(-1, 1, 3 * length * 16).reshape(3, length, 16).to("ltc")
        loss = forward(layer, x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        ltm.mark_step()
    return [loss.cpu() for loss in losses]


def test_calls_that_draw_run_at_any_size_where_there_is_no_program(monkeypatch):
    monkeypatch.setattr(exit_liveness, "ask_for_sizes", lambda *arguments: Never())
    native, auto, grown = on_each_tier(encoded)
    torch.testing.assert_close(auto, native, rtol=1e-4, atol=1e-5)
    assert grown["ImmediateSteps"] == len(LENGTHS)
    assert grown["llvm.compiled"] == grown["UncachedCompile"] == grown["ExecuteTime"] == 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_layer_that_is_computed_once_more_is_one_program(use_reentrant):
    """A checkpoint's second forward draws what the first one drew, at any length."""

    def again(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x.requires_grad_(), use_reentrant=use_reentrant)

    with config.override(LTC_TIER="auto"):
        kept = encoded()
        forget_paths()
        with metrics.counted() as grown:
            once_more = encoded(again)
    torch.testing.assert_close(once_more, kept, rtol=1e-4, atol=1e-5)
    assert grown["SymbolicSizes"] >= len(LENGTHS) - 4
    assert grown["ImmediateSteps"] <= 4


def test_many_numbers_are_drawn_by_one_kernel_at_all_sizes():
    """The reference would take longer than a program that is planned for each."""
    with config.override(LTC_TIER="auto"), metrics.counted() as grown:
        for rows in (300, 310, 320, 330):
            x = torch.ones(rows, 1000).to("ltc")
            kept = F.dropout(x, 0.25)
            ltm.mark_step()
            assert abs((kept.cpu() > 0).float().mean().item() - 0.75) < 0.01
    assert grown["llvm.compiled"] <= 4


@pytest.mark.parametrize("width", [64, 32])
def test_a_size_that_happens_to_be_another_extent_is_no_exception(width):
    """4 * 16 rows of 64 columns: tuples of sizes are compared from the left."""
    torch.manual_seed(0)
    layer, plain = nn.Linear(width, width), nn.Linear(width, width)
    plain.load_state_dict(layer.state_dict())
    layer = layer.to("ltc")
    with config.override(LTC_TIER="auto"), metrics.counted() as grown:
        for length in (9, 10, 11, 12, 16, 8, 17, 32):
            x = torch.linspace(-1, 1, 4 * length * width).reshape(4, length, width)
            made = [f(y).tanh() for f, y in ((layer, x.to("ltc")), (plain, x))]
            ltm.mark_step()
            torch.testing.assert_close(made[0].detach().cpu(), made[1].detach())
    assert (grown["SymbolicPrograms"], grown["SymbolicSizes"]) == (1, 5)


def drawn() -> list[torch.Tensor]:
    torch.ltc.manual_seed(11)
    made = []
    for rows in LENGTHS:
        x = torch.linspace(0, 1, rows * 4).reshape(rows, 4).to("ltc")
        times = torch.randint(0, 50, (rows,), device="ltc")
        chosen = torch.randint(rows, (rows,), device="ltc")
        made.append((x[chosen] * torch.bernoulli(x)).sum(-1) + times)
        ltm.mark_step()
    return [one.cpu() for one in made]


def test_whole_numbers_that_are_drawn_are_one_program_and_the_same_on_each_tier():
    native, auto, grown = on_each_tier(drawn)
    torch.testing.assert_close(auto, native, rtol=1e-5, atol=1e-6)
    assert (grown["SymbolicPrograms"], grown["ImmediateSteps"]) == (1, 3)
