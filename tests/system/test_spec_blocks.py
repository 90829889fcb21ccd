"""The code blocks of the four documents that ltc answers to, as far as they concern one device.

The text of each block is the document's own, with three changes: names of torch_xla and xm are
those of lazy_tensor_core and ltm, `.to(device)` is added to the model of the training snippets
(by the documents' own rule that operands share a device), and what a block takes from the reader
(data, a model, a path) is defined before it runs.

  000, 001  The API and backend guides show no Python; a device without a backend is tested here.
  002       The index of names: each is importable and callable.
  003       The API guide.
  004       The older API guide.
"""

import contextlib
import inspect
import io
import re
import subprocess
import sys

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F


class MNIST(nn.Module):
    """The network that the documents train and do not show."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 10, 5)
        self.second = nn.Conv2d(10, 20, 5)
        self.head = nn.Linear(320, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.first(x), 2))
        x = F.relu(F.max_pool2d(self.second(x), 2))
        return F.log_softmax(self.head(x.flatten(1)), dim=1)


def loader() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Three batches that say their label by the brightness of one row."""
    noise = torch.Generator().manual_seed(4)
    labels = torch.arange(8) % 10
    batches = []
    for _ in range(3):
        images = torch.randn(8, 1, 28, 28, generator=noise) * 0.1
        for image, label in zip(images, labels):
            image[0, 2 * int(label)] += 2
        batches.append((images, labels))
    return batches


def given() -> dict:
    """What a reader has in scope when a block begins."""
    return {
        "torch": torch,
        "nn": nn,
        "optim": optim,
        "MNIST": MNIST,
        "train_loader": loader(),
        "lr": 0.05,
        "momentum": 0.5,
    }


def run(*blocks: str, **names) -> tuple[dict, str]:
    """Run the blocks one after another; the names they leave and what they printed."""
    scope, printed = {**given(), **names}, io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in blocks:
            exec(block, scope)
    return scope, printed.getvalue()


# --- 001: a device without a backend ------------------------------------------------------------


