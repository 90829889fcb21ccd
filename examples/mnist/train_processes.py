"""Train the network of train.py in several processes, each with a device of its own.

python examples/mnist/train_processes.py --replicas 2
torchrun --nproc-per-node 2 examples/mnist/train_processes.py
"""

from __future__ import annotations

import argparse
import sys

import torch
from data import load
from model import MNIST
from replicated import Training, arguments, batches, verdict
from train import accuracy

import ltc.core.lazy_model as ltm
import ltc.distributed.lazy_multiprocessing as lmp
import ltc.distributed.parallel_loader as pl


def train(rank: int, chosen: argparse.Namespace) -> float:
    """What one process does; returns the test accuracy of its model, in percent."""
    replicas = ltm.xrt_world_size()
    device = ltm.lazy_device()
    digits = load(chosen.data_dir)
    torch.manual_seed(chosen.seed)
    model = MNIST(chosen.dropout).to(device)  # of the same seed: equal in every process
    loader = pl.MpDeviceLoader(batches(digits, chosen, replicas, rank, replicas), device)
    ltm.master_print(
        f"{digits.name}: {len(digits.train_labels)} images to train on, "
        f"{len(digits.test_labels)} to test on; {replicas} processes"
    )
    training = Training(model, chosen, chosen.epochs * len(loader))
    for epoch in range(1, chosen.epochs + 1):
        training.epoch(model, loader, f"epoch {epoch}")
    if chosen.save:
        ltm.save(model.state_dict(), chosen.save, global_master=True)
    return accuracy(model, digits, device)


def main(argv: list[str] | None = None) -> int:
    """Train, test, save; 1 where the test accuracy is below the target, else 0."""
    chosen = arguments(__doc__.splitlines()[0], argv)
    percents = lmp.spawn(train, args=(chosen,), nprocs=chosen.replicas)
    return verdict(percents[0], chosen) if ltm.is_master_ordinal(local=False) else 0


if __name__ == "__main__":
    sys.exit(main())
