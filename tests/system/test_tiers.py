"""What is new runs at once on PyTorch's kernels, and is compiled when it comes back often enough."""

import os
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.backends.interpreter.interpreted import InterpretedComputation
from ltc.debug import metrics
from ltc.device.op_by_op import forks
from ltc.runtime import graph_compiler, program, tiers
from tests.recorders import forget_paths
from tests.training_loop import train


@pytest.fixture(autouse=True)
def tiered(monkeypatch):
    """As in a process of one device that was told nothing, and records all, from a fresh path on."""
    forget_paths()
    monkeypatch.setattr(tiers, "_has_replicas", lambda: False)
    monkeypatch.setattr(forks, "RECORDED", 1 << 30)  # test_op_by_op.py is about the others
    with config.override(LTC_TIER="auto", LTC_CACHE=0, LTC_BACKEND="llvm"):
        yield


def fresh(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to("ltc:0")


NAMES = ("InterpretedPrograms", "InterpretedRuns", "UncachedCompile", "TierUpRepeated")


def counts(grown) -> tuple[int, ...]:
    return tuple(grown[name] for name in NAMES)


def run(x: torch.Tensor) -> torch.Tensor:
    """A program of a shape of its own."""
    y = (x * 2).tanh().sum(0)
    ltm.mark_step()
    return y


def test_a_new_program_runs_without_being_compiled():
    x = fresh(3, 1201)
    with metrics.counted() as grown:
        y = run(x)
        assert torch.equal(y.cpu(), (x.cpu() * 2).tanh().sum(0))
    assert counts(grown) == (1, 1, 0, 0)


def test_a_loop_is_compiled_at_its_third_step():
    x = fresh(3, 1202)
    with metrics.counted() as grown:
        for _ in range(2):
            run(x)
        ltm.wait_device_ops()
        assert counts(grown) == (1, 2, 0, 0)
        for _ in range(3):
            y = run(x)
        ltm.wait_device_ops()
    assert counts(grown) == (1, 2, 1, 1)
    torch.testing.assert_close(y.cpu(), (x.cpu() * 2).tanh().sum(0))


def test_a_loop_of_several_programs_is_compiled_as_well():
    x, z = fresh(3, 1203), fresh(4, 1203)
    with metrics.counted() as grown:
        for _ in range(4):
            run(x)
            run(z)
        ltm.wait_device_ops()
    assert counts(grown) == (2, 4, 2, 2)


def test_a_loop_of_one_call_stays_with_the_kernel_that_does_it(monkeypatch):
    monkeypatch.setattr(tiers, "COMPILE_SECONDS", (60.0, 0.0))  # however slow the machine is
    x = fresh(3, 1207)
    with metrics.counted() as grown:
        for _ in range(6):
            y = x.sum(0)
            ltm.mark_step(wait=True)
    assert counts(grown) == (1, 6, 0, 0)
    torch.testing.assert_close(y.cpu(), x.cpu().sum(0))


def test_a_loop_of_one_call_that_draws_is_compiled():
    with metrics.counted() as grown:
        for _ in range(4):
            y = torch.rand(3, 1208, device="ltc:0")
            ltm.mark_step(wait=True)
    assert counts(grown) == (1, 2, 1, 1)
    assert 0 <= y.min().item() <= y.max().item() < 1


def test_a_loop_of_one_update_over_lists_is_compiled():
    values = [fresh(3, 1209).requires_grad_() for _ in range(2)]
    for value in values:
        value.grad = torch.ones_like(value)
    optimizer = torch.optim.AdamW(values)
    ltm.mark_step(wait=True)
    with metrics.counted() as grown:
        for _ in range(5):
            optimizer.step()
            ltm.mark_step(wait=True)
    assert grown["TierUpRepeated"] == 1


def test_shapes_that_change_compile_nothing(monkeypatch):
    monkeypatch.setattr(tiers, "COMPILE_SECONDS", (60.0, 0.0))  # however slow the machine is
    with metrics.counted() as grown:
        for length in range(1210, 1230):
            run(fresh(3, length))
        for length in range(1210, 1230):  # they come back, but not as in a loop
            run(fresh(3, length))
        ltm.wait_device_ops()
    assert counts(grown) == (20, 40, 0, 0)


def test_a_program_is_compiled_once_it_has_taken_as_long_as_that(monkeypatch):
    monkeypatch.setattr(tiers, "COMPILE_SECONDS", (0.0, 0.0))
    x = fresh(3, 1204)
    with metrics.counted() as grown:
        run(x)
        for length in range(1230, 1236):
            run(fresh(3, length))
        run(x)
        ltm.wait_device_ops()
    assert grown["TierUpPaid"] >= 1
    assert grown["TierUpRepeated"] == 0


def test_ltc_tier_native_compiles_before_the_first_run():
    x = fresh(3, 1205)
    with config.override(LTC_TIER="native"), metrics.counted() as grown:
        run(x)
        ltm.wait_device_ops()
    assert counts(grown) == (0, 0, 1, 0)


def test_replicas_run_compiled_programs_only(monkeypatch):
    monkeypatch.setattr(tiers, "_has_replicas", lambda: True)
    x = fresh(3, 1206)
    with metrics.counted() as grown:
        run(x)
        ltm.wait_device_ops()
    assert counts(grown) == (0, 0, 1, 0)


@pytest.mark.parametrize(("seconds", "is_behind"), [(60.0, False), (0.0, True)])
def test_small_kernels_are_called_in_the_calling_thread(monkeypatch, seconds, is_behind):
    monkeypatch.setattr(tiers, "REPEATS", 1 << 30)
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
    assert grown["InterpretedRuns"] >= 2 and grown["TierUpRepeated"] >= 1
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
    table = fresh(5, 1208)
    told = []
    for tier in ("auto", "native"):
        with config.override(LTC_TIER=tier):
            row = table[torch.tensor([7]).to("ltc:0")]
            total = table.sum()
            with pytest.raises(IndexError) as caught:
                ltm.mark_step(wait=True)
            told.append((str(caught.value), caught.value.__notes__))
            torch.testing.assert_close(
                total.cpu(), table.cpu().sum()
            )  # it needs nothing that failed
            del row
    (text, notes), (other, other_notes) = told
    assert text == other
    assert [note.partition(" called at")[0] for note in notes] == [
        note.partition(" called at")[0] for note in other_notes
    ]


def test_a_parameter_keeps_its_value_where_its_step_fails():
    weight = fresh(5, 1209).requires_grad_()
    before = weight.detach().cpu().clone()
    weight[torch.tensor([9]).to("ltc:0")].sum().backward()
    with torch.no_grad():
        weight.sub_(weight.grad)
    with pytest.raises(IndexError):
        ltm.mark_step(wait=True)
    assert torch.equal(weight.detach().cpu(), before)


def test_an_update_in_place_writes_over_the_parameter():
    """As compiled programs do: a tensor keeps its one block of memory from step to step."""
    weight, momentum = fresh(64, 1211), fresh(64, 1211)
    with torch.no_grad():
        for step in range(2):
            before = metrics.counter_value("InterpretedRuns") or 0
            momentum.mul_(0.9).add_(weight, alpha=0.1)
            weight.sub_(momentum, alpha=0.01 * (step + 1))
            handle = weight_address(weight)
            ltm.mark_step(wait=True)
            assert metrics.counter_value("InterpretedRuns") == before + 1
            assert weight_address(weight) == handle


def weight_address(x: torch.Tensor) -> int:
    from ltc.device.recording.tensors import state_of

    state = state_of(x)
    buffer = state.buffer
    if buffer is None:  # pending: what is to be replaced
        buffer = state.device.recorder().inputs[state.device.recorder().bound.index(state)]
    return buffer.handle.data_ptr()


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
        x = torch.ones(3, 1213).to("ltc:0")
        results.extend(run(x).cpu() for _ in range(6))

    with metrics.counted() as grown:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert grown["UncachedCompile"] == 1
    expected = (torch.ones(3, 1213) * 2).tanh().sum(0)
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
        with tiers._compiling:
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


def test_attention_with_dropout_runs_interpreted():
    def attend(tier: str) -> torch.Tensor:
        q = torch.linspace(-1, 1, 2 * 3 * 4 * 8).view(2, 3, 4, 8).to("ltc:0").requires_grad_()
        ltm.set_rng_state(3)
        with config.override(LTC_TIER=tier):
            F.scaled_dot_product_attention(q, q, q, dropout_p=0.3).square().sum().backward()
            ltm.mark_step()
            return q.grad.cpu()

    with metrics.counted() as grown:
        interpreted = attend("auto")
    assert grown["InterpretedRuns"] == 1
    torch.testing.assert_close(interpreted, attend("native"), rtol=1e-4, atol=1e-5)


def test_what_was_made_in_inference_mode_is_written_over_behind_it():
    for _ in range(12):  # also by one function of all calls
        with torch.inference_mode():
            x = torch.ones(3).to("ltc:0")
            x.add_(1)
        ltm.mark_step()
        assert x.tolist() == [2, 2, 2]
