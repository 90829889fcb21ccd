"""Lazy tensors through every way of saving and copying that PyTorch programs use."""

import builtins
import copy
import errno
import fcntl
import io
import os
import pickle
import re
import resource
import shutil
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy
import pytest
import safetensors.torch
import torch
import torch.utils.dlpack
from torch import nn

import ltc.core.lazy_model as ltm
import ltc.utils.serialization as xser
from ltc.checkpointing import saving
from ltc.debug import metrics
from ltc.support import atomic_file
from tests.unit.test_serialization import DTYPES, bits, has_elements, random_bits

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "stress"))
import fuzz_checkpoints
import kill_saves


class Tied(nn.Module):
    """Two layers with one weight, a buffer, and a parameter that is not trained."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.last.bias.requires_grad_(False)

    def forward(self, x):
        return self.norm(self.last(self.first(x)))


def trained(device="ltc"):
    torch.manual_seed(0)
    model = Tied().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 4).to(device)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def through_torch(data, **options):
    file = io.BytesIO()
    torch.save(data, file)
    file.seek(0)
    return torch.load(file, **options)


def through_a_queue(data):
    """What `put` and `get` of a multiprocessing queue do to data."""
    return pickle.loads(ForkingPickler.dumps(data))


WAYS = {
    "torch.save": through_torch,
    "pickle": lambda data: pickle.loads(pickle.dumps(data)),
    "queue": through_a_queue,
    "deepcopy": copy.deepcopy,
}


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def way(request):
    return request.param


def assert_same(after, before):
    assert after.keys() == before.keys()
    for name in before:
        assert after[name].device == before[name].device
        assert bits(after[name]) == bits(before[name]), name


# --- every way ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [d for d in DTYPES if has_elements(d)], ids=str)
def test_every_dtype_goes_through_every_way(dtype, way):
    for shape in [(), (0, 3), (2, 3)]:
        before = random_bits(dtype, shape).to("ltc:0")
        after = way(before)
        assert (after.dtype, after.shape, str(after.device)) == (dtype, before.shape, "ltc:0")
        assert bits(after) == bits(before)


def test_a_tensor_may_want_a_gradient_before_and_after(way):
    assert way(torch.ones(2, device="ltc", requires_grad=True)).requires_grad
    assert not way(torch.ones(2, device="ltc")).requires_grad
    parameter = way(nn.Parameter(torch.ones(2, device="ltc")))
    assert type(parameter) is nn.Parameter and parameter.requires_grad


class Named(torch.Tensor):
    """A subclass that does nothing of its own."""


KINDS = {
    "tensor": lambda: torch.ones(2, device="ltc", requires_grad=True),
    "parameter": lambda: nn.Parameter(torch.ones(2, device="ltc")),
    "buffer": lambda: nn.Buffer(torch.ones(2, device="ltc")),
    "subclass": lambda: torch.ones(2, device="ltc").as_subclass(Named),
    "result": lambda: torch.ones(2, device="ltc", requires_grad=True) * 1,
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_copy_has_the_class_and_the_attributes_of_its_original(make):
    before = make()
    before.note = ["mine"]
    if before.requires_grad and before.is_leaf:
        before.grad = torch.ones(2, device="ltc")
    after = copy.copy(before)
    assert type(after) is type(before) and after.note is before.note
    assert after.requires_grad == before.requires_grad
    assert not after.is_leaf or after.grad is None
    with torch.no_grad():
        after.add_(1)
    assert before.tolist() == [1, 1]


def test_a_hook_that_does_not_go_through_is_warned_of():
    x = torch.ones(2, device="ltc", requires_grad=True)
    x.register_hook(print)
    for name in ("torch.save", "pickle", "queue"):
        with pytest.warns(UserWarning, match="backward hook .* will not be serialized"):
            WAYS[name](x)


def test_a_result_with_a_history_goes_through_no_queue():
    with pytest.raises(RuntimeError, match="refusing to serialize non-leaf tensor"):
        through_a_queue(torch.ones(2, device="ltc", requires_grad=True) * 2)


def test_a_state_dict_keeps_its_ties(way):
    state = trained()[0].state_dict()
    after = way(state)
    assert_same(after, state)
    after["first.weight"].fill_(3)
    assert after["last.weight"].eq(3).all() and not state["first.weight"].eq(3).any()


def test_an_optimizers_state_goes_through(way):
    _, optimizer = trained()
    after = way(optimizer.state_dict())
    for number, state in optimizer.state_dict()["state"].items():
        assert_same(after["state"][number], state)


@pytest.mark.parametrize("name", ["pickle", "queue", "deepcopy"])
def test_a_module_keeps_its_ties(name):
    model, _ = trained()
    after = WAYS[name](model)
    assert after.first.weight is after.last.weight
    assert_same(after.state_dict(), model.state_dict())
    assert not after.last.bias.requires_grad


def test_a_module_saved_whole_keeps_its_ties():
    model, _ = trained()
    after = through_torch(model, weights_only=False)
    assert after.first.weight is after.last.weight and after.norm.running_mean.device.type == "ltc"


def test_equal_values_of_one_program_are_not_tied(way):
    state = {"ones": torch.ones(2, device="ltc"), "others": torch.ones(2, device="ltc")}
    ltm.mark_step()
    after = way(state)
    after["ones"].add_(1)
    assert after["others"].tolist() == state["ones"].tolist() == [1, 1]


def test_threads_save_one_tensor_at_the_same_time():
    x = torch.ones(100_000, device="ltc")
    with ThreadPoolExecutor(4) as pool:
        saved = list(pool.map(lambda _: through_torch([x, x.detach()]), range(40)))
    assert {str(t.device) for pair in saved for t in pair} == {"ltc:0"}


def test_a_module_made_on_the_device_is_saved_and_loaded():
    with torch.device("ltc"):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    assert_same(through_torch(model.state_dict()), model.state_dict())


def test_a_view_alone_is_saved_as_what_it_shows(way):
    x = torch.arange(12.0, device="ltc").reshape(3, 4)
    assert way(x.t()[1:]).tolist() == x.cpu().t()[1:].tolist()


def test_a_moving_average_is_a_copy_of_its_own():
    model, _ = trained()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    before = averaged.module.first.weight.clone()
    with torch.no_grad():
        model.first.weight.add_(1)
    averaged.update_parameters(model)
    assert not torch.equal(averaged.module.first.weight.cpu(), before.cpu())


# --- torch.save ---------------------------------------------------------------------------------


@pytest.mark.devices(4)
@pytest.mark.parametrize(
    "target, device",
    [
        (None, "ltc:2"),
        ("cpu", "cpu"),
        (torch.device("cpu"), "cpu"),
        ({"ltc:2": "cpu"}, "cpu"),
        (lambda storage, location: storage, "cpu"),
        ("ltc:1", "ltc:1"),
        ({"ltc:2": "ltc:3"}, "ltc:3"),
    ],
)
def test_map_location_is_honoured(target, device):
    x = torch.arange(3.0, device="ltc:2")
    loaded = through_torch([x, x.detach()], map_location=target)
    assert [str(t.device) for t in loaded] == [device, device]
    loaded[0].add_(1)
    assert loaded[1].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: x + 1,
        lambda x: x[2:6],
        lambda x: x.reshape(3, 4).t(),
        lambda x: (x + 1).double()[:0],
        lambda x: x[2:3].expand(20),
        lambda x: (x + 1).expand(3, 12),
    ],
)
def test_the_bytes_of_a_storage_are_copied_pending_or_not(make):
    """The stager of torch.distributed.checkpoint.async_save does it so."""
    x = make(torch.arange(12.0, device="ltc"))
    storage = x.untyped_storage()
    copied = torch.UntypedStorage(storage.size()).copy_(storage)
    shown = torch.empty(0, dtype=x.dtype).set_(copied, x.storage_offset(), x.size(), x.stride())
    assert torch.equal(shown, x.cpu())


class SharedHalves(nn.Module):
    """One weight in two layers, and on ltc two buffers that are parts of one memory and share nothing."""

    def __init__(self, device):
        super().__init__()
        self.first, self.last = nn.Linear(20, 20), nn.Linear(20, 20)
        self.last.weight = self.first.weight
        self.to(device)
        whole = torch.arange(40.0, device=device)
        halves = whole.split(20) if device == "ltc" else [x.clone() for x in whole.split(20)]
        self.register_buffer("low", halves[0])
        self.register_buffer("high", halves[1])


def test_safetensors_writes_a_shared_weight_once(tmp_path):
    sizes = []
    for device in ("cpu", "ltc"):
        model, path = SharedHalves(device), tmp_path / f"{device}.safetensors"
        safetensors.torch.save_model(model, str(path))
        sizes.append(path.stat().st_size)
        other = SharedHalves("ltc")
        assert safetensors.torch.load_model(other, str(path)) == (set(), [])
        for name, tensor in other.state_dict().items():
            assert torch.equal(tensor.cpu(), model.state_dict()[name].cpu())
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("part", [lambda x: x, lambda x: x[1:3], lambda x: x.view(-1)])
def test_safetensors_refuses_tensors_that_share_as_on_the_cpu(part, tmp_path):
    for device in ("cpu", "ltc"):
        x = torch.ones(4, 4, device=device)
        with pytest.raises(RuntimeError, match="share memory"):
            safetensors.torch.save_file({"a": x, "b": part(x)}, str(tmp_path / "file"))
    x = torch.arange(8.0, device="ltc")
    safetensors.torch.save_file({"a": x[:4], "b": x[4:]}, str(tmp_path / "file"))
    assert safetensors.torch.load_file(str(tmp_path / "file"))["b"].tolist() == [4, 5, 6, 7]


def test_a_copy_on_the_cpu_is_saved_as_one_of_the_cpu():
    x = torch.arange(3.0, device="ltc")
    through_torch(x)
    assert through_torch([x.cpu(), x.detach().cpu()])[0].device.type == "cpu"


def test_a_file_of_the_cpu_loads_to_the_device():
    model = Tied()
    loaded = through_torch(model.state_dict(), map_location="ltc")
    loaded["first.weight"].fill_(2)
    assert loaded["last.weight"].eq(2).all()


@pytest.mark.devices(4)
@pytest.mark.parametrize("location", [None, "cpu", "ltc:1"])
@pytest.mark.parametrize("device", ["cpu", "ltc"])
def test_files_of_the_old_format_load(device, location):
    """Their tensors are made first; what these hold stands behind all of them."""
    model, file = Tied().to(device), io.BytesIO()
    state = {**model.state_dict(), "half": torch.ones(3, device=device, dtype=torch.bfloat16)}
    torch.save(state, file, _use_new_zipfile_serialization=False)
    file.seek(0)
    loaded = torch.load(file, map_location=location)
    wanted = torch.device(location or ("ltc:0" if device == "ltc" else "cpu"))
    assert {value.device for value in loaded.values()} == {wanted}
    assert all(bits(loaded[name]) == bits(value) for name, value in state.items())
    loaded["first.weight"].fill_(2)
    assert loaded["last.weight"].eq(2).all()


def test_a_storage_is_saved_with_what_it_holds():
    x = torch.arange(3.0, device="ltc") + 1  # pending
    storage = through_torch(x.untyped_storage(), weights_only=False)
    assert torch.empty(0, device="ltc").set_(storage.untyped()).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[0:2],
        lambda t: t[:],
        lambda t: t.view(4, 4),
        lambda t: t.t(),
        lambda t: t.view(16),
    ],
)
def test_160_a_tensor_and_a_view_of_it_can_not_be_saved_together(view, error_of):
    t = torch.zeros(4, 4, device="ltc")
    text = error_of(lambda: through_torch((t, view(t))))
    assert re.match(r"Tensor ID \d+ .*is sharing a view with tensor ID \d+", text)


def run_plain(code, *arguments, **environment):
    """Run code in a fresh interpreter; returns what it printed."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        timeout=1200,
    ).stdout


