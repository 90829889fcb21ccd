"""The vendor interface: what a backend outside the package can do, and what its errors say."""

import itertools
import os
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch import nn

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.backends import interface
from ltc.backends.interface import BackendRegistrar
from ltc.debug import environment, graphs, metrics
from ltc.errors import BackendMissing, InvalidGraph, OutOfMemory
from ltc.ir import build, ops
from ltc.ir.graph import Graph
from ltc.ir.node import make
from ltc.runtime.partition import compile_in_segments

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
import toy_vendor
from toy_vendor import ToyBackend

DTYPE = torch.float64


def train_mlp(device, steps=5):
    """Losses and parameters of a network with a hidden layer, after a few steps of Adam."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).to(DTYPE)
    inputs, targets = torch.randn(8, 6, dtype=DTYPE), torch.randn(8, 3, dtype=DTYPE)
    model, inputs, targets = model.to(device), inputs.to(device), targets.to(device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        if device != "cpu":
            ltm.mark_step()
        losses.append(loss.detach())
    return [t.detach().cpu() for t in (*losses, *model.parameters())]


def test_the_toy_vendor_trains_an_mlp_and_cuts_nothing_out():
    with config.override(LTC_BACKEND="toy"), metrics.counted() as grown:
        on_toy = train_mlp("ltc")
    assert grown["UncachedCompile"] >= 1
    assert not [name for name in grown if name.startswith("CutOut::")]
    for ours, theirs in zip(on_toy, train_mlp("cpu"), strict=True):
        # NumPy sums in another order: a few units in the last place, over five steps
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_a_primitive_that_the_vendor_lacks_is_cut_out_and_counted():
    torch.manual_seed(0)
    x, index = torch.randn(4, 5, dtype=DTYPE), torch.tensor([[0, 4], [1, 1], [2, 3], [0, 0]])
    with config.override(LTC_BACKEND="toy"), metrics.counted() as grown:
        result = ((x.to("ltc") * 2).gather(1, index.to("ltc")) + 1).cpu()
    assert grown["CutOut::gather"] == 1
    assert torch.equal(result, (x * 2).gather(1, index) + 1)


def test_a_dtype_that_the_vendor_lacks_is_cut_out_too():
    x = torch.arange(6).to(torch.bfloat16)
    with config.override(LTC_BACKEND="toy"), metrics.counted() as grown:
        result = (x.to("ltc") * 2).float().cpu()
    assert grown["CutOut::cast"] >= 1
    assert torch.equal(result, (x * 2).float())


def test_outputs_of_a_program_in_parts_that_lie_in_one_place_are_known():
    """Whoever writes over one of them has to know; an input that is an output lies apart."""
    with config.override(LTC_BACKEND="toy"):
        x = make(ops.INPUT, index=0, dtype=DTYPE, shape=(2, 2))
        index = make(ops.INPUT, index=1, dtype=torch.int64, shape=(2, 1))
        picked = make(ops.GATHER, x, index, dim=1)
        doubled = x + x
        graph = Graph((x, index), (), (doubled, picked, x, doubled, picked), {})
        computation = compile_in_segments(ToyBackend(), graph, 0)
        given = torch.ones(2, 2, dtype=DTYPE), torch.tensor([[1], [0]])
        buffers = [computation.upload(one, 0) for one in given]
        outputs = computation.launch(buffers, [])
    assert computation.capabilities.aliased_outputs == ((0, 3), (1, 4))
    assert outputs[2] is not buffers[0]
    for position, value in enumerate([2, 1, 1, 2, 1]):
        assert (computation.download(outputs[position]) == value).all()


class OwnWords(toy_vendor.ToyComputation):
    """A program that can be printed in the backend's own words."""

    @property
    def capabilities(self):
        return interface.ComputationCapabilities(text=lambda: "two arrays and a plus")


class Describing(ToyBackend):
    """A backend that has stages of its own to show."""

    capabilities = interface.BackendCapabilities(
        stages=("arrays",), explain=lambda graph: iter([("arrays", f"{len(graph.inputs)} arrays")])
    )

    def compile(self, graph, device, donated):
        return OwnWords(graph)


