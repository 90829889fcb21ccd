"""Train a small convolutional network on handwritten digits, on the lazy device or on the CPU.

python examples/mnist/train.py                        # scikit-learn's digits, no network
python examples/mnist/train.py --data-dir mnist/      # MNIST's IDX files
python examples/mnist/train.py --device cpu           # the same training without ltc
python examples/mnist/train.py --device both          # the one, then the other, and their times
python examples/mnist/train.py --backend xla          # on what JAX finds: docs/accelerators.md
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from data import Digits, load
from model import MNIST
from torch import nn, optim
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset
from tqdm import tqdm

STEPS_PER_REPORT = 10  # reading a loss waits for its step, so it is read rarely


class Eager:
    """Training as PyTorch does it: every operation runs when it is called."""

    device = torch.device("cpu")

    def step(self, optimizer: optim.Optimizer) -> None:
        optimizer.step()

    def report(self, show, loss: torch.Tensor) -> None:
        show(loss)

    def save(self, state: dict, path: Path) -> None:
        torch.save(state, path)


class Lazy:
    """Training on the lazy device: a step is recorded, then runs as one program."""

    def __init__(self):
        import ltc.core.lazy_model as ltm  # here, so that --device cpu needs PyTorch alone

        self.ltm = ltm
        self.device = ltm.lazy_device()

    def step(self, optimizer: optim.Optimizer) -> None:
        self.ltm.optimizer_step(optimizer, barrier=True)

    def report(self, show, loss: torch.Tensor) -> None:
        self.ltm.add_step_closure(show, args=(loss,))  # runs once the step's values are there

    def save(self, state: dict, path: Path) -> None:
        self.ltm.save(state, path)


DEVICES = {"cpu": Eager, "ltc": Lazy}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=[*sorted(DEVICES), "both"], default="ltc")
    parser.add_argument(
        "--backend", help="of the device ltc: llvm, xla, ...; LTC_BACKEND names it too"
    )
    parser.add_argument(
        "--data-dir", type=Path, help="folder with MNIST's IDX files, gzipped or not"
    )
    parser.add_argument("--epochs", type=int, help="default: 15, or 5 with --data-dir")
    parser.add_argument("--batch-size", type=int, default=32)
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
    chosen = parser.parse_args(argv)
    if chosen.epochs is None:
        chosen.epochs = 15 if chosen.data_dir is None else 5
    for name in ("epochs", "batch_size"):
        if getattr(chosen, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if chosen.save and not chosen.save.parent.is_dir():  # before the training, not behind it
        parser.error(f"--save {chosen.save}: there is no folder {chosen.save.parent}")
    return chosen


def batches(images, labels, batch_size: int, seed: int) -> DataLoader:
    """Batches of one size in an order drawn from the seed; what does not fill a batch is left out.

    One size means one program: every shape that a step sees is compiled once.
    """
    if len(labels) < batch_size:
        raise SystemExit(
            f"--batch-size {batch_size} is more than the {len(labels)} images to train on"
        )
    digits = TensorDataset(images, labels)
    order = RandomSampler(digits, generator=torch.Generator().manual_seed(seed))
    return DataLoader(
        digits, sampler=BatchSampler(order, batch_size, drop_last=True), batch_size=None
    )


def train(model: nn.Module, digits: Digits, chosen: argparse.Namespace, backend) -> float:
    """Train the model in place: momentum, and a rate that falls along half a cosine.

    Returns:
        Milliseconds that a step of the last epoch took, its data included.
    """
    loader = batches(digits.train_images, digits.train_labels, chosen.batch_size, chosen.seed)
    loss_function = nn.NLLLoss()
    optimizer = optim.SGD(model.parameters(), lr=chosen.lr, momentum=0.9, weight_decay=5e-4)
    schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, chosen.epochs * len(loader))

    model.train()
    for epoch in range(1, chosen.epochs + 1):
        images_per_epoch, began = len(loader) * chosen.batch_size, time.perf_counter()
        with tqdm(total=images_per_epoch, unit=" images", desc=f"epoch {epoch}") as progress:
            for step, (images, labels) in enumerate(loader, start=1):
                images, labels = images.to(backend.device), labels.to(backend.device)
                optimizer.zero_grad()
                loss = loss_function(model(images), labels)
                loss.backward()
                if step % STEPS_PER_REPORT == 0 or step == len(loader):
                    backend.report(lambda x: progress.set_postfix(loss=f"{x.item():.6f}"), loss)
                backend.step(optimizer)
                schedule.step()
                progress.update(chosen.batch_size)
            loss.item()  # the epoch is over once its last step is
    return (time.perf_counter() - began) / len(loader) * 1e3


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits, device: torch.device) -> float:
    """The share of test images the model names right, in percent."""
    model.eval()
    right = torch.zeros((), dtype=torch.int64, device=device)
    for images, labels in zip(digits.test_images.split(500), digits.test_labels.split(500)):
        predicted = model(images.to(device)).argmax(dim=1)
        right += (predicted == labels.to(device)).sum()
    return 100.0 * right.item() / len(digits.test_labels)


def main(argv: list[str] | None = None) -> int:
    """Train, test, save; 1 where the test accuracy is below the target, else 0."""
    chosen = arguments(argv)
    digits, times = load(chosen.data_dir), {}
    if chosen.backend:
        os.environ["LTC_BACKEND"] = chosen.backend
    for device in sorted(DEVICES) if chosen.device == "both" else [chosen.device]:
        backend = DEVICES[device]()
        torch.manual_seed(chosen.seed)
        model = MNIST(chosen.dropout).to(backend.device)  # made on the CPU: equal on every device
        print(
            f"{digits.name}: {len(digits.train_labels)} images to train on, "
            f"{len(digits.test_labels)} to test on; device {backend.device}"
        )
        times[device] = train(model, digits, chosen, backend)
        percent = accuracy(model, digits, backend.device)
        print(f"test accuracy: {percent:.2f} %")
    each = ", ".join(f"{device} {took:.1f} ms" for device, took in times.items())
    other = "" if len(times) > 1 else " (--device both: beside the CPU's)"
    print(f"a step of the last epoch: {each}{other}")
    if chosen.save:
        backend.save(model.state_dict(), chosen.save)
    if percent < chosen.target_accuracy:
        print(f"below the target of {chosen.target_accuracy:g} %", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