WITHOUT_LTC = """
import sys, torch
print(torch.load(sys.argv[1], map_location="cpu")["x"].tolist())
try:
    torch.load(sys.argv[1])
except RuntimeError as error:
    print(error)
assert "ltc" not in sys.modules
"""


@pytest.mark.devices(4)
def test_a_saved_tensor_loads_without_ltc_onto_the_cpu_or_says_what_is_missing(tmp_path):
    torch.save({"x": torch.arange(3, device="ltc:2")}, tmp_path / "x")
    # which ltc would otherwise be found by torch, where it is installed
    printed = run_plain(WITHOUT_LTC, tmp_path / "x", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert "[0, 1, 2]" in printed and "ltc:2" in printed


ON_ONE_DEVICE = """
import pickle, sys, torch, ltc
for load in (lambda: torch.load(sys.argv[1]), lambda: pickle.load(open(sys.argv[2], "rb"))):
    try:
        load()
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.devices(4)
def test_159_a_tensor_of_a_device_that_is_missing_is_an_error_that_names_it(tmp_path):
    x = torch.ones(2, device="ltc:3")
    torch.save(x, tmp_path / "x")
    (tmp_path / "p").write_bytes(pickle.dumps(x))
    printed = run_plain(ON_ONE_DEVICE, tmp_path / "x", tmp_path / "p", LTC_NUM_DEVICES="1")
    assert "LTC device 3" in printed and "ltc:3 does not exist" in printed


FUNCTIONS = """torch.flatten torch.ravel torch.reshape torch.save torch.serialization.save
    torch.jit.save torch.jit.load torch.Tensor.contiguous torch.Tensor.flatten torch.Tensor.ravel
    torch.Tensor.reshape torch.Tensor.reshape_as torch.tensor torch.Tensor.to"""


@pytest.mark.devices(2)
@pytest.mark.parametrize("name", FUNCTIONS.split())
def test_a_function_of_torch_is_pickled_by_its_name(name):
    with torch.ltc.device(1):  # where a few more are replaced
        function = eval(name)
        assert pickle.loads(pickle.dumps(function)) is function


PLAIN_MODEL = """
import sys, torch
print(torch.load(sys.argv[1], map_location="cpu", weights_only=False).function(torch.ones(2, 2)))
assert "ltc" not in sys.modules
"""


def test_a_model_that_holds_a_function_of_torch_is_saved_and_loads_without_ltc(tmp_path):
    model = nn.Linear(2, 2).to("ltc")
    model.function = torch.flatten
    torch.save(model, tmp_path / "x")
    printed = run_plain(PLAIN_MODEL, tmp_path / "x", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert printed == "tensor([1., 1., 1., 1.])\n"


# --- ltm.save -----------------------------------------------------------------------------------


def test_149_a_saved_state_is_on_the_cpu_and_needs_no_ltc(tmp_path):
    model, _ = trained()
    ltm.save(model.state_dict(), tmp_path / "x")
    code = "import sys, torch; s = torch.load(sys.argv[1], weights_only=True)\n"
    code += "assert 'ltc' not in sys.modules; print({t.device.type for t in s.values()}, len(s))"
    assert run_plain(code, tmp_path / "x") == f"{{'cpu'}} {len(model.state_dict())}\n"


def test_149_tied_tensors_are_tied_in_the_file(tmp_path):
    ltm.save(trained()[0].state_dict(), tmp_path / "x")
    loaded = torch.load(tmp_path / "x")
    loaded["first.weight"].fill_(2)
    assert loaded["last.weight"].eq(2).all()


@pytest.mark.native("it counts the programs that are compiled")
def test_everything_pending_is_computed_by_one_program(tmp_path):
    a = torch.ones(3, device="ltc")
    data = [a + 1, {"x": (a + 1) * 2}, a - 1]
    with metrics.counted() as grown:
        ltm.save(data, tmp_path / "x")
    assert grown.get("CachedCompile", 0) + grown.get("UncachedCompile", 0) == 1
    assert torch.load(tmp_path / "x")[1]["x"].tolist() == [4, 4, 4]


def test_only_the_master_writes_and_nobody_waits(tmp_path, monkeypatch):
    monkeypatch.setenv("XRT_SHARD_ORDINAL", "1")
    monkeypatch.setenv("XRT_SHARD_LOCAL_ORDINAL", "1")
    monkeypatch.setenv("XRT_SHARD_WORLD_SIZE", "2")
    x = torch.ones(2, device="ltc")
    xser.save(x, tmp_path / "x")
    saving.save_for_cpu(x, tmp_path / "x", write=False)
    assert not list(tmp_path.iterdir())
    xser.save(x, tmp_path / "mine", master_only=False)
    monkeypatch.setenv("XRT_SHARD_LOCAL_ORDINAL", "0")
    xser.save(x, tmp_path / "local")
    xser.save(x, tmp_path / "global", global_master=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["local", "mine"]


def test_153_a_save_after_an_update_in_place_has_the_new_value(tmp_path):
    x = torch.zeros(3, device="ltc")
    for step in range(3):
        x.add_(1)
        xser.save(x, tmp_path / "x")
        assert xser.load(tmp_path / "x").tolist() == [step + 1] * 3
    x.add_(1)
    assert x.tolist() == [4, 4, 4]


# --- other libraries ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "export",
    [
        torch.to_dlpack,
        torch.utils.dlpack.to_dlpack,
        lambda x: x.__dlpack__(),
        lambda x: x.__dlpack__(max_version=(1, 0)),
        numpy.from_dlpack,
    ],
)
def test_the_memory_of_a_tensor_is_shared_with_no_other_library(export):
    with pytest.raises(BufferError, match="no memory that another library could share"):
        export(torch.arange(3.0, device="ltc"))


def test_copies_on_the_cpu_go_to_other_libraries_and_back():
    x = torch.arange(3.0, device="ltc")
    assert numpy.from_dlpack(x.cpu()).tolist() == [0, 1, 2]
    assert torch.from_dlpack(x.__dlpack__(dl_device=(1, 0))).tolist() == [0, 1, 2]
    assert torch.from_dlpack(numpy.arange(3), device="ltc").is_ltc


def test_safetensors_saves_lazy_tensors(tmp_path):
    state = {"x": torch.arange(3.0, device="ltc"), "y": torch.ones(2, 2, device="ltc").bfloat16()}
    safetensors.torch.save_file(state, tmp_path / "x")
    loaded = safetensors.torch.load_file(tmp_path / "x")
    assert loaded["x"].tolist() == [0, 1, 2] and loaded["y"].dtype == torch.bfloat16


def test_safetensors_saves_and_loads_a_tied_model(tmp_path):
    model, fresh = trained()[0], Tied().to("ltc")
    safetensors.torch.save_model(model, tmp_path / "x")
    safetensors.torch.load_model(fresh, tmp_path / "x")
    assert_same(fresh.state_dict(), model.state_dict())


def test_save_pretrained_finds_the_ties_and_no_others():
    """transformers groups tensors by (device, address of the storage, its size)."""
    groups = {}
    for name, tensor in trained()[0].state_dict().items():
        storage = tensor.untyped_storage()
        groups.setdefault((tensor.device, storage.data_ptr(), storage.nbytes()), set()).add(name)
    shared = [names for names in groups.values() if len(names) > 1]
    assert shared == [{"first.weight", "last.weight"}]


@pytest.mark.filterwarnings("ignore")
def test_distributed_checkpoints_of_one_process(tmp_path):
    import torch.distributed.checkpoint as dcp

    model, optimizer = trained()
    dcp.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        checkpoint_id=tmp_path / "x",
    )
    fresh = Tied().to("ltc")
    dcp.load({"model": fresh.state_dict()}, checkpoint_id=tmp_path / "x")
    assert_same(fresh.state_dict(), model.state_dict())


class GpuModule:
    """What the writer of distributed checkpoints asks of a GPU's module."""

    class Stream:
        def synchronize(self):
            pass

    stream_now = Stream()

    def current_stream(self):
        return self.stream_now

    def stream(self, stream):
        return nullcontext(stream)


@pytest.mark.filterwarnings("ignore")
def test_distributed_checkpoints_are_written_beside_a_gpu(monkeypatch, tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import filesystem

    monkeypatch.setattr(filesystem, "_get_available_device_type", lambda: "cuda")
    monkeypatch.setattr(filesystem, "_get_device_module", lambda device_type: GpuModule())
    weights = {"w": torch.arange(6.0).to("ltc").view(2, 3), "n": torch.tensor(3, device="ltc")}
    dcp.save(weights, checkpoint_id=tmp_path / "x")
    found = {"w": torch.zeros(2, 3), "n": torch.tensor(0)}
    dcp.load(found, checkpoint_id=tmp_path / "x")
    assert_same(found, {name: weight.cpu() for name, weight in weights.items()})


# --- whole or not at all ------------------------------------------------------------------------

SAVES = {"xser": (xser.save, xser.load), "ltm": (ltm.save, torch.load)}


@pytest.fixture(params=SAVES.values(), ids=SAVES)
def saves(request):
    return request.param


@contextmanager
def files_of_at_most(nbytes):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_without_room_leaves_the_old_file(saves, tmp_path):
    save, load = saves
    save([torch.ones(2)], tmp_path / "x")
    with files_of_at_most(1 << 20), pytest.raises(OSError, match="Could not save .*x.*unchanged"):
        save([torch.zeros(1 << 20)], tmp_path / "x")
    assert load(tmp_path / "x")[0].tolist() == [1, 1]
    assert [file.name for file in tmp_path.iterdir()] == ["x"]


def test_a_full_disk_says_how_much_was_needed(tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(xser, "_stream", fail)
    with pytest.raises(OSError, match=r"of \d+ bytes: No space left on device; nothing") as caught:
        xser.save(torch.ones(2), tmp_path / "x")
    assert caught.value.errno == errno.ENOSPC and not list(tmp_path.iterdir())


def test_a_folder_that_is_missing_is_named(saves, tmp_path):
    with pytest.raises(FileNotFoundError, match="Could not save .*nowhere"):
        saves[0]([1], tmp_path / "nowhere" / "x")


def test_a_folder_that_vanishes_meanwhile_is_an_error(tmp_path, monkeypatch):
    folder, stream = tmp_path / "folder", xser._stream
    folder.mkdir()

    def vanish(*arguments):
        shutil.rmtree(folder)
        return stream(*arguments)

    monkeypatch.setattr(xser, "_stream", vanish)
    with pytest.raises(FileNotFoundError, match="Could not save .*nothing was written"):
        xser.save(torch.ones(2), folder / "x")


def test_a_folder_one_may_not_write_to_leaves_the_old_file(saves, tmp_path):
    save, load = saves
    save([1], tmp_path / "x")
    tmp_path.chmod(0o555)
    user = os.geteuid()
    tmp_path.parent.chmod(0o755)
    try:
        if user == 0:  # whom no permission stops
            os.seteuid(65534)
        with pytest.raises(PermissionError, match="Could not save .*Permission denied"):
            save([2], tmp_path / "x")
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o755)
    assert load(tmp_path / "x") == [1]


@contextmanager
def pipe_in(folder):
    """(The path of a pipe, what is read from it until its end)."""
    path, read = folder / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()), daemon=True)
    reader.start()
    yield path, read
    assert stat.S_ISFIFO(path.stat().st_mode) and os.listdir(folder) == [path.name]
    reader.join()


