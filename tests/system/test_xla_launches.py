"""What a launch on XLA spares the host: checks that are waited for, small buffers, numbers that stay.

Nothing of it is kept from step to step.
"""

import gc

import pytest
import torch
from torch.nn import functional as F

import ltc
import ltc.core.lazy_model as ltm
from ltc import config
from ltc.backends.interface import BackendRegistrar
from ltc.debug import metrics
from ltc.ir import build, ops
from ltc.ir.graph import Graph
from ltc.ir.node import make

jax = pytest.importorskip("jax", reason="JAX is not installed")
import numpy as np

from ltc.backends.xla import packed_state
from ltc.backends.xla.compiled_graph import ScalarGroup
from ltc.backends.xla.numbers import DTYPES

XLA = {"LTC_BACKEND": "xla"}


def given(dtype: torch.dtype, *shapes: tuple) -> list:
    return [make(ops.INPUT, index=k, dtype=dtype, shape=s) for k, s in enumerate(shapes)]


def compiled(graph: Graph, *donated: int):
    return BackendRegistrar.get("xla").compile(graph, 0, frozenset(donated))


# --- checks ahead --------------------------------------------------------------------------------


def picked():
    """A table's rows by their numbers, and the table doubled, which is written over."""
    (table,) = given(torch.float32, (4,))
    index = make(ops.INPUT, index=1, dtype=torch.int64, shape=(3,))
    wrapped = make(ops.WRAP_INDEX, index, size=4, lowest=0, message="index {} is out of range")
    rows = make(ops.TAKE, table, wrapped, dim=0)
    return compiled(Graph((table, index), (), (table * 2, rows)), 0)


def test_a_program_whose_labels_are_checked_ahead_is_not_waited_for():
    computation = picked()
    assert computation.capabilities.begins_at_once
    table = computation.upload(torch.arange(4.0), 0)
    outputs = computation.launch([table, computation.upload(torch.tensor([3, 0, 1]), 0)], [])
    assert computation.download(outputs[1]).tolist() == [3.0, 0.0, 1.0]


def test_labels_are_asked_again_only_where_they_are_others(monkeypatch):
    computation = picked()
    early = computation._checked.program.early
    asked, run = [], early._run
    monkeypatch.setattr(early, "_run", lambda arrays: asked.append(arrays) or run(arrays))
    labels = [computation.upload(torch.tensor([k, 0, 1]), 0) for k in range(2)]
    for k in (0, 1, 0, 1, 1):
        computation.launch([computation.upload(torch.arange(4.0), 0), labels[k]], [])
    assert len(asked) == 2


def test_a_label_out_of_range_is_told_and_nothing_is_written_over():
    computation = picked()
    for _ in range(2):
        table = computation.upload(torch.arange(4.0), 0)
        with pytest.raises(IndexError) as raised:
            computation.launch([table, computation.upload(torch.tensor([0, 7, 1]), 0)], [])
        kept = raised.value.restored[0]
        assert computation.download(kept).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_check_of_computed_values_is_waited_for():
    x, y = given(torch.int64, (3,), (3,))
    computation = compiled(Graph((x, y), (), (make(ops.FLOOR_DIVIDE, x, y - build.sum_of(y, 0)),)))
    assert not computation.capabilities.begins_at_once


# --- many steps ----------------------------------------------------------------------------------


