"""Runs of one body pass through every state of a step, and LTC_CHECK changes none of them."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ltc import config
from ltc.native.core import CORE
from tests.compared import Comparison
from tests.recorders import forget_paths
from tests.states import (
    COMPILED,
    FOLLOWED,
    HOT,
    IMMEDIATE,
    RECORDED,
    SIDE_EXIT,
    wait_for_the_compiler,
)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path):
    with config.override(LTC_CACHE_DIR=tmp_path):
        yield


def gradients(device, size):
    x = torch.randn(5, size).to(device).requires_grad_()
    (x.sin() @ x.t()).tanh().sum().backward()
    return x.grad


def writes_in_place(device, size):
    x = torch.randn(4, size).to(device)
    x[1:3].mul_(2).add_(1)
    rows = x.t()[2:]
    rows.relu_()
    return x, rows, x.sum(0)


def a_training_step(device, size):
    model = nn.Sequential(nn.Linear(size, 5), nn.GELU(), nn.Linear(5, 3)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    F.cross_entropy(
        model(torch.randn(7, size).to(device)), torch.arange(7).to(device) % 3
    ).backward()
    optimizer.step()
    return [p.detach() for p in model.parameters()]


def random_numbers(device, size):
    x = torch.randn(size).to(device)
    return torch.dropout(x, 0.0, True) * 2 + x.exp().sum()


BODIES = [gradients, writes_in_place, a_training_step, random_numbers]
RUNS = 5 if CORE is None else 7  # which notes a path once its sum has come back


def states_of_runs(body: Callable, size: int) -> list[set[str]]:
    """The states of some runs in a row, of one that is left in its midst, and of one after it."""
    forget_paths()  # and no other test has compiled a program of that size
    comparison, found = Comparison(body, {"size": size}), []
    for _ in range(RUNS):
        found.append(comparison.run("in a row"))
        wait_for_the_compiler()
        comparison.draw()
    stray = comparison.stray_call()
    found.append(comparison.run("left in its midst", stray))
    assert stray.is_made
    found.append(comparison.run("taken up again"))
    return found


@pytest.mark.parametrize("body", BODIES)
def test_a_body_passes_through_every_state(body):
    *rising, left, _ = states_of_runs(body, 41)
    assert IMMEDIATE in rising[0] and FOLLOWED not in rising[0]
    assert CORE is not None or RECORDED in rising[0]  # the core sums a new path up first
    assert {RECORDED, HOT} <= set().union(*rising)
    assert rising[-1] == {COMPILED, FOLLOWED}
    assert left >= {IMMEDIATE, RECORDED, SIDE_EXIT} and FOLLOWED not in left


@pytest.mark.parametrize("body", BODIES)
def test_checks_change_no_state(body):
    with config.override(LTC_CHECK=0):
        unchecked = states_of_runs(body, 42)
    assert states_of_runs(body, 43) == unchecked
