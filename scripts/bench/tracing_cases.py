"""Cases of `bench.py --tracing`: recording a step of a small network, or one operation.

A case is build(device) -> (step, unit): `step()` records one step and returns what its caller may
drop; its time is divided by `unit` for the table. Nothing here knows a backend.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

ADDITIONS = 100  # in one step of `add`
LISTED_TENSORS, LIST_OPERATIONS = 120, 8  # as many as an AdamW step has


class TiedTransformer(nn.Module):
    """An encoder layer between an embedding and its transpose; [N, T] to [N, T, 50] logits."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.output = nn.Linear(32, 50)
        self.output.weight = self.embedding.weight

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.output(self.layer(self.embedding(tokens), src_mask=mask, is_causal=True))


def small_mlp() -> nn.Module:
    hidden = nn.Linear(16, 16)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), hidden, nn.Tanh(), nn.Linear(16, 4))


def training(model, optimizer: Callable, inputs, targets, device) -> tuple[Callable, int]:
    model = model.to(device)
    optimizer = optimizer(model.parameters())
    inputs, targets = inputs.to(device), targets.to(device)

    def step():
        optimizer.zero_grad()
        logits = model(inputs)
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
        loss.backward()
        optimizer.step()
        return loss

    return step, 1


def adam(parameters) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 1e-3, foreach=True)


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 1e-3)


def mlp(device, optimizer) -> tuple[Callable, int]:
    return training(small_mlp(), optimizer, torch.randn(4, 8), torch.randint(4, (4,)), device)


def transformer(device) -> tuple[Callable, int]:
    tokens, targets = torch.randint(50, (2, 6)), torch.randint(50, (2, 6))
    return training(TiedTransformer(), adam, tokens, targets, device)


def add(device) -> tuple[Callable, int]:
    x, y = torch.randn(4, 8).to(device), torch.randn(4, 8).to(device)

    def step():
        for _ in range(ADDITIONS):
            z = x + y
        return z

    return step, ADDITIONS


def listed_tensors(device) -> tuple[list, list]:
    return tuple([torch.randn(16).to(device) for _ in range(LISTED_TENSORS)] for _ in range(2))


def list_operation(device) -> tuple[Callable, int]:
    values, others = listed_tensors(device)

    def step():
        for _ in range(LIST_OPERATIONS):
            torch._foreach_add_(values, others, alpha=0.5)

    return step, LISTED_TENSORS * LIST_OPERATIONS


def adamw_over_a_list(device, **form) -> tuple[Callable, int]:
    values, gradients = listed_tensors(device)
    for value, gradient in zip(values, gradients):
        value.requires_grad_().grad = gradient
    return torch.optim.AdamW(values, 1e-3, **form).step, 1


# name -> (build, what ltc may take in microseconds, with nothing evicting its caches)
CASES = {
    "add": (add, 2.5),
    "list op, per tensor": (list_operation, 0.4),
    "AdamW foreach over 120 tensors": (partial(adamw_over_a_list, foreach=True), 600),
    "AdamW fused over 120 tensors": (partial(adamw_over_a_list, fused=True), 600),
    "MLP + SGD": (lambda device: mlp(device, sgd), 350),
    "MLP + Adam": (lambda device: mlp(device, adam), 450),
    "transformer + Adam": (transformer, 1700),
}
