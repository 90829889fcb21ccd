"""Data parallel training on several hosts: each runs this file under torchrun, and rank 0 prints.

    torchrun --standalone --nproc-per-node 2 examples/several_hosts.py    # one host, two processes
    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 1 --master-addr alpha --master-port 29400 \\
        examples/several_hosts.py                                         # on alpha; on the other with --node-rank 1

docs/clusters.md has the lines for SLURM, Kubernetes and Ray. One process group serves both devices: gloo the CPU,
ltc's own backend the tensors of ltc.
"""

import contextlib
import os

import torch
import torch.distributed as dist
from on_both import mark_step, on_both, options
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ltc  # noqa: F401  before the group: its backend serves ltc's tensors

BATCH = 64


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of a step, others for each rank."""
    draw = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(BATCH, 30, generator=draw)
    return x, (x[:, 0] * x[:, 1] + x[:, 2].sin() > 0).float()


def train(device: str, steps: int, width: int) -> str:
    """Train on a part of the data in each process; return the mean loss of all, of the last step."""
    torch.manual_seed(0)  # the same weights in each process
    layers = (
        nn.Linear(30, width),
        nn.GELU(),
        nn.Linear(width, width),
        nn.GELU(),
        nn.Linear(width, 1),
    )
    model = DistributedDataParallel(nn.Sequential(*layers).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        x, y = (part.to(device) for part in batch(step, dist.get_rank()))
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
        loss.backward()  # averages the gradients of all processes
        optimizer.step()
        mark_step(device)
    total = loss.detach().clone()
    dist.all_reduce(total)
    return f"{dist.get_world_size()} processes, loss {total.item() / dist.get_world_size():.3f}"


def main() -> None:
    dist.init_process_group()
    with contextlib.ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        if dist.get_rank():
            stack.enter_context(
                contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w")))
            )
        on_both(train, **options(__doc__, steps=300, width=256))


if __name__ == "__main__":
    main()
