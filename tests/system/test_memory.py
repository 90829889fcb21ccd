"""Memory stays bounded, and nothing recurses, however long a program goes without a mark."""

import gc
import itertools
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import ltc
import ltc.core.lazy_model as ltm
from ltc import config
from ltc.support.process import machine_memory

MIB = 2**20


def resident_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


linux_only = pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")


def test_a_chain_of_100_000_operations_records_runs_and_is_freed():
    """With the cut far away, so that all of it is one graph; no recursion at any point."""
    with config.override(LTC_MAX_PENDING_NODES=10**9, LTC_CHECK=0):
        x = torch.zeros((), device="ltc")
        for _ in range(100_000):
            x = x.cos()
        assert abs(x.item() - 0.7390851) < 1e-6  # the number that is its own cosine
    del x
    gc.collect()
    assert torch.ones(2, device="ltc").sum().item() == 2


def test_a_long_chain_dropped_unread_is_freed():
    with config.override(LTC_MAX_PENDING_NODES=10**9):
        x = torch.zeros((), device="ltc")
        for _ in range(50_000):
            x = x + 1
        del x
        gc.collect()
        ltm.mark_step()
    assert torch.ones(2, device="ltc").sum().item() == 2


def test_a_long_chain_of_views_written_at_its_end():
    x = torch.zeros(4, device="ltc")
    view = x
    for _ in range(2_000):
        view = view.view(4)
    view.add_(1)
    assert x.tolist() == [1, 1, 1, 1] and view.tolist() == [1, 1, 1, 1]


@linux_only
def test_a_sum_without_a_mark_stays_small():
    """`total = total + 1` cuts itself: what is pending is bounded, by nodes and by bytes.

    In a process of its own, whose memory no other test has shaped.
    """
    soak = Path(__file__).parents[2] / "scripts" / "stress" / "soak.py"
    command = [sys.executable, str(soak), "--only", "chain", "--count", "60000"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("kept") == 2


@pytest.mark.devices(4)
def test_a_cut_without_a_mark_warns_once_with_the_users_line(recwarn):
    with config.override(LTC_MAX_PENDING_NODES=200):
        x = torch.zeros((), device="ltc:3")  # a device no other test cuts on
        for _ in range(1_000):
            x = x + 1
        assert x.item() == 1_000
    warned = [w for w in recwarn if "mark_step" in str(w.message)]
    assert len(warned) <= 1
    assert all("test_memory.py" in str(w.message) or "test_memory.py" in w.filename for w in warned)


def test_pending_bytes_are_bounded():
    with config.override(LTC_MAX_PENDING_BYTES=MIB):
        kept = [torch.full((MIB // 16,), float(i), device="ltc") for i in range(64)]
        assert [int(tensor[0]) for tensor in kept] == list(range(64))


@linux_only
def test_steps_do_not_grow_memory():
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)).to("ltc")
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        optimizer.zero_grad()
        model(torch.randn(16, 32).to("ltc")).square().mean().backward()
        optimizer.step()
        ltm.mark_step()

    def resident_after(steps: int) -> int:
        for _ in range(steps):
            step()
        ltm.wait_device_ops()
        gc.collect()
        return resident_bytes()

    with config.override(LTC_CHECK=0):  # as users run it
        sizes = [resident_after(steps) for steps in (100, 200, 200, 200, 200)]
    # what steps kept would grow each time; an allocator takes another arena now and then
    assert min(after - before for before, after in itertools.pairwise(sizes)) < 2 * MIB


def test_buffers_are_freed_with_their_tensors():
    gc.collect()  # what earlier tests left in cycles
    before = torch.ltc.memory_allocated()
    tensors = [torch.randn(MIB, device="ltc") for _ in range(8)]  # 4 MiB each
    ltm.mark_step(wait=True)
    assert torch.ltc.memory_allocated() - before >= 32 * MIB
    del tensors
    gc.collect()
    assert torch.ltc.memory_allocated() - before < 4 * MIB


def test_tensors_die_without_the_collector():
    gc.disable()
    try:
        x = torch.ones(3, device="ltc") * 2
        reference = weakref.ref(x)
        del x
        assert reference() is None
    finally:
        gc.enable()


def test_the_memory_of_a_device_can_be_asked_for():
    info = ltm.get_memory_info(ltm.lazy_device())
    assert info["kb_total"] >= info["kb_free"] > 0


ANSWERS = {
    "memory_allocated": 4096,
    "memory_reserved": 4096,
    "max_memory_allocated": 3 * 4096,
    "max_memory_reserved": 3 * 4096,
}


@pytest.mark.devices(4)
def test_the_accelerators_figures_are_the_devices_own():
    device = torch.device("ltc:3")  # no other test has tensors there
    gone = torch.ones(2048).to(device)
    gc.collect()
    torch.accelerator.reset_peak_memory_stats(device)
    kept = torch.ones(1024).to(device)
    torch.accelerator.reset_accumulated_memory_stats(device)
    del gone
    assert {name: getattr(torch.accelerator, name)(3) for name in ANSWERS} == ANSWERS
    assert {name: getattr(torch.ltc, name)(3) for name in ANSWERS} == ANSWERS
    stats = torch.accelerator.memory_stats("ltc:3")
    assert stats["allocated_bytes.all.current"] == kept.nbytes
    assert (stats["allocation.all.current"], stats["allocation.all.freed"]) == (1, 1)
    assert stats["allocation.all.allocated"] == 2
    free, total = torch.accelerator.get_memory_info(device)
    assert total - free == kept.nbytes
    torch.accelerator.empty_cache()
    if torch.__version__ >= "2.12":
        torch.accelerator.empty_host_cache()
    torch.accelerator.reset_peak_memory_stats(device)
    assert torch.accelerator.memory.max_memory_allocated(device) == kept.nbytes


TOO_LARGE = (1_000_000, 1_000_000)  # 4 TB


def of_ones(shape):
    return torch.ones(shape, device="ltc")


@pytest.mark.native("the memory that a program would need is known before it runs")
@pytest.mark.parametrize("backend", ["llvm", "eager"])
@pytest.mark.parametrize(
    ("call", "made_by"),
    [
        (lambda: torch.full(TOO_LARGE, 1.5, device="ltc").cpu(), "aten::full"),
        (lambda: (of_ones((1_000_000, 1)) @ of_ones((1, 1_000_000))).sort().values.sum().item(),
         "aten::"),
    ],
    ids=["an output", "a value inside"],
)  # fmt: skip
def test_too_little_memory_is_one_error_that_says_for_what(backend, call, made_by):
    weight, held = of_ones(3), torch.ltc.memory_allocated()
    with config.override(LTC_BACKEND=backend, LTC_MAX_PENDING_BYTES=1 << 60):
        weight.add_(1)
        with pytest.raises(torch.OutOfMemoryError, match="ltc:0 out of memory") as caught:
            call()
        assert caught.value.nbytes >= 10**12
        assert f"Tried to allocate {caught.value.nbytes} bytes" in str(caught.value)
        held_then = int(str(caught.value).split("its tensors hold ")[1].split()[0])
        assert held_then < 100 * MIB  # and not what there was no memory for
        assert "f32[1000000,1000000]" in str(caught.value)
        assert f"made by {made_by}" in str(caught.value)
        assert "test_memory.py" in str(caught.value)
        assert isinstance(caught.value, RuntimeError)  # as on the CPU
        del caught
        assert torch.ltc.memory_allocated() - held < MIB  # nothing is held for what failed
        assert (of_ones(4) + 1).tolist() == [2, 2, 2, 2]


def test_a_copy_to_the_device_that_does_not_fit_is_the_same_error():
    huge = torch.ones(()).expand(10**12)  # one number in memory
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 4000000000000 bytes"):
        huge.to("ltc")
    assert of_ones(2).sum().item() == 2


@pytest.fixture
def little_memory(monkeypatch):
    """A machine on which 16 MiB are all there are, and which promises more."""
    gc.collect()  # what an earlier test has dropped comes back now
    torch.accelerator.empty_cache()  # what is there already is not refused
    monkeypatch.setattr(machine_memory, "total", lambda: 16 * MIB)


# Calls that run when they are made have the memory of PyTorch's allocator, which refuses none of this.
where_programs_run = pytest.mark.parametrize(
    ("backend", "tier"), [("llvm", "native"), ("eager", "native"), ("eager", "auto")]
)

SIDE = 2300
LARGE = (SIDE, SIDE)  # 20 MiB of float32


def row_and_column():
    return of_ones((SIDE, 1)), of_ones((1, SIDE))


def product_in_use():
    row, column = row_and_column()
    return (row @ column).sort().values.sum().item()


@where_programs_run
@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.full(LARGE, 1.5, device="ltc").cpu(),
        lambda: of_ones((SIDE, 1)).expand(LARGE).clone().cpu(),
        product_in_use,
        lambda: torch.special.zeta(*row_and_column()).sum().item(),
    ],
    ids=["an output", "of a view", "a value inside", "through PyTorch"],
)  # fmt: skip
def test_more_than_the_machine_has_in_all_is_refused_before_it_is_touched(
    backend, tier, call, little_memory
):
    with config.override(LTC_BACKEND=backend, LTC_TIER=tier):
        with pytest.raises(torch.OutOfMemoryError, match="ltc:0 out of memory") as caught:
            call()
        assert caught.value.nbytes >= 20 * MIB
        assert "this process can have 16777216 at most" in str(caught.value.__cause__)
        assert (of_ones(4) + 1).tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("tier", ["native", "auto"])
