"""Train the network of train.py so that it goes on after any process dies, on any number of them.

torchrun --nproc-per-node 2 --max-restarts 3 examples/mnist/train_elastic.py --checkpoints run-1

Every --interval steps a checkpoint is written behind the training. Where a process dies, torchrun
starts all of them again, and they go on at the latest checkpoint that is whole; where torchrun or
its machine dies, so does the same command, also with another number of processes. Which images a
step trains on depends on neither. The page is docs/elastic.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from data import load
from model import MNIST
from replicated import Training, checked, parser, verdict
from torch.utils.data import DataLoader, TensorDataset
from train import accuracy

import ltc.core.lazy_model as ltm
import ltc.distributed.lazy_multiprocessing as lmp
import ltc.distributed.parallel_loader as pl
from ltc.checkpointing.resumable import ElasticSampler, Resumable
from ltc.utils.checkpoint import CheckpointManager


def train(rank: int, chosen: argparse.Namespace) -> float:
    """What one process does; returns the test accuracy of its model, in percent."""
    device = ltm.lazy_device()
    digits = load(chosen.data_dir)
    torch.manual_seed(chosen.seed)
    model = MNIST(chosen.dropout).to(device)  # of the same seed: equal in every process
    images = TensorDataset(digits.train_images, digits.train_labels)
    sampler = ElasticSampler(images, chosen.batch_size, seed=chosen.seed)
    on_device = pl.MpDeviceLoader(DataLoader(images, batch_sampler=sampler), device)
    loader = Resumable(on_device, sampler=sampler)
    training = Training(model, chosen, chosen.epochs * len(sampler))
    manager = CheckpointManager(
        chosen.checkpoints,
        sharded=True,  # each process keeps its own random numbers, which dropout draws
        model=model,
        optimizer=training.optimizer,
        schedule=training.schedule,
        loader=loader,
    )
    restored = manager.restore_latest()
    step = restored.step if restored else 0
    ltm.master_print(f"{ltm.xrt_world_size()} processes go on behind step {step}")
    while loader.epoch < chosen.epochs:
        for images, labels in loader:
            training.step(model, images, labels)
            step += 1
            if step % chosen.interval == 0:
                manager.save(step, blocking=False)
    manager.wait()
    if chosen.save:
        ltm.save(model.state_dict(), chosen.save, global_master=True)
    return accuracy(model, digits, device)


def main(argv: list[str] | None = None) -> int:
    """Train, test, save; 1 where the test accuracy is below the target, else 0."""
    known = parser(__doc__.splitlines()[0])
    known.add_argument("--checkpoints", type=Path, required=True, help="folder of this training")
    known.add_argument("--interval", type=int, default=20, help="steps from one to the next")
    chosen = checked(known, argv)
    percents = lmp.spawn(train, args=(chosen,), nprocs=chosen.replicas)
    return verdict(percents[0], chosen) if ltm.is_master_ordinal(local=False) else 0


if __name__ == "__main__":
    sys.exit(main())