def test_a_pipe_or_a_device_is_written_to_and_stays(tmp_path):
    with pipe_in(tmp_path) as (path, read):
        ltm.save({"x": torch.arange(3.0, device="ltc")}, path)
    assert torch.load(io.BytesIO(read[0]))["x"].tolist() == [0, 1, 2]


def test_a_pipe_takes_no_file_whose_start_is_written_last(tmp_path):
    with pipe_in(tmp_path) as (path, _), pytest.raises(OSError, match="Could not save .*pipe"):
        xser.save({"x": torch.arange(3.0, device="ltc")}, path)


def test_what_killed_saves_left_behind_is_removed_by_the_next(tmp_path):
    """Of this path and of others in the folder, at once; what lives, or is another's, stays."""
    older, left, of_another = (
        tmp_path / name
        for name in (
            f".x.{'a' * 32}",
            f".x.{'b' * 32}.ltc-unfinished",
            f".y.{'c' * 32}.ltc-unfinished",
        )
    )
    others = [tmp_path / name for name in (".x.backup", f".y.{'d' * 32}", "x.ltc-unfinished")]
    for file in (older, left, of_another, *others):
        file.write_bytes(b"half")
    with atomic_file.replacing(tmp_path / "y") as in_use:
        xser.save([1], tmp_path / "x")
        assert not older.exists() and not left.exists() and not of_another.exists()
        assert Path(in_use.name).exists() and all(file.exists() for file in others)
    assert sorted(f.name for f in tmp_path.iterdir()) == sorted(
        ["x", "y", *(f.name for f in others)]
    )


