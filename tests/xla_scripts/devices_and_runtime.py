"""What a script asks about devices, and the ways in which it names one."""

import contextlib
import io

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.runtime as xr


def main():
    devices()
    strings()
    factories()
    random_numbers()
    printing()
    assert xr.device_type() == "CPU" and xr.is_bf16_supported() and not xr.is_spmd()
    xr.set_device_type("CPU")
    met.clear_all()
    xr.set_device_type("TPU")
    assert xm.xla_device(devkind="TPU") == "xla:0"
    assert xm.get_xla_supported_devices("TPU", 1) == ["xla:0"]
    assert met.counter_value("torch_xla.ignored.devkind") == 2
    assert met.counter_value("torch_xla.ignored.device_type") == 1 and xr.using_pjrt()
    counts = xr.local_device_count(), xr.addressable_device_count(), xr.global_device_count()
    assert counts == (2, 2, 2) and xr.global_runtime_device_count() == 2
    assert (xr.process_count(), xr.process_index(), xr.host_index()) == (1, 0, 0)
    assert (xr.world_size(), xr.global_ordinal(), xr.local_ordinal()) == (1, 0, 0)
    assert (xm.xrt_world_size(), xm.get_ordinal(), xm.is_master_ordinal()) == (1, 0, True)
    assert len(xr.global_runtime_device_attributes()) == 2


def devices():
    device = xm.xla_device()
    assert device == torch_xla.device() == torch_xla.devices()[0]
    assert (device.type, device.index, str(device), f"{device}") == ("xla", 0, "xla:0", "xla:0")
    assert torch_xla.device_count() == 2 and torch_xla.real_devices() == ["CPU:0", "CPU:1"]
    assert xm.get_xla_supported_devices() == ["xla:0", "xla:1"]
    assert xm.get_xla_supported_devices(max_devices=1) == xm.get_xla_supported_devices("CPU", 1)
    assert xm.xla_device_hw(device) == xm.xla_device_hw("xla:1") == "CPU"
    assert xm.xla_real_devices([device, "xla:1"]) == ["CPU:0", "CPU:1"]
    assert xm.xla_replication_devices(["xla:0", "xla:1"]) == ["CPU:0", "CPU:1"]
    x = torch.ones(2, device=device)
    assert xm.is_xla_tensor(x) and x.is_xla and not torch.ones(2).is_xla
    assert x.device == device and device == x.device and {x.device: 1}[device] == 1
    assert (
        torch_xla.device(1) == "xla:1" and torch.ones(1, device=xm.xla_device()).device.index == 1
    )
    xm.xla_device(0)
    memory = xm.get_memory_info(device)
    assert memory["bytes_limit"] > memory["bytes_used"] >= 0 and "kb_total" in memory


def strings():
    """ "xla" wherever torch takes a device."""
    expected = torch.arange(4.0)
    for name in ("xla", "xla:0", torch.device("xla"), torch.device("xla", 0), xm.xla_device()):
        made = [
            torch.arange(4.0, device=name),
            torch.tensor([0.0, 1, 2, 3], device=name),
            torch.as_tensor([0.0, 1, 2, 3], device=name),
            expected.to(name),
            expected.to(name, torch.float64).float(),
            expected.to(device=name),
            torch.empty(4, device=name).copy_(expected),
            torch.zeros(4, device=name).add_(expected.to(name)),
            expected.new_zeros(4, device=name) + expected.to(name),
            torch.nn.Embedding.from_pretrained(expected[:, None]).to(name).weight.flatten(),
        ]
        for tensor in made:
            assert xm.is_xla_tensor(tensor) and torch.equal(tensor.cpu(), expected)
        on_device = expected.to(name)
        assert on_device.to(name) is on_device
        with torch.device(name):
            assert xm.is_xla_tensor(torch.ones(1)) and xm.is_xla_tensor(torch.tensor(1.0))
        layer = torch.nn.Linear(2, 2, device=name)
        assert layer.weight.requires_grad and layer.weight.is_leaf and layer.weight.is_xla
    assert torch.ones(1, device="xla:1").device.index == 1
    leaf = torch.ones(3, requires_grad=True)
    (leaf.to("xla") * 2).sum().backward()
    assert leaf.grad.tolist() == [2.0] * 3


def factories():
    """What makes a tensor makes the CPU's, by every name of the device."""
    for make in (
        lambda device: torch.fft.fftfreq(7, 0.5, device=device),
        lambda device: torch.fft.rfftfreq(6, device=device),
        lambda device: torch.kaiser_window(5, False, 3.0, device=device),
        lambda device: torch.hamming_window(5, device=device),
        lambda device: torch.blackman_window(6, device=device),
        lambda device: torch.bartlett_window(6, device=device),
        lambda device: torch.arange(1, 9, 3, device=device, dtype=torch.int16),
        lambda device: torch.linspace(0, 1, 7, device=device),
        lambda device: torch.logspace(0, 1, 5, base=2.0, device=device),
        lambda device: torch.eye(3, 4, device=device, dtype=torch.bool),
        lambda device: torch.tril_indices(3, 4, 1, device=device),
        lambda device: torch.triu_indices(3, 4, -1, device=device),
        lambda device: torch.full((2, 0), 3, device=device),
        lambda device: torch.full((), 2.5, device=device, dtype=torch.float64),
        lambda device: torch.ones(2, 3, device=device, dtype=torch.complex64),
        lambda device: torch.full_like(torch.ones(2), 3.0, device=device),
        lambda device: torch.ones(2).new_full((2,), 4, device=device, dtype=torch.int8),
        lambda device: torch.zeros_like(torch.ones(2, 3).t(), device=device),
    ):
        expected = make("cpu")
        for name in ("xla", torch.device("xla", 0), xm.xla_device()):
            made = make(name)
            assert made.is_xla and made.dtype == expected.dtype
            torch.testing.assert_close(made.cpu(), expected)


def random_numbers():
    xm.set_rng_state(7)
    first = torch.rand(4, device="xla")
    state = xm.get_rng_state()
    with xm.fork_rng():
        torch.rand(4, device="xla")
    assert xm.get_rng_state() == state
    torch_xla.manual_seed(7)
    assert torch.equal(first.cpu(), torch.rand(4, device="xla").cpu())
    generators = [torch.Generator(device="xla").manual_seed(1) for _ in range(2)]
    drawn = [torch.rand(3, device="xla", generator=one).cpu() for one in generators]
    assert torch.equal(*drawn)
    for make in (torch.rand, torch.randn, torch.randperm, torch.kaiser_window, torch.hann_window):
        torch_xla.manual_seed(3)
        mine = make(5, device="xla")
        torch_xla.manual_seed(3)
        assert torch.equal(mine.cpu(), make(5, device=xm.xla_device()).cpu()), make


def printing():
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        xm.master_print("on", xm.xla_device(), flush=True)
    assert said.getvalue() == "on xla:0\n"
    met.clear_all()
    assert met.counter_value("MarkStep") is None
    xm.mark_step()
    assert met.counter_value("MarkStep") == 1 and "MarkStep" in met.counter_names()
    assert "Counter: MarkStep" in met.metrics_report()
    assert torch_xla._XLAC._xla_counter_value("MarkStep") == 1
    assert torch_xla._XLAC._xla_get_default_device() == "xla:0"


if __name__ == "__main__":
    main()
