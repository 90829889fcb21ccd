"""Factories, random numbers, generators, and modules moved to ltc and back."""

import _thread
import contextlib
import copy
import pickle
import sys
import threading
import warnings
import weakref
from types import FunctionType

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ltc
import ltc.core.lazy_model as ltm
import ltc.utils.serialization as xser
from ltc import config
from ltc.checkpointing.resumable import (
    ElasticSampler,
    Resumable,
    random_state,
    restore_random_state,
)
from ltc.debug import graphs, metrics
from ltc.device import register
from ltc.distributed.data_parallel import DataParallel
from ltc.runtime.program_cache import PROGRAMS
from ltc.utils.checkpoint import CheckpointManager
from tests.recorders import forget_paths

FACTORIES = {
    "zeros": lambda d: torch.zeros(2, device=d, dtype=torch.bool),
    "ones": lambda d: torch.ones(2, 0, 3, device=d),
    "full": lambda d: torch.full((2,), 3, device=d),
    "arange": lambda d: torch.arange(1, 7, 2, device=d),
    "arange of floats": lambda d: torch.arange(0.0, 1.0, 0.3, device=d),
    "linspace": lambda d: torch.linspace(0, 1, 3, device=d),
    "logspace": lambda d: torch.logspace(0, 2, 3, device=d),
    "eye": lambda d: torch.eye(2, 3, device=d),
    "tensor": lambda d: torch.tensor([[1.0, 2], [3, 4]], device=d),
    "a number": lambda d: torch.tensor(3.5, device=d),
    "complex": lambda d: torch.tensor([1 + 2j], device=d),
    "tril_indices": lambda d: torch.tril_indices(3, 3, device=d),
    "as_tensor of numpy": lambda d: torch.as_tensor(np.ones(3), device=d),
    "new_full": lambda d: torch.ones(2, device=d).new_full((3,), 4),
    "zeros_like": lambda d: torch.zeros_like(torch.ones(2, 3, device=d), dtype=torch.int8),
    "hann_window": lambda d: torch.hann_window(5, device=d),
    "empty_strided": lambda d: torch.empty_strided((2, 3), (1, 2), device=d).fill_(2).sum(),
    "meshgrid": lambda d: torch.meshgrid(
        torch.arange(2, device=d), torch.arange(3, device=d), indexing="ij"
    ),
}


@pytest.mark.compared
@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_makes_what_the_cpu_makes(device, name):
    return FACTORIES[name](device)


@pytest.mark.devices(4)
@pytest.mark.parametrize("index", range(4))
def test_factories_make_tensors_on_the_device_they_are_given(index):
    device = torch.device("ltc", index)
    for made in (torch.ones(2, device=device), torch.randn(2, device=device)):
        assert made.device == device
        assert made.new_zeros(3).device == device
        assert torch.empty_like(made).device == device


def test_a_device_without_index_is_the_first():
    assert torch.ones(1, device="ltc").device == torch.device("ltc", 0)


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(RuntimeError, match="9"):
        torch.ones(2, device="ltc:9")


@pytest.mark.devices(4)
def test_the_default_device_can_be_set():
    torch.set_default_device("ltc:1")
    try:
        assert torch.ones(2).device == torch.device("ltc:1")
    finally:
        torch.set_default_device(None)


@pytest.mark.devices(4)
def test_a_device_is_a_context():
    with torch.device("ltc:2"):
        made = torch.randn(2), nn.Linear(2, 2).weight, torch.tensor([1.0])
    assert {tensor.device for tensor in made} == {torch.device("ltc:2")}


@pytest.mark.devices(4)
def test_the_accelerator_is_ltc():
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator().type == "ltc"
    assert torch.accelerator.device_count() == 4
    torch.accelerator.synchronize()


@pytest.mark.devices(4)
def test_tensors_and_modules_have_the_devices_shortcuts():
    assert torch.ones(2).ltc(1).device == torch.device("ltc:1")
    assert torch.ones(2, device="ltc").is_ltc
    assert nn.Linear(1, 1).ltc().weight.is_ltc


