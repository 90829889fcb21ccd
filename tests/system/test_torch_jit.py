"""torch.jit: modules on the lazy device are traced, scripted, moved and saved."""

import io
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ltc.errors import LtcError

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.*is deprecated", "ignore:.*TracerWarning"
)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.back = nn.Conv2d(4, 4, 3, groups=2), nn.ConvTranspose2d(4, 2, 3)
        self.scale = nn.Parameter(torch.rand(2, 1, 1), requires_grad=False)
        self.register_buffer("shift", torch.arange(2.0).reshape(2, 1, 1))

    def forward(self, x):
        hidden = F.max_pool2d(self.norm(self.first(x)).relu(), 2)
        return self.back(self.second(hidden)) * self.scale + self.shift


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.embedding(x).tanh())


MODULES = {
    "linear": (lambda: nn.Linear(3, 2), lambda: torch.randn(4, 3)),
    "convolutions": (Convolutions, lambda: torch.randn(2, 3, 8, 8)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 2, padding="same"), lambda: torch.randn(2, 3, 8)),
    "tied": (Tied, lambda: torch.arange(7)),
    "norms": (lambda: nn.Sequential(nn.LayerNorm(4), nn.GELU()), lambda: torch.randn(2, 4)),
}
ONNX_MODULES = [name for name in MODULES if name != "conv1d"]  # ONNX has no padding="same"
WAYS = {
    "trace": lambda module, x: torch.jit.trace(module, (x,)),
    "script": lambda module, x: torch.jit.script(module),
}


def made(name, training=False):
    torch.manual_seed(0)
    make, make_input = MODULES[name]
    return make().train(training), make_input()


