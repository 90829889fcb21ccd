"""Whole steps with LTC_BACKEND=llvm: equal to the CPU, and native where that is promised."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ltc.core.lazy_model as ltm
from ltc.debug import metrics

pytestmark = pytest.mark.also_native


@pytest.fixture(autouse=True)
def llvm(monkeypatch):
    monkeypatch.setenv("LTC_BACKEND", "llvm")


class Block(nn.Module):
    """Attention and a feed-forward layer behind norms, tied to an embedding."""

    def __init__(self):
        super().__init__()
        self.tokens, self.norm = nn.Embedding(50, 32), nn.LayerNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, tokens):
        x = self.tokens(tokens)
        n, t, d = x.shape
        q, k, v = (
            p.reshape(n, t, 4, 8).transpose(1, 2) for p in self.qkv(self.norm(x)).split(d, 2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, d))
        x = x + self.down(F.gelu(self.up(x)))
        return x @ self.tokens.weight.t()


def mlp():
    return nn.Sequential(
        nn.Linear(20, 33), nn.ReLU(), nn.Linear(33, 33), nn.Tanh(), nn.Linear(33, 7)
    )


def convnet():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 12, 3, stride=2), nn.SiLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(12, 7),
    )  # fmt: skip


def batch(name):
    if name == "block":
        return torch.randint(50, (3, 9)), torch.randint(50, (27,))
    shape = (6, 20) if name == "mlp" else (6, 3, 10, 10)
    return torch.randn(shape, dtype=torch.float64), torch.randint(7, (6,))


MODELS = {"mlp": mlp, "convnet": convnet, "block": Block}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    # The gradient of a key's bias is 0 but for rounding, which a small eps would blow up.
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-5, centered=True),
}


@pytest.mark.compared
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_training_equals_the_cpu(device, name, optimizer):
    model = MODELS[name]().double().to(device)
    x, y = (t.to(device) for t in batch(name))
    update, losses = OPTIMIZERS[optimizer](model.parameters()), []
    for _ in range(4):
        update.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, -2), y)
        loss.backward()
        update.step()
        ltm.mark_step()
        losses.append(loss.detach())
    return [
        *losses,
        *[p.detach() for p in model.parameters()],
        *[p.grad for p in model.parameters()],
    ]


def test_dropout_keeps_the_share_and_repeats_with_the_seed():
    def once():
        torch.manual_seed(3)
        return F.dropout(torch.ones(100, 100, device="ltc"), 0.25).cpu()

    first = once()
    assert torch.equal(first, once())
    assert abs((first != 0).float().mean() - 0.75) < 0.02  # four standard deviations


def test_an_update_of_many_parameters_runs_without_python():
    parameters = [torch.randn(n, device="ltc", requires_grad=True) for n in (5, 300, 7, 1000)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    update = torch.optim.AdamW(parameters, lr=0.01)
    update.step()
    ltm.mark_step(wait=True)
    with metrics.counted() as grown:
        update.step()
        ltm.mark_step(wait=True)
    assert not grown.get("extern.python", 0)


@pytest.mark.native("it counts programs, and calls that run when made are none")
def test_a_later_step_compiles_nothing():
    model, x = mlp().to("ltc"), torch.randn(6, 20).to("ltc")
    update = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        update.zero_grad()
        model(x).square().mean().backward()
        update.step()
        ltm.mark_step(wait=True)

    step()
    step()
    with metrics.counted() as grown:
        for _ in range(3):
            step()
    assert not grown.get("llvm.compiled", 0)


def test_an_index_outside_names_the_line_and_leaves_parameters_alone():
    table = nn.Embedding(5, 3).to("ltc")
    before = table.weight.detach().cpu().clone()
    update = torch.optim.SGD(table.parameters(), lr=1.0)
    with pytest.raises(IndexError, match="index out of range in self"):
        table(torch.tensor([1, 9]).to("ltc")).sum().backward()
        update.step()
        ltm.mark_step(wait=True)
    assert torch.equal(table.weight.detach().cpu(), before)


def test_torchs_kernels_see_values_of_a_program_at_the_start_of_their_storage():
    x = torch.arange(24.0, device="ltc")
    scratch = x * 2  # lies somewhere in the program's block
    twice = torch.as_strided(scratch + x, (5, 4), (1, 6), 1)
    assert torch.equal(twice.cpu(), torch.as_strided(torch.arange(24.0) * 3, (5, 4), (1, 6), 1))
