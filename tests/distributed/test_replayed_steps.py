"""Replicas that replay their steps average gradients as those that record them do."""

import pytest
import torch
from torch import nn

import ltc
import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics
from ltc.distributed.lazy_multiprocessing import spawn
from tests.distributed.replicas import in_threads, values

pytestmark = pytest.mark.devices(4)

STEPS = 8


def trained(ordinal: int, device, compiled) -> tuple[list, int]:
    """The parameters after some steps, and how many of these were replayed."""
    weight = nn.Parameter(torch.linspace(-1, 1, 6).to(device))
    optimizer = torch.optim.AdamW([weight], lr=0.1)

    def step(x):
        optimizer.zero_grad()
        (x * weight).sum().square().backward()
        ltm.optimizer_step(optimizer, barrier=True)

    call = compiled(step)
    with metrics.counted() as grown:
        for number in range(STEPS):
            call(torch.full((6,), 0.1 * number + ordinal).to(device))
    return weight.tolist(), grown["ReplayedCalls"]


def plainly(function):
    return function


def in_a_process(rank: int) -> tuple[tuple, tuple]:
    with config.override(LTC_CHECK=0):  # which compares every call
        return trained(rank, "ltc", ltc.compile), trained(rank, "ltc", plainly)


def test_processes():
    for (replayed, count), (recorded, _) in spawn(in_a_process, nprocs=2):
        assert replayed == recorded
        assert count == 5


def test_threads():
    with config.override(LTC_CHECK=0):
        replayed = values(in_threads(lambda o, d: trained(o, d, ltc.compile), 2))
    recorded = values(in_threads(lambda o, d: trained(o, d, plainly), 2))
    assert [weights for weights, _ in replayed] == [weights for weights, _ in recorded]
    assert sum(one for _, one in replayed) > 0
