"""Calls run when they are made, noted or left alone, and give what they give when followed."""

import gc
import random
import threading
import weakref
from types import FunctionType

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.aten.schema import overload_named
from ltc.debug import metrics
from ltc.device import policy
from ltc.device.immediate import immediate_session
from ltc.device.recording.entries import KERNEL_FILE
from ltc.device.recording.recorder import device_at
from ltc.device.recording.run_now import how_to_run
from ltc.device.recording.signature import Signature
from ltc.device.torch_device import storage_of
from ltc.native.core import CORE
from ltc.runtime import first_runs
from ltc.support.torch_private import below_autograd, set_view_replay_enabled
from tests.each_state import IMMEDIATE, in_each_state, tier_of
from tests.recorders import forget_paths, process_of_one_device
from tests.states import wait_for_the_compiler
from tests.training_loop import train


@pytest.fixture(autouse=True)
def auto():
    """As in a process of one device that was told nothing."""
    with process_of_one_device(LTC_TIER="auto", LTC_CACHE=0, LTC_SYMBOLIC=0):
        yield


@pytest.fixture
def left_alone():
    """Calls run at once and are not noted, so that they may write into the memory that is there."""
    with tier_of("left alone"):
        yield


@pytest.fixture(params=IMMEDIATE)
def immediate(request):
    """Calls run at once, and are noted or left alone."""
    with tier_of(request.param):
        yield


def place_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's value, which is in a buffer or in the session that has made it."""
    state = storage_of(tensor).lazy
    held = state.value.tensor if state.buffer is None else state.buffer.handle
    address: int = held.data_ptr()
    return address


def run(length: int) -> torch.Tensor:
    x = torch.linspace(-1, 1, 3 * length).view(3, length)
    y = (x.to("ltc:0") * 2).tanh().sum(0)
    ltm.mark_step()
    torch.testing.assert_close(y.cpu(), (x * 2).tanh().sum(0))
    return y


# --- when ---


NAMES = ("ImmediateSteps", "ImmediateCalls", "RecordedEntries", "UncachedCompile", "ExecuteTime")


def counts(grown) -> tuple[int, ...]:
    return tuple(grown[name] for name in NAMES)


@pytest.mark.skipif(CORE is not None, reason="the core sums up a path before it is noted")
def test_what_is_new_is_noted_and_runs_at_once():
    with metrics.counted() as grown:
        run(2001)
    assert counts(grown) == (1, 3, 4, 0, 0)  # an input, and three calls


@pytest.mark.skipif(CORE is not None, reason="the core sums up a path before it is noted")
def test_a_loop_is_followed_from_its_third_step_on():
    with metrics.counted() as grown:
        for _ in range(6):
            run(2103)
    assert counts(grown) == (2, 6, 4, 1, 4)
    assert grown["CallByCallRuns"] == grown["SideExits"] == 0


def test_other_paths_in_between_keep_no_path_from_being_followed():
    with metrics.counted() as grown:
        for other in range(2110, 2116):
            run(2104)
            run(other)
    assert (grown["ImmediateSteps"], grown["UncachedCompile"], grown["ExecuteTime"]) == (9, 1, 3)


@pytest.mark.parametrize("update", ["adam", "foreach"])
def test_one_call_that_writes_to_a_list_counts_for_each_of_its_tensors(update):
    parameters = [torch.zeros(7, 3, device="ltc", requires_grad=True) for _ in range(5)]
    for parameter in parameters:
        parameter.grad = torch.ones(7, 3, device="ltc")
    optimizer = torch.optim.AdamW(parameters)

    def step() -> None:
        if update == "adam":
            optimizer.step()
        else:
            torch._foreach_mul_([one.data for one in parameters], 0.5)
        ltm.mark_step(wait=True)

    for _ in range(10):
        step()
        wait_for_the_compiler()
    with metrics.counted() as grown:
        step()
    assert (grown["ImmediateSteps"], grown["ExecuteTime"]) == (0, 1)


def choose(choices: list[int]) -> torch.Tensor:
    """A step of one call for each choice among three."""
    x = torch.linspace(-1, 1, 6)
    y = x.to("ltc")
    for choice in choices:
        x, y = ((one.sin(), one.cos(), one.tanh())[choice] for one in (x, y))
    ltm.mark_step()
    torch.testing.assert_close(y.cpu(), x)
    return y