@pytest.mark.compared
@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
    ],
    ids=str,
)
def test_every_dtype_crosses_both_ways(device, dtype):
    values = torch.tensor([0, 1, 3, 100]).to(dtype)
    moved = values.to(device)
    return moved.dtype, moved.cpu().view(torch.uint8) if dtype.itemsize == 1 else moved


# --- where the user's default device is ltc: what ltc makes for itself is on the CPU -------------


@contextlib.contextmanager
def by_default_there(how="a context inside another"):
    """Programs are made anew: those that other tests have made know no default device."""
    PROGRAMS.clear()
    forget_paths()
    torch.set_default_device("ltc")
    try:
        with torch.device("ltc:0") if how != "set" else contextlib.nullcontext():
            yield
    finally:
        torch.set_default_device(None)


@pytest.fixture(params=["set", "a context inside another"])
def by_default(request):
    with by_default_there(request.param):
        yield


def trained_losses(step=lambda run: run) -> list[float]:
    torch.manual_seed(3)
    with torch.device("cpu"):
        model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 4))
    model.append(nn.Dropout(0.3)).to("ltc")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x, target = torch.linspace(-1, 1, 128).view(2, 1, 8, 8), torch.tensor([1, 3])
    x, target = x.to("ltc"), target.to("ltc")

    def run():
        optimizer.zero_grad()
        wide = F.interpolate(x, scale_factor=1.5, mode="bilinear")[..., :8, :8]
        loss = F.cross_entropy(model(wide) * torch.tensor(0.5, device="ltc"), target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    run, losses = step(run), []
    for _ in range(5):
        losses.append(run())
        ltm.mark_step()
    return [loss.item() for loss in losses]


PACKED = [torch.float4_e2m1fn_x2, torch.bits16, torch.bits4x2]


@pytest.mark.parametrize("dtype", PACKED, ids=str)
def test_empty_tensors_have_the_dtypes_that_pytorch_cannot_fill(dtype):
    for shape in ((2, 3), (0, 3), ()):
        made = torch.empty(shape, dtype=dtype, device="ltc")
        assert (made.dtype, made.shape) == (dtype, torch.Size(shape))
        assert not any(made.cpu().untyped_storage())


WAYS_TO_RUN = {
    "compiled": {"LTC_TIER": "native"},
    "compiled in its turn": {"LTC_TIER": "auto"},
    "op by op": {"LTC_TIER": "op_by_op"},
    "on PyTorch's kernels": {"LTC_BACKEND": "eager"},
    "verified": {"LTC_TIER": "native", "LTC_VERIFY": 1},
    "checked": {"LTC_TIER": "native", "LTC_CHECK": 1},
    "looked at for NaN": {"LTC_TIER": "native", "LTC_DEBUG_NANS": 1},
}


@pytest.mark.parametrize("way", WAYS_TO_RUN)
def test_a_training_is_that_of_the_default_device_cpu(way):
    with config.override(LTC_CACHE=0, **WAYS_TO_RUN[way]):
        expected = trained_losses()
    with config.override(LTC_CACHE=0, **WAYS_TO_RUN[way]), by_default_there():
        assert trained_losses() == pytest.approx(expected, rel=1e-5)


def test_a_compiled_step_runs_by_default_there(by_default):
    with config.override(LTC_TIER="native", LTC_CACHE=0):
        losses = trained_losses(ltc.compile)
    assert losses[-1] < losses[0]


def test_sizes_may_change_by_default_there(by_default):
    with config.override(LTC_CACHE=0):
        for rows in (*range(2, 12), 5):
            x = torch.ones(rows, 37)
            y = (F.softmax(x * 3, 1) @ x.T).cumsum(1)
            ltm.mark_step()
            assert y.sum().item() == pytest.approx(rows * rows * (rows + 1) / 2, rel=1e-4)


@pytest.mark.devices(4)
def test_replicas_in_threads_may_each_have_a_default_device():
    def loop(model, loader, device, context):
        with torch.device(device):
            scale = torch.ones(3)
            sums = []
            for _, x in loader:
                sums.append((model(x) * scale).sum().detach())
                ltm.mark_step()
            return [value.item() for value in sums]

    model = nn.Linear(2, 3)
    nn.init.ones_(model.weight), nn.init.zeros_(model.bias)
    parallel = DataParallel(model, ["ltc:0", "ltc:1"])
    with config.override(LTC_TIER="native", LTC_CACHE=0):
        results = parallel(loop, [torch.full((1, 2), float(n)) for n in range(4)])
    assert sorted(value for sums in results for value in sums) == [0, 6, 12, 18]


@pytest.mark.native("a stage is shown where a graph is compiled")
def test_stages_are_shown_by_default_there(by_default):
    x = torch.ones(1, 1, 4, 4)
    y = F.interpolate(x, scale_factor=1.7, mode="bicubic")
    ops = [graphs.text(y + 1, stage=stage) for stage in graphs.stages()]
    assert all(ops)


SAVED = {
    "pickle": lambda value, _: pickle.loads(pickle.dumps(value)),
    "torch.save": lambda value, path: torch.save(value, path) or torch.load(path),
    "ltm.save": lambda value, path: ltm.save(value, path) or torch.load(path),
    "xser": lambda value, path: xser.save(value, path) or xser.load(path),
}


@pytest.mark.parametrize("way", SAVED)
def test_what_is_saved_by_default_there_is_loaded(way, by_default, tmp_path):
    value = {"x": torch.arange(4.0), "empty": torch.ones(0, 3), "cpu": torch.ones(2, device="cpu")}
    loaded = SAVED[way](value, tmp_path / "saved")
    for name, tensor in value.items():
        assert torch.equal(loaded[name].cpu(), tensor.cpu())
    assert loaded["cpu"].device.type == "cpu"


def test_storages_are_copied_both_ways_by_default_there(by_default):
    x = torch.arange(6.0)
    ltm.mark_step()
    on_host = x.untyped_storage().cpu()
    assert torch.empty(0, device="cpu").set_(on_host).tolist() == [*range(6)]
    back = torch.UntypedStorage(24, device="ltc").copy_(on_host)
    assert torch.empty(0).set_(back).tolist() == [*range(6)]


def test_a_random_state_is_on_the_cpu_by_default_there(by_default):
    states = [torch.ltc.get_rng_state(), *random_state()["ltc"], random_state()["python"][1]]
    assert {state.device.type for state in states} == {"cpu"}
    state, own = random_state(), torch.ltc.get_rng_state()
    first = torch.rand(3).tolist(), torch.rand(3, device="cpu").tolist()
    restore_random_state(state)
    assert (torch.rand(3).tolist(), torch.rand(3, device="cpu").tolist()) == first
    torch.ltc.set_rng_state(own)
    assert torch.rand(3).tolist() == first[0]


def test_an_elastic_sampler_gives_the_samples_of_the_default_device_cpu():
    def order():
        return list(ElasticSampler(range(20), 4, seed=5))

    expected = order()
    with by_default_there():
        assert order() == expected


def _samples(folder, until: int) -> list[list[int]]:
    """Of each step from where the folder's last checkpoint is; the device draws between."""
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.arange(12, device="cpu"))
    loader = Resumable(torch.utils.data.DataLoader(data, batch_size=3, shuffle=True))
    manager = CheckpointManager(folder, loader=loader)
    restored = manager.restore_latest()
    step, seen = restored.step if restored else 0, []
    while step < until:
        for (x,) in loader:
            seen.append([*x.tolist(), torch.rand(1).item()])
            step += 1
            if step == until:
                manager.save(step)
                break
    return seen


