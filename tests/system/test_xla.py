"""LTC_BACKEND=xla, on whatever device JAX finds: training, random numbers, errors, launches.

Every primitive is tried by tests/ops/test_every_primitive.py, every check of values by
test_value_checks.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import ltc
import ltc.core.lazy_model as ltm
from ltc import config
from ltc.backends.interface import BackendRegistrar
from ltc.debug import metrics
from ltc.device.evidence import hints
from ltc.device.recording.tensors import current_device
from ltc.errors import OutOfMemory, VerificationError
from ltc.ir import build, ops
from ltc.ir.graph import Graph, Origin
from ltc.ir.node import make

jax = pytest.importorskip("jax", reason="JAX is not installed")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "bench"))
import more_workloads
import workloads

from ltc.backends.xla import computation, lowering

XLA = {"LTC_BACKEND": "xla"}
STEPS = 10


def small_resnet(device, way):
    model, batches = workloads.ResNet18(width=8), workloads.images(8, 3, 16, batches=2)
    of = workloads.sgd, workloads.cross_entropy
    return workloads.training(model, *of, batches, device, way)


def losses_of(name: str, device: str) -> torch.Tensor:
    torch.manual_seed(0)
    way = workloads.Way(mark=ltm.mark_step if device == "ltc" else lambda: None)
    named = [vars(module).get(name) for module in (workloads, more_workloads)]
    step = (named[0] or named[1] or small_resnet)(device, way)
    return torch.stack([step().detach().double().cpu().clone() for _ in range(STEPS)])


def cut_out(grown) -> list[str]:
    return [name for name in grown if name.startswith("CutOut::")]


@pytest.mark.parametrize("name", ["mlp", "gpt", "dlrm", "lstm", "tiny", "vit"])
def test_a_workload_has_the_cpus_losses_and_nothing_is_cut_out(name):
    expected = losses_of(name, "cpu")
    with config.override(**XLA), metrics.counted() as grown:
        found = losses_of(name, "ltc")
    assert not cut_out(grown)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_convolutions_with_batch_norm_have_the_cpus_losses_in_float64():
    """In float32 these losses differ by 1e-3 among any two backends: rounding grows tenfold a step."""
    torch.set_default_dtype(torch.float64)
    try:
        test_a_workload_has_the_cpus_losses_and_nothing_is_cut_out("small_resnet")
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4)])
def test_no_elements_have_the_cpus_strides_on_the_host(shape):
    with config.override(**XLA):
        made = torch.ones(shape, device="ltc") + 1
        assert made.cpu().stride() == torch.ones(shape).stride()


def test_dropout_keeps_what_llvm_keeps():
    with config.override(LTC_TIER="native"):
        expected = losses_of("mnist_cnn", "ltc")
    with config.override(**XLA), metrics.counted() as grown:
        found = losses_of("mnist_cnn", "ltc")
    assert not cut_out(grown)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


DRAWS = {
    "rand": lambda device: torch.rand(1001, device=device),
    "rand64": lambda device: torch.rand(77, device=device, dtype=torch.float64),
    "dropout": lambda device: F.dropout(torch.ones(33, 35, device=device), 0.3),
    "bernoulli": lambda device: torch.bernoulli(torch.full((500,), 0.7, device=device)),
    "randint": lambda device: torch.randint(-7, 1 << 40, (300,), device=device),
    "randperm": lambda device: torch.randperm(200, device=device),
    "multinomial": lambda device: torch.multinomial(torch.ones(50, device=device), 30),
    "random_": lambda device: torch.empty(40, dtype=torch.int16, device=device).random_(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_are_llvms_bit_by_bit(name):
    def drawn(**settings):
        with config.override(**settings):
            torch.manual_seed(5)
            return [DRAWS[name]("ltc").cpu().clone() for _ in range(3)]

    for ours, theirs in zip(drawn(**XLA), drawn(LTC_TIER="native"), strict=True):
        assert torch.equal(ours, theirs)


def test_a_schedule_of_learning_rates_compiles_nothing():
    with config.override(**XLA), metrics.counted() as grown:
        model = torch.nn.Linear(4, 2).to("ltc")
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for k in range(8):
            optimizer.param_groups[0]["lr"] = 0.5**k
            optimizer.zero_grad()
            F.dropout(model(torch.ones(3, 4).to("ltc"))).sum().backward()
            optimizer.step()
            ltm.mark_step(wait=True)
            if k == 2:
                compiled = dict(grown)["UncachedCompile"]
        assert grown["UncachedCompile"] == compiled


# --- the contract --------------------------------------------------------------------------------


def graph_with_a_check():
    """x is replaced by x + sum(x[index]), where an index of 5 rows may be out of range."""
    x = make(ops.INPUT, index=0, dtype=torch.float32, shape=(1000,))
    index = make(ops.INPUT, index=1, dtype=torch.int64, shape=(3,))
    wrapped = make(ops.WRAP_INDEX, index, size=5, lowest=0, message="index {} is out of range")
    rows = make(ops.TAKE, x, wrapped, dim=0)
    origin = Origin("aten::embedding", "net.py:3 in forward", 0)
    return Graph((x, index), (), (x + build.sum_of(rows, 0), rows), {wrapped: origin})


def test_a_launch_that_a_check_ends_gives_donated_buffers_back():
    backend = BackendRegistrar.get("xla")
    computation = backend.compile(graph_with_a_check(), 0, frozenset({0}))
    x = computation.upload(torch.arange(1000.0), 0)
    x, _ = computation.launch([x, computation.upload(torch.tensor([1, 2, 3]), 0)], [])
    expected = computation.download(x).clone()
    with pytest.raises(IndexError, match="index 7 is out of range") as raised:
        computation.launch([x, computation.upload(torch.tensor([1, 7, 9]), 0)], [])
    assert "net.py:3 in forward" in " ".join(raised.value.__notes__)
    assert x.is_deleted()
    assert torch.equal(computation.download(raised.value.restored[0]), expected)


def test_equal_graphs_share_a_program_and_keep_their_lines():
    backend, graph = BackendRegistrar.get("xla"), graph_with_a_check()
    other = Graph(graph.inputs, (), graph.outputs, {})
    first, second = (backend.compile(one, 0, frozenset()) for one in (graph, other))
    assert first._checked.program is second._checked.program
    wrong = [first.upload(torch.ones(1000), 0), first.upload(torch.tensor([9, 0, 0]), 0)]
    with pytest.raises(IndexError) as raised:
        second.launch(wrong, [])
    assert not getattr(raised.value, "__notes__", ())


def test_outputs_of_one_value_lie_apart():
    x = make(ops.INPUT, index=0, dtype=torch.float32, shape=(100,))
    graph = Graph((x,), (), (x, x + 1, x + 1))
    backend = BackendRegistrar.get("xla")
    computation = backend.compile(graph, 0, frozenset())
    given = computation.upload(torch.arange(100.0), 0)
    outputs = computation.launch([given], [])
    overwriting = backend.compile(Graph((x,), (), (x * 2,)), 0, frozenset({0}))
    for one in outputs[:2]:
        overwriting.launch([one], [])
        assert one.is_deleted()
    assert torch.equal(computation.download(given), torch.arange(100.0))
    assert torch.equal(computation.download(outputs[2]), torch.arange(100.0) + 1)


def test_what_was_uploaded_and_what_was_read_stay_as_they_are():
    x = make(ops.INPUT, index=0, dtype=torch.float32, shape=(1 << 16,))
    computation = BackendRegistrar.get("xla").compile(Graph((x,), (), (x + 1,)), 0, frozenset({0}))
    given = torch.zeros(1 << 16)
    buffer = computation.upload(given, 0)
    given.fill_(5)
    (buffer,) = computation.launch([buffer], [])
    read = computation.download(buffer)
    (buffer,) = computation.launch([buffer], [])
    assert torch.equal(read, torch.ones(1 << 16))
    assert torch.equal(computation.download(buffer), torch.full((1 << 16,), 2.0))


KINDS = (torch.bfloat16, torch.bool, torch.complex64, torch.uint64, torch.complex32)


@pytest.mark.parametrize("dtype", KINDS)
def test_values_of_every_kind_go_there_and_back(dtype):
    x = torch.tensor([[0, 1, 2], [1, 0, 3]]).to(dtype)
    computation = BackendRegistrar.get("xla").computation
    buffer = computation.upload(x, 0)
    copied = BackendRegistrar.capabilities("xla").copy(buffer)
    assert copied is not buffer
    assert torch.equal(computation.download(copied).to(torch.complex128), x.to(torch.complex128))


def test_a_cast_to_bfloat16_rounds_though_another_undoes_it():
    with config.override(**XLA):
        x = torch.tensor([1.0 + 2**-10]).to("ltc")
        assert x.to(torch.bfloat16).float().item() == 1.0


def test_what_is_masked_by_a_product_keeps_its_nans():
    x, mask = torch.tensor([torch.nan, torch.inf, 3.0]), torch.tensor([False, False, True])
    with config.override(**XLA):
        found = (x.to("ltc") * mask.to("ltc")).cpu()
    torch.testing.assert_close(found, x * mask, equal_nan=True)


def test_a_division_by_one_number_rounds_once():
    with config.override(**XLA):
        x = torch.arange(1.0, 1000.0)
        found = (x.to("ltc") / 49).cpu()
    if jax.default_backend() == "cpu":
        assert torch.equal(found, x / 49)
    else:  # an H200's quotients are near
        torch.testing.assert_close(found, x / 49, rtol=2**-22, atol=0)


@pytest.mark.parametrize(
    ("text", "asked"),
    [("trying to allocate 4096 bytes.", 4096), ("trying to allocate 1.50GiB.", 3 << 29), ("", 0)],
)
def test_an_error_of_memory_says_what_was_asked_for(text, asked):
    told = computation.as_told(RuntimeError(f"RESOURCE_EXHAUSTED: Out of memory while {text}"))
    assert isinstance(told, OutOfMemory)
    assert told.nbytes == asked


def test_a_hint_runs_no_kernel_of_pytorchs_on_the_devices_values():
    with config.override(LTC_CHECK="0", **XLA), metrics.counted() as grown:
        given = torch.rand(3).to("ltc") * 2
        ltm.mark_step(wait=True)
        given.index_fill_(0, torch.zeros(1, dtype=torch.long, device="ltc"), 0.5)
        assert hints.kernel_time(current_device().recorder()) is None
        assert given[0].item() == 0.5
    assert "Fault" not in " ".join(grown)


def test_the_host_runs_ahead_by_as_many_programs_as_are_allowed():
    """By the words of launched programs: those that it has waited for are at most so many behind."""
    words = []
    begin = computation.XlaComputation.begin

    def counted(self, buffers, scalars):
        outputs, token = begin(self, buffers, scalars)
        words.append(token)
        ahead.append(sum(not token.is_finished() for token in words))
        return outputs, token

    ahead = []
    with config.override(LTC_MAX_IN_FLIGHT=3, **XLA), pytest.MonkeyPatch.context() as patched:
        patched.setattr(computation.XlaComputation, "begin", counted)
        x = torch.rand(300, 300, device="ltc")
        for _ in range(20):
            for _ in range(6):
                x = x @ x / 150
            ltm.mark_step()
        ltm.mark_step(wait=True)
    assert len(words) >= 20
    assert 2 <= max(ahead) <= 3
    assert all(token.is_finished() for token in words)


def test_a_launch_that_fails_on_the_device_is_told_with_its_line():
    """With more memory than there is: the host has gone on when XLA asks for it."""
    with config.override(LTC_MAX_PENDING_BYTES=1 << 60, **XLA):
        x = torch.ones(1 << 22, device="ltc")
        y = x[:, None] @ x[None]
        with pytest.raises(OutOfMemory, match="Tried to allocate") as raised:
            ltm.mark_step(wait=True)
        assert "aten::mm called at" in str(raised.value)
        with pytest.raises(OutOfMemory):
            y.sum().item()
        assert x.sum().item() == 1 << 22


# --- LTC_VERIFY ----------------------------------------------------------------------------------


def verified_training(width: int) -> dict:
    """Two steps of a layer whose every value is judged: what was counted."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(6, width), torch.nn.GELU(), torch.nn.LayerNorm(width)
    model, x = torch.nn.Sequential(*layers).to("ltc"), torch.randn(4, 6).to("ltc")
    optimizer = torch.optim.AdamW(model.parameters())
    with metrics.counted() as grown:
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(x).tanh().square().mean()
            loss.backward()
            optimizer.step()
            ltm.mark_step(wait=True)
    return grown