def saved(script) -> io.BytesIO:
    file = io.BytesIO()
    torch.jit.save(script, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("way", WAYS)
def test_a_module_runs_and_trains_as_on_the_cpu(way, name, training, equal):
    results = {}
    for device in ("cpu", "ltc"):
        module, x = made(name, training)
        state = {key: value.clone() for key, value in module.state_dict().items()}
        script = WAYS[way](module.to(device), x.to(device))
        module.load_state_dict(state)  # a trace runs the forward: so do its statistics
        for _ in range(3):  # TorchScript optimizes what it runs for the second time
            out = script(x.to(device))
            out.square().sum().backward()
        gradients = [p.grad for p in module.parameters()]
        results[device] = out, gradients, list(module.buffers())
    equal(results["ltc"], results["cpu"])


def test_a_traced_convolution_is_in_the_graph_as_on_the_cpu():
    module, x = made("convolutions")
    kinds = {}
    for device in ("cpu", "ltc"):
        graph = torch.jit.trace(module.to(device), (x.to(device),)).inlined_graph
        kinds[device] = [node.kind() for node in graph.nodes() if node.kind().startswith("aten::")]
    assert kinds["ltc"] == kinds["cpu"]


@pytest.mark.filterwarnings(
    "ignore:.*legacy TorchScript", "ignore:no signature found", "ignore:The feature will"
)
@pytest.mark.parametrize("options", [{}, {"do_constant_folding": False}])
@pytest.mark.parametrize("name", ONNX_MODULES)
@pytest.mark.parametrize("way", [*WAYS, "module"])
def test_the_older_export_to_onnx_has_the_calls_and_values_of_the_cpu(
    way, name, options, equal, monkeypatch
):
    """Its passes take the address of a tensor for what is in it: two biases at none were one."""
    of_onnx = "torch.onnx._internal.torchscript_exporter.onnx_proto_utils._add_onnxscript_fn"
    monkeypatch.setattr(of_onnx, lambda model, opsets: model)  # all that needs the package onnx
    last_pass = torch._C._jit_pass_onnx_deduplicate_initializers
    written = []

    def watched(graph, parameters, *args):
        values = last_pass(graph, parameters, *args)
        copies = {key: value.detach().clone() for key, value in values.items()}  # before a move
        written.append(([node.kind() for node in graph.nodes()], copies))
        return values

    monkeypatch.setattr(torch._C, "_jit_pass_onnx_deduplicate_initializers", watched)
    module, x = made(name)
    for device in ("cpu", "ltc"):
        moved, on_device = module.to(device), x.to(device)
        script = WAYS[way](moved, on_device) if way in WAYS else moved
        torch.onnx.export(script, (on_device,), io.BytesIO(), dynamo=False, **options)
    on_cpu, on_ltc = written
    equal(on_ltc, on_cpu)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_a_traced_recurrent_cell_runs_where_it_is_loaded(cell, equal):
    """The CPU has no kernel for the fused cells of outside devices, nor has ONNX."""
    module, x, hidden = cell(3, 4), torch.randn(2, 3), torch.randn(2, 2, 4)

    def states(device):
        one, other = hidden.to(device)
        return (one, other) if cell is nn.LSTMCell else one

    expected = module(x, states("cpu"))
    script = torch.jit.trace(module.to("ltc"), (x.to("ltc"), states("ltc")))
    equal(script(x.to("ltc"), states("ltc")), expected)
    equal(torch.jit.load(saved(script))(x, states("cpu")), expected)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("way", WAYS)
def test_a_saved_module_has_its_weights(way, name, equal, tmp_path):
    module, x = made(name)
    expected = module(x)
    on_cpu = torch.jit.load(saved(WAYS[way](module, x)))
    script = WAYS[way](module.to("ltc"), x.to("ltc"))
    path = tmp_path / "module.pt"
    torch.jit.save(script, path)
    script.save(str(tmp_path / "same.pt"))
    for source in (saved(script), path, tmp_path / "same.pt", io.BytesIO(script.save_to_buffer())):
        loaded = torch.jit.load(source)
        assert {t.device.type for t in loaded.state_dict().values()} == {"cpu"}
        for one, other in zip(loaded.parameters(), on_cpu.parameters(), strict=True):
            assert one.requires_grad == other.requires_grad
        assert len(_memory(loaded)) == len(_memory(on_cpu))
        equal(loaded(x), expected)
    assert all(p.is_ltc for p in script.parameters())  # saving has moved a copy
    loaded = torch.jit.load(path, map_location="ltc")
    assert all(t.is_ltc for t in loaded.state_dict().values())
    equal(loaded(x.to("ltc")), expected)


def _memory(module) -> set:
    return {tensor.untyped_storage().data_ptr() for tensor in module.state_dict().values()}


def test_a_saved_module_loads_where_ltc_is_not_installed(tmp_path):
    module, x = made("convolutions")
    path = tmp_path / "module.pt"
    torch.jit.save(torch.jit.trace(module.to("ltc"), (x.to("ltc"),)), path)
    code = (
        f"import sys, torch; module = torch.jit.load({str(path)!r})\n"
        f"assert 'ltc' not in sys.modules\n"
        f"print(module(torch.ones(1, 3, 8, 8)).sum().item())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    on_cpu = module.cpu()(torch.ones(1, 3, 8, 8)).sum().item()
    assert float(done.stdout) == pytest.approx(on_cpu, rel=1e-5)


def test_extra_files_are_saved():
    script, files = torch.jit.script(nn.Linear(3, 2).to("ltc")), {"note": ""}
    file = io.BytesIO()
    torch.jit.save(script, file, _extra_files={"note": "by hand"})
    file.seek(0)
    torch.jit.load(file, _extra_files=files)
    assert files == {"note": b"by hand"}


class WithAttribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.plain, self.listed = torch.ones(3, device="ltc"), [torch.ones(3, device="ltc")]

    def forward(self, x):
        return x * self.plain + self.listed[0]


def test_what_cannot_be_saved_says_so_and_leaves_the_file(tmp_path):
    constant, x = torch.ones(3, device="ltc"), torch.ones(3, device="ltc")
    path = tmp_path / "module.pt"
    path.write_bytes(b"before")
    traced = torch.jit.trace(lambda x: x * constant, (x,))
    scripted = torch.jit.script(WithAttribute())
    for save in (
        lambda: scripted.save(str(path)),
        lambda: torch.jit.save(scripted, path),
        lambda: traced.save(str(path)),
        traced.save_to_buffer,
        scripted.save_to_buffer,
    ):
        with pytest.raises(LtcError, match=r"Make them buffers \(register_buffer\)"):
            save()
    assert path.read_bytes() == b"before"


@pytest.mark.devices(2)
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("way", WAYS)
def test_a_script_moves(way, name, equal):
    module, x = made(name)
    script = WAYS[way](module, x)
    expected, count = module(x), len(list(script.parameters()))
    for device in ("ltc", "cpu", "ltc:1", "ltc:0"):
        parameters = list(script.parameters())
        script.to(device)
        assert all(a is b for a, b in zip(script.parameters(), parameters, strict=True))
        assert len(parameters) == count
        here = torch.ones(0, device=device).device
        assert all(tensor.device == here for tensor in script.state_dict().values())
        equal(script(x.to(device)), expected)


def test_a_script_within_a_module_moves_or_stays_whole(equal):
    module = nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Linear(3, 3)))
    x = torch.randn(4, 3)
    expected, left = module(x), iter(range(3))

    def failing(tensor):
        next(left)
        return tensor.to("ltc")

    with pytest.raises(StopIteration):
        module._apply(failing)
    equal(module(x), expected)
    equal(module.to("ltc")(x.to("ltc")), expected)


def test_a_script_of_functions_that_ask_for_strides_is_torchs_own():
    def f(x):
        rows = torch.reshape(x.transpose(0, 1), [x.size(1), -1]).contiguous()
        return torch.flatten(rows, 0) + torch.ravel(x)

    x = torch.arange(6.0).reshape(2, 3)
    script = torch.jit.script(f)
    for device in ("cpu", "ltc"):
        assert torch.equal(script(x.to(device)).cpu(), f(x))
    assert "aten::flatten" in str(script.graph)


def test_a_symbolic_trace_calls_torchs_own_functions():
    traced = torch.fx.symbolic_trace(lambda x: torch.flatten(x.contiguous().reshape(3, -1)))
    assert "torch.flatten(reshape)" in traced.code
    assert torch.equal(traced(torch.ones(2, 3, device="ltc")).cpu(), torch.ones(6))