def test_a_training_goes_on_with_its_samples_by_default_there(by_default, tmp_path):
    whole = _samples(tmp_path / "whole", 9)
    parts = [_samples(tmp_path / "parts", until) for until in (2, 6, 9)]
    assert sum(parts, []) == whole


# --- random numbers -----------------------------------------------------------------------------

DRAWS = {
    "randn": lambda d: torch.randn(5, 5, device=d),
    "rand": lambda d: torch.rand(5, device=d),
    "randint": lambda d: torch.randint(0, 1000, (5,), device=d),
    "randperm": lambda d: torch.randperm(50, device=d),
    "normal_": lambda d: torch.empty(5, device=d).normal_(2, 1),
    "uniform_": lambda d: torch.empty(5, device=d).uniform_(1, 2),
    "exponential_": lambda d: torch.empty(5, device=d).exponential_(),
    "bernoulli_": lambda d: torch.zeros(200, device=d).bernoulli_(0.3),
    "dropout": lambda d: F.dropout(torch.ones(200, device=d), 0.3),
    "multinomial": lambda d: torch.multinomial(torch.ones(50, device=d), 20),
    "Gamma": lambda d: torch.distributions.Gamma(torch.ones(5, device=d), 1.0).sample(),
    "Normal": lambda d: torch.distributions.Normal(torch.zeros(5, device=d), 1.0).rsample(),
    "gumbel_softmax": lambda d: F.gumbel_softmax(torch.zeros(5, device=d)),
    "kaiming_uniform_": lambda d: nn.init.kaiming_uniform_(torch.empty(5, 5, device=d)),
    "trunc_normal_": lambda d: nn.init.trunc_normal_(torch.empty(5, device=d)),
    "orthogonal_": lambda d: nn.init.orthogonal_(torch.empty(5, 5, device=d)),
    "rrelu": lambda d: F.rrelu(-torch.ones(5, device=d), training=True),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_repeat_with_the_seed_and_differ_without(name):
    def drawn():
        return DRAWS[name]("ltc").cpu()

    torch.manual_seed(7)
    first, second = drawn(), drawn()
    torch.manual_seed(7)
    assert torch.equal(drawn(), first)
    assert not torch.equal(first, second)


def test_draws_follow_their_distributions():
    """Each bound is more than six standard errors of 100 000 samples wide."""
    n = 100_000
    x = torch.empty(n, device="ltc")
    assert abs(x.normal_(2, 1).mean().item() - 2) < 0.02
    assert abs(x.normal_(2, 3).std().item() - 3) < 0.05
    uniform = x.uniform_(1, 2).cpu()
    assert uniform.min() >= 1 and uniform.max() <= 2 and abs(uniform.mean() - 1.5) < 0.01
    assert abs(x.exponential_(2).mean().item() - 0.5) < 0.01
    assert abs(x.bernoulli_(0.3).mean().item() - 0.3) < 0.01
    assert abs(F.dropout(torch.ones(n, device="ltc"), 0.3).mean().item() - 1) < 0.02
    assert torch.equal(torch.randperm(99, device="ltc").sort()[0].cpu(), torch.arange(99))


def test_the_state_of_the_generator_can_be_taken_and_set():
    state = torch.ltc.get_rng_state()
    first = torch.rand(3, device="ltc").cpu()
    torch.ltc.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="ltc").cpu(), first)


