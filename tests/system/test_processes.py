"""Fork and spawn after the parent has used the device, data loader workers, queues."""

import multiprocessing
import os
import subprocess
import sys

import pytest
import torch
import torch.multiprocessing
from torch import nn
from torch.utils.data import DataLoader, Dataset

import ltc  # noqa: F401  a spawned child imports this module and needs the device

# There PyTorch's autograd has threads after the first backward, and refuses one in a forked child.
BESIDE_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="torch has a GPU")
METHODS = [pytest.param("fork", marks=BESIDE_CUDA), "spawn"]


@pytest.fixture(autouse=True)
def used_in_the_parent():
    """The parent has run a graph, a backward, and holds a tensor on the device."""
    model = nn.Linear(50, 2).to("ltc")
    x = torch.randn(50, 50, device="ltc")
    (model(x) @ model(x).t()).sum().backward()
    assert model.weight.grad.isfinite().all()
    yield x


def trained(device: str) -> list[float]:
    """The losses of a few steps, from weights and data that depend on nothing else."""
    generator = torch.Generator().manual_seed(1)
    model = nn.Linear(3, 2).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator))
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    x = torch.rand(4, 3, generator=generator, dtype=torch.double).to(device)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def send_trained(answer, device):
    answer.send(trained(device))


def in_child(method: str, target, *arguments):
    """What `target(answer, *arguments)` sends, run in a child process."""
    context = multiprocessing.get_context(method)
    receiver, answer = context.Pipe(duplex=False)
    child = context.Process(target=target, args=(answer, *arguments))
    child.start()
    answer.close()  # so that a child that dies ends the wait below
    try:
        return receiver.recv()
    finally:
        child.join()
        assert child.exitcode == 0