def test_running_without_a_backend_names_what_is_missing():
    program = (
        "import os; os.environ['LTC_BACKEND'] = 'nobody'\n"
        "import torch, ltc\n"
        "try:\n"
        "    print(torch.randn(2, 2, device='ltc'))\n"
        "except RuntimeError as error:\n"
        "    print('said:', error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "said:" in done.stdout, done.stdout + done.stderr
    assert "nobody" in done.stdout and "backend" in done.stdout.lower()


def test_the_interfaces_of_a_vendor_backend_can_be_imported():
    from ltc.backends.interface import (
        BackendImplInterface,
        BackendRegistrar,
        Computation,
        LoweringContext,
        NodeLowering,
    )

    interfaces = BackendImplInterface, BackendRegistrar, Computation, LoweringContext, NodeLowering
    assert all(inspect.getdoc(interface) for interface in interfaces)


# --- 002: names ---------------------------------------------------------------------------------

NAMES_OF_002 = (
    "is_lazy_tensor", "get_lazy_supported_devices", "lazy_device", "lazy_real_devices",
    "lazy_replication_devices", "set_replication", "xrt_world_size", "get_ordinal",
    "is_master_ordinal", "master_print", "optimizer_step",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES_OF_002)
def test_002_every_name_is_there_with_its_documentation(name):
    import lazy_tensor_core.core.lazy_model as ltm

    assert callable(getattr(ltm, name)) and inspect.getdoc(getattr(ltm, name))


def test_002_every_member_of_utils_is_there():
    import lazy_tensor_core.utils.utils as xu

    members = (
        "Cleaner LazyProperty TmpFolder SampleGenerator FnDataGenerator DataWrapper as_list "
        "getenv_as for_each_instance for_each_instance_rewrite shape flatten_nested_tuple "
        "list_copy_append null_print eprint get_print_fn timed get_free_tcp_ports parallel_work "
        "TimedScope"
    ).split()
    assert [name for name in members if not callable(getattr(xu, name, None))] == []


# --- 003 ----------------------------------------------------------------------------------------

CREATE = """
import torch
import lazy_tensor_core
import lazy_tensor_core.core.lazy_model as ltm

t = torch.randn(2, 2, device=ltm.lazy_device())
print(t.device)
print(t)
"""
ADD = """
t0 = torch.randn(2, 2, device=ltm.lazy_device())
t1 = torch.randn(2, 2, device=ltm.lazy_device())
print(t0 + t1)
"""
MULTIPLY = """
print(t0.mm(t1))
"""
MODULE = """
l_in = torch.randn(10, device=ltm.lazy_device())
linear = torch.nn.Linear(10, 20).to(ltm.lazy_device())
l_out = linear(l_in)
print(l_out)
"""
MIXED_003 = """
l_in = torch.randn(10, device=ltm.lazy_device())
linear = torch.nn.Linear(10, 20)
l_out = linear(l_in)
print(l_out)
# Input tensor is not a lazy tensor: torch.FloatTensor
"""
MIXED_004 = """
l_in = torch.randn(10, device=ltm.lazy_device())
linear = torch.nn.Linear(10, 20).cpu()
l_out = linear(l_in)
print(l_out)
# Input tensor is not a lazy tensor: torch.FloatTensor
"""
TRAIN_003 = """
import lazy_tensor_core.core.lazy_model as ltm

device = ltm.lazy_device()
model = MNIST().train().to(device)
loss_fn = nn.NLLLoss()
optimizer = optim.SGD(model.parameters(), lr=lr, momentum=momentum)

for data, target in train_loader:
  optimizer.zero_grad()
  data = data.to(device)
  target = target.to(device)
  output = model(data)
  loss = loss_fn(output, target)
  loss.backward()

  optimizer.step()
  ltm.mark_step()
"""
SAVE_ON_CPU = """
import torch
import lazy_tensor_core
import lazy_tensor_core.core.lazy_model as ltm

device = ltm.lazy_device()

t0 = torch.randn(2, 2, device=device)
t1 = torch.randn(2, 2, device=device)

tensors = (t0.cpu(), t1.cpu())

torch.save(tensors, 'tensors.pt')

tensors = torch.load('tensors.pt')

t0 = tensors[0].to(device)
t1 = tensors[1].to(device)
"""
SAVE_MODEL = """
import torch
import lazy_tensor_core
import lazy_tensor_core.core.lazy_model as ltm

ltm.save(model.state_dict(), path)
"""
STREAM = """
import lazy_tensor_core.utils.serialization as xser

xser.save(model.state_dict(), path)
"""
STREAM_BACK = """
import lazy_tensor_core.utils.serialization as xser

state_dict = xser.load(path)
model.load_state_dict(state_dict)
"""
TRAIN_004 = """
import torch
import lazy_tensor_core
import lazy_tensor_core.core.lazy_model as ltm

device = ltm.lazy_device()
model = MNIST().to(device)
loss_fn = nn.NLLLoss()
optimizer = optim.SGD(model.parameters(), lr=lr, momentum=momentum)

model.train()
for data, target in train_loader:
  optimizer.zero_grad()
  data = data.to(device)
  target = target.to(device)
  output = model(data)
  loss = loss_fn(output, target)
  loss.backward()
  ltm.optimizer_step(optimizer, barrier=True)
"""
SAVE_LAZY = """
import torch
import lazy_tensor_core
import lazy_tensor_core.core.lazy_model as ltm

t0 = torch.randn(2, 2, device=ltm.lazy_device())
t1 = torch.randn(2, 2, device=ltm.lazy_device())

tensors = (t0, t1)

torch.save(tensors, 'tensors.pt')

tensors = torch.load('tensors.pt')

print(tensors)
"""
SAVE_A_VIEW = """
import torch
import lazy_tensor_core
import lazy_tensor_core.core.lazy_model as ltm

t = torch.randn(2, 2, device=ltm.lazy_device())
t_view = t[0:2]

tensors = (t, t_view)

torch.save(tensors, 'tensors.pt')
# RuntimeError: Tensor ID 2 is sharing a view with tensor ID 1
"""


def test_003_creating_and_printing_a_tensor():
    _, printed = run(CREATE)
    assert printed.startswith("ltc:0\ntensor([[")
    assert printed.endswith("device='ltc:0')\n")


def test_003_tensors_work_as_pytorchs_do():
    scope, printed = run(CREATE, ADD, MULTIPLY, MODULE)
    assert printed.count("device='ltc:0'") == 4
    t0, t1, linear = scope["t0"].cpu(), scope["t1"].cpu(), scope["linear"]
    torch.testing.assert_close((scope["t0"] + scope["t1"]).cpu(), t0 + t1)
    torch.testing.assert_close(scope["t0"].mm(scope["t1"]).cpu(), t0.mm(t1))
    expected = linear.cpu()(scope["l_in"].cpu())
    torch.testing.assert_close(scope["l_out"].cpu(), expected)


@pytest.mark.parametrize("block", [MIXED_003, MIXED_004])
def test_003_004_a_module_on_the_cpu_refuses_a_lazy_tensor(block, error_of):
    text = error_of(lambda: run(CREATE, block))
    assert text.startswith("Input tensor is not a lazy tensor: torch.FloatTensor")


@pytest.mark.parametrize("block", [TRAIN_003, TRAIN_004])
def test_003_004_a_network_trains_as_on_the_cpu(block, equal):
    torch.manual_seed(0)
    scope, _ = run(block)
    torch.manual_seed(0)
    model = MNIST().train()
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    for data, target in loader():
        optimizer.zero_grad()
        loss = nn.NLLLoss()(model(data), target)
        loss.backward()
        optimizer.step()
    equal(dict(scope["model"].state_dict()), dict(model.state_dict()))
    equal(scope["loss"], loss)


def test_003_tensors_saved_from_the_cpu_load_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope, _ = run(SAVE_ON_CPU)
    assert [tensor.device.type for tensor in scope["tensors"]] == ["cpu", "cpu"]
    assert torch.equal(scope["t0"].cpu(), scope["tensors"][0])
    assert scope["t1"].device.type == "ltc"


def test_003_the_saved_state_of_a_model_is_on_the_cpu(tmp_path):
    path = tmp_path / "model.pt"
    model = MNIST().to("ltc")
    run(SAVE_MODEL, model=model, path=path)
    loaded = torch.load(path)
    assert {tensor.device.type for tensor in loaded.values()} == {"cpu"}
    fresh = MNIST()
    fresh.load_state_dict(loaded)
    assert torch.equal(fresh.head.weight, model.head.weight.cpu())


def test_003_a_state_streamed_to_disk_loads_into_a_model(tmp_path):
    path, model, fresh = tmp_path / "model", MNIST().to("ltc"), MNIST()
    run(STREAM, model=model, path=str(path))
    run(STREAM_BACK, model=fresh, path=str(path))
    assert torch.equal(fresh.head.weight, model.head.weight.cpu())


def test_003_a_view_that_moves_is_a_view_no_more():
    t = torch.zeros(2, 2, device="ltc")
    moved = t[0:1].cpu()
    moved.add_(1)
    assert t.sum().item() == 0
    moved.to("ltc").add_(1)
    assert moved.sum().item() == 2


# --- 004 ----------------------------------------------------------------------------------------


def test_004_lazy_tensors_load_back_to_their_device(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope, printed = run(SAVE_LAZY)
    assert printed.count("device='ltc:0'") == 2
    for loaded, saved in zip(scope["tensors"], (scope["t0"], scope["t1"])):
        assert loaded.device == saved.device and torch.equal(loaded.cpu(), saved.cpu())


def test_004_a_tensor_and_its_view_can_not_be_saved_together(tmp_path, monkeypatch, error_of):
    monkeypatch.chdir(tmp_path)
    text = error_of(lambda: run(SAVE_A_VIEW))
    assert re.match(r"Tensor ID \d+ .*is sharing a view with tensor ID \d+", text)


def test_004_a_copy_is_deep_and_a_view_is_shallow():
    import copy

    t = torch.zeros(3, device="ltc")
    copied, viewed = copy.copy(t), t.view(3)
    copied.add_(1)
    assert t.tolist() == [0, 0, 0]
    viewed.add_(2)
    assert t.tolist() == [2, 2, 2]