def test_a_value_that_a_compiled_program_never_holds_is_not_refused(tier, little_memory):
    with config.override(LTC_BACKEND="llvm", LTC_TIER=tier):
        row, column = row_and_column()
        assert (row + column).abs().sum().item() == 2 * SIDE**2


@where_programs_run
def test_sizes_that_grow_are_refused_where_they_are_too_large(backend, tier, little_memory):
    with config.override(LTC_BACKEND=backend, LTC_TIER=tier):
        for size in (3, 5, 8, 13, 21, 34):
            made = of_ones((size, 1)) * 2 + torch.zeros(1, size, device="ltc")
            assert made.sum().item() == 2 * size * size
            ltc.sync()
        with pytest.raises(torch.OutOfMemoryError, match="ltc:0 out of memory"):
            made = of_ones((SIDE, 1)) * 2 + torch.zeros(1, SIDE, device="ltc")
            made.cpu()
        made = of_ones((55, 1)) * 2 + torch.zeros(1, 55, device="ltc")
        assert made.cpu().sum().item() == 2 * 55 * 55


@pytest.mark.parametrize(
    "copy",
    [
        lambda x: x.to("ltc"),
        lambda x: x.contiguous().to("ltc"),
        lambda x: x.to("ltc", torch.float64),
        lambda x: torch.empty(LARGE, device="ltc").copy_(x),
        lambda x: torch.empty(LARGE, device="ltc").copy_(x[0, 0]),
    ],
)
@pytest.mark.parametrize("backend", ["llvm", "eager"])
def test_a_copy_of_more_than_the_machine_has_is_refused(backend, copy, little_memory):
    with config.override(LTC_BACKEND=backend):
        with pytest.raises(
            torch.OutOfMemoryError, match="Tried to allocate (21160000|42320000) bytes"
        ):
            copy(torch.ones(()).expand(LARGE))
        assert of_ones(2).sum().item() == 2
