"""What the trainings on several replicas share: the command line, the batches, the loop.

All replicas together train as one would: each step uses `--batch-size` images, whatever the number
of replicas, which split them evenly and average their gradients.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from data import Digits
from torch import nn, optim
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, TensorDataset
from tqdm import tqdm

import ltc
import ltc.core.lazy_model as ltm

STEPS_PER_REPORT = 10  # reading a loss waits for its step, so it is read rarely


def arguments(description: str, argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    return checked(parser(description), argv)


def parser(description: str) -> argparse.ArgumentParser:
    """What these trainings can be told."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--replicas", type=int, default=2, help="torchrun's --nproc-per-node wins")
    parser.add_argument("--data-dir", type=Path, help="folder with MNIST's IDX files")
    parser.add_argument("--epochs", type=int, help="default: 25, or 5 with --data-dir")
    parser.add_argument("--batch-size", type=int, default=32, help="of all replicas together")
    parser.add_argument("--lr", type=float, default=0.03, help="of the first step; falls to 0")
    parser.add_argument("--dropout", type=float, default=0.1, help="0 switches dropout off")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the batch order")
    parser.add_argument("--save", type=Path, help="file for the trained weights")
    parser.add_argument(
        "--target-accuracy",
        type=float,
        default=0.0,
        metavar="PERCENT",
        help="exit with code 1 where the test accuracy is lower",
    )
    return parser


def checked(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """What the command line says."""
    chosen = parser.parse_args(argv)
    if chosen.epochs is None:
        chosen.epochs = 25 if chosen.data_dir is None else 5
    for name in ("epochs", "batch_size", "replicas"):
        if getattr(chosen, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if chosen.save and not chosen.save.parent.is_dir():  # before the training, not behind it
        parser.error(f"--save {chosen.save}: there is no folder {chosen.save.parent}")
    return chosen


class Every(Sampler):
    """Every `step`-th item of a sampler from the `start`-th on, in complete rounds."""

    def __init__(self, items: Sampler, start: int, step: int):
        self.items, self.start, self.step = items, start, step

    def __len__(self) -> int:
        return len(self.items) // self.step

    def __iter__(self) -> Iterator:
        for position, item in enumerate(self.items):  # to the end, where some samplers draw again
            if position < len(self) * self.step and position % self.step == self.start:
                yield item


def batches(digits: Digits, chosen: argparse.Namespace, replicas: int, part: int, parts: int):
    """A loader of the batches that replicas take in turns, or of every `parts`-th of them.

    The order is drawn from the seed; what does not fill a step of all replicas is left out.
    """
    if chosen.batch_size % replicas:
        raise SystemExit(f"--batch-size {chosen.batch_size} does not divide by {replicas} replicas")
    if len(digits.train_labels) < chosen.batch_size:
        raise SystemExit(
            f"--batch-size {chosen.batch_size} is more than the {len(digits.train_labels)} images "
            f"to train on"
        )
    images = TensorDataset(digits.train_images, digits.train_labels)
    order = RandomSampler(images, generator=torch.Generator().manual_seed(chosen.seed))
    in_turns = BatchSampler(order, chosen.batch_size // replicas, drop_last=True)
    return DataLoader(images, sampler=Every(in_turns, part, parts), batch_size=None)


class Training:
    """One replica's optimizer and schedule: momentum, and a rate that falls along half a cosine."""

    def __init__(self, model: nn.Module, chosen: argparse.Namespace, steps: int):
        self.optimizer = optim.SGD(
            model.parameters(), lr=chosen.lr, momentum=0.9, weight_decay=5e-4
        )
        self.schedule = optim.lr_scheduler.CosineAnnealingLR(self.optimizer, steps)
        self.loss_function = nn.NLLLoss()
        ltc.manual_seed(chosen.seed + ltm.get_ordinal())  # other units drop out on each replica

    def step(self, model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Train on one batch; returns the loss."""
        self.optimizer.zero_grad()
        loss = self.loss_function(model(images), labels)
        loss.backward()
        ltm.optimizer_step(self.optimizer)  # averages the gradients of all replicas
        self.schedule.step()
        return loss

    def epoch(self, model: nn.Module, loader, name: str) -> None:
        """Train the model in place with the batches of a device loader."""
        model.train()
        master = ltm.is_master_ordinal(local=False)
        with tqdm(total=len(loader), unit=" steps", desc=name, disable=not master) as progress:
            for step, (images, labels) in enumerate(loader, start=1):
                loss = self.step(model, images, labels)
                if master and (step % STEPS_PER_REPORT == 0 or step == len(loader)):
                    show = lambda x: progress.set_postfix(loss=f"{x.item():.6f}")  # noqa: E731
                    ltm.add_step_closure(show, args=(loss,))
                progress.update()


def verdict(percent: float, chosen: argparse.Namespace) -> int:
    """Print the accuracy; 1 where it is below the target, else 0."""
    print(f"test accuracy: {percent:.2f} %")
    if percent < chosen.target_accuracy:
        print(f"below the target of {chosen.target_accuracy:g} %", file=sys.stderr)
        return 1
    return 0