def test_what_a_backend_and_its_programs_offer_besides_is_used(tmp_path):
    BackendRegistrar.register("describing", Describing)
    path = tmp_path / "graphs"
    as_text = {"LTC_SAVE_TENSORS_FILE": str(path), "LTC_SAVE_TENSORS_FMT": "backend"}
    with config.override(LTC_BACKEND="describing", **as_text):
        x = torch.ones(2).to("ltc")
        pending = x + 1
        assert graphs.stages()[-1] == "arrays"
        assert graphs.text(pending, stage="arrays") == "1 arrays"
        ltm.mark_step(wait=True)
    assert "two arrays and a plus" in path.read_text()


def test_a_backend_that_declares_nothing_besides_can_do_nothing_besides():
    assert interface.BackendCapabilities.of(ToyBackend()) == interface.BackendCapabilities()


def test_members_of_the_fields_names_count_where_nothing_is_declared():
    class Staged(ToyBackend):
        stages = ("arrays",)

    assert interface.BackendCapabilities.of(Staged()).stages == ("arrays",)


def test_a_step_of_another_backend_imports_nothing_of_llvm():
    program = """
import os, sys, torch, ltc, ltc.core.lazy_model as ltm
model = torch.nn.Linear(3, 2).to("ltc")
with ltc.profile(os.devnull):
    model(torch.ones(4, 3).to("ltc")).sum().backward()
    ltm.mark_step(wait=True)
found = [n for n in sys.modules if n.startswith(("ltc.llvm", "ltc.backends.llvm", "llvmlite", "jax"))]
assert not found, found
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "LTC_BACKEND": "eager", "LTC_NATIVE": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


class Copying(ToyBackend):
    """A backend that copies on its device, and says what that is."""

    copied = 0

    @staticmethod
    def copy(buffer):
        Copying.copied += 1
        return buffer.copy()

    @staticmethod
    def describe():
        return "an abacus"


def test_a_backend_that_copies_is_asked_to():
    BackendRegistrar.register("copying", Copying)
    with config.override(LTC_BACKEND="copying"):
        x = make(ops.INPUT, index=0, dtype=DTYPE, shape=(2,))
        index = make(ops.INPUT, index=1, dtype=torch.int64, shape=(2,))
        graph = Graph((x, index), (), (x, make(ops.GATHER, x, index, dim=0)), {})
        computation = compile_in_segments(Copying(), graph, 0)
        given = torch.ones(2, dtype=DTYPE), torch.tensor([1, 0])
        buffers = [computation.upload(one, 0) for one in given]
        outputs = computation.launch(buffers, [])
        assert "an abacus" in environment.describe()
    assert Copying.copied == 1 and outputs[0] is not buffers[0]


class Restoring(toy_vendor.ToyComputation):
    """A program that overwrites its input before it fails, and gives the value back elsewhere."""

    def launch(self, buffers, scalars):
        kept = buffers[0].copy()
        buffers[0][:] = -1
        error = RuntimeError("the device says no")
        error.restored = {0: kept}
        raise error


def test_what_a_failed_launch_restores_is_there_again():
    class Failing(ToyBackend):
        def compile(self, graph, device, donated):
            computation = Restoring if donated else toy_vendor.ToyComputation
            return computation(graph)

    BackendRegistrar.register("failing", Failing)
    with config.override(LTC_BACKEND="failing"):
        x = torch.ones(3).to("ltc")
        ltm.mark_step(wait=True)
        x += 1
        with pytest.raises(RuntimeError, match="the device says no"):
            ltm.mark_step(wait=True)
        assert torch.equal(x.cpu(), torch.ones(3))


def test_an_error_of_the_vendors_launch_reaches_the_reader():
    with config.override(LTC_BACKEND="toy"):
        zero = torch.zeros(3, dtype=torch.int64).to("ltc")
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            (7 // zero).cpu()


def test_the_toy_vendor_claims_what_it_promises():
    kinds = {"elementwise", "reduce", "view", "pad", "concat", "insert", "matmul"}
    promised = {op for op in ops.ALL.values() if op.kind in kinds}
    assert promised <= set(ToyBackend.lowering.table)
    assert len((ROOT / "tests" / "toy_vendor.py").read_text().splitlines()) <= 160


ELEMENTWISE = [op for op in ops.ALL.values() if op.kind == "elementwise"]
WITH_ATTRIBUTES = {ops.CAST: {"dtype": torch.int32}, ops.BITCAST: {"dtype": torch.int64}}
WITH_ATTRIBUTES[ops.WRAP_INDEX] = {"size": 9, "lowest": -9, "message": "{}"}
WITH_ATTRIBUTES[ops.CHECK] = {"message": "{}"}
INTEGRAL = {ops.NOT, ops.AND, ops.OR, ops.XOR, ops.SHIFT_LEFT, ops.SHIFT_RIGHT, ops.WRAP_INDEX}
UNARY = set(ELEMENTWISE[: ELEMENTWISE.index(ops.ADD)]) | set(WITH_ATTRIBUTES)


@pytest.mark.parametrize("op", ELEMENTWISE, ids=lambda op: op.name)
def test_each_elementwise_row_computes_what_the_reference_computes(op):
    first = torch.tensor([-7.5, -2.0, -0.25, 0.0, 0.5, 0.75, 3.0, 8.0], dtype=DTYPE)
    second = torch.tensor([2.0, -3.0, 0.5, 1.5, -0.5, 2.0, 2.5, 3.0], dtype=DTYPE)
    if op in INTEGRAL:
        first, second = first.to(torch.int64), second.to(torch.int64).abs()
    values = [first] if op in UNARY else [first, second]
    if op is ops.WHERE:
        values = [first > 0, first, second]
    if op is ops.CHECK:
        values = [first, first == first]
    nodes = [
        make(ops.INPUT, index=index, dtype=value.dtype, shape=tuple(value.shape))
        for index, value in enumerate(values)
    ]
    graph = Graph(tuple(nodes), (), (make(op, *nodes, **WITH_ATTRIBUTES.get(op, {})),))
    ours, theirs = (_launch(name, graph, values) for name in ("toy", "eager"))
    # two implementations of one function: digamma's series is the least exact, about 1e-11
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10, equal_nan=True)


def _launch(name, graph, values):
    backend = BackendRegistrar.get(name)
    computation = backend.compile(graph, 0, frozenset())
    buffers = [backend.computation.upload(value, 0) for value in values]
    (result,) = computation.launch(buffers, [])
    return backend.computation.download(result)


def test_movement_and_reductions_compute_what_the_reference_computes():
    x = make(ops.INPUT, index=0, dtype=DTYPE, shape=(3, 4))
    filler, corner = (
        build.constant(0.5, DTYPE),
        {"starts": (0, 0), "limits": (3, 2), "steps": (1, 1)},
    )
    for node in (
        make(ops.PERMUTE, x, dims=(1, 0)),
        make(ops.SLICE, x, starts=(0, 1), limits=(3, 4), steps=(2, 2)),
        make(ops.EXPAND, x, shape=(2, 3, 4)),
        make(ops.RESHAPE, x, shape=(2, 6)),
        make(ops.FLIP, x, dims=(1,)),
        make(ops.PAD, x, filler, low=(1, 0), high=(0, 2)),
        make(ops.CONCAT, x, x, dim=1),
        make(ops.INSERT, x, make(ops.SLICE, x, **corner), starts=(0, 1), steps=(1, 2)),
        make(ops.SUM, x, dims=(0, 1)),
        make(ops.PROD, x, dims=(1,)),
        make(ops.MAX, x, dims=(0,)),
        make(ops.MIN, x, dims=(1,)),
        make(ops.ARGMAX, x, dim=1),
        make(ops.ARGMIN, x, dim=0),
        make(ops.ANY, make(ops.CAST, x, dtype=torch.bool), dims=(0,)),
        make(ops.ALL_TRUE, make(ops.CAST, x, dtype=torch.bool), dims=(0,)),
        make(ops.MATMUL, x, make(ops.PERMUTE, x, dims=(1, 0))),
    ):
        values = [torch.tensor([[3.0, 1, 0, 2], [7, 2, 9, -4], [1, 1, 5, 5]], dtype=DTYPE)]
        graph = Graph((x,), (), (node,))
        ours, theirs = (_launch(name, graph, values) for name in ("toy", "eager"))
        torch.testing.assert_close(ours, theirs, msg=lambda text: f"{node}: {text}")


def test_a_missing_backend_is_named_with_the_nearest_one():
    with pytest.raises(BackendMissing, match=r"no backend called 'toi'.*mean 'toy'.*ltc\.backends"):
        BackendRegistrar.get("toi")


def test_running_on_a_missing_backend_names_it():
    with config.override(LTC_BACKEND="warp_drive"):
        with pytest.raises(BackendMissing, match="no backend called 'warp_drive'"):
            (torch.ones(2, device="ltc") + 1).cpu()


def test_an_incomplete_backend_is_told_what_it_lacks():
    class Half:
        name, lowering, computation = "half", ToyBackend.lowering, toy_vendor.ToyComputation

        def devices(self):
            return ()

    BackendRegistrar.register("half", Half)
    lacking = "Half is not a BackendImplInterface: it lacks compile, prepare_to_exit"
    with pytest.raises(TypeError, match=lacking):
        BackendRegistrar.get("half")


def test_an_incomplete_computation_is_told_what_it_lacks():
    class Deaf:
        def launch(self, buffers, scalars):
            return buffers

    class Backend(ToyBackend):
        computation = Deaf

    BackendRegistrar.register("deaf", Backend)
    lacking = "Deaf is not a Computation: it lacks upload, download, wait"
    with pytest.raises(TypeError, match=lacking):
        BackendRegistrar.get("deaf")


def test_an_installed_package_is_found_through_its_entry_point(monkeypatch):
    point = metadata.EntryPoint("boxed", "toy_vendor:ToyBackend", interface.ENTRY_POINT_GROUP)
    installed = {interface.ENTRY_POINT_GROUP: (point,)}
    monkeypatch.setattr(metadata, "entry_points", lambda group: installed.get(group, ()))
    assert "boxed" in BackendRegistrar.names()
    assert isinstance(BackendRegistrar.get("boxed"), ToyBackend)


def test_the_backends_of_ltc_are_the_entry_points_of_its_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    offered = project["entry-points"][interface.ENTRY_POINT_GROUP]
    assert offered == {point.name: point.value for point in interface.OWN_ENTRY_POINTS}


@pytest.mark.parametrize("name", ["eager", "llvm"])
def test_a_backend_of_ltc_is_found_without_a_search_of_what_is_installed(name):
    """So where nothing is: in a source tree."""
    program = """