VERIFIED = {**XLA, "LTC_VERIFY": 1, "LTC_CHECK": 0, "LTC_CACHE": 0}


def test_what_is_right_passes_verification():
    with config.override(**VERIFIED):
        grown = verified_training(5)
    assert grown["verify.programs"] == 2
    assert grown["verify.nodes"] > 40
    assert grown["verify.findings"] == grown["verify.unjudged"] == 0


def test_a_wrong_row_is_named_by_verification(monkeypatch):
    rows = lowering.TOGETHER.table
    right = rows[ops.TANH]
    monkeypatch.setitem(rows, ops.TANH, lambda node, x: right(node, x) * 1.001)
    with config.override(**VERIFIED), pytest.raises(VerificationError) as raised:
        verified_training(7)  # no other test has made a program of this width, without the fault
    assert raised.value.difference.node.op is ops.TANH
    assert "backend 'xla'" in str(raised.value)
    assert "in verified_training" in raised.value.origin.line


# --- without JAX ---------------------------------------------------------------------------------


def outcome_of(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "LTC_BACKEND": "xla", **environment},
    )  # fmt: skip
    return done.stdout + done.stderr


USE = "import torch, ltc; print(torch.ones(2).to('ltc') + 1)"


def test_nothing_of_jax_is_imported_before_it_is_asked_for():
    program = "import sys, ltc, torch; print('jax' in sys.modules)"
    assert outcome_of(program) == "False\n"


