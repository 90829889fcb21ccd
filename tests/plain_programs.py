"""Programs on the CPU that never name ltc. Installed and unused, it may change nothing of them.

    python -m tests.plain_programs quick

prints, as JSON, the result and the warnings of each program of a family. A test runs it in a torch
that finds ltc and in one that does not, and compares.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import pickle
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.trainers import prepare_torchvision

QUICK: dict[str, Callable[[], Any]] = {}
SLOW: dict[str, Callable[[], Any]] = {}
FAMILIES = {"quick": QUICK, "slow": SLOW}


def quick(program: Callable[[], Any]) -> Callable[[], Any]:
    QUICK[program.__name__] = program
    return program


def slow(program: Callable[[], Any]) -> Callable[[], Any]:
    SLOW[program.__name__] = program
    return program


# --- small parts of the programs ------------------------------------------------------------------


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2))


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 24).reshape(6, 4)


def trained(model: nn.Module, steps: int = 3, **options: Any) -> list[float]:
    """The losses of a few steps of Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, **options)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def answer(function: Callable[[], Any]) -> Any:
    """The result of a call, or the kind and text of its error."""
    try:
        return function()
    except Exception as error:
        return [type(error).__name__, str(error)]


def group(**arguments: Any) -> None:
    dist.init_process_group(rank=0, world_size=1, store=dist.HashStore(), **arguments)