def _drawn_around_a_mark() -> list[float]:
    before = torch.rand(1, device="ltc")
    ltm.mark_step()
    return [before.item(), torch.rand(1, device="ltc").item()]


@pytest.mark.parametrize("drawn_before", [0, 2])
@pytest.mark.parametrize("seed", [0, 7, -1, 1 << 63])
def test_a_state_of_ltm_repeats_what_is_drawn_behind_the_next_mark(seed, drawn_before):
    ltm.set_rng_state(seed)
    for _ in range(drawn_before):
        torch.rand(2, device="ltc")
    state = ltm.get_rng_state()
    assert isinstance(state, int)
    first = _drawn_around_a_mark()
    ltm.set_rng_state(state)
    assert ltm.get_rng_state() == state
    assert _drawn_around_a_mark() == first


def test_a_state_without_a_draw_is_the_seed():
    ltm.set_rng_state(7)
    assert ltm.get_rng_state() == 7


@pytest.mark.parametrize("state", [1.5, "x", None])
def test_a_state_that_is_no_integer_is_refused(state):
    kept = ltm.get_rng_state()
    with pytest.raises(TypeError, match=f"seeded with an integer.*got {state!r}"):
        ltm.set_rng_state(state)
    assert ltm.get_rng_state() == kept


def test_a_cpu_generator_seeds_draws_on_the_device():
    generator = torch.Generator().manual_seed(3)
    first = torch.randn(3, device="ltc", generator=generator).cpu()
    second = torch.randn(3, device="ltc", generator=generator).cpu()
    generator.manual_seed(3)
    assert torch.equal(torch.randn(3, device="ltc", generator=generator).cpu(), first)
    assert not torch.equal(first, second)
    generator.manual_seed(3)
    assert torch.empty(3, device="ltc").normal_(generator=generator).isfinite().all()


