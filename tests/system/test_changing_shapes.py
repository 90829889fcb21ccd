"""Steps whose shapes differ each time are recorded without asking torch's kernels for types."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics
from ltc.device.shapes import meta, type_cache


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(type_cache, "look_up", lambda overload, key: None)
    meta._known.clear()
    with config.override(LTC_BACKEND="eager"):  # of recording nothing is the backend's business
        yield


def trained(model, optimizer, loss_of):
    """A step on a batch of n."""
    model = model.to("ltc")
    optimizer = optimizer(model.parameters())

    def step(n: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, n)
        loss.backward()
        optimizer.step()
        return loss

    return step


def classes(n: int, count: int = 4) -> torch.Tensor:
    return (torch.arange(n) % count).to("ltc")


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def mlp():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))
    return model, lambda m, n: F.cross_entropy(m(torch.randn(n, 6).to("ltc")), classes(n))


def transformer():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.1)
    model = nn.Sequential(nn.Embedding(20, 16), layer, nn.Linear(16, 4))

    def loss_of(m, n):
        tokens = torch.randint(0, 20, (3, n)).to("ltc")
        return F.cross_entropy(m(tokens).mean(1), classes(3))

    return model, loss_of


def convolutions():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, stride=2, groups=2),
        nn.GroupNorm(2, 8),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    return model, lambda m, n: F.cross_entropy(m(torch.randn(n, 3, 16, 16).to("ltc")), classes(n))


class Messages(nn.Module):
    """Each node adds what its neighbours say."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x, source, target):
        x = self.first(x)
        x = torch.zeros_like(x).index_add(0, target, x[source]).relu()
        return self.last(x)


def graph():
    def loss_of(m, n):
        edges = torch.randint(0, n, (2, 3 * n)).to("ltc")
        return F.cross_entropy(m(torch.randn(n, 6).to("ltc"), *edges.unbind()), classes(n))

    return Messages(), loss_of


def regression():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1))

    def loss_of(m, n):
        x = torch.randn(n, 6).to("ltc")
        wanted = torch.where(x.sum(1, keepdim=True) > 0, x.amax(1, keepdim=True), 0.0)
        return F.mse_loss(m(x), wanted) + 1e-3 * m[0].weight.norm()

    return model, loss_of


@pytest.mark.parametrize("network", [mlp, transformer, convolutions, graph, regression])
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_another_batch_size_asks_no_kernel_for_types(network, optimizer):
    model, loss_of = network()
    step = trained(model, optimizer, loss_of)
    step(12)
    ltm.mark_step(wait=True)
    with metrics.counted() as grown:
        for n in (9, 15, 4):
            step(n)
            ltm.mark_step()
    assert grown["MetaInference"] == 0
    assert grown["RecordedEntries"] > 0
