"""Ray Train's TorchTrainer with two workers on this machine, each on a device of its own.

    pip install 'ray[train]'
    python examples/ray_train.py [--device ltc] [--steps 20] [--storage FOLDER]

It trains on the CPU, then on ltc, and prints both times. Run again with the same folder it goes on from the last
checkpoint.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import ray
import ray.train
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(config: dict) -> None:
    """A worker's loop: what it would be under torchrun, with Ray's report at each step."""
    import torch
    from torch import nn

    import ltc  # noqa: F401  # the group that Ray has made serves ltc tensors from here on

    device = torch.device(config["device"])  # ray.train.torch.get_device() knows GPUs and the CPU
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    first = restore(model, optimizer, device)
    parallel = nn.parallel.DistributedDataParallel(model)
    for step in range(first, config["steps"]):
        x, y = batch(step, ray.train.get_context().get_world_rank())
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(parallel(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        report(step, loss.item(), model, optimizer)


def batch(step: int, rank: int) -> tuple:
    """Images and labels of a step, others for each worker."""
    import torch

    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(16, 8, generator=generator)
    return x, x[:, :3].argmax(1)


def report(step: int, loss: float, model, optimizer) -> None:
    """Tell Ray the loss; the first worker writes a checkpoint, that loads without ltc."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if ray.train.get_context().get_world_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({"step": step, **state}, Path(folder) / "state.pt")
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report({"loss": loss, "step": step}, checkpoint=checkpoint)


def restore(model, optimizer, device) -> int:
    """Load the last checkpoint; the step to go on with."""
    import torch

    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        state = torch.load(Path(folder) / "state.pt", map_location=device)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"] + 1


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--device", nargs="+", default=["cpu", "ltc"])
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--storage", default=None, help="where checkpoints are kept")
    chosen = options.parse_args()
    storage = os.path.abspath(chosen.storage or tempfile.mkdtemp())
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    for device in chosen.device:
        began = time.perf_counter()
        result = fit(device, chosen.steps, storage)
        if result.metrics:
            print(f"step {result.metrics['step']}: loss {result.metrics['loss']:.6f}")
        else:
            print("nothing was left to do")
        print(
            f"{device}: {time.perf_counter() - began:.1f} s, of which most is the start of the workers"
        )
    ray.shutdown()


def fit(device: str, steps: int, storage: str) -> ray.train.Result:
    """Train on a device; go on where a run in the same folder has ended."""
    trainer = TorchTrainer(
        train,
        train_loop_config={"device": device, "steps": steps},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name=device, storage_path=storage),
    )
    return trainer.fit()


if __name__ == "__main__":
    main()
