"""Tabular data with early stopping: a perceptron whose validation loss decides when to end.

Sums of losses stay on the device; an epoch reads two numbers, behind its last mark.
"""

import copy

import torch
from on_both import mark_step, on_both, options
from torch import nn


def table(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features, and whether a noisy function of them is positive."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 30, generator=draw)
    noise = 0.3 * torch.randn(rows, generator=draw)
    return x, (x[:, 0] * x[:, 1] + x[:, 2].sin() + noise > 0).float()


def train(device: str, rows: int, epochs: int, patience: int) -> str:
    """Train until the validation loss has not fallen for `patience` epochs."""
    x, y = (one.to(device) for one in table(rows))
    cut = rows * 4 // 5 // 64 * 64
    layers = nn.Linear(30, 128), nn.GELU(), nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 1)
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loss_of = nn.BCEWithLogitsLoss()
    best, accuracy, left, weights = float("inf"), 0.0, patience, model.state_dict()
    for epoch in range(epochs):
        order = torch.randperm(cut).to(device)
        for rows_of_batch in order.split(64):
            optimizer.zero_grad()
            loss_of(model(x[rows_of_batch]).squeeze(1), y[rows_of_batch]).backward()
            optimizer.step()
            mark_step(device)
        with torch.no_grad():
            outputs = model(x[cut:]).squeeze(1)
            loss, right = loss_of(outputs, y[cut:]), ((outputs > 0) == (y[cut:] > 0)).float().mean()
        mark_step(device)
        found, share = torch.stack([loss, right]).tolist()  # one read for both
        if found < best:
            best, accuracy, left = found, share, patience
            weights = copy.deepcopy(model.state_dict())
        else:
            left -= 1
        if not left:
            break
    model.load_state_dict(weights)
    return f"{epoch + 1} epochs, validation loss {best:.3f}, accuracy {100 * accuracy:.0f} %"


if __name__ == "__main__":
    on_both(train, **options(__doc__, rows=6400, epochs=30, patience=4))