@pytest.mark.devices(2)
@pytest.mark.parametrize("device", ["ltc:0", "ltc:1"])
@pytest.mark.parametrize("method", METHODS)
def test_a_child_trains_though_the_parent_used_the_device(method, device):
    assert in_child(method, send_trained, device) == pytest.approx(trained("cpu"), rel=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_the_parent_trains_on_after_its_child_ended(method):
    in_child(method, send_trained, "ltc")
    assert trained("ltc") == pytest.approx(trained("cpu"), rel=1e-9)


def send_sum(answer, x):
    answer.send((str(x.device), (x * 2).sum().item()))


BESIDE_A_GPU = """
import multiprocessing
import torch
torch.cuda.device_count = lambda: 1
import ltc

def trained(answers=None):
    w = torch.ones(3, device="ltc", requires_grad=True)
    (w * 2).sum().backward()
    answers and answers.put(w.grad.tolist())
    return w.grad.tolist()

(torch.ones(3, device="ltc") + 1).tolist()  # used, but for no backward
context = multiprocessing.get_context("fork")
answers = context.Queue()
child = context.Process(target=trained, args=(answers,))
child.start()
assert answers.get() == [2, 2, 2] == trained()
child.join()
print("both have trained")
"""


def test_where_there_is_a_gpu_the_import_leaves_the_engine_to_the_children():
    """There the engine starts threads at the first backward: forks before it have to stay legal."""
    done = subprocess.run(
        [sys.executable, "-c", BESIDE_A_GPU], env=os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == "both have trained\n", done.stderr


def test_a_forked_child_reads_what_the_parent_computed():
    x = torch.arange(4.0, device="ltc") + 1
    x.sum().item()
    assert in_child("fork", send_sum, x) == ("ltc:0", 20.0)


@pytest.mark.devices(2)
def test_a_tensor_is_sent_to_a_spawned_child():
    assert in_child("spawn", send_sum, torch.arange(4.0, device="ltc:1") + 1) == ("ltc:1", 20.0)


def send_pending(answer, x):
    try:
        answer.send(x.sum().item())
    except RuntimeError as error:
        answer.send(str(error))


def test_work_pending_at_a_fork_is_computed_or_refused_in_the_child():
    pending = torch.ones(8, device="ltc") * 3
    said = in_child("fork", send_pending, pending)
    assert said == 24.0 or "fork" in said
    assert pending.sum().item() == 24.0


def spawned(index: int) -> None:
    assert torch.ones(3, device=f"ltc:{index}").mul(2).sum().item() == 6


@pytest.mark.devices(2)
def test_torchs_own_spawn_starts_children_that_use_the_device():
    torch.multiprocessing.spawn(spawned, args=(), nprocs=2)


class Rows(Dataset):
    """Eight rows on the CPU."""

    device = "cpu"

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((3,), float(index), device=self.device), index


class LazyRows(Rows):
    """Eight rows that the worker makes on the device."""

    device = "ltc"


@pytest.mark.parametrize("rows", [Rows, LazyRows])
@pytest.mark.parametrize("method", METHODS)
def test_a_loaders_workers_fill_batches(method, rows):
    loader = DataLoader(rows(), batch_size=4, num_workers=1, multiprocessing_context=method)
    assert sum(batch.to("ltc").sum().item() for batch, _ in loader) == 84


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
def test_a_loader_with_pinned_memory_fills_batches():
    loader = DataLoader(Rows(), batch_size=4, num_workers=1, pin_memory=True)
    assert sum(batch.to("ltc", non_blocking=True).sum().item() for batch, _ in loader) == 84


class RowsOfLazyOnes(Rows):
    """Eight rows of tensors that travel to the worker."""

    def __init__(self):
        self.lazy = torch.arange(8.0, device="ltc")[:, None] + torch.zeros(3, device="ltc")

    def __getitem__(self, index):
        return self.lazy[index], index


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
@pytest.mark.parametrize("rows, pinned", [(Rows, True), (RowsOfLazyOnes, False)])
def test_spawned_workers_that_stay_fill_the_batches_of_every_epoch(rows, pinned):
    loader = DataLoader(
        rows(),
        batch_size=2,
        num_workers=2,
        pin_memory=pinned,
        persistent_workers=True,
        multiprocessing_context="spawn",
    )
    for _ in range(2):
        assert sum(batch.to("ltc").sum().item() for batch, _ in loader) == 84


def test_the_interpreter_ends_with_work_pending():
    program = "import torch, ltc; x = torch.ones(9, device='ltc'); y = x @ x; print('end')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_an_error_of_the_last_step_is_printed_where_nothing_is_read_or_marked_behind_it(
    monkeypatch,
):
    monkeypatch.setenv("LTC_CACHE", "0")  # the program is there at its third step
    program = (
        "import torch, ltc\n"
        "import ltc.core.lazy_model as ltm\n"
        "rows, big = torch.ones(5, 3).to('ltc'), torch.randn(600, 600).to('ltc')\n"
        "for index in (1, 1, 1, 1, 1, 1, 99):\n"
        "    row = rows[torch.tensor([index]).to('ltc')].sum(0)\n"
        "    other = big @ big @ big @ big\n"  # so long that the program runs behind the mark
        "    ltm.mark_step()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == ""
    assert "index 99 is out of bounds for dimension 0 with size 5" in done.stderr
    assert "called at <string>:5" in done.stderr


@pytest.mark.parametrize("tier", ["auto", "native"])
def test_what_runs_at_the_exit_computes_without_a_new_thread(monkeypatch, tier):
    """From Python 3.12 on none starts there any more; what waited for it waited for ever."""
    monkeypatch.setenv("LTC_TIER", tier)
    program = (
        "import atexit, threading, torch, ltc\n"
        "import ltc.core.lazy_model as ltm\n"
        "def refused(thread):\n"
        '    raise RuntimeError("can\'t create new thread at interpreter shutdown")\n'
        "@atexit.register\n"
        "def at_exit():\n"
        "    threading.Thread.start = refused\n"
        "    x = torch.ones(300, 300, device='ltc')\n"
        "    for _ in range(6):\n"
        "        x = (x @ x).tanh()\n"
        "        ltm.mark_step()\n"
        "    ltm.add_step_closure(print, ('closure',), run_async=True)\n"
        "    ltm.mark_step()\n"
        "    print(x.sum().item())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "closure\n90000.0\n", "")


def test_the_import_prints_nothing_and_starts_no_thread():
    program = (
        "import threading, torch\n"
        "before = threading.active_count()\n"
        "import ltc\n"
        "assert threading.active_count() == before\n"
        "import sys\n"
        "assert 'llvmlite' not in sys.modules, 'the compiler is imported when it is first needed'\n"
        "assert 'torch.utils.flop_counter' not in sys.modules, 'triton comes with it'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_without_its_compiler_the_default_backend_says_what_to_do():
    program = (
        "import os, sys, torch\n"
        "os.environ['LTC_NATIVE'] = '0'\n"  # with the core, so small a step is worth no program
        "import ltc\n"
        "sys.modules['llvmlite'] = None\n"
        "print((torch.ones(2, device='ltc') + 1).cpu())\n"
        "for _ in range(4):\n"  # until its path has a program
        "    x = (torch.ones(2, device='ltc') * 2).exp()\n"
        "    ltc.sync()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install llvmlite), or set LTC_BACKEND=eager" in done.stderr
    environment = {**os.environ, "LTC_BACKEND": "eager"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert done.stdout == "tensor([2., 2.])\n"
