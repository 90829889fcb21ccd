"""Programs of packages that train with PyTorch, each as the package's own examples show it.

A program is given a device and a watch. It says `watch.begin()` when its training begins, and
`watch.step(loss)` behind each step; otherwise nothing in it knows that it is watched. It goes on for
as long as it is asked. The data is made up on the CPU, so it is the same on every device.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from client_agents import Watch, dqn, ppo
from torch import nn
from torch.nn import functional as F


def perceptron(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
        nn.Linear(hidden, outputs),
    )  # fmt: skip


# --- graphs and differential equations -----------------------------------------------------------


def graph_network(device: str, watch: Watch, first: nn.Module, last: nn.Module) -> None:
    """Train as torch_geometric's examples of GCN and GAT do, on a graph of 600 nodes."""
    nodes = 600
    x = torch.rand(nodes, 64).to(device)
    edges = torch.randint(0, nodes, (2, 2400)).to(device)
    wanted = torch.randint(0, 7, (nodes,)).to(device)
    train_mask = (torch.rand(nodes) < 0.3).to(device)
    first, last = first.to(device), last.to(device)
    parameters = [*first.parameters(), *last.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.01, weight_decay=5e-4)
    watch.begin()
    while True:
        optimizer.zero_grad()
        h = F.dropout(x, p=0.5, training=True)
        h = first(h, edges).relu()
        out = last(F.dropout(h, p=0.5, training=True), edges)
        loss = F.cross_entropy(out[train_mask], wanted[train_mask])
        loss.backward()
        optimizer.step()
        watch.step(loss)


def pyg_gcn(device: str, watch: Watch) -> None:
    from torch_geometric.nn import GCNConv

    graph_network(device, watch, GCNConv(64, 16), GCNConv(16, 7))


def pyg_gat(device: str, watch: Watch) -> None:
    from torch_geometric.nn import GATConv

    first = GATConv(64, 8, heads=8, dropout=0.6)
    graph_network(device, watch, first, GATConv(64, 7, heads=1, concat=False, dropout=0.6))


class Spiral(nn.Module):
    """The derivative that torchdiffeq's demo learns."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 2))

    def forward(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.net(y**3)


def differential_equation(device: str, watch: Watch, integrate: Callable, method: str) -> None:
    """Train as torchdiffeq's demo does: 20 pieces of a path, of ten points each."""
    time = torch.linspace(0.0, 25.0, 1000)
    path = torch.stack([torch.exp(-0.1 * time) * torch.cos(time),
                        torch.exp(-0.1 * time) * torch.sin(time)], -1)[:, None]  # fmt: skip
    model = Spiral().to(device)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    watch.begin()
    while True:
        starts = torch.randperm(990)[:20]
        batch_y0, batch_t = path[starts].to(device), time[:10].to(device)
        batch_y = torch.stack([path[starts + i] for i in range(10)]).to(device)
        optimizer.zero_grad()
        predicted = integrate(model, batch_y0, batch_t, method=method).to(device)
        loss = torch.mean(torch.abs(predicted - batch_y))
        loss.backward()
        optimizer.step()
        watch.step(loss)


def odeint_rk4(device: str, watch: Watch) -> None:
    from torchdiffeq import odeint

    differential_equation(device, watch, odeint, "rk4")


def odeint_dopri5(device: str, watch: Watch) -> None:
    from torchdiffeq import odeint

    differential_equation(device, watch, odeint, "dopri5")


def odeint_adjoint(device: str, watch: Watch) -> None:
    from torchdiffeq import odeint_adjoint

    differential_equation(device, watch, odeint_adjoint, "dopri5")


# --- probability ---------------------------------------------------------------------------------


def pyro_svi(device: str, watch: Watch) -> None:
    """Fit a Bayesian regression as pyro's tutorial does."""
    import pyro
    from pyro.infer import SVI, Trace_ELBO
    from pyro.infer.autoguide import AutoDiagonalNormal
    from pyro.nn import PyroModule, PyroSample

    x = torch.randn(100, 3)
    y = (x @ torch.tensor([1.0, -2.0, 0.5]) + 0.1 * torch.randn(100)).to(device)
    x = x.to(device)
    zero, one, ten = (torch.tensor(number).to(device) for number in (0.0, 1.0, 10.0))

    class Regression(PyroModule):
        def __init__(self) -> None:
            super().__init__()
            self.linear = PyroModule[nn.Linear](3, 1)
            normal = pyro.distributions.Normal
            self.linear.weight = PyroSample(normal(zero, one).expand([1, 3]).to_event(2))
            self.linear.bias = PyroSample(normal(zero, ten).expand([1]).to_event(1))

        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            sigma = pyro.sample("sigma", pyro.distributions.Uniform(zero, ten))
            mean = self.linear(x).squeeze(-1)
            with pyro.plate("data", x.shape[0]):
                pyro.sample("obs", pyro.distributions.Normal(mean, sigma), obs=y)
            return mean

    pyro.clear_param_store()
    model = Regression().to(device)
    guide = AutoDiagonalNormal(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.03}), loss=Trace_ELBO())
    watch.begin()
    while True:
        watch.step(svi.step(x, y))


