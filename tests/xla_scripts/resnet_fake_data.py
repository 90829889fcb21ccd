"""A residual network on fake data with one process per device, each step compiled."""

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.runtime as xr
import torch_xla.utils.utils as xu
from torch import nn, optim

BATCH, STEPS = 4, 5


def fake_data():
    generator = torch.Generator().manual_seed(8)
    return torch.rand(BATCH, 3, 16, 16, generator=generator), torch.arange(BATCH)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in "ab")
        self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x):
        out = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(x + self.bn2(self.conv2(out)))


def resnet():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), Block(8), Block(8),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    )  # fmt: skip


class TrainResNetBase:
    def __init__(self):
        torch.manual_seed(42)
        self.device = torch_xla.device()
        train_loader = xu.SampleGenerator(data=fake_data(), sample_count=STEPS)
        self.train_device_loader = pl.MpDeviceLoader(train_loader, self.device)
        self.model = resnet().to(self.device)
        self.optimizer = optim.SGD(self.model.parameters(), lr=0.05, weight_decay=1e-4)
        self.loss_fn = nn.CrossEntropyLoss()
        self.compiled_step_fn = torch_xla.compile(self.step_fn, full_graph=True, name="resnet_step")

    def run_optimizer(self):
        xm.optimizer_step(self.optimizer)

    def step_fn(self, data, target):
        self.optimizer.zero_grad()
        loss = self.loss_fn(self.model(data), target)
        loss.backward()
        self.run_optimizer()
        return loss

    def start_training(self):
        tracker, losses = xm.RateTracker(), []
        self.model.train()
        for step, (data, target) in enumerate(self.train_device_loader):
            loss = self.compiled_step_fn(data, target)
            tracker.add(BATCH)
            xm.add_step_closure(lambda loss: losses.append(loss.item()), args=(loss,))
        xm.wait_device_ops()
        torch_xla.sync()
        return losses


def _mp_fn(index):
    losses = TrainResNetBase().start_training()
    assert xr.world_size() == 2 and len(losses) == STEPS and losses[-1] < losses[0]
    # each replica has the same data, so all of them train as one process on the CPU does
    torch.manual_seed(42)
    model, loss_fn = resnet(), nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.parameters(), lr=0.05, weight_decay=1e-4)
    for loss in losses:
        optimizer.zero_grad()
        data, target = fake_data()
        expected = loss_fn(model(data), target)
        expected.backward()
        optimizer.step()
        assert abs(loss - expected.item()) < 1e-3, (loss, expected.item())


if __name__ == "__main__":
    torch_xla.launch(_mp_fn, args=(), start_method="fork")
