"""Train the digits network with DistributedDataParallel: plain PyTorch, several processes.

    python examples/mnist/train_ddp.py --nprocs 2                   # starts two processes itself
    torchrun --nproc-per-node 2 examples/mnist/train_ddp.py         # or lets torchrun start them
    torchrun --nproc-per-node 2 examples/mnist/train_ddp.py --device cpu    # the same without ltc

What is particular to the lazy device: `import ltc`, the names of the device and of the backend, and
the end of a step.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from data import Digits, load
from model import MNIST
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "ltc"), default="ltc")
    parser.add_argument("--nprocs", type=int, default=1, help="processes to start without torchrun")
    parser.add_argument("--data-dir", type=Path, help="folder with MNIST's IDX files")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="of each process")
    parser.add_argument("--lr", type=float, default=0.05, help="of the first step; falls to 0")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0, help="of weights and sample order")
    parser.add_argument(
        "--target-accuracy",
        type=float,
        default=0.0,
        metavar="PERCENT",
        help="exit with code 1 where the test accuracy is lower",
    )
    chosen = parser.parse_args(argv)
    for name in ("nprocs", "epochs", "batch_size"):
        if getattr(chosen, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return chosen


@contextmanager
def process_group(device: str):
    """Join the other processes, whose number and ranks stand in the environment.

    Gives what ends a step: on the lazy device that runs what was recorded, with the exchange of
    gradients.
    """
    if device == "ltc":
        import ltc  # here, so that --device cpu needs PyTorch alone

        backend, end_step = "ltc", ltc.sync
    else:
        backend, end_step = "gloo", lambda: None
    dist.init_process_group(backend)
    try:
        yield end_step
    finally:
        dist.destroy_process_group()


def train(
    model: nn.Module, digits: Digits, chosen: argparse.Namespace, end_step: Callable[[], None]
) -> None:
    """Train the model in place on this rank's share of the images."""
    samples = TensorDataset(digits.train_images, digits.train_labels)
    sampler = DistributedSampler(samples, seed=chosen.seed, drop_last=True)
    loader = DataLoader(samples, batch_size=chosen.batch_size, sampler=sampler, drop_last=True)
    if not len(loader):
        raise SystemExit(f"--batch-size {chosen.batch_size}: a rank has {len(sampler)} images only")
    loss_function = nn.NLLLoss()
    optimizer = optim.SGD(model.parameters(), lr=chosen.lr, momentum=0.9, weight_decay=5e-4)
    schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, chosen.epochs * len(loader))

    model.train()
    for epoch in range(chosen.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = loss_function(model(images.to(chosen.device)), labels.to(chosen.device))
            loss.backward()
            optimizer.step()
            schedule.step()
            end_step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits, device: str) -> float:
    """The share of test images the model names right, in percent: each rank tests its part."""
    model.eval()
    part = slice(dist.get_rank(), None, dist.get_world_size())
    images, labels = digits.test_images[part].to(device), digits.test_labels[part].to(device)
    right = (model(images).argmax(dim=1) == labels).sum()
    dist.all_reduce(right)
    return 100.0 * right.item() / len(digits.test_labels)


def run(chosen: argparse.Namespace) -> int:
    """One process: train, test; 1 where the test accuracy is below the target, else 0."""
    digits = load(chosen.data_dir)
    with process_group(chosen.device) as end_step:
        torch.manual_seed(chosen.seed)
        model = MNIST(chosen.dropout).to(chosen.device)
        torch.manual_seed(chosen.seed + dist.get_rank())  # dropout differs from rank to rank
        train(DistributedDataParallel(model), digits, chosen, end_step)
        percent = accuracy(model, digits, chosen.device)
        if dist.get_rank() == 0:
            print(f"{dist.get_world_size()} processes, test accuracy: {percent:.2f} %", flush=True)
    return 1 if percent < chosen.target_accuracy else 0


def run_as(rank: int, port: int, chosen: argparse.Namespace) -> None:
    """What a started process does: say who it is as torchrun would, and run."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(chosen.nprocs),
        LOCAL_WORLD_SIZE=str(chosen.nprocs),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // chosen.nprocs))
    if run(chosen):
        raise SystemExit(f"rank {rank}: the test accuracy is below {chosen.target_accuracy:g} %")


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main(argv: list[str] | None = None) -> int:
    """Train in the processes that torchrun started, or start them."""
    chosen = arguments(argv)
    if "RANK" in os.environ:
        return run(chosen)
    torch.multiprocessing.spawn(run_as, (free_port(), chosen), chosen.nprocs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
