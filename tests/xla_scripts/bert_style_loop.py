"""A language model's loop: Adam, a schedule, clipped gradients, accumulation, and evaluation."""

import copy

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
from torch import nn

ACCUMULATED = 2


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 20)

    def forward(self, tokens):
        return self.head(self.layer(self.words(tokens)))


def batches():
    generator = torch.Generator().manual_seed(3)
    return [{"tokens": torch.randint(20, (4, 6), generator=generator)} for _ in range(8)]


def loss_of(model, tokens):
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.reshape(-1, 20), tokens[:, 1:].reshape(-1))


def train(model, loader, step_optimizer):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    losses = []
    for step, batch in enumerate(loader):
        loss = loss_of(model, batch["tokens"]) / ACCUMULATED
        loss.backward()
        losses.append(loss.detach())
        if (step + 1) % ACCUMULATED == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            step_optimizer(optimizer)
            schedule.step()
            optimizer.zero_grad()
    return [loss.item() for loss in losses]


def main():
    torch.manual_seed(0)
    on_cpu = Tiny()
    device = torch_xla.device()
    model = copy.deepcopy(on_cpu).to(device)
    loader = pl.MpDeviceLoader(batches(), device, loader_prefetch_size=2, device_prefetch_size=1)
    assert len(loader) == 8
    mine = train(model, loader, xm.optimizer_step)
    theirs = train(on_cpu, batches(), lambda optimizer: optimizer.step())
    for a, b in zip(mine, theirs):
        assert abs(a - b) < 1e-3, (mine, theirs)
    model.eval()
    with torch.no_grad():
        for batch in pl.ParallelLoader(batches(), [device]).per_device_loader(device):
            assert torch.isfinite(loss_of(model, batch["tokens"])).item()


if __name__ == "__main__":
    main()
