"""autocast, loss scaling, and optimizers that skip a step without reading the device."""

import copy

import torch
import torch_xla.core.xla_model as xm
from torch import nn
from torch_xla.amp import GradScaler, autocast, syncfree


def network():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def batch():
    generator = torch.Generator().manual_seed(9)
    return torch.rand(6, 8, generator=generator), torch.randint(4, (6,), generator=generator)


def main():
    device = xm.xla_device()
    model, data = network().to(device), batch()[0].to(device)
    on_cpu, x = network(), batch()[0]
    for how in (autocast(device), autocast("xla"), torch.autocast(device_type="xla"),
                torch.autocast(device.type, dtype=torch.bfloat16)):  # fmt: skip
        with how:
            output = model(data)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = on_cpu(x)
        assert output.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(output.cpu(), expected, rtol=2e-2, atol=1e-2)
    with autocast(device, enabled=False):
        assert model(data).dtype == torch.float32
    train(model, on_cpu, device)
    skipped(device)


def train(model, on_cpu, device):
    """Scaled, and in float32 on both sides: the very steps of plain training."""
    optimizer = syncfree.SGD(model.parameters(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(on_cpu.parameters(), lr=0.1, momentum=0.9)
    scaler = GradScaler(init_scale=1024.0)
    x, y = batch()
    data, target = x.to(device), y.to(device)
    for _ in range(4):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data), target)
        scaler.scale(loss).backward()
        xm.reduce_gradients(optimizer)
        scaler.step(optimizer)
        scaler.update()
        xm.mark_step()
        theirs.zero_grad()
        nn.functional.cross_entropy(on_cpu(x), y).backward()
        theirs.step()
    for mine, expected in zip(model.parameters(), on_cpu.parameters()):
        torch.testing.assert_close(mine.detach().cpu(), expected.detach(), rtol=1e-4, atol=1e-5)


def skipped(device):
    for kind in (syncfree.SGD, syncfree.Adam, syncfree.AdamW):
        model = network().to(device)
        before = copy.deepcopy(model.state_dict())
        optimizer = kind(model.parameters(), lr=0.1)
        model(batch()[0].to(device)).sum().backward()
        optimizer.step(found_inf=torch.ones((), device=device))
        for name, value in model.state_dict().items():
            assert torch.equal(value.cpu(), before[name].cpu()), name
        optimizer.step(found_inf=torch.zeros((), device=device))
        assert not torch.equal(model[0].weight.detach().cpu(), before["0.weight"].cpu())


if __name__ == "__main__":
    main()