from importlib import metadata
import torch, ltc
metadata.entry_points = metadata.distribution = None
print((torch.ones(2).to("ltc") + 1).tolist())
"""
    assert output_of(program, LTC_BACKEND=name) == "[2.0, 2.0]"


def test_the_module_of_a_backend_is_imported_when_it_is_asked_for(tmp_path):
    """As at the top of a program, whatever mode its first use happens in."""
    about = tmp_path / "vendor-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vendor\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[ltc.backends]\nboxed = boxed:made\n")
    (tmp_path / "boxed.py").write_text("""
import torch
from ltc.backends.eager import EagerBackend
one = torch.ones(1)
def made():
    print(one.device, one.is_inference())
    return EagerBackend()
""")
    program = """
import sys, torch, ltc
torch.set_default_device("ltc")
print("boxed" in sys.modules)
with torch.inference_mode():
    print(torch.ones(2).tolist())
"""
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    said = output_of(program, LTC_BACKEND="boxed", PYTHONPATH=path)
    assert said.splitlines() == ["False", "cpu False", "[1.0, 1.0]"]


def output_of(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_page_on_writing_a_backend_shows_the_toy_vendor_as_it_is():
    shown, page = ROOT / "tests" / "toy_vendor.py", ROOT / "docs" / "vendor.md"
    assert f"```python\n{shown.read_text()}```" in page.read_text()


@pytest.fixture(autouse=True)
def no_registration_outlives_its_test(monkeypatch):
    monkeypatch.setattr(BackendRegistrar, "_makers", dict(BackendRegistrar._makers))
    monkeypatch.setattr(BackendRegistrar, "_backends", dict(BackendRegistrar._backends))


class OfItsDevice(toy_vendor.ToyComputation):
    """A program that reads the memory of the device it was compiled for, and of no other."""

    def __init__(self, graph, device):
        super().__init__(graph)
        self.device = device

    @staticmethod
    def upload(tensor, device):
        return device, toy_vendor.ToyComputation.upload(tensor, device)

    @staticmethod
    def download(buffer):
        return toy_vendor.ToyComputation.download(buffer[1])

    def launch(self, buffers, scalars):
        assert all(device == self.device for device, _ in buffers), "a buffer of another device"
        results = super().launch([array for _, array in buffers], scalars)
        return [(self.device, array) for array in results]


class WithMemories(ToyBackend):
    computation = OfItsDevice

    def compile(self, graph, device, donated):
        return OfItsDevice(graph, device)


@pytest.mark.devices(4)
def test_each_device_has_programs_of_its_own_where_the_vendor_promises_nothing():
    BackendRegistrar.register("memories", WithMemories)
    with config.override(LTC_BACKEND="memories"):
        for device in ("ltc:0", "ltc:1", "ltc:0"):
            x = torch.arange(4.0).to(device)
            assert (x * 2 + 1).tolist() == [1, 3, 5, 7]


@pytest.mark.devices(4)
def test_a_program_for_every_device_is_compiled_once():
    for backend in ("llvm", "eager"):
        with config.override(LTC_BACKEND=backend, LTC_TIER="native"), metrics.counted() as grown:
            for device in ("ltc:0", "ltc:1"):
                x = torch.arange(7.0).to(device)
                assert (x * 11 - 5).sum().item() == 196
        assert grown["UncachedCompile"] <= 1, backend


_numbers = itertools.count()


def failing(method, result):
    """A backend of which one method gives `result`, or raises it."""

    def replaced(*given):
        if isinstance(result, Exception):
            raise result
        return result

    made = staticmethod(replaced)
    computation = type("Failing", (toy_vendor.ToyComputation,), {method: made})
    members = {method: made} if method == "compile" else {"computation": computation}
    if method == "launch":
        members["compile"] = lambda self, graph, device, donated: computation(graph)
    name = f"failing {next(_numbers)}"  # each compiles for itself
    BackendRegistrar.register(name, type("FailingBackend", (ToyBackend,), members))
    return config.override(LTC_BACKEND=name)


def error_of_a_step():
    x = torch.arange(5.0).to("ltc")
    with pytest.raises(Exception, match=".") as caught:
        _ = (x * 3.0625 + 1).tolist()  # recorded nowhere else: a path keeps its first lines
    return caught.value


@pytest.mark.parametrize(
    ("method", "words"),
    [("compile", "while toy compiled a program"), ("launch", "while running a program")],
)
def test_what_a_vendor_raises_carries_the_users_lines(method, words):
    with failing(method, ArithmeticError("parity")):
        error = error_of_a_step()
    assert str(error) == "parity"
    note, *_ = error.__notes__
    assert note.startswith(f"{words}, from aten::mul.Tensor called at {__file__}")
    assert "to aten::add.Tensor called at" in note


@pytest.mark.parametrize(
    ("result", "given"), [([], "a list of 0"), (None, "a NoneType"), ([1, 2], "a list of 2")]
)
def test_a_launch_that_gives_too_little_is_the_backends_fault(result, given):
    with failing("launch", result):
        error = error_of_a_step()
    assert isinstance(error, InvalidGraph)
    assert f"test_vendor.Failing.launch returned {given} for a program of 1 outputs" in str(error)


@pytest.mark.parametrize(
    ("result", "given"), [(torch.zeros(3), "f32[3]"), ([0.0] * 5, "list"), (None, "NoneType")]
)
def test_a_download_of_another_shape_is_the_backends_fault(result, given):
    with failing("download", result):
        error = error_of_a_step()
    assert isinstance(error, InvalidGraph)
    assert f"'toy' returned {given} for a buffer of f32[5]" in str(error)


def test_a_name_that_is_in_use_is_registered_again_with_a_warning():
    BackendRegistrar.register("again", ToyBackend)
    BackendRegistrar.register("again", ToyBackend)  # nobody has asked for it yet
    BackendRegistrar.get("again")
    with pytest.warns(UserWarning, match="'again' is in use already") as caught:
        BackendRegistrar.register("again", ToyBackend)
    assert caught[0].filename == __file__


def test_a_download_with_gaps_is_read_as_it_is_meant():
    with failing("download", torch.arange(10.0)[::2]):
        read = (torch.arange(5.0).to("ltc") * 3).cpu()
    assert read.is_contiguous()
    assert read.tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("method", ["launch", "upload"])
def test_a_vendor_without_memory_may_raise_what_pytorch_has_for_it(method):
    with failing(method, torch.OutOfMemoryError("the toy box is full")):
        with pytest.raises(OutOfMemory, match="ltc:0 out of memory") as caught:
            _ = torch.ones(4).to("ltc").exp().tolist()
    assert str(caught.value.__cause__) == "the toy box is full"
