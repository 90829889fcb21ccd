"""Programs of symbols are compiled by another process, while their calls run at once at any sizes."""

import os
import signal
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import ltc
import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics
from ltc.errors import OutOfRangeIndexError
from ltc.runtime.background import compile_behind
from tests.recorders import forget_paths, process_of_one_device
from tests.training_loop import train

pytestmark = pytest.mark.noted_at_once("it counts the programs of the first steps")


@pytest.fixture(autouse=True)
def auto(tmp_path) -> Iterator[None]:
    """As in a process of one device that was told nothing, with an empty disk cache."""
    settings = {"LTC_TIER": "auto", "LTC_CACHE": 1, "LTC_CACHE_DIR": str(tmp_path)}
    settings["LTC_COPY_PROCESS"] = 0  # a new process answers later than the next few steps end
    compile_behind.end()  # one that another test has begun keeps its programs elsewhere
    with process_of_one_device(LTC_NUM_DEVICES=1, **settings):
        yield
        ltm.mark_step()
        compile_behind.end()


def rows_step(rows: int) -> None:
    x = torch.randn(rows, 7)
    y = (x.to("ltc:0").exp() * 3).sum(1).view(rows, 1).expand(rows, 3).contiguous()
    ltm.mark_step(wait=True)
    torch.testing.assert_close(y.cpu(), (x.exp() * 3).sum(1).view(rows, 1).expand(rows, 3))


def test_steps_of_other_sizes_go_on_while_their_program_is_compiled_behind():
    with metrics.counted() as grown:
        for rows in range(20, 30):
            rows_step(rows)
        assert (grown["SymbolicPaths"], grown["CompileBehind"]) == (1, 1)
        assert (grown["SymbolicPrograms"], grown["UncachedCompile"]) == (0, 0)
        assert grown["ImmediateSteps"] == 10
        compile_behind.wait()
        for rows in range(30, 40):
            rows_step(rows)
    assert (grown["SymbolicPrograms"], grown["UncachedCompile"]) == (1, 1)
    assert (grown["SymbolicSizes"], grown["ExecuteTime"], grown["CallByCallRuns"]) == (9, 9, 0)
    assert grown["CompileBehindFailed"] == 0
    assert any("was compiled in the background" in one.what for one in ltc.explain())


def test_a_profile_of_them_tells_each_call_at_the_sizes_of_its_run(tmp_path):
    def product(rows: int) -> None:
        y = torch.randn(rows, 7).to("ltc:0").exp() @ torch.ones(7, 2, device="ltc:0")
        ltm.mark_step(wait=True)
        assert y.shape == (rows, 2)

    for rows in range(20, 25):
        product(rows)
    with ltc.profile(tmp_path / "profile.json") as profile:
        for rows in (31, 33):
            product(rows)
    found = [program["kernels"] for program in profile.trace["ltc"]["programs"]]
    products = [k for kernels in found for k in kernels if k["name"].startswith("mm ")]
    assert [(k["name"], k["multiply_adds"]) for k in products] == [
        ("mm [31, 7] [7, 2]", 31 * 7 * 2),
        ("mm [33, 7] [7, 2]", 33 * 7 * 2),
    ]


def test_what_is_kept_on_disk_is_taken_at_once_by_paths_made_later():
    def run(first: int) -> None:
        for rows in range(first, first + 10):
            rows_step(rows)

    run(20)
    compile_behind.wait()
    run(20)
    forget_paths()
    with metrics.counted() as grown:
        run(20)
    assert grown["SymbolicPrograms"] == 1
    assert grown["RecalledPrograms"] >= 1
    assert grown["CompileBehind"] == 0


def trained(device: str, sizes: range) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = ((torch.randn(n, 6).to(device), torch.randint(0, 3, (n,)).to(device)) for n in sizes)
    losses = []
    for loss in train(model, optimizer, batches):
        losses.append(loss.item())
        if device != "cpu" and len(losses) == len(sizes) // 2 and compile_behind._worker:
            compile_behind.wait()
    return losses


def test_training_goes_on_as_on_the_cpu_across_the_change():
    with metrics.counted() as grown:
        found = trained("ltc:0", range(30, 50))
    torch.testing.assert_close(
        torch.tensor(found), torch.tensor(trained("cpu", range(30, 50))), rtol=1e-4, atol=1e-4
    )
    assert grown["SymbolicPrograms"] >= 1
    assert grown["CompileBehind"] >= 1


def test_where_the_process_is_gone_the_program_is_made_here():
    with metrics.counted() as grown:
        for rows in range(20, 26):
            rows_step(rows)
        os.kill(compile_behind._worker._process.pid, signal.SIGKILL)
        compile_behind.wait()
        for rows in range(26, 30):
            rows_step(rows)
    assert (grown["SymbolicPrograms"], grown["UncachedCompile"]) == (1, 1)


def test_what_cannot_be_compiled_behind_is_told_once():
    for rows in range(20, 26):
        rows_step(rows)
    worker = compile_behind._worker
    (request,) = worker._requests.values()
    os.kill(worker._process.pid, signal.SIGKILL)
    compile_behind.wait()
    request.error = "Unsupported: drawn from a hat\n  %v1 = add i64 %v0, 1\n"
    with metrics.counted() as grown:
        for rows in range(26, 30):
            rows_step(rows)
    assert (grown["SymbolicPrograms"], grown["SymbolicProgramsRefused"]) == (0, 1)
    told = [one for one in ltc.explain() if "drawn from a hat" in one.difference]
    assert [one.difference for one in told] == ["Unsupported: drawn from a hat"]


def test_a_child_of_fork_does_not_wait_for_it():
    for rows in range(20, 26):
        rows_step(rows)
    (request,) = compile_behind._worker._requests.values()
    assert not request.is_over
    child = os.fork()
    if child == 0:
        os._exit(0 if request.is_over else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_index_out_of_range_is_told_while_calls_run_one_by_one():
    def step(rows: int, index: int) -> torch.Tensor:
        y = (torch.arange(rows).to("ltc:0") * 2)[torch.tensor([index, 0]).to("ltc:0")]
        ltm.mark_step(wait=True)
        return y.cpu()

    for rows in range(20, 28):
        assert step(rows, rows - 1).tolist() == [2 * rows - 2, 0]
    with pytest.raises(
        OutOfRangeIndexError, match="index 28 is out of bounds for dimension 0 with size 28"
    ):
        step(28, 28)
    assert step(29, 28).tolist() == [56, 0]


@pytest.mark.parametrize("setting", ["LTC_COMPILE_BEHIND", "LTC_CACHE"])
def test_without_it_the_step_waits(setting):
    with config.override(**{setting: 0}), metrics.counted() as grown:
        for rows in range(20, 30):
            rows_step(rows)
    assert (grown["CompileBehind"], grown["SymbolicPrograms"]) == (0, 1)