def plain(value: Any) -> Any:
    """A value of lists, numbers and texts alone."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), str(value.device), plain(value.tolist())]
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value if isinstance(value, (int, float, str, type(None))) else str(value)


# --- process groups -------------------------------------------------------------------------------


@quick
def group_without_a_backend():
    group()
    x = torch.ones(2)
    dist.all_reduce(x)
    dist.barrier()
    gathered = [None]
    dist.all_gather_object(gathered, {"rank": dist.get_rank()})
    told = dist.get_backend(), dist.get_backend_config(), dist.group.WORLD._device_types
    dist.destroy_process_group()
    return x, gathered, told


@quick
def groups_by_name():
    group(backend="gloo")
    smaller = dist.new_group([0], backend="gloo")
    x = torch.ones(2)
    dist.broadcast(x, 0, group=smaller)
    told = dist.get_backend(smaller), dist.is_backend_available("gloo")
    dist.destroy_process_group()
    return x, told, answer(lambda: group(backend="nonsense"))


@quick
def group_on_a_device_number():
    return answer(lambda: group(device_id=0))


@quick
def distributed_data_parallel():
    group()
    losses = trained(nn.parallel.DistributedDataParallel(network()))
    dist.destroy_process_group()
    return losses


@quick
def fully_sharded_data_parallel():
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    group()
    first = answer(lambda: trained(FullyShardedDataParallel(network())))
    second = answer(lambda: trained(fully_shard(network())))
    dist.destroy_process_group()
    return first, second


@quick
def distributed_tensors():
    from torch.distributed.tensor import Shard, distribute_tensor

    group()
    mesh = dist.init_device_mesh("cpu", (1,))
    x = distribute_tensor(batch(), mesh, [Shard(0)])
    total = (x @ x.T).sum().full_tensor()
    dist.destroy_process_group()
    return total, str(mesh)


@quick
def distributed_checkpoint():
    import torch.distributed.checkpoint as dcp

    with tempfile.TemporaryDirectory() as folder:
        state = {"model": network().state_dict()}
        dcp.save(state, checkpoint_id=folder)
        empty = {"model": {name: torch.zeros_like(one) for name, one in state["model"].items()}}
        dcp.load(empty, checkpoint_id=folder)
        return empty


# --- questions ------------------------------------------------------------------------------------


@quick
def questions_about_accelerators():
    ask = torch.accelerator
    questions = [
        ask.is_available, ask.current_accelerator, ask.device_count, ask.current_device_index,
        ask.current_stream, ask.synchronize, ask.empty_cache, ask.memory_stats, ask.memory_allocated,
        ask.get_device_capability, lambda: ask.current_accelerator(check_available=True),
        lambda: ask.set_device_index(0), lambda: ask.device_index(0).__enter__(),
        lambda: torch.get_device_module().__name__, lambda: torch._C._get_accelerator(),
    ]  # fmt: skip
    return [answer(question) for question in questions]


@quick
def questions_about_gpus():
    questions = [
        torch.cuda.is_available, torch.cuda.device_count, torch.cuda.is_initialized,
        torch.xpu.is_available, torch.backends.mps.is_available, torch.mtia.is_available,
        lambda: torch.cuda.current_device(), lambda: torch.ones(2, device="cuda"),
        lambda: torch.ones(2).cuda(),
    ]  # fmt: skip
    return [str(answer(question))[:80] for question in questions]


@quick
def questions_of_libraries():
    from torch import _utils
    from torch.utils import checkpoint

    questions = [
        _utils._get_available_device_type, _utils._get_all_device_indices,
        lambda: bool(_utils._is_privateuse1_backend_available()),
        lambda: checkpoint._infer_device_type(batch()), torch.get_default_device,
        lambda: torch.profiler.supported_activities(), lambda: torch.compiler.is_compiling(),
        lambda: dist.get_default_backend_for_device("cpu"),
        lambda: torch.amp.is_autocast_available("cpu"), lambda: torch.get_autocast_dtype("cpu"),
    ]  # fmt: skip
    return [answer(question) for question in questions]


@quick
def names_of_devices():
    return [answer(lambda name=name: torch.device(name)) for name in ("cpu", "meta", "nonsense")]


# --- memory and data ------------------------------------------------------------------------------


@quick
def pinned_memory():
    x = torch.ones(3)
    return [
        answer(ask) for ask in (x.is_pinned, x.pin_memory, lambda: x.untyped_storage().is_pinned())
    ]


@quick
def loader_that_pins():
    data = TensorDataset(batch(), torch.arange(6))
    loader = DataLoader(data, batch_size=2, pin_memory=True)
    return [[*part, *(one.is_pinned() for one in part)] for part in loader]


@quick
def loader_of_workers():
    torch.manual_seed(5)
    data = TensorDataset(batch())
    loader = DataLoader(data, batch_size=2, shuffle=True, num_workers=1, pin_memory=True)
    return [part[0] for part in loader]


@quick
def files_of_state():
    written = io.BytesIO()
    torch.save(network().state_dict(), written)
    digest = hashlib.sha256(written.getvalue()).hexdigest()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.pt"
        path.write_bytes(written.getvalue())
        mapped = torch.load(path, map_location="cpu", mmap=True)
        loaded = torch.load(path)
    return digest, mapped, loaded


@quick
def pickles_and_copies():
    model = network()
    again = pickle.loads(pickle.dumps(model))
    tied = copy.deepcopy([model[0], model[0]])
    return again.state_dict(), tied[0] is tied[1]


@quick
def shared_memory():
    x = torch.ones(3).share_memory_()
    x.untyped_storage().fill_(0)
    return x, x.is_shared(), x.clone().storage_offset()


@quick
def children_of_fork():
    context = torch.multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=lambda: queue.put((torch.ones(2) * 2).tolist()))
    child.start()
    received = queue.get()
    child.join()
    return received, child.exitcode


# --- training -------------------------------------------------------------------------------------


@quick
def training_with_each_optimizer():
    return [
        trained(network()), trained(network(), foreach=True), trained(network(), fused=True),
        trained(network(), amsgrad=True),
    ]  # fmt: skip


@quick
def data_parallel():
    return trained(nn.DataParallel(network()))


@quick
def autocast():
    model, x = network(), batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = model(x)
    with torch.autocast("cuda"):
        ignored = model(x)
    return narrow, ignored, answer(lambda: torch.autocast("nonsense"))


@quick
def scaled_gradients():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler, absent = torch.amp.GradScaler("cpu"), torch.amp.GradScaler()
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(batch()).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return model.state_dict(), scaler.state_dict(), absent.state_dict()


@quick
def recomputed_activations():
    from torch.utils.checkpoint import checkpoint, checkpoint_sequential

    model, x = network(), batch().requires_grad_()
    torch.manual_seed(9)
    checkpoint(model, x, use_reentrant=False).sum().backward()
    checkpoint(model, x, use_reentrant=True).sum().backward()
    checkpoint_sequential(model, 2, x, use_reentrant=False).sum().backward()
    return x.grad, model[0].weight.grad


@quick
def random_numbers():
    torch.manual_seed(7)
    with torch.random.fork_rng():
        torch.manual_seed(8)
        inside = torch.rand(2)
    state = torch.get_rng_state()
    drawn = torch.rand(2), torch.randn(2), torch.randperm(4)
    torch.set_rng_state(state)
    return inside, drawn, torch.rand(2), torch.initial_seed(), torch.Generator().initial_seed()


@quick
def default_device():
    torch.set_default_device("meta")
    imagined = torch.ones(2).device
    torch.set_default_device(None)
    with torch.device("cpu"):
        return imagined, torch.ones(2), nn.Linear(1, 1).weight.device, torch.get_default_device()


@quick
def recurrent_and_attention():
    torch.manual_seed(1)
    x = torch.randn(2, 5, 8)
    recurrent = nn.LSTM(8, 8, batch_first=True)
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    return recurrent(x)[0], layer(x), nn.functional.scaled_dot_product_attention(x, x, x)


@quick
def normalised_and_averaged():
    from torch.optim.swa_utils import AveragedModel

    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    averaged = AveragedModel(model)
    model(batch())
    averaged.update_parameters(model)
    return answer(lambda: nn.SyncBatchNorm(3)(batch()[:, :3])), list(averaged.state_dict())


# --- transformations ------------------------------------------------------------------------------


@quick
def profiles():
    with torch.profiler.profile() as profile:
        network()(batch())
    averages = profile.key_averages()
    table = averages.table(row_limit=1).splitlines()
    return profile.use_device, sorted(one.key for one in averages), table[1].split()


@quick
def scripts_and_traces():
    scripted = torch.jit.script(network().eval())
    traced = torch.jit.trace(network().eval(), batch())
    return scripted(batch()), traced(batch()), str(traced.graph)


@quick
def exported_program():
    exported = torch.export.export(network().eval(), (batch(),))
    return exported.graph_module.code, exported.module()(batch())


@quick
def compiled_functions():
    def step(x):
        at = torch.accelerator.current_accelerator()
        where = at.type if at is not None and torch.accelerator.is_available() else "cpu"
        return (x.sin() * 2).sum(), where, torch.cuda.is_available()

    results = []
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        x = batch().requires_grad_()
        total, *answers = torch.compile(step, backend=backend)(x)
        total.backward()
        results.append((total.detach(), answers, x.grad))
    return results


@quick
def imagined_tensors():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:
        made = torch.ones(2, 3) @ torch.ones(3, 2)
        elsewhere = answer(lambda: str(torch.empty(2, device="cuda:0").device))
    return made.shape, made.device, elsewhere, mode.avoid_device_init


@quick
def function_transformations():
    from torch.func import functional_call, grad, hessian, vmap

    model = network().eval()
    parameters = dict(model.named_parameters())
    gradients = grad(lambda p: functional_call(model, p, (batch(),)).sum())(parameters)
    return (
        gradients,
        vmap(torch.dot)(batch(), batch()),
        hessian(lambda x: x.pow(3).sum())(batch()[0]),
    )


@quick
def dispatched_operations():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Log():
        trained(network(), 1)
        torch.ones(2).to("cpu", non_blocking=True)
    return seen


@quick
def own_operations():
    @torch.library.custom_op("plain_programs::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    double.register_fake(torch.empty_like)
    return double(batch()), torch.compile(double, backend="aot_eager")(batch())


@quick
def sparse_and_quantized():
    sparse = torch.eye(3).to_sparse() @ torch.ones(3, 1)
    quantized = torch.quantize_per_tensor(batch(), 0.1, 0, torch.qint8).dequantize()
    return sparse, quantized


@quick
def signals_from_module_hooks():
    seen = []
    model = network()
    model[0].register_forward_hook(lambda *_: seen.append("forward"))
    model[0].register_full_backward_hook(lambda *_: seen.append("backward"))
    trained(model, 1)
    with torch.autograd.graph.save_on_cpu(pin_memory=False):
        model(batch()).sum().backward()
    return seen


# --- programs that start others, or import large packages -----------------------------------------


def started(*command: str, **variables: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, *command], env=os.environ | variables, text=True, capture_output=True,
    )  # fmt: skip
    return [str(done.returncode), *sorted(done.stdout.splitlines())]


@slow
def import_with_warnings_as_errors():
    return started(
        "-W", "error", "-c", "import torch, torch.distributed as d; print(d.is_available())"
    )


RANK = """
import torch, torch.distributed as dist
dist.init_process_group()
x = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(x)
told = (dist.get_rank(), x.item(), dist.get_backend(), torch.accelerator.is_available())
print(str(told) + "\\n", end="", flush=True)  # one write: ranks share the pipe
dist.destroy_process_group()
"""


@slow
def started_by_torchrun():
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "rank.py"
        script.write_text(RANK)
        options = ("--standalone", "--nproc-per-node", "2")
        return started("-m", "torch.distributed.run", *options, str(script), OMP_NUM_THREADS="1")


@slow
def processes_chosen_by_torchrun():
    from torch.distributed.run import determine_local_world_size

    return [answer(lambda kind=kind: determine_local_world_size(kind)) for kind in ("auto", "gpu")]


def doubled(queue: Any) -> None:
    queue.put((torch.ones(2) * 2).tolist() + [str(torch.accelerator.current_accelerator())])


@slow
def children_of_spawn():
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    child = context.Process(target=doubled, args=(queue,))
    child.start()
    received = queue.get()
    child.join()
    return received, child.exitcode


@slow
def compiled_by_inductor():
    torch._dynamo.reset()
    x = batch().requires_grad_()
    torch.compile(lambda x: (x.sin() * 2).sum())(x).backward()
    return x.grad


@slow
def accelerate_trains():
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(batch()), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for (x,) in loader:
        loss = model(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses, accelerator.device, accelerator.distributed_type, loader.pin_memory


@slow
def transformers_train():
    prepare_torchvision()
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, x):
            return {"loss": self.inner(x).square().mean()}

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=3, report_to=[], logging_steps=1, disable_tqdm=True, save_strategy="no",
        )  # fmt: skip
        trainer = Trainer(Model(), arguments, train_dataset=[{"x": x} for x in batch()])
        trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses, arguments.device, arguments.parallel_mode, arguments.n_gpu


@slow
def lightning_trains():
    prepare_torchvision()
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner, self.losses = network(), []

        def training_step(self, rows, _):
            loss = self.inner(rows[0]).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_epochs=1, **quiet)
    trainer.fit(module, DataLoader(TensorDataset(batch()), batch_size=2))
    return module.losses, type(trainer.accelerator).__name__, type(trainer.strategy).__name__


# --- the report -----------------------------------------------------------------------------------


def report(programs: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Result and warnings of each program; a warning is its kind, text and file."""
    told = {}
    for name, program in programs.items():
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            result = plain(answer(program))
        texts = [[one.category.__name__, str(one.message), one.filename] for one in seen]
        told[name] = {"result": result, "warnings": texts}
        if dist.is_initialized():  # left by a program that failed
            dist.destroy_process_group()
    return told


if __name__ == "__main__":
    outcome = report(FAMILIES[sys.argv[1]])
    outcome["about"] = {"imported": "ltc" in sys.modules, "found": hasattr(torch, "ltc")}
    print(json.dumps(outcome))
