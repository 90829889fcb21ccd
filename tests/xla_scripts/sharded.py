"""Models and optimizers that are spread over the replicas."""

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import nn, optim
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as FSDP
from torch_xla.distributed.fsdp import checkpoint_module
from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

STEPS = 3


def network():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.rand(4, 6, generator=generator), torch.rand(4, 2, generator=generator)


def on_the_cpu(world, clip=None):
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for step in range(STEPS):
        x, y = (torch.cat(c) for c in zip(*[batch(rank, step) for rank in range(world)]))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def fully_sharded(rank, world):
    device = xm.xla_device()
    inner = [
        FSDP(checkpoint_module(m)) if list(m.parameters()) else m for m in network().to(device)
    ]
    model = FSDP(nn.Sequential(*inner), reshard_after_forward=True, compute_dtype=torch.float32)
    optimizer = optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return [one_step(model, optimizer, rank, step, device) for step in range(STEPS)]


def zero(rank, world):
    device = xm.xla_device()
    model = network().to(device)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optim.SGD, grad_clipping=True, max_norm=0.1, pin_layout=False,
        lr=0.5, momentum=0.9,
    )  # fmt: skip
    return [one_step(model, optimizer, rank, step, device) for step in range(STEPS)]


def one_step(model, optimizer, rank, step, device):
    data, target = (part.to(device) for part in batch(rank, step))
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(data), target)
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    return loss.item()


def compare(index):
    rank, world = xr.global_ordinal(), xr.world_size()
    for how, expected in ((fully_sharded, on_the_cpu(world)), (zero, on_the_cpu(world, clip=0.1))):
        losses = torch.tensor(how(rank, world))
        mean = xm.mesh_reduce("losses", losses, lambda all: sum(all) / len(all))
        torch.testing.assert_close(mean, torch.tensor(expected), rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    torch_xla.launch(compare, start_method="fork")
