"""What is new runs at once; what comes back is compiled, and its calls run until there is a program."""

import os
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ltc
import ltc.core.lazy_model as ltm
from ltc import config
from ltc.backends.interpreter.interpreted import InterpretedComputation
from ltc.debug import metrics
from ltc.device.immediate import permission
from ltc.device.recording.tensors import state_of
from ltc.native.core import CORE
from ltc.runtime import first_runs, graph_compiler, program
from tests.each_state import in_each_state
from tests.recorders import process_of_one_device
from tests.training_loop import train

pytestmark = pytest.mark.noted_at_once("it counts steps until they are followed")


@pytest.fixture(autouse=True)
def tiered(monkeypatch):
    """As in a process of one device that was told nothing, from a fresh path on."""
    with process_of_one_device(LTC_TIER="auto", LTC_CACHE=0):
        yield


def fresh(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to("ltc:0")


NAMES = ("ImmediateSteps", "CallByCallRuns", "UncachedCompile", "TierUp")


def counts(grown) -> tuple[int, ...]:
    return tuple(grown[name] for name in NAMES)


def run(x: torch.Tensor) -> torch.Tensor:
    """A program of a shape of its own."""
    y = (x * 2).tanh().sum(0)
    ltm.mark_step()
    return y


@pytest.mark.skipif(CORE is not None, reason="the core counts a step where the next one begins")
def test_what_is_new_is_not_compiled():
    x = fresh(3, 1201)
    with metrics.counted() as grown:
        y = run(x)
        assert torch.equal(y.cpu(), (x.cpu() * 2).tanh().sum(0))
    assert counts(grown) == (1, 0, 0, 0)


@pytest.mark.skipif(CORE is not None, reason="the core counts a step where the next one begins")
def test_a_loop_runs_compiled_at_its_third_step():
    x = fresh(3, 1202)
    with metrics.counted() as grown:
        for _ in range(2):
            run(x)
        assert counts(grown) == (2, 0, 0, 0)  # asked for: it is compiled where it is needed
        for _ in range(3):
            y = run(x)
        ltm.wait_device_ops()
    assert counts(grown) == (2, 0, 1, 1)
    torch.testing.assert_close(y.cpu(), (x.cpu() * 2).tanh().sum(0))


def test_a_loop_of_several_programs_is_compiled_as_well():
    x, z = fresh(3, 1203), fresh(4, 1204)
    with metrics.counted() as grown:
        for _ in range(6):
            run(x)
            run(z)
        ltm.wait_device_ops()
    assert counts(grown)[1:] == (0, 2, 2)
    assert grown["ImmediateSteps"] <= 6


@pytest.mark.skipif(CORE is not None, reason="the core counts a step where the next one begins")
def test_a_loop_of_one_call_stays_with_the_kernel_that_does_it():
    x = fresh(3, 1207)
    with metrics.counted() as grown:
        for _ in range(6):
            y = x.sum(0)
            ltm.mark_step(wait=True)
    assert counts(grown) == (6, 0, 0, 0)
    torch.testing.assert_close(y.cpu(), x.cpu().sum(0))


def test_where_other_tensors_are_alive_the_followed_path_has_another_program():
    x = fresh(3, 1210)
    for _ in range(4):
        run(x)
    ltm.wait_device_ops()
    with metrics.counted() as grown:
        doubled = x * 2
        y = doubled.tanh().sum(0)
        ltm.mark_step(wait=True)
    assert (grown["UncachedCompile"], grown["ExecuteTime"], grown["ImmediateSteps"]) == (1, 1, 0)
    assert torch.equal(doubled.cpu(), x.cpu() * 2)
    torch.testing.assert_close(y.cpu(), (x.cpu() * 2).tanh().sum(0))


def test_what_is_left_in_the_midst_has_its_beginning_run_call_by_call():
    x = fresh(3, 1211)
    for _ in range(4):
        run(x)
    with metrics.counted() as grown:
        y = (x * 2).tanh().cosh().sum(1)
        ltm.mark_step()
    assert (grown["SideExits"], grown["CallByCallRuns"], grown["ImmediateSteps"]) == (1, 1, 1)
    torch.testing.assert_close(y.cpu(), (x.cpu() * 2).tanh().cosh().sum(1))


def test_lengths_that_take_turns_are_each_compiled():
    with config.override(LTC_SYMBOLIC=0), metrics.counted() as grown:
        for _ in range(8):
            for length in range(1310, 1315):
                run(fresh(3, length))
        ltm.wait_device_ops()
    assert counts(grown)[1:] == (0, 5, 5)
    assert grown["ImmediateSteps"] <= 20


def test_ltc_tier_native_compiles_before_the_first_run():
    x = fresh(3, 1205)
    with config.override(LTC_TIER="native"), metrics.counted() as grown:
        run(x)
        ltm.wait_device_ops()
    assert counts(grown) == (0, 0, 1, 0)


def test_replicas_run_compiled_programs_only():
    x = fresh(3, 1206)
    with config.override(LTC_NUM_DEVICES=2), metrics.counted() as grown:
        run(x)
        ltm.wait_device_ops()
    assert counts(grown) == (0, 0, 1, 0)


def test_a_replayed_call_runs_compiled():
    """Calls of such a function never run when they are made, so the policy does not hear of them."""

    @ltc.compile
    def step(x):
        return (x * 2).tanh().sum(0)

    with config.override(LTC_CHECK=0), metrics.counted() as grown:
        for _ in range(5):
            y = step(fresh(3, 1231))
        ltm.wait_device_ops()
    assert grown["ReplayedCalls"] == 3
    assert grown["CallByCallRuns"] == 1  # the first one
    assert y.shape == (1231,)


def test_a_loop_whose_graphs_are_saved_runs_compiled_when_it_comes_back(tmp_path):
    x = fresh(3, 1232)
    with (
        config.override(LTC_SAVE_TENSORS_FILE=str(tmp_path / "graphs")),
        metrics.counted() as grown,
    ):
        for _ in range(5):
            run(x)
        ltm.wait_device_ops()
    assert counts(grown) == (0, 1, 1, 1)


@pytest.fixture
def process_group():
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_processes_that_train_together_run_compiled_programs_only(process_group):
    """Each would begin with its compiled program at another step: not the same bits."""
    x = fresh(3, 1233)
    with metrics.counted() as grown:
        for _ in range(3):
            run(x)
        ltm.wait_device_ops()
    assert counts(grown) == (0, 0, 1, 0)


@pytest.mark.parametrize(("seconds", "is_behind"), [(60.0, False), (0.0, True)])
def test_small_kernels_are_called_in_the_calling_thread(monkeypatch, seconds, is_behind):
    monkeypatch.setattr(first_runs, "may_run_uncompiled", lambda: True)
    monkeypatch.setattr(permission, "may_run_uncompiled", lambda: False)  # all is recorded
    monkeypatch.setattr(first_runs.FirstRuns, "ask", lambda self: None)
    monkeypatch.setattr(program, "SHORT_SECONDS", 0.0)
    monkeypatch.setattr(program, "SHORT_CALL_SECONDS", seconds)
    threads, launch = [], InterpretedComputation.launch

    def seen(self, *arguments):
        threads.append(threading.get_ident())
        return launch(self, *arguments)

    monkeypatch.setattr(InterpretedComputation, "launch", seen)
    x = fresh(3, 1240 + is_behind)
    for _ in range(3):
        run(x)
        ltm.wait_device_ops()
    here = threading.get_ident()
    assert [one != here for one in threads] == [False, is_behind, is_behind]


def trained(device: str, steps: int, tier: str) -> list[torch.Tensor]:
    """The parameters and losses of a network with dropout, running statistics and momentum."""
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(12, 24, bias=False),
        nn.BatchNorm1d(24),
        nn.GELU(),
        nn.Dropout(0.3),
        nn.Linear(24, 5),
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(2)
    batches = (
        (
            torch.randn(16, 12, generator=data).to(device),
            torch.randint(0, 5, (16,), generator=data).to(device),
        )
        for _ in range(steps)
    )
    with config.override(LTC_TIER=tier):
        losses = list(train(model, optimizer, batches))
    return [*losses, *(p.detach() for p in model.state_dict().values())]


def test_a_training_draws_the_same_random_numbers_on_every_tier():
    with metrics.counted() as grown:
        by_both = [value.cpu() for value in trained("ltc:0", 6, "auto")]
    assert grown["ImmediateSteps"] >= 2 and grown["TierUp"] >= 1
    for mine, other in zip(by_both, trained("ltc:0", 6, "native"), strict=True):
        torch.testing.assert_close(mine, other.cpu(), rtol=1e-4, atol=1e-5)


def test_random_numbers_are_those_of_a_compiled_program():
    def drawn(tier: str) -> list[torch.Tensor]:
        with config.override(LTC_TIER=tier):
            ltm.set_rng_state(7)
            values = [
                torch.rand(1207, device="ltc:0"),
                torch.randn(1207, device="ltc:0"),
                torch.empty(1207, device="ltc:0").uniform_(-1, 2),
                torch.empty(1207, device="ltc:0").normal_(3, 0.1) * 1.5,
                torch.empty(1207, device="ltc:0").exponential_(2),
                F.dropout(torch.full((1207,), 0.7, device="ltc:0"), 0.3),
                torch.randint(0, 99, (1207,), device="ltc:0"),
                torch.bernoulli(torch.full((1207,), 0.3, device="ltc:0")),
                torch.randperm(1207, device="ltc:0"),
            ]
            ltm.mark_step()
            return [value.cpu() for value in values]

    for mine, other in zip(drawn("auto"), drawn("native"), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize(
    "drawn",
    [
        lambda below: torch.randint(below, (64,), device="ltc"),
        lambda below: torch.randint(-3, below, (64,), device="ltc"),
        lambda below: torch.ones(64, device="ltc").random_(0, below),
    ],
)
def test_numbers_below_a_limit_that_grows_compile_nothing(drawn):
    """As from a replay buffer that fills: each limit was a kernel of its own, 40 ms a step."""
    with config.override(LTC_TIER="auto"), metrics.counted() as grown:
        for below in range(5, 11):
            found = drawn(below).cpu()
            assert found.min() >= -3 and found.max() < below
            ltm.mark_step()
    assert grown["llvm.compiled"] == grown["UncachedCompile"] == 0


def test_a_line_that_draws_is_planned_once_for_all_programs_with_it(monkeypatch):
    planned = []
    compile_traced = graph_compiler.compile_traced
    monkeypatch.setattr(
        graph_compiler,
        "compile_traced",
        lambda graph, device: planned.append(graph) or compile_traced(graph, device),
    )

    def noise() -> torch.Tensor:
        return torch.randn(3, 5, device="ltc")

    def drawn(*added: float) -> list[torch.Tensor]:
        ltm.set_rng_state(7)
        values = [noise() for _ in range(2)]
        for number in added:
            values[1] = values[1] + torch.full_like(values[0], number)
        ltm.mark_step()
        return [value.cpu() for value in values]

    graph_compiler._compiled_calls.clear()
    with config.override(LTC_TIER="auto"):
        first, second = drawn()
        other, more = drawn(2.0, 1.0)
    assert len(planned) == 1
    assert torch.equal(first, other) and not torch.equal(first, second)
    torch.testing.assert_close(second + 3, more)


def test_an_error_is_the_one_of_a_compiled_program():
    """Raised by the call that runs at once, and at the mark by a program."""
    table = fresh(5, 1208)
    told = []
    for tier in ("auto", "native"):
        with config.override(LTC_TIER=tier):
            total = table.sum()
            with pytest.raises(IndexError) as caught:
                row = table[torch.tensor([7]).to("ltc:0")]
                ltm.mark_step(wait=True)
            told.append(str(caught.value).partition("\n")[0])
            torch.testing.assert_close(
                total.cpu(), table.cpu().sum()
            )  # it needs nothing that failed
            if tier == "native":
                del row
    assert told[0] == told[1]


@pytest.mark.parametrize("times", [0, 4])
def test_a_parameter_keeps_its_value_where_its_step_fails(times):
    """Noted, and behind steps that are followed."""
    weight = fresh(5, 1209).requires_grad_()

    def step(row: int) -> None:
        weight.grad = None
        weight[torch.tensor([row]).to("ltc:0")].sum().backward()
        with torch.no_grad():
            weight.sub_(weight.grad)
        ltm.mark_step(wait=True)

    for _ in range(times):
        step(2)
    before = weight.detach().cpu().clone()
    with pytest.raises(IndexError):
        step(9)
    assert torch.equal(weight.detach().cpu(), before)
    step(3)
    assert torch.equal(weight.detach().cpu()[3], before[3] - 1)


@pytest.mark.skipif(CORE is not None, reason="the core has the value, and no buffer is there")
def test_an_update_in_place_writes_over_the_parameter():
    """As compiled programs do: a tensor keeps its one block of memory from step to step."""
    weight, momentum = fresh(64, 1211), fresh(64, 1211)
    ltm.mark_step(wait=True)
    with torch.no_grad(), metrics.counted() as grown:
        for step in range(5):
            address = weight_address(weight)
            momentum.mul_(0.9).add_(weight, alpha=0.1)
            weight.sub_(momentum, alpha=0.01 * (step + 1))
            ltm.mark_step(wait=True)
            assert weight_address(weight) == address
    assert (grown["ImmediateSteps"], grown["ExecuteTime"]) == (2, 3)


def weight_address(x: torch.Tensor) -> int:
    return state_of(x).buffer.handle.data_ptr()


@in_each_state
def test_views_that_share_memory_stay_apart_from_what_is_written():
    x = fresh(6, 1212)
    on_cpu = x.cpu().clone()
    view, flat = x.t(), x.view(-1)
    copy = x.clone()
    x.add_(1)
    on_cpu_view, on_cpu_flat, on_cpu_copy = on_cpu.t(), on_cpu.view(-1), on_cpu.clone()
    on_cpu.add_(1)
    flat[3:9].mul_(3)
    on_cpu_flat[3:9].mul_(3)
    ltm.mark_step()
    for mine, theirs in (
        (x, on_cpu),
        (view, on_cpu_view),
        (flat, on_cpu_flat),
        (copy, on_cpu_copy),
    ):
        assert torch.equal(mine.cpu(), theirs)


def test_threads_that_use_one_program_compile_it_once():
    results: list[torch.Tensor] = []

    def work() -> None:
        x = torch.ones(3, 1413).to("ltc:0")
        results.extend(run(x).cpu() for _ in range(6))

    with metrics.counted() as grown:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert grown["UncachedCompile"] == 1
    expected = (torch.ones(3, 1413) * 2).tanh().sum(0)
    for result in results:
        torch.testing.assert_close(result, expected)


def test_who_looks_at_the_passes_sees_them_at_once(capsys):
    with config.override(LTC_DUMP="simplify"):
        run(fresh(3, 1250))
    assert "after simplify" in capsys.readouterr().out


def test_a_child_of_fork_compiles_whoever_compiled_in_the_parent():
    x = fresh(3, 1260)
    run(x)
    run(x)
    ltm.wait_device_ops()
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with first_runs._compiling:
            held.set()
            go_on.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    try:
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            try:
                os.write(writer, repr(run(x).sum().item()).encode())
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            told = pipe.read()
        os.waitpid(child, 0)
    finally:
        go_on.set()
        holder.join()
    assert float(told) == pytest.approx(run(x).sum().item(), rel=1e-4)


def test_attention_with_dropout_is_that_of_a_compiled_program():
    def attend(tier: str) -> torch.Tensor:
        q = torch.linspace(-1, 1, 2 * 3 * 4 * 8).view(2, 3, 4, 8).to("ltc:0").requires_grad_()
        ltm.set_rng_state(3)
        with config.override(LTC_TIER=tier):
            F.scaled_dot_product_attention(q, q, q, dropout_p=0.3).square().sum().backward()
            ltm.mark_step()
            return q.grad.cpu()

    with metrics.counted() as grown:
        noted = attend("auto")
    assert (grown["ImmediateSteps"], grown["ExecuteTime"]) == (1, 0)
    torch.testing.assert_close(noted, attend("native"), rtol=1e-4, atol=1e-5)


@in_each_state
def test_what_was_made_in_inference_mode_is_written_over_behind_it():
    for _ in range(12):  # also by one function of all calls
        with torch.inference_mode():
            x = torch.ones(3).to("ltc:0")
            x.add_(1)
        ltm.mark_step()
        assert x.tolist() == [2, 2, 2]