def test_a_generator_of_the_device_draws_on_it():
    generator = torch.Generator(device="ltc").manual_seed(3)
    assert isinstance(generator, torch.Generator)
    assert generator.device.type == "ltc" and generator.initial_seed() == 3
    state = generator.get_state()
    first = torch.randn(3, device="ltc", generator=generator).cpu()
    generator.set_state(state)
    assert torch.equal(torch.randn(3, device="ltc", generator=generator).cpu(), first)
    assert isinstance(torch.Generator(), torch.Generator)


def test_a_generator_of_its_own_leaves_the_devices_alone():
    torch.manual_seed(5)
    expected = torch.randn(3, device="ltc").cpu()
    torch.manual_seed(5)
    torch.randn(3, device="ltc", generator=torch.Generator(device="ltc").manual_seed(9))
    assert torch.equal(torch.randn(3, device="ltc").cpu(), expected)


# --- modules that move --------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


def test_parameters_keep_their_identity_when_a_module_moves():
    model = nn.Linear(3, 2)
    before = list(model.parameters())
    model.to("ltc")
    assert all(mine is theirs for mine, theirs in zip(model.parameters(), before))
    assert all(parameter.is_ltc for parameter in before)
    model.to("cpu")
    assert all(mine is theirs for mine, theirs in zip(model.parameters(), before))


def test_tied_weights_stay_tied_when_a_module_moves():
    model = Tied().to("ltc")
    assert model.head.weight is model.embedding.weight
    copied = copy.deepcopy(model)
    assert copied.head.weight is copied.embedding.weight is not model.head.weight


@pytest.mark.compared
def test_tied_weights_train_as_one(device):
    model = Tied().double().to(device)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.arange(7, device=device)).logsumexp(1).mean().backward()
        optimizer.step()
    return model.head.weight, model.embedding.weight


@pytest.mark.compared
def test_an_optimizer_built_before_the_move_trains_the_moved_model(device):
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model.to(device)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 3, device=device, dtype=torch.double)).pow(2).sum().backward()
        optimizer.step()
    return list(model.parameters())


def test_a_module_on_the_cpu_moves_as_without_ltc():
    model = nn.Linear(3, 2)
    data_pointer = model.weight.data_ptr()
    model.to("cpu")
    assert model.weight.data_ptr() == data_pointer
    assert not torch.__future__.get_swap_module_params_on_conversion()


def test_a_module_made_empty_on_the_device_loads_a_state():
    source = nn.Linear(3, 2)
    model = nn.Linear(3, 2, device="meta").to_empty(device="ltc")
    model.load_state_dict(source.state_dict())
    assert torch.equal(model.weight.cpu(), source.weight)
    assigned = nn.Linear(3, 2)
    assigned.load_state_dict(model.state_dict(), assign=True)
    assert assigned.weight.is_ltc


def test_pinned_memory_is_accepted():
    assert torch.equal(torch.ones(2).pin_memory().to("ltc", non_blocking=True).cpu(), torch.ones(2))


