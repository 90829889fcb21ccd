"""Spec 004's blocks for several devices, run as scripts.

The text of each block is the document's own, with two changes: names of torch_xla, xm and xmp are
those of lazy_tensor_core, ltm and lmp, and `.to(device)` is added to the model of the block with
processes (by the document's own rule that operands share a device).  What a block takes from the
reader (data, a model, rates) is written above it; a model writes its weights to a file when its
process ends, so that a test can compare them.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import optim
from torch.nn import functional as F

ROOT = Path(__file__).parents[2]

GIVEN = '''
import atexit, os, sys
import torch
from torch import nn, optim
from torch.nn import functional as F

lr, momentum, num_epochs = 0.05, 0.5, 2
made = []


class MNIST(nn.Module):
    """The network that the document trains and does not show."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(1, 10, 5)
        self.second = nn.Conv2d(10, 20, 5)
        self.head = nn.Linear(320, 10)
        made.append(self)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.first(x), 2))
        x = F.relu(F.max_pool2d(self.second(x), 2))
        return F.log_softmax(self.head(x.flatten(1)), dim=1)


def batches(count):
    """Batches that say their label by the brightness of one row."""
    noise = torch.Generator().manual_seed(4)
    for _ in range(count):
        labels = torch.randint(10, (8,), generator=noise)
        images = torch.randn(8, 1, 28, 28, generator=noise) * 0.1
        for image, label in zip(images, labels):
            image[0, 2 * int(label)] += 2
        yield images, labels
'''

WITH_PROCESSES = """
import torch
import lazy_tensor_core
import lazy_tensor_core.core.lazy_model as ltm
import lazy_tensor_core.distributed.parallel_loader as pl
import lazy_tensor_core.distributed.lazy_multiprocessing as lmp

def _mp_fn(index):
  device = ltm.lazy_device()
  para_loader = pl.ParallelLoader(train_loader, [device])

  model = MNIST().to(device)
  loss_fn = nn.NLLLoss()
  optimizer = optim.SGD(model.parameters(), lr=lr, momentum=momentum)

  model.train()
  for data, target in para_loader.per_device_loader(device):
    optimizer.zero_grad()
    output = model(data)
    loss = loss_fn(output, target)
    loss.backward()
    ltm.optimizer_step(optimizer)

if __name__ == '__main__':
  lmp.spawn(_mp_fn, args=())
"""

WITH_THREADS = """
import lazy_tensor_core.core.lazy_model as ltm
import lazy_tensor_core.distributed.data_parallel as dp

devices = ltm.get_lazy_supported_devices()
model_parallel = dp.DataParallel(MNIST, device_ids=devices)

def train_loop_fn(model, loader, device, context):
  loss_fn = nn.NLLLoss()
  optimizer = optim.SGD(model.parameters(), lr=lr, momentum=momentum)

  model.train()
  for _, (data, target) in loader:
    optimizer.zero_grad()
    output = model(data)
    loss = loss_fn(output, target)
    loss.backward()
    ltm.optimizer_step(optimizer)

for epoch in range(1, num_epochs + 1):
  model_parallel(train_loop_fn, train_loader)
"""

# Each process reads batches of its own, as a reader's distributed sampler would have it.
DATA_OF_PROCESSES = """
rank = int(os.environ.get("XRT_SHARD_ORDINAL", os.environ.get("RANK", 0)))
train_loader = [batch for i, batch in enumerate(batches(6)) if i % 2 == rank]
atexit.register(lambda: [
    torch.save({k: v.cpu() for k, v in model.state_dict().items()}, f"weights-{rank}.pt")
    for model in made
])
"""
DATA_OF_THREADS = """
train_loader = list(batches(6))
atexit.register(lambda: [
    torch.save({k: v.cpu() for k, v in model.state_dict().items()}, f"weights-{i}.pt")
    for i, model in enumerate(model_parallel.models)
])
"""


def run(folder: Path, *parts: str, launcher=(sys.executable,)) -> list[dict]:
    """Run the parts as one script with two devices; the weights of the two replicas."""
    script = folder / "train.py"
    script.write_text("\n".join(parts))
    environment = {**os.environ, "LTC_NUM_DEVICES": "2"}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'ltc' / 'compat'}"
    done = subprocess.run(
        [*launcher, str(script)], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [torch.load(folder / f"weights-{replica}.pt") for replica in range(2)]


def trained_on_the_cpu(epochs: int) -> dict:
    """The weights of one process whose batches are those of both replicas together."""
    scope: dict = {}
    exec(GIVEN, scope)
    model = scope["MNIST"]()
    source = list(scope["batches"](6))
    for _ in range(epochs):
        optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
        for pair in zip(source[0::2], source[1::2]):
            optimizer.zero_grad()
            data, target = (torch.cat(parts) for parts in zip(*pair))
            F.nll_loss(model(data), target).backward()
            optimizer.step()
    return model.state_dict()


def assert_trained(replicas: list[dict], epochs: int) -> None:
    """All replicas bitwise alike, and like one process with the whole batches."""
    first, second = replicas
    expected = trained_on_the_cpu(epochs)
    for name, value in expected.items():
        assert torch.equal(first[name], second[name]), name
        # A mean of two means of 8 and a mean of 16 round differently, in each of a few steps.
        torch.testing.assert_close(first[name], value, rtol=1e-5, atol=1e-6)


def test_004_the_block_with_processes_trains_them_together(tmp_path):
    replicas = run(tmp_path, GIVEN, DATA_OF_PROCESSES, WITH_PROCESSES)
    assert_trained(replicas, epochs=1)


def test_004_the_block_with_processes_runs_under_torchrun(tmp_path):
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    replicas = run(tmp_path, GIVEN, DATA_OF_PROCESSES, WITH_PROCESSES, launcher=launcher)
    assert_trained(replicas, epochs=1)


def test_004_the_block_with_threads_trains_them_together(tmp_path):
    replicas = run(tmp_path, GIVEN, DATA_OF_THREADS, WITH_THREADS)
    assert_trained(replicas, epochs=2)
