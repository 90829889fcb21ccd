"""Replicas measure no products: each has the bits of the model alone."""

import torch
from torch import nn

import ltc
import ltc.distributed.lazy_multiprocessing as lmp
from ltc.debug import metrics


def trained(rank: int) -> tuple[int | None, list[list[float]]]:
    """The number of called products, and a weight after steps whose products are worth a call."""
    torch.manual_seed(0)
    layer = nn.Linear(128, 140).to("ltc")
    x = torch.randn(150, 128).to("ltc")
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for _ in range(6):
        optimizer.zero_grad()
        layer(x).tanh().square().mean().backward()
        optimizer.step()
        ltc.sync()
    return metrics.counter_value("CalledProducts"), layer.weight.tolist()


def test_replicas_have_the_same_products():
    first, second = lmp.spawn(trained, nprocs=2)
    assert first == second
    assert first[0] is None