def zuko_flow(device: str, watch: Watch) -> None:
    """Train a neural spline flow as zuko's README does."""
    import zuko

    flow = zuko.flows.NSF(3, 5, transforms=3, hidden_features=[64] * 2).to(device)
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-3)
    watch.begin()
    while True:
        x, c = torch.randn(64, 3).to(device), torch.randn(64, 5).to(device)
        loss = -flow(c).log_prob(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.step(loss)


def gpytorch_exact(device: str, watch: Watch) -> None:
    """Fit a Gaussian process as gpytorch's tutorial of regression does."""
    import gpytorch

    class Exact(gpytorch.models.ExactGP):
        def __init__(self, x: torch.Tensor, y: torch.Tensor, likelihood: Any) -> None:
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: torch.Tensor) -> Any:
            mean, covariance = self.mean_module(x), self.covar_module(x)
            return gpytorch.distributions.MultivariateNormal(mean, covariance)

    x = torch.linspace(0, 1, 100)
    y = (torch.sin(x * 6.28) + torch.randn(100) * 0.2).to(device)
    x = x.to(device)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Exact(x, y, likelihood).to(device)
    model.train()
    likelihood.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    watch.begin()
    while True:
        optimizer.zero_grad()
        loss = -mll(model(x), y)
        loss.backward()
        optimizer.step()
        watch.step(loss)


# --- beside, around and inside of training -------------------------------------------------------


def torchmetrics_beside(device: str, watch: Watch) -> None:
    """Train a classifier, with three metrics of each batch and of every ten together."""
    from torchmetrics import MetricCollection, classification

    model = perceptron(32, 64, 10).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    kinds = "Accuracy", "F1Score", "ConfusionMatrix"
    made = [getattr(classification, f"Multiclass{kind}")(num_classes=10) for kind in kinds]
    metrics = MetricCollection(made).to(device)
    watch.begin()
    for number in itertools.count(1):
        x, y = torch.randn(64, 32).to(device), torch.randint(0, 10, (64,)).to(device)
        out = model(x)
        loss = F.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metrics.update(out, y)
        if number % 10 == 0:
            metrics.compute()
            metrics.reset()
        watch.step(loss)


