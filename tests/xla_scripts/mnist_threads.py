"""Digits with one thread per device: the shape of torch_xla's first examples."""

import torch
import torch.nn.functional as F
import torch_xla.core.xla_model as xm
import torch_xla.distributed.data_parallel as dp
from torch import nn, optim

BATCH, STEPS = 8, 6


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 4))


def batches(count):
    generator = torch.Generator().manual_seed(4)
    return [
        (torch.rand(BATCH, 1, 8, 8, generator=generator), torch.arange(BATCH) % 4)
        for _ in range(count)
    ]


def on_the_cpu(loader, devices):
    """What one process makes of batches as large as all devices' together."""
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for first in range(0, len(loader), devices):
            group = loader[first : first + devices]
            optimizer.zero_grad()
            sum(F.cross_entropy(model(x), y) for x, y in group).div(devices).backward()
            optimizer.step()
    return model


def main():
    devices = xm.get_xla_supported_devices(max_devices=2)
    loader = batches(STEPS * len(devices))
    model_parallel = dp.DataParallel(network, device_ids=devices)

    def train_loop_fn(model, loader, device, context):
        assert device.type == "xla" and str(device) in devices
        optimizer = context.getattr_or(
            "optimizer", lambda: optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        )
        tracker = xm.RateTracker()
        model.train()
        for step, (data, target) in enumerate(loader):
            assert data.device == device
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), target)
            loss.backward()
            xm.optimizer_step(optimizer)
            tracker.add(BATCH)
        return step + 1

    for _ in range(2):
        assert model_parallel(train_loop_fn, loader) == [STEPS] * len(devices)
    expected = on_the_cpu(loader, len(devices))
    for model in model_parallel.models:
        for mine, theirs in zip(model.parameters(), expected.parameters()):
            torch.testing.assert_close(mine.detach().cpu(), theirs.detach(), rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main()
