"""Loops and recomputation, which are parts of a program for XLA, and donated buffers."""

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
from torch import nn
from torch_xla.experimental.assume_pure import assume_pure
from torch_xla.experimental.fori_loop import while_loop
from torch_xla.experimental.gradient_accumulation import gradient_accumulation
from torch_xla.experimental.scan import scan
from torch_xla.experimental.scan_layers import scan_layers
from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config
from torch_xla.utils.checkpoint import checkpoint


def network():
    torch.manual_seed(2)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])


def data():
    torch.manual_seed(3)
    return torch.rand(5, 2, 4), torch.rand(5, 2, 4)


def assert_same_gradients(model, expected):
    for mine, theirs in zip(model.parameters(), expected.parameters()):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-6)


def accumulate(device):
    model, expected, (xs, ys) = network().to(device), network(), data()

    def train_step(x, y, seen):
        return nn.functional.mse_loss(model(x), y), seen + 1

    loss, seen = gradient_accumulation(
        train_step, (xs.to(device), ys.to(device)), model, (torch.tensor(0, device=device),)
    )
    torch_xla.sync()
    losses = [nn.functional.mse_loss(expected(x), y) / 5 for x, y in zip(xs, ys)]
    sum(losses).backward()
    assert seen.item() == 5 and abs(loss.item() - sum(losses).item()) < 1e-5
    assert not loss.requires_grad
    assert_same_gradients(model, expected)


def layers(device):
    model, expected, (xs, _) = network().to(device), network(), data()
    scan_layers(list(model), xs[0].to(device)).square().sum().backward()
    expected(xs[0]).square().sum().backward()
    assert_same_gradients(model, expected)
    model.zero_grad()
    checkpoint(assume_pure(model), xs[0].to(device)).square().sum().backward()
    assert_same_gradients(model, expected)


def loops(device):
    xs = torch.arange(6.0).reshape(3, 2)

    def step(carry, row):
        carry = carry + row["x"]
        return carry, (carry * 2, row["x"])

    carry, (doubled, rows) = scan(step, torch.zeros(2, device=device), {"x": xs.to(device)})
    torch.testing.assert_close(carry.cpu(), xs.sum(0))
    torch.testing.assert_close(doubled.cpu(), xs.cumsum(0) * 2)
    torch.testing.assert_close(rows.cpu(), xs)
    start = torch.tensor(1, device=device), torch.tensor(0, device=device)
    last, turns = while_loop(lambda v, n: v < 100, lambda v, n: (v * 2, n + 1), start)
    assert (last.item(), turns.item()) == (128, 7)


if __name__ == "__main__":
    device = xm.xla_device()
    accumulate(device)
    layers(device)
    loops(device)
    with alias_with_buffer_donor_config():
        assert (torch.ones(2, device=device) + 1).tolist() == [2.0, 2.0]
    assert met.counter_value("torch_xla.ignored.buffer_donation") == 1