def test_what_never_comes_back_is_noted_ever_more_seldom_and_never_compiled(monkeypatch):
    monkeypatch.setattr(policy, "MAX_NEW_PATHS", 32)
    draw, calls = random.Random(0), 40
    with metrics.counted() as grown:
        for _ in range(150):
            choose(draw.choices(range(3), k=calls))
    assert (grown["UncachedCompile"], grown["ExecuteTime"]) == (0, 0)
    with metrics.counted() as grown:
        for _ in range(100):
            choose(draw.choices(range(3), k=calls))
    assert grown["ImmediateSteps"] == 100
    assert grown["RecordedEntries"] < 40 * calls * 3
    alike = draw.choices(range(3), k=calls)
    for _ in range(100):  # a loop settles: it is followed all the same
        choose(alike)
    with metrics.counted() as grown:
        choose(alike)
    assert (grown["ImmediateSteps"], grown["RecordedEntries"], grown["ExecuteTime"]) == (0, 0, 1)


@pytest.mark.skipif(CORE is not None, reason="the core sums up a path before it is noted")
def test_a_side_exit_runs_what_was_followed_and_notes_the_rest():
    def step(leaves: bool) -> torch.Tensor:
        x = torch.linspace(-1, 1, 2201)
        y = (x.to("ltc:0") * 2).exp()
        z = (y - 1).sinh() if leaves else y.mean(0).cos()
        ltm.mark_step()
        x = (x * 2).exp()
        torch.testing.assert_close(z.cpu(), (x - 1).sinh() if leaves else x.mean(0).cos())
        return z

    for _ in range(3):
        step(False)
    with metrics.counted() as grown:
        step(True)
    assert (grown["SideExits"], grown["ImmediateSteps"], grown["CallByCallRuns"]) == (1, 1, 1)
    for _ in range(6):
        step(True)
    with metrics.counted() as grown:
        for _ in range(3):
            step(True)
    assert (grown["SideExits"], grown["ExecuteTime"]) == (0, 3)


def test_another_copy_through_a_view_is_run():
    x, y = torch.zeros(2, 3).to("ltc:0"), torch.arange(3.0).to("ltc:0")
    for turn in range(4):
        rows = [y * n for n in range(4)]
        x[0].copy_(rows[turn])
        ltm.mark_step()
        assert x.tolist() == [[0, turn, 2 * turn], [0, 0, 0]]


@pytest.mark.parametrize("setting", ["replicas", "peers", "native"])
def test_what_needs_the_same_bits_everywhere_is_never_run_so(monkeypatch, setting):
    if setting == "peers":
        monkeypatch.setattr(first_runs, "has_peers", lambda: True)
    tier, count = "native" if setting == "native" else "auto", 2 if setting == "replicas" else 1
    with config.override(LTC_TIER=tier, LTC_NUM_DEVICES=count), metrics.counted() as grown:
        for length in range(2301, 2306):
            run(length)
    assert grown["ImmediateSteps"] == 0


def test_a_path_that_was_recorded_is_not_followed_either():
    x = torch.ones(3).to("ltc:0")
    for _ in range(3):
        y = x * 5
        ltm.mark_step()
    with config.override(LTC_TIER="op_by_op"):
        ltm.mark_step()
        for _ in range(3):
            z = x * 5
            ltm.mark_step()
        with metrics.counted() as grown:
            z = x * 5
            ltm.mark_step()
    assert grown["ImmediateCalls"] == 1
    assert torch.equal(y.cpu(), z.cpu())


def test_every_call_runs_when_it_is_made(immediate):
    x = torch.ones(3).to("ltc:0")
    with metrics.counted() as grown:
        y = x + 1
        assert storage_of(y).lazy.value.tensor.tolist() == [2.0] * 3
        ltm.mark_step()
    assert grown["ImmediateCalls"] == 1
    assert y.tolist() == [2.0] * 3


# --- what tensors are to one another ---