@pytest.mark.parametrize("tier", ["native", "op_by_op"])
def test_a_like_of_another_device_is_there_after_one_of_this_device(tier):
    with config.override(LTC_TIER=tier):
        x = torch.ones(3).to("ltc:0")
        for device in (None, None, "ltc:0", "cpu"):
            made = torch.ones_like(x, device=device)
            assert made.device == torch.device(device or "ltc:0")
            assert made.tolist() == [1.0] * 3
            ltm.mark_step()


def warned_at(function) -> list[tuple[str, int]]:
    """The lines of the warnings that C++ gives, from the function's first."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [(one.filename, one.lineno - function.__code__.co_firstlineno) for one in caught]


def copies_a_tensor():
    torch.ones(3, device="ltc").new_tensor(torch.ones(3, device="ltc"))
    torch.tensor(torch.ones(3, device="ltc"), device="ltc")


@pytest.mark.devices(4)
@pytest.mark.parametrize("index", [0, 1])
def test_a_warning_of_what_takes_a_device_names_the_users_line(index):
    """Also once another device is the current one: then ltc stands before more functions."""
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(index)
    try:
        assert warned_at(copies_a_tensor) == [(__file__, 1), (__file__, 2)]
    finally:
        torch.accelerator.set_device_index(before)


# --- what a step that comes back costs -----------------------------------------------------------


COMES_BACK = {
    **{name: FACTORIES[name] for name in ("zeros", "ones", "full", "arange", "linspace", "eye")},
    "randn": lambda d: torch.randn(2, 3, device=d),
    "randint": lambda d: torch.randint(0, 9, (2,), device=d),
    "empty": lambda d: torch.empty(2, 3, device=d).zero_(),
    "another dtype": lambda d: torch.ones(2, 3, device=d).to(torch.float64),
    "copy_": lambda d: torch.zeros(3, device=d).copy_(torch.ones(3, device=d)),
    "copy_ of another dtype": lambda d: torch.zeros(3, device=d).copy_(torch.arange(3, device=d)),
    "copy_ of another shape": lambda d: torch.zeros(2, 3, device=d).copy_(torch.ones(3, device=d)),
    "copy_ to a view": lambda d: torch.zeros(2, 3, device=d)[0].copy_(torch.ones(3, device=d)),
    "a number where": lambda d: torch.where(torch.ones(2, device=d) > 0, 0.0, 1.0),
    "std": lambda d: torch.ones(4, device=d).std(),
}


@pytest.mark.native("it counts the instructions of a step that is followed")
@pytest.mark.parametrize("name", COMES_BACK)
def test_what_comes_back_is_not_looked_at_thoroughly(name, monkeypatch):
    def step():
        made = [COMES_BACK[name]("ltc") for _ in range(2)]
        ltm.mark_step()
        return made

    for _ in range(3):
        step()
    closed, recorded = [], metrics.metric_data("LazyTracing")
    exclusively = register.exclusively
    monkeypatch.setattr(
        register, "exclusively", lambda *call: closed.append(call) or exclusively(*call)
    )
    made = step()
    assert metrics.metric_data("LazyTracing") == recorded
    assert not closed
    if not name.startswith("rand"):
        for one in made:
            torch.testing.assert_close(one.cpu(), COMES_BACK[name]("cpu"))


def test_what_takes_a_device_is_called_by_code_that_has_no_lines():
    code = copies_a_tensor.__code__.replace(co_linetable=b"")
    assert not [*code.co_lines()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        FunctionType(code, globals())()
    assert [one.filename for one in caught] == [__file__] * 2


class Numbers(list):
    """A list of which it is known when it goes."""


def test_what_takes_a_device_is_called_by_nobody(monkeypatch):
    errors, gone, numbers = [], threading.Event(), Numbers([1.0, 2.0])
    monkeypatch.setattr(sys, "unraisablehook", lambda failed: errors.append(failed.exc_type))
    weakref.finalize(numbers, gone.set)
    _thread.start_new_thread(torch.ones(2).new_tensor, (numbers,))
    del numbers
    gone.wait()
    assert not errors
