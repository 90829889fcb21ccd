"""DistributedDataParallel over the process group 'xla', whose ranks need no MASTER_ADDR."""

import os

import torch
import torch.distributed as dist
import torch_xla
import torch_xla.distributed.xla_backend
import torch_xla.runtime as xr
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP


def network():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.rand(5, 6, generator=generator), torch.rand(5, 1, generator=generator)


def on_the_cpu(world, steps):
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        parts = [batch(rank, step) for rank in range(world)]
        x, y = (torch.cat(column) for column in zip(*parts))
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


def train(index):
    assert not {"MASTER_ADDR", "RANK"} & set(os.environ)
    dist.init_process_group("xla", init_method="xla://")
    rank, world = dist.get_rank(), dist.get_world_size()
    assert (rank, world) == (xr.global_ordinal(), xr.world_size()) == (index, 2)
    assert dist.get_backend() == "xla"
    device = torch_xla.device()
    model = DDP(network().to(device), gradient_as_bucket_view=True)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        data, target = (part.to(device) for part in batch(rank, step))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(data), target).backward()
        optimizer.step()
        torch_xla.sync()
    for mine, theirs in zip(model.parameters(), on_the_cpu(world, 4).parameters()):
        torch.testing.assert_close(mine.detach().cpu(), theirs.detach(), rtol=1e-4, atol=1e-5)
    dist.destroy_process_group()
    dist.init_process_group("xla", init_method="pjrt://")
    total = torch.full((2,), float(rank + 1), device=device)
    dist.all_reduce(total)
    assert total.tolist() == [3.0, 3.0]
    dist.destroy_process_group()


if __name__ == "__main__":
    torch_xla.launch(train, start_method="fork")