def written_through_views(x):
    view, other = x[1:], x.t()
    view.add_(10)
    other[0].mul_(2)
    return x, view, other, x.view(-1)


def copies_are_apart(x):
    y, z = torch.empty_like(x), torch.zeros_like(x)
    y.copy_(x)
    z[1:].copy_(y[1:])
    y.add_(1)
    x.sub_(1)
    return x, y, z


def sharing_one_storage(x):
    y = x.detach()
    y.mul_(3)
    z = x.data
    z[0] = 5
    return x, y, z


def chunks_and_parts(x):
    first, *others = x.unbind(1)
    first.zero_()
    for part in x.chunk(2, 1):
        part.add_(first[:, None])
    return x, first, *others


def masks_and_indices(x):
    mask = x > 0
    x[mask] = -1
    x.index_put_((torch.tensor([0, 1], device=x.device),), x[1].clone(), accumulate=True)
    return x, x[~mask], mask.nonzero(), x.masked_select(x > 0)


def out_tensors(x):
    y = torch.empty(0, device=x.device, dtype=x.dtype)
    torch.add(x, 1, out=y)
    z = torch.ones_like(x)
    torch.mul(x, 2, out=z[:, :])
    return y, z


def lists(x):
    tensors = [x, x * 2, x[0]]
    torch._foreach_add_(tensors[1:], 1)
    return [*torch._foreach_mul(tensors, 2), *tensors]


def broadcast(x):
    y = x[:, :1].expand(-1, 4)
    return y + 1, y.sum(0), x.expand_as(x).add_(1), x


def complex_parts(x):
    z = torch.complex(x, x + 1)
    conjugate = z.conj()
    z.real.mul_(2)
    conjugate.imag.add_(x)
    z[:, :3].mH[1].imag.mul_(3)
    torch._neg_view(conjugate.real).sub_(x)
    return z, conjugate, conjugate.imag, (conjugate * z).abs()


def reads_in_between(x):
    y = x * 2
    first = y[0, 0].item()
    y.add_(first)
    return y, x + y.sum().item(), torch.tensor(y.tolist())


def rows_while_others_are_held(x):
    rows, flat, column = list(x), x.view(-1), x[:, 1]
    for k, row in enumerate(rows):
        x[k] += rows[k - 1][0]
        x[k, 1:] /= 2
        row.mul_(3)
        x[k] = rows[k - 1]
    column.copy_(x[:, 2])
    x[1:, ::2].copy_(torch.ones(2, 2, dtype=torch.float64, device=x.device))
    flat[2:4] = column[:2].clone()
    return x, *rows, flat, column


def rows_of_what_the_step_was_given(x):
    held = x[0]
    ltm.mark_step()
    held.sub_(1)
    x[1] = held
    ltm.mark_step()
    x[2].addcmul_(held, x[1])
    return x, held, x.sum(0)


PROGRAMS = [
    rows_while_others_are_held, rows_of_what_the_step_was_given,
    written_through_views, copies_are_apart, sharing_one_storage, chunks_and_parts,
    masks_and_indices, out_tensors, lists, broadcast, complex_parts, reads_in_between,
]  # fmt: skip


