"""Digits with one process per device: the shape of torch_xla's own MNIST example."""

import os
import sys
import tempfile

import torch
import torch.nn.functional as F
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.runtime as xr
import torch_xla.test.test_utils as test_utils
import torch_xla.utils.utils as xu
from torch import nn, optim

FLAGS = {"batch_size": 16, "num_epochs": 2, "lr": 0.1, "log_steps": 2, "logdir": None}


class MNIST(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, kernel_size=5)
        self.bn1 = nn.BatchNorm2d(4)
        self.fc1 = nn.Linear(4 * 6 * 6, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 4))
        x = self.bn1(x)
        x = torch.flatten(x, 1)
        return F.log_softmax(self.fc1(x), dim=1)


def fake_digits(batches):
    """Batches whose labels can be told: the brightest of ten stripes."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for _ in range(batches):
        labels = torch.randint(10, (FLAGS["batch_size"],), generator=generator)
        images = torch.rand(FLAGS["batch_size"], 1, 28, 28, generator=generator) * 0.1
        for image, label in zip(images, labels):
            image[0, :, 2 * label + 4 : 2 * label + 6] += 1.0
        made.append((images, labels))
    return made


def _train_update(device, step, loss, tracker, epoch, writer):
    test_utils.print_training_update(
        device,
        step,
        loss.item(),
        tracker.rate(),
        tracker.global_rate(),
        epoch,
        summary_writer=writer,
    )


def train_mnist(flags, **kwargs):
    torch.manual_seed(1)
    everyone = fake_digits(12)
    mine = everyone[xr.global_ordinal() :: xr.world_size()]
    lr = flags["lr"] * xr.world_size()
    device = xm.xla_device()
    model = MNIST().to(device)
    xm.broadcast_master_param(model)

    writer = None
    if xm.is_master_ordinal():
        writer = test_utils.get_summary_writer(flags["logdir"])
    optimizer = optim.SGD(model.parameters(), lr=lr, momentum=0.5)
    loss_fn = nn.NLLLoss()

    def train_loop_fn(loader, epoch):
        tracker = xm.RateTracker()
        model.train()
        for step, (data, target) in enumerate(loader):
            optimizer.zero_grad()
            output = model(data)
            loss = loss_fn(output, target)
            loss.backward()
            xm.optimizer_step(optimizer)
            tracker.add(flags["batch_size"])
            if step % flags["log_steps"] == 0:
                xm.add_step_closure(
                    _train_update, args=(device, step, loss, tracker, epoch, writer)
                )

    def test_loop_fn(loader):
        total_samples = 0
        correct = 0
        model.eval()
        for data, target in loader:
            output = model(data)
            pred = output.max(1, keepdim=True)[1]
            correct += pred.eq(target.view_as(pred)).sum()
            total_samples += data.size()[0]
        accuracy = 100.0 * correct.item() / total_samples
        return xm.mesh_reduce("test_accuracy", accuracy, lambda all: sum(all) / len(all))

    train_device_loader = pl.MpDeviceLoader(mine, device)
    test_device_loader = pl.MpDeviceLoader(mine, device)
    accuracy, max_accuracy = 0.0, 0.0
    for epoch in range(1, flags["num_epochs"] + 1):
        xm.master_print(f"Epoch {epoch} train begin {test_utils.now()}")
        train_loop_fn(train_device_loader, epoch)
        accuracy = test_loop_fn(test_device_loader)
        xm.master_print(f"Epoch {epoch} test end, Accuracy={accuracy:.2f}")
        max_accuracy = max(accuracy, max_accuracy)
    test_utils.write_to_summary(writer, 0, {"Accuracy/test": accuracy}, write_xla_metrics=True)
    test_utils.close_summary_writer(writer)
    assert "ExecuteTime" in met.metrics_report()
    return max_accuracy, model


def _mp_fn(index, flags, folder):
    torch.set_default_dtype(torch.float32)
    assert index == xm.get_ordinal() == xr.global_ordinal()
    accuracy, model = train_mnist(flags)
    path = os.path.join(folder, "model.pt")
    xm.save(model.state_dict(), path)
    xm.rendezvous("saved")
    state = torch.load(path, weights_only=True)
    mine = {name: value.cpu() for name, value in model.state_dict().items()}
    for (
        name,
        value,
    ) in mine.items():  # the weights are one model's; running statistics are each one's
        if "running" not in name:
            torch.testing.assert_close(state[name], value, msg=name)
    if accuracy < 90.0:
        print(f"Accuracy {accuracy} is below target 90")
        sys.exit(21)


if __name__ == "__main__":
    assert xu.getenv_as("CPU_NUM_DEVICES", int, 0) == 2
    with tempfile.TemporaryDirectory() as folder:
        xmp.spawn(_mp_fn, args=(FLAGS, folder))
    print("trained by", os.environ["CPU_NUM_DEVICES"], "processes")