def kornia_augmentation(device: str, watch: Watch) -> None:
    """Train a small network on pictures that kornia flips, turns and colours."""
    from kornia import augmentation

    augment = augmentation.AugmentationSequential(
        augmentation.RandomHorizontalFlip(p=0.5),
        augmentation.RandomAffine(degrees=15.0, p=0.7),
        augmentation.ColorJitter(0.1, 0.1, 0.1, 0.1, p=0.8),
        data_keys=["input"],
    )
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 16, 3, 2), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 7 * 7, 10),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    watch.begin()
    while True:
        x, y = torch.rand(16, 3, 32, 32).to(device), torch.randint(0, 10, (16,)).to(device)
        loss = F.cross_entropy(model(augment(x)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.step(loss)


def skorch_digits(device: str, watch: Watch) -> None:
    """Fit skorch's classifier; a step is an epoch of 16 batches, and its validation."""
    import numpy as np
    import skorch

    draws = np.random.default_rng(0)
    x = draws.standard_normal((640, 64)).astype(np.float32)
    y = draws.integers(0, 10, 640)

    class Report(skorch.callbacks.Callback):
        def on_epoch_end(self, net: Any, **_: Any) -> None:
            watch.step(net.history[-1, "train_loss"])

    net = skorch.NeuralNetClassifier(
        perceptron(64, 64, 10), criterion=nn.CrossEntropyLoss, max_epochs=10**9, lr=0.1,
        batch_size=32, device=device, verbose=0, callbacks=[Report()],
    )  # fmt: skip
    watch.begin()
    net.fit(x, y)


def sine_task() -> tuple[torch.Tensor, torch.Tensor]:
    """Twenty points of a sine of some amplitude and phase."""
    x = torch.rand(20, 1) * 10 - 5
    return x, (torch.rand(1) * 5) * torch.sin(x + torch.rand(1) * 3.14)


def higher_maml(device: str, watch: Watch) -> None:
    """Learn to learn four sines with `higher`: three steps inside, one outside."""
    import higher

    model = perceptron(1, 40, 1).to(device)
    meta = torch.optim.Adam(model.parameters(), lr=1e-3)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    watch.begin()
    while True:
        meta.zero_grad()
        total = 0.0
        for _ in range(4):
            x, y = (part.to(device) for part in sine_task())
            with higher.innerloop_ctx(model, inner, copy_initial_weights=False) as (net, steps):
                for _ in range(3):
                    steps.step(F.mse_loss(net(x[:10]), y[:10]))
                loss = F.mse_loss(net(x[10:]), y[10:])
                total += loss.detach()
                loss.backward()
        meta.step()
        watch.step(total)


def func_maml(device: str, watch: Watch) -> None:
    """Learn to learn eight sines with torch.func, as PyTorch's own example of it does."""
    from torch.func import functional_call, grad, vmap

    model = perceptron(1, 40, 1).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss_of(parameters: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(functional_call(model, parameters, (x,)), y)

    def learned(parameters: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        gradients = grad(loss_of)(parameters, x[:10], y[:10])
        moved = {name: parameters[name] - 0.01 * gradients[name] for name in parameters}
        return loss_of(moved, x[10:], y[10:])

    watch.begin()
    while True:
        xs, ys = (torch.stack(part).to(device) for part in zip(*(sine_task() for _ in range(8))))
        parameters = dict(model.named_parameters())
        loss = vmap(learned, in_dims=(None, 0, 0))(parameters, xs, ys).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.step(loss)


def opacus_private(device: str, watch: Watch) -> None:
    """Train with private gradients: batches of Poisson's sizes, clipped, with noise."""
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.randn(1024, 32), torch.randint(0, 4, (1024,)))
    model = perceptron(32, 64, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=64),
        noise_multiplier=1.1, max_grad_norm=1.0,
    )  # fmt: skip
    watch.begin()
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            watch.step(loss)


def captum_gradients(device: str, watch: Watch) -> None:
    """Explain a classifier's answers with integrated gradients, and read what they say."""
    from captum.attr import IntegratedGradients

    model = perceptron(32, 64, 4).to(device).eval()
    explained = IntegratedGradients(model)
    watch.begin()
    while True:
        x = torch.randn(8, 32).to(device)
        target = model(x).argmax(1)
        found, delta = explained.attribute(x, target=target, return_convergence_delta=True)
        watch.step(float(found.cpu().abs().sum() + delta.cpu().sum()))


def trainer_padded(device: str, watch: Watch) -> None:
    """Train a small BERT with transformers' Trainer, each batch padded to its longest text."""
    import tempfile

    import transformers
    from torch.nn.utils.rnn import pad_sequence

    numbers = random.Random(0)
    texts = [
        {"input_ids": torch.randint(1, 500, (length,)), "labels": numbers.randrange(2)}
        for length in numbers.choices(range(5, 61), k=512)
    ]

    def padded(batch: list[dict]) -> dict[str, torch.Tensor]:
        ids = pad_sequence([text["input_ids"] for text in batch], batch_first=True)
        labels = torch.tensor([text["labels"] for text in batch])
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}

    class Watched(transformers.Trainer):
        def training_step(self, *arguments: Any, **named: Any) -> torch.Tensor:
            loss = super().training_step(*arguments, **named)
            watch.step(loss)
            return loss

    config = transformers.BertConfig(
        vocab_size=500, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=128, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, per_device_train_batch_size=8, max_steps=10**6, logging_steps=25,
            save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=device == "cpu",
        )  # fmt: skip
        model = transformers.BertForSequenceClassification(config)
        trainer = Watched(model, arguments, data_collator=padded, train_dataset=texts)
        watch.begin()
        trainer.train()


def ddp_digits(device: str, watch: Watch) -> None:
    """Train a small network in two processes of torchrun, with DistributedDataParallel."""
    from torch import distributed

    distributed.init_process_group("ltc" if device == "ltc" else "gloo")
    torch.manual_seed(distributed.get_rank())
    model = nn.parallel.DistributedDataParallel(perceptron(64, 64, 10).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    watch.begin()
    while True:
        x, y = torch.randn(32, 64).to(device), torch.randint(0, 10, (32,)).to(device)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.step(loss)


@dataclass(frozen=True)
class Client:
    """A program, and what running it takes.

    Attributes:
        packages: The modules that it imports.
        draws: True if it draws random numbers on the device: other ones than on the CPU.
        processes: The number of processes that torchrun starts; 0: it is not started by torchrun.
    """

    run: Callable[[str, Watch], None]
    packages: tuple[str, ...] = ()
    draws: bool = False
    processes: int = 0


CLIENTS: dict[str, Client] = {
    client.run.__name__: client
    for client in (
        Client(ppo, ("gymnasium",), draws=True),
        Client(dqn, ("gymnasium",)),
        Client(pyg_gcn, ("torch_geometric",), draws=True),
        Client(pyg_gat, ("torch_geometric",), draws=True),
        Client(odeint_rk4, ("torchdiffeq",)),
        Client(odeint_dopri5, ("torchdiffeq",)),
        Client(odeint_adjoint, ("torchdiffeq",)),
        Client(pyro_svi, ("pyro",), draws=True),
        Client(zuko_flow, ("zuko",)),
        Client(torchmetrics_beside, ("torchmetrics",)),
        Client(kornia_augmentation, ("kornia",), draws=True),
        Client(gpytorch_exact, ("gpytorch",)),
        Client(skorch_digits, ("skorch",)),
        Client(higher_maml, ("higher",)),
        Client(func_maml),
        Client(opacus_private, ("opacus",), draws=True),
        Client(captum_gradients, ("captum",)),
        Client(trainer_padded, ("transformers", "accelerate"), draws=True),
        Client(ddp_digits, processes=2),
    )
}