def test_a_file_that_was_taken_for_abandoned_is_made_again(tmp_path, monkeypatch):
    """Another save looks between the making of a file and its lock."""
    made, real = [], builtins.open

    def opened(path, mode="r", *args, **kwargs):
        file = real(path, mode, *args, **kwargs)
        if mode == "xb":
            made.append(path)
            if len(made) == 1:
                atomic_file.remove_abandoned(tmp_path / "y")
                assert not path.exists()
        return file

    monkeypatch.setattr(builtins, "open", opened)
    xser.save([1], tmp_path / "x")
    monkeypatch.undo()
    assert len(made) == 2 and xser.load(tmp_path / "x") == [1] and os.listdir(tmp_path) == ["x"]


def test_a_file_is_held_until_it_is_in_its_place(tmp_path, monkeypatch):
    """Another save that tidies up just before the rename takes nothing away."""
    rename = os.replace

    def rename_after_another_began(beside, path) -> None:
        atomic_file.remove_abandoned(tmp_path / "y")
        rename(beside, path)

    monkeypatch.setattr(os, "replace", rename_after_another_began)
    with atomic_file.replacing(tmp_path / "x") as file:
        file.write(b"whole")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"whole"]


def test_where_there_are_no_locks_a_file_is_abandoned_after_a_minute(tmp_path, monkeypatch):
    def flock(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    fresh, old = (tmp_path / f".x.{digit * 32}.ltc-unfinished" for digit in "ab")
    for file in (fresh, old):
        file.write_bytes(b"half")
    os.utime(old, (0, 0))
    xser.save([1], tmp_path / "x")
    assert fresh.exists() and not old.exists() and xser.load(tmp_path / "x") == [1]


@pytest.mark.parametrize("name", kill_saves.WAYS)
def test_a_crash_loop_leaves_one_file_at_most(name):
    """8 of the 50 kills of scripts/stress/kill_saves.py --crash-loop."""
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/stress/kill_saves.py", "--crash-loop", "--count", "8", "--way",
         name], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", kill_saves.WAYS)