def training(device: str):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 6) for _ in range(6)]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x, y = torch.randn(8, 6).to(device), torch.tensor([0, 1, 2, 3, 4, 5, 0, 1]).to(device)

    def step(y=y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, step


STEPS = 200


@pytest.mark.parametrize("way", ["recorded", "replayed"])
def test_nothing_is_kept_from_step_to_step(way):
    """Neither an array of JAX's nor anything of Python's: half an object a step would be too many."""
    with config.override(**XLA):
        _, _, step = training("ltc")
        step = ltc.compile(step) if way == "replayed" else step

        def arrays_and_objects_after(steps: int) -> tuple[int, int]:
            for k in range(steps):
                loss = step()
                ltm.mark_step()
                if k % 10 == 9:
                    loss.item()
            ltm.wait_device_ops()
            gc.collect()
            return len(jax.live_arrays()), len(gc.get_objects())

        arrays, objects = arrays_and_objects_after(30)
        with metrics.counted() as grown:
            more_arrays, more_objects = arrays_and_objects_after(STEPS)
        assert not grown["UncachedCompile"]
        assert more_arrays == arrays
        assert more_objects - objects < STEPS / 2


# --- packs ---------------------------------------------------------------------------------------


@pytest.fixture
def packing(monkeypatch):
    """Values lie in packs on this machine's CPU too."""
    monkeypatch.setattr(packed_state, "largest_part", lambda device: 1 << 12)


@pytest.mark.parametrize("way", ["recorded", "replayed"])
def test_states_stay_in_their_packs_from_step_to_step(packing, way):
    _, _, expected = training("cpu")
    with config.override(**XLA):
        _, _, step = training("ltc")
        step = ltc.compile(step) if way == "replayed" else step
        for k in range(6):
            with metrics.counted() as grown:
                loss = step().item()
                ltm.mark_step()
            assert loss == pytest.approx(expected().item(), rel=1e-5)
            assert k < 2 or not grown["XlaPacks"]


def test_what_lies_in_a_pack_is_read_copied_and_written_as_anything_else(packing):
    with config.override(**XLA):
        found, expected = training("ltc"), training("cpu")
        for k in range(6):
            for model, _, step in (found, expected):
                step()
                ltm.mark_step()
                if k == 3:
                    kept = [p.detach().clone() for p in model.parameters()]
                    with torch.no_grad():
                        next(model.parameters()).mul_(0.5)
                if k == 4:
                    kept += [p.detach().cpu().clone() for p in model.parameters()]
                    model.kept = kept
        for ours, theirs in zip(found[0].kept, expected[0].kept, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-6)
        for ours, theirs in zip(found[0].parameters(), expected[0].parameters(), strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-6)


def test_a_step_that_is_refused_leaves_what_lies_in_packs(packing):
    with config.override(**XLA):
        model, _, step = training("ltc")
        for _ in range(4):
            step()
            ltm.mark_step()
        before = [p.detach().cpu().clone() for p in model.parameters()]
        wrong = torch.tensor([0, 1, 2, 3, 4, 5, 0, 9]).to("ltc")
        with pytest.raises(IndexError):
            step(wrong)
            ltm.mark_step(wait=True)
        for ours, theirs in zip(model.parameters(), before, strict=True):
            assert torch.equal(ours.cpu(), theirs)
        step()
        ltm.mark_step(wait=True)
        assert not torch.equal(next(model.parameters()).cpu(), before[0])


def test_memory_of_a_pack_goes_with_its_last_part(packing):
    nodes = given(torch.float32, *[(k + 1,) for k in range(8)])
    computation = compiled(Graph(tuple(nodes), (), tuple(n * 2 for n in nodes)), *range(8))
    buffers = [computation.upload(torch.ones(k + 1), 0) for k in range(8)]
    buffers = computation.launch(buffers, [])
    array = buffers[0].pack.array
    with metrics.counted() as grown:
        buffers = computation.launch(buffers, [])
    assert not grown["XlaPacks"]
    assert array.is_deleted()
    assert computation.download(buffers[5]).tolist() == [4.0] * 6


# --- numbers -------------------------------------------------------------------------------------


def test_numbers_of_two_dtypes_are_handed_over_in_one_array():
    (x,) = given(torch.float64, (2,))
    whole = make(ops.SCALAR, slot=0, dtype=torch.int64, wrapped=True)
    rate = make(ops.SCALAR, slot=1, dtype=torch.float64, wrapped=True)
    graph = Graph((x,), (whole, rate), (x * rate + build.cast(whole, torch.float64),))
    computation = compiled(graph)
    assert len(computation._checked.program.groups) == 1
    buffer = computation.upload(torch.tensor([1.0, 2.0], dtype=torch.float64), 0)
    for numbers in ([3, 0.1], [3, 0.1], [3, 0.1], [-(1 << 60), 0.1], [5, -2.5]):
        (made,) = computation.launch([buffer], numbers)
        expected = torch.tensor([1.0, 2.0], dtype=torch.float64) * numbers[1] + numbers[0]
        assert torch.equal(computation.download(made), expected)


def test_numbers_that_stay_are_sent_once_and_a_zeros_sign_is_another_number():
    group = ScalarGroup({np.dtype(np.float64): (0,)}, stays=True)
    first, second, third = (group.array([0.0]) for _ in range(3))
    assert isinstance(first, np.ndarray)
    assert second is third
    assert np.signbit(np.asarray(group.array([-0.0])))[0]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_a_number_of_every_dtype_stays_until_it_is_another(dtype):
    group = ScalarGroup({dtype: (0, 2)}, stays=True)
    _, second, third = (group.array([1, None, 0]) for _ in range(3))
    assert second is third
    for numbers in ([0, None, 0], [0, None, 1]):
        found = group.array(numbers)
        assert found.dtype == dtype
        assert found.tolist() == [numbers[0], numbers[2]]


def test_cpu_tensors_without_dimensions_are_numbers_too():
    (x,) = given(torch.float32, (2,))
    rate = make(ops.SCALAR, slot=0, dtype=torch.bfloat16, wrapped=False)
    least = make(ops.SCALAR, slot=1, dtype=torch.float32, wrapped=True)
    graph = Graph((x,), (rate, least), (x * build.cast(rate, torch.float32) + least,))
    computation = compiled(graph)
    buffer = computation.upload(torch.tensor([1.0, 2.0]), 0)
    held = torch.tensor(1.5, dtype=torch.bfloat16)
    for number in (held, 2.0, torch.nn.Parameter(held)):
        (made,) = computation.launch([buffer], [number, 0.25])
        assert computation.download(made).tolist() == [number + 0.25, 2 * number + 0.25]
