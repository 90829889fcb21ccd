"""k replicas with batches of b train as one process with batches of k * b, and repeat exactly."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ltc.core.lazy_model as ltm
from ltc.distributed import world

sys.path.insert(0, str(Path(__file__).parent))

from replicas import in_processes, in_threads, values

pytestmark = pytest.mark.devices(4)

STEPS, BATCH = 10, 8


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 10)
    )


INITIAL = network().state_dict()  # drawn once: threads would draw from one generator in turns


def batch(step: int, ordinal: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * step + ordinal)
    return torch.randn(BATCH, 1, 8, 8, generator=draw), torch.randint(10, (BATCH,), generator=draw)


def trained(device: str, batches: list, end_step) -> list[torch.Tensor]:
    model = network().to("cpu")
    model.load_state_dict(INITIAL)
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for images, labels in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images.to(device)), labels.to(device)).backward()
        end_step(optimizer)
    return [p.detach().cpu() for p in model.parameters()]


def as_replica(ordinal: int, device: str = "ltc:0") -> list[torch.Tensor]:
    """The weights after some steps on this replica's own batches."""
    assert ordinal == world.ordinal()

    def end_step(optimizer) -> None:
        ltm.optimizer_step(optimizer)
        ltm.mark_step()

    return trained(device, [batch(step, ordinal) for step in range(STEPS)], end_step)


def alone(replicas: int) -> list[torch.Tensor]:
    """The weights of one process, on the CPU, with everyone's batches together."""
    together = [
        [torch.cat(parts) for parts in zip(*(batch(step, r) for r in range(replicas)))]
        for step in range(STEPS)
    ]
    return trained("cpu", together, lambda optimizer: optimizer.step())


WAYS = {
    "threads": lambda replicas: in_threads(as_replica, replicas),
    "processes": lambda replicas: in_processes(__file__, "as_replica", replicas),
    "two hosts": lambda replicas: in_processes(
        __file__, "as_replica", replicas, LOCAL_WORLD_SIZE=str(replicas // 2)
    ),
}


@pytest.mark.parametrize(
    ("way", "replicas"),
    [("threads", 2), ("threads", 4), ("processes", 4), ("two hosts", 2), ("two hosts", 4)],
)
def test_replicas_train_as_one_process_and_repeat(way, replicas):
    first, again = values(WAYS[way](replicas)), values(WAYS[way](replicas))
    for weights in [*first, *again]:
        assert all(torch.equal(a, b) for a, b in zip(weights, first[0], strict=True))
    for mine, expected in zip(first[0], alone(replicas), strict=True):
        assert (mine - expected).abs().max() <= 1e-6  # float32: sums in another order