@pytest.mark.parametrize("mark", [True, False], ids=["marked", "not marked"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@in_each_state
def test_views_and_writes_are_the_cpus(program, mark):
    x = torch.randn(3, 4)
    there = x.clone()
    found = program(x.to("ltc:0"))
    if mark:
        ltm.mark_step()
    for ours, theirs in zip(found, program(there), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)


@in_each_state
def test_a_view_that_the_cpu_refuses_may_be_written_to():
    x = torch.zeros(2, 3).to("ltc:0")
    x.t().view(6).add_(torch.arange(6.0).to("ltc:0"))
    assert x.tolist() == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize("tier", ["op_by_op", "auto"])
@pytest.mark.parametrize(
    "write, expected",
    [
        (lambda x: x[1:, 1:].fill_diagonal_(9), [[0, 1, 2], [3, 9, 5], [6, 7, 9]]),
        (lambda x: x[1:].as_strided((2,), (2,), 1).zero_(), [[0, 1, 2], [3, 0, 5], [0, 7, 8]]),
        (lambda x: x.t().as_strided((3,), (1,)).zero_(), [[0, 1, 2], [0, 4, 5], [0, 7, 8]]),
        (lambda x: x.t().view(-1).view(torch.int32)[1].zero_(), [[0, 1, 2], [0, 4, 5], [6, 7, 8]]),
        (lambda x: x.unfold(1, 2, 1).view(-1)[1].zero_(), [[0, 0, 2], [3, 4, 5], [6, 7, 8]]),
    ],
)
def test_a_write_through_views_counts_in_what_they_show(tier, write, expected):
    with config.override(LTC_TIER=tier):
        forget_paths()
        x = torch.arange(9.0).view(3, 3).to("ltc:0")
        write(x)
        assert x.tolist() == expected


@in_each_state
def test_what_a_view_shows_by_strides_is_counted_in_it():
    x = torch.arange(9.0).view(3, 3).to("ltc:0")
    shown = [x[1:].as_strided((2,), (1,), 0), x[1:, 1:].as_strided((4,), (1,)), x.t().view(-1)]
    assert [part.tolist() for part in shown] == [[3, 4], [4, 5, 7, 8], [0, 3, 6, 1, 4, 7, 2, 5, 8]]


@in_each_state
def test_what_an_input_shares_with_another_tensor_is_not_written_over():
    x = torch.ones(4).to("ltc:0")
    y = x.clone()
    ltm.mark_step()
    z = x.detach().clone()
    x.add_(1)
    y.data = x
    y.mul_(2)
    assert (x.tolist(), y.tolist(), z.tolist()) == ([4.0] * 4, [4.0] * 4, [1.0] * 4)


@pytest.mark.parametrize("reentrant", [False, True])
@in_each_state
def test_a_checkpoint_computes_again_what_its_backward_needs(reentrant):
    grown = []
    for device in ("cpu", "ltc:0"):
        x = torch.linspace(-1, 1, 6, requires_grad=True)
        moved = x.to(device)
        hidden = checkpoint(lambda y: (y * 2).tanh() * y, moved, use_reentrant=reentrant)
        checkpoint(torch.exp, hidden, use_reentrant=reentrant).sum().backward()
        grown.append((x.grad, moved.cpu()))  # what was computed again has written to nothing
    torch.testing.assert_close(*grown)


def test_what_is_written_to_in_place_stays_in_its_memory(immediate):
    weights = [torch.ones(4).to("ltc:0") for _ in range(3)]
    ltm.mark_step()
    places = list(map(place_of, weights))
    for _ in range(2):
        torch._foreach_add_(weights, 1.0)
        weights[0].mul_(2)
        ltm.mark_step()
    assert list(map(place_of, weights)) == places
    assert [w.tolist()[0] for w in weights] == [10, 3, 3]


def test_calls_that_an_ended_thread_left_unread_keep_no_memory_from_being_reused(immediate):
    def record():
        with config.override(LTC_TIER="native"):
            torch.ones(4).to("ltc:0").mul(2)

    weight = torch.ones(4).to("ltc:0")
    ltm.mark_step()
    thread = threading.Thread(target=record)
    thread.start()
    thread.join()
    place = place_of(weight)
    weight.mul_(2)
    ltm.mark_step()
    assert place_of(weight) == place
    assert weight.tolist() == [2.0] * 4


def test_a_write_to_a_part_leaves_the_rest_where_it_is(immediate):
    x, kept = torch.zeros(100, 8).to("ltc:0"), torch.zeros(100, 8).to("ltc:0") + 1
    row, before = x[7], x.clone()
    x.add_(1)
    place = storage_of(x).lazy.value.tensor.data_ptr()
    for number in range(100):
        x[number] = kept[number] * number
        x[number, 2:].mul_(2)
        row += 1
    assert storage_of(x).lazy.value.tensor.data_ptr() == place
    assert storage_of(row).lazy.value.tensor.data_ptr() == place + 7 * 32
    assert (row[1].item(), row[2].item()) == (100.0, 107.0)
    assert x[:, 1].tolist()[8:] == [float(number) for number in range(8, 100)]
    assert not before.any()


@in_each_state
def test_a_write_from_what_lies_in_the_same_memory_reads_all_of_it_first():
    x = torch.arange(5.0).to("ltc:0")
    x[1:] = x[:-1]
    x[:-1].add_(x[1:])
    y = torch.arange(5.0).to("ltc:0")
    torch._foreach_add_([y[1:]], [y[:-1].clone()])
    y[2:].addcmul_(y[:3], y[1:4])
    assert x.tolist() == [0.0, 1.0, 3.0, 5.0, 3.0]
    assert y.tolist() == [0.0, 1.0, 3.0, 8.0, 22.0]


def test_what_is_copied_to_stays_in_its_memory(left_alone):
    kept, mean = torch.ones(3, 2).to("ltc:0"), torch.zeros(3, 2).to("ltc:0")
    ltm.mark_step()
    place = place_of(mean)
    for _ in range(2):
        mean.copy_(mean * 0.5 + kept)
        mean.copy_(mean)
        kept.copy_(torch.arange(2, device="ltc:0"))  # another type, and repeated
        ltm.mark_step()
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape|must match the size"):
        mean.copy_(torch.ones(4, device="ltc:0"))
    ltm.mark_step()
    assert place_of(mean) == place
    assert (mean.tolist(), kept.tolist()) == ([[0.5, 1.5]] * 3, [[0.0, 1.0]] * 3)


def test_calls_run_at_once_behind_an_input_that_was_expected():
    """A setting changes when the first input of a path has been bound already."""
    x = torch.arange(4.0).to("ltc:0")
    with config.override(LTC_TIER="native"):
        y = x * 3
        ltm.mark_step()
        x.sub_(1)
        ltm.mark_step()
    with config.override(LTC_TIER="op_by_op"):
        assert (x + y).tolist() == [-1.0, 3.0, 7.0, 11.0]
        ltm.mark_step()


def test_what_does_nothing_but_raise_is_run(left_alone):
    x = torch.eye(3).to("ltc:0")
    with metrics.counted() as grown:
        inverse = torch.linalg.inv(x * 2)
        with pytest.raises(torch.linalg.LinAlgError) as ours:
            torch.linalg.inv(x * 0)
    with pytest.raises(torch.linalg.LinAlgError) as theirs:
        torch.linalg.inv(torch.zeros(3, 3))
    assert str(ours.value) == str(theirs.value)
    assert grown["aten::_linalg_check_errors"] == 0  # no read, and no call on copies
    assert inverse.tolist() == (torch.eye(3) / 2).tolist()


@pytest.mark.skipif(CORE is not None, reason="the core sums such calls up: none is left alone")
def test_a_read_ends_only_what_has_run_for_long(monkeypatch):
    monkeypatch.setattr(immediate_session, "UNNOTED_CALLS", 8)
    monkeypatch.setattr(policy, "SHORT_PATHS", 0)  # all that is not behind such calls is left alone
    forget_paths()
    with metrics.counted() as grown:
        x = torch.ones(3).to("ltc:0")
        for number in range(1, 4):
            x += 1
            assert (x[0].item(), x.tolist()) == (number + 1, [number + 1] * 3)
    assert (grown["ImmediateSteps"], grown["ImmediateCalls"]) == (1, 0)
    with metrics.counted() as grown:
        for number in range(4, 12):
            assert x.add_(1)[0].item() == number + 1
    assert grown["ImmediateSteps"] >= 1
    assert grown["ImmediateCalls"] >= 8


def test_a_tensor_that_nobody_holds_is_freed_at_once(immediate):
    x = torch.ones(4).to("ltc:0")
    gone = []
    for _ in range(300):
        x = x + 1
        gone.append(weakref.ref(storage_of(x).lazy))
    gc.collect()
    assert sum(state() is not None for state in gone) == 1


@pytest.mark.skipif(CORE is not None, reason="the core has the input, and no buffer is there")
def test_an_input_that_nobody_holds_is_freed_at_once(immediate):
    x, y = torch.ones(4).to("ltc:0"), torch.ones(4).to("ltc:0")
    buffer = storage_of(x).lazy.buffer
    y += x
    del x
    assert len(gc.get_referrers(buffer)) <= 1
    assert y.tolist() == [2.0] * 4


def test_views_that_are_gone_are_forgotten(immediate):
    x = torch.ones(4).to("ltc:0")
    for _ in range(200):
        x[1:].add_(1)
    assert len(storage_of(x).lazy.views or ()) < 100
    assert x.tolist() == [1.0, 201.0, 201.0, 201.0]


# --- the rest of what a step is ---


def draw(tier: str) -> list[torch.Tensor]:
    x = torch.ones(64).to("ltc:0")
    generator = torch.Generator(device="cpu").manual_seed(3)
    with config.override(LTC_TIER=tier):
        torch.manual_seed(5)
        ltm.set_rng_state(7)
        found = [F.dropout(x, 0.5), torch.rand(8, device="ltc:0"), torch.bernoulli(x / 2)]
        found += [torch.randint(100, (8,), device="ltc:0"), torch.randperm(9, device="ltc:0")]
        found.append(torch.rand(8, device="ltc:0", generator=None) + 0)
        found.append(x.clone().uniform_(generator=generator))
        ltm.mark_step()
        return [one.cpu() for one in found]


def test_random_numbers_are_those_of_every_other_tier():
    for ours, theirs in zip(draw("op_by_op"), draw("native"), strict=True):
        assert torch.equal(ours, theirs)


def test_a_fork_at_a_random_call_draws_once():
    def dropped(length: int) -> torch.Tensor:
        ltm.set_rng_state(11)
        y = F.dropout(torch.ones(length).to("ltc:0"), 0.5)
        ltm.mark_step()
        return y.cpu()

    for length in range(2401, 2406):
        tiered = dropped(length)
        with config.override(LTC_TIER="native"):
            assert torch.equal(tiered, dropped(length))


@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"fused": True}], ids=str)
def test_training_with_another_batch_each_step(options):
    def trained(device: str) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)
        )
        model(torch.zeros(2, 1, 12))
        model = model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
        batches = (
            (torch.randn(n, 1, 12).to(device), torch.randint(0, 3, (n,)).to(device))
            for n in range(2, 14)
        )
        return [loss.item() for loss in train(model, optimizer, batches)]

    with metrics.counted() as grown:
        ours = trained("ltc:0")
    assert grown["ImmediateSteps"] >= 9
    torch.testing.assert_close(ours, trained("cpu"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("start", [0, 1], ids=["before", "behind"])
def test_adam_with_a_gradient_in_the_memory_of_its_parameter(immediate, start):
    def trained(device: str) -> list[float]:
        whole = torch.arange(101.0).to(device)
        weight = whole[start : start + 100].detach().requires_grad_()
        optimizer = torch.optim.Adam([weight], lr=0.5)
        for _ in range(3):
            weight.grad = whole[1 - start : 101 - start]
            optimizer.step()
        return whole.tolist()

    torch.testing.assert_close(trained("ltc:0"), trained("cpu"))


@pytest.mark.parametrize("options", [{"amsgrad": True}, {"weight_decay": 0.1}], ids=str)
def test_no_operand_of_adam_is_written_down_to_find_an_overload(immediate, options, monkeypatch):
    weight = torch.ones(3, device="ltc:0").requires_grad_()
    optimizer = torch.optim.Adam([weight], lr=0.1, **options)
    written = []
    monkeypatch.setattr(torch.Tensor, "__repr__", lambda tensor, **_: written.append(tensor) or "")
    for _ in range(2):
        optimizer.zero_grad()
        weight.exp().sum().backward()
        optimizer.step()
    assert not written


def test_what_lists_of_inputs_hold_is_there_after_the_step(immediate):
    tensors = [torch.ones(3, device="ltc"), torch.ones(2, device="ltc")]
    ltm.mark_step()
    before = torch.ones(1, device="ltc") + 1  # so that calls run already
    made = torch._foreach_add(tensors, 1.0)  # takes them all at once
    ltm.mark_step()
    with config.override(LTC_TIER="native"):
        assert [x.tolist() for x in (*tensors, *made)] == [
            [1.0] * 3,
            [1.0] * 2,
            [2.0] * 3,
            [2.0] * 2,
        ]
        assert (tensors[0] + made[0] + before).tolist() == [5.0] * 3


@pytest.mark.parametrize("tier", ["auto", "op_by_op"])
@pytest.mark.parametrize("is_marked", [True, False])
def test_calls_go_on_when_a_setting_ends_that_had_them_recorded(tmp_path, tier, is_marked):
    """Inputs and calls of the recording are known there: the next call ends it first."""
    x = torch.arange(3.0).to("ltc")
    for asked in ({"LTC_TIER": "native"}, {"LTC_SAVE_TENSORS_FILE": tmp_path / "graphs"}):
        with config.override(LTC_TIER=tier):
            with config.override(**asked):
                y = x * 2
                y[1:].add_(1)
                if is_marked:
                    ltm.mark_step()
            assert (y.sum() + x.sum()).item() == 11
            assert y.tolist() == [0, 3, 5]


@in_each_state
def test_an_error_is_raised_by_its_call_and_the_rest_lives():
    x = torch.ones(3, 4).to("ltc:0")
    y = x + 1
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        x @ x
    with pytest.raises(IndexError):
        x[torch.tensor([7], device="ltc:0")]
    assert (x + y).sum().item() == 36


def calls_of(name: str) -> list[dict]:
    """The globals of the overload's generated kernel, which call torch's."""
    functions = [one for one in gc.get_objects() if type(one) is FunctionType]
    kernels = [f.__globals__ for f in functions if f.__code__.co_filename == KERNEL_FILE]
    return [known for known in kernels if known["signature"].name == name]


@pytest.mark.skipif(CORE is not None, reason="it puts a Python function in a kernel's place")
def test_a_list_of_which_a_part_is_written_is_not_written_again(immediate, monkeypatch):
    def stops_half_way(tensors, scalar):
        tensors[0].mul_(scalar)
        raise NotImplementedError("no kernel for the second")

    first, second = (torch.ones(4).to("ltc:0") for _ in range(2))
    torch._foreach_mul_([first, second], 2.0)
    name = "aten::_foreach_mul_.Scalar"
    for where in calls_of(name):
        monkeypatch.setitem(where, "call", stops_half_way)
        monkeypatch.setattr(how_to_run(where["signature"]), "function", stops_half_way)
    with pytest.raises(NotImplementedError, match="the second"):
        torch._foreach_mul_([first, second], 3.0)
    assert second.tolist() == [2.0] * 4


@in_each_state
def test_no_result_of_a_kernel_may_hold_what_ltc_does_not():
    with pytest.raises(NotImplementedError, match="sparse"):
        torch.ones(3, 4).to("ltc:0").to_sparse()


@in_each_state
def test_another_thread_reads_what_this_one_has_computed():
    x = torch.ones(4).to("ltc:0")
    y = x + 1
    found = []

    def other() -> None:
        found.append((y * 2).tolist())
        y.add_(5)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [[4.0] * 4]
    assert (y + x).tolist() == [8.0] * 4


@in_each_state
def test_a_thread_that_ends_leaves_what_has_run():
    x, made = torch.ones(3).to("ltc:0"), []
    thread = threading.Thread(target=lambda: made.append((x + 1, (x * 2).sum().item())))
    thread.start()
    thread.join()
    assert device_at(0).has_one_recorder()
    assert (made[0][0].tolist(), made[0][1]) == ([2.0] * 3, 6.0)


@in_each_state
def test_threads_that_read_one_another():
    shared = [torch.full((64,), float(n)).to("ltc:0") for n in range(3)]
    failures = []

    def work(number: int) -> None:
        for _ in range(50):
            total = sum(x * 1.0 for x in shared) + number
            if total[0].item() != 3 + number:
                failures.append(total)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_session_begins_before_its_first_operand_is_bound(immediate):
    x = torch.arange(3.0).to("ltc:0")
    x.cosh()  # its kernel is made
    ltm.mark_step()
    with metrics.counted() as grown:
        y = x.cosh()
        ltm.mark_step(wait=True)
    assert grown["ImmediateSteps"] == 1
    assert grown["LazyTracing"] == 0  # it does not go the thorough way
    torch.testing.assert_close(y.cpu(), torch.arange(3.0).cosh())


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@in_each_state
def test_modes(mode):
    x = torch.randn(4, 4)
    with mode():
        y = (x.to("ltc:0").t() @ x.to("ltc:0")).relu()
        y[0].add_(1)
    theirs = (x.t() @ x).relu()
    theirs[0].add_(1)
    torch.testing.assert_close(y.cpu(), theirs)


@in_each_state
def test_a_dispatch_mode_sees_no_call_on_the_cpu():
    on_cpu = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if any(isinstance(x, torch.Tensor) and x.device.type == "cpu" for x in args):
                on_cpu.append(str(function))
            return function(*args, **(kwargs or {}))

    x = torch.randn(2, 2, 4, 4).to("ltc:0").requires_grad_()
    with Seen():
        F.scaled_dot_product_attention(x, x, x, dropout_p=0.5).sum().backward()
    assert not on_cpu


@in_each_state
def test_autocast_of_the_cpu_does_not_reach_in():
    x = torch.randn(4, 4).to("ltc:0")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype is torch.float32


_X = torch.ones(2, 2)


@pytest.mark.parametrize(
    "name, args",
    [
        ("add.Tensor", (_X, _X)), ("mul.Tensor", (_X, 2.0)), ("pow.Tensor_Scalar", (_X, 2)),
        ("pow.Tensor_Tensor", (_X, _X)), ("gt.Scalar", (_X, 0.5)), ("gt.Tensor", (_X, _X)),
        ("div.Tensor", (_X, _X)), ("div.Tensor_mode", (_X, _X)), ("sum", (_X,)),
        ("sum.dim_IntList", (_X, [1], True)), ("mean.dim", (_X, [0])), ("max.dim", (_X, 1)),
        ("max.other", (_X, _X)), ("max", (_X,)), ("squeeze", (_X,)), ("squeeze.dim", (_X, 0)),
        ("squeeze.dims", (_X, [0])), ("transpose.int", (_X, 0, 1)), ("select.int", (_X, 0, 1)),
        ("view", (_X, [4])), ("view.dtype", (_X, torch.int32)), ("clamp", (_X, 0.0, 1.0)),
        ("clamp.Tensor", (_X, _X, _X)), ("where.self", (_X > 0, _X, _X)), ("mm", (_X, _X)),
        ("linear", (_X, _X, None)), ("cat", ([_X, _X], 1)), ("add_.Tensor", (_X.clone(), _X)),
        ("masked_fill_.Scalar", (_X.clone(), _X > 2, 1.0)), ("argmax", (_X, None, False)),
    ],
)  # fmt: skip
def test_torchs_functions_come_to_the_overload_that_was_called(name, args):
    kernel = how_to_run(Signature(overload_named(f"aten::{name}")))
    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    options = {"rounding_mode": "floor"} if name.endswith("_mode") else {}
    assert kernel.quick is not kernel.function
    with below_autograd(), Seen():
        kernel.quick(*args, **options)
    assert seen[0] is overload_named(f"aten::{name}")


@pytest.mark.parametrize("name", ["slice.Tensor", "split.sizes", "_foreach_sqrt_", "zeros_like"])
def test_where_torch_has_no_such_function_the_overload_is_called(name):
    kernel = how_to_run(Signature(overload_named(f"aten::{name}")))
    assert kernel.quick is kernel.function


def test_gradients_of_writes_to_a_part_are_right_where_no_view_was_made_before():
    """Autograd is told to replay views by whoever makes them: as_strided knows no offset here."""

    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        found = []
        for _ in range(4):
            set_view_replay_enabled(False)  # as in a new thread
            x, w = (torch.randn(3).double().to(device).requires_grad_() for _ in range(2))
            made = x.new_empty(5)
            made[1:4].copy_(x)
            made[:1].copy_(made[3:4])
            made[4:].copy_(w[1:2])
            padded = F.pad((x * w).view(1, 1, 3), (1, 2), mode="circular")
            weights = torch.arange(1.0, 7.0).double().to(device)
            ((made * weights[1:]).sum() + (padded * weights).sum()).backward()
            found += [x.grad.cpu(), w.grad.cpu()]
        return found

    torch.testing.assert_close(run("ltc"), run("cpu"))
