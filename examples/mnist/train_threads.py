"""Train the network of train.py in several threads of one process, each with a device of its own.

LTC_NUM_DEVICES=2 python examples/mnist/train_threads.py --replicas 2
"""

from __future__ import annotations

import sys

import torch
from data import load
from model import MNIST
from replicated import Training, arguments, batches, verdict
from train import accuracy

import ltc.core.lazy_model as ltm
import ltc.distributed.data_parallel as dp


def main(argv: list[str] | None = None) -> int:
    """Train, test, save; 1 where the test accuracy is below the target, else 0."""
    chosen = arguments(__doc__.splitlines()[0], argv)
    devices = ltm.get_lazy_supported_devices(max_devices=chosen.replicas)
    if len(devices) < chosen.replicas:
        raise SystemExit(
            f"--replicas {chosen.replicas} needs as many devices, and there are {len(devices)}: "
            f"set LTC_NUM_DEVICES={chosen.replicas}."
        )
    digits = load(chosen.data_dir)
    loader = batches(digits, chosen, len(devices), part=0, parts=1)
    steps = chosen.epochs * (len(loader) // len(devices))
    torch.manual_seed(chosen.seed)
    parallel = dp.DataParallel(
        lambda: MNIST(chosen.dropout), device_ids=devices, enumerate_batches=False
    )
    print(
        f"{digits.name}: {len(digits.train_labels)} images to train on, "
        f"{len(digits.test_labels)} to test on; {len(devices)} threads"
    )

    def train(model, batches, device, context, name):
        # Kept in the context, so that the next epoch goes on with them.
        training = context.getattr_or("training", lambda: Training(model, chosen, steps))
        training.epoch(model, batches, name)

    for epoch in range(1, chosen.epochs + 1):
        parallel(train, loader, name=f"epoch {epoch}")
    model = parallel.models[0]
    if chosen.save:
        ltm.save(model.state_dict(), chosen.save)
    return verdict(accuracy(model, digits, ltm.lazy_device(0)), chosen)


if __name__ == "__main__":
    sys.exit(main())