def test_a_killed_save_leaves_the_old_file_or_the_new(name):
    """7 of the 200 kills of scripts/stress/kill_saves.py, in a process without threads to fork."""
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/stress/kill_saves.py", "--count", "7", "--way", name],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore")
def test_damaged_and_crafted_files_are_refused_or_harmless():
    """200 of the 10 000 files of scripts/stress/fuzz_checkpoints.py."""
    assert fuzz_checkpoints.run(first=0, count=200) == {}


@pytest.mark.parametrize("places", [{"ltc:0": "cpu"}, lambda storage, place: storage, 1.5])
def test_a_map_location_that_is_no_one_device_is_refused(places, tmp_path):
    xser.save({"x": torch.ones(2, device="ltc")}, tmp_path / "x")
    with pytest.raises(
        TypeError, match=f"is a {type(places).__name__}, but.*all are loaded to one"
    ):
        xser.load(tmp_path / "x", map_location=places)


def test_a_map_location_that_is_missing_is_no_damage_to_the_file(tmp_path):
    xser.save({"x": torch.ones(2, device="ltc")}, tmp_path / "x")
    with pytest.raises((AssertionError, RuntimeError), match="not compiled with CUDA|No CUDA"):
        xser.load(tmp_path / "x", map_location="cuda")