def test_nothing_of_llvm_is_imported_for_it():
    program = """
import os, sys, torch, ltc, ltc.core.lazy_model as ltm
model = torch.nn.Linear(3, 2).to("ltc")
with ltc.profile(os.devnull):
    model(torch.ones(4, 3).to("ltc")).sum().backward()
    ltm.mark_step(wait=True)
print([name for name in sys.modules if name.startswith(("ltc.llvm", "ltc.backends.llvm", "llvmlite"))])
"""
    assert outcome_of(program).splitlines()[-1] == "[]"


def test_without_jax_it_says_what_to_install():
    hidden = "from importlib import metadata as m; import sys; sys.modules['jax'] = None\n"
    hidden += "def none(name): raise m.PackageNotFoundError\nm.version = none\n"
    assert "pip install 'ltc[xla]'" in outcome_of(hidden + USE)


@pytest.mark.parametrize(
    ("version", "words"), [("0.4.30", "needs JAX 0.10"), ("0.99", "not tried")]
)
def test_other_versions_of_jax_are_told(version, words):
    assert words in outcome_of(
        f"from importlib import metadata as m; m.version = lambda name: '{version}'\n" + USE
    )


def test_a_platform_that_is_not_there_is_told():
    assert "JAX finds no device" in outcome_of(USE, JAX_PLATFORMS="tpu")


def test_programs_are_kept_in_ltcs_folder(tmp_path):
    program = "import torch, ltc; x = torch.rand(64, 64, device='ltc'); print((x @ x).sum().item())"
    first = outcome_of(program, LTC_CACHE_DIR=str(tmp_path))
    assert list((tmp_path / "xla").glob("*"))
    assert outcome_of(program, LTC_CACHE_DIR=str(tmp_path)) == first


def test_ltc_replays_steps():
    with config.override(**XLA):
        weight = torch.ones(2, device="ltc", requires_grad=True)

        @ltc.compile
        def step(x):
            loss = (x * weight).square().sum()
            loss.backward()
            gradient, weight.grad = weight.grad, None
            return gradient

        for k in range(6):
            x = torch.tensor([1.0, k])
            assert torch.equal(step(x.to("ltc")).cpu(), 2 * x * x)
