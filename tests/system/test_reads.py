"""Where reads follow one another after few calls, calls are left alone and no read ends what runs."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import ltc
import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics
from ltc.device.policy import LAUNCH_CALLS, SHORT_PATHS, UNNOTED_CALLS
from ltc.device.recording.recorder import device_at
from ltc.device.recording.sync import end_what_runs_at_once
from ltc.device.recording.tensors import state_of
from ltc.native.core import CORE
from ltc.runtime import first_runs
from tests.recorders import process_of_one_device
from tests.states import wait_for_the_compiler


@pytest.fixture(autouse=True)
def auto(monkeypatch) -> Iterator[None]:
    """As in a process of one device that was told nothing."""
    with process_of_one_device(LTC_TIER="auto", LTC_CACHE=0, LTC_NUM_DEVICES=1):
        yield


def read(times: int) -> None:
    """One after the other, with three calls before each."""
    x = torch.arange(5.0)
    mine = x.to("ltc:0")
    for number in range(times):
        assert (mine * number).sum().item() == (x * number).sum().item()


def long_stretch(calls: int) -> torch.Tensor:
    x = torch.full((5,), 1.0).to("ltc:0")
    for _ in range(calls):
        x = x + 1
    return x


def test_reads_after_few_calls_start_no_programs():
    read(2 * SHORT_PATHS)
    with metrics.counted() as grown:
        read(20)
    summed_up = (
        0 if CORE is None else 20
    )  # recordings that run at once, of which the core keeps sums
    assert (grown["ExecuteTime"], grown["RecordedEntries"]) == (0, 0)
    assert grown["ImmediateSteps"] == summed_up


@pytest.mark.noted_at_once("it counts what is noted")
def test_few_reads_are_noted():
    with metrics.counted() as grown:
        read(SHORT_PATHS - 1)
    assert (grown["ExecuteTime"], grown["ImmediateSteps"]) == (0, SHORT_PATHS - 1)
    assert grown["RecordedEntries"] == 3  # an input and two calls, which come back


def test_what_a_read_ends_after_few_calls_is_not_compiled():
    """A loop that acts would wait for a compiler at its third action, and need nothing of it."""
    x = torch.arange(5.0).to("ltc:0")
    with metrics.counted() as grown:
        for number in range(3 * SHORT_PATHS):
            assert (x * number).cosh().sum().item() > 0
    assert grown["UncachedCompile"] == grown["TierUp"] == grown["ExecuteTime"] == 0


def test_what_a_mark_ends_between_short_reads_is_left_alone_with_them(quick_calls):
    """As at a detector's end: a mask is read, and what follows ends at the step's mark."""
    x = torch.arange(12.0).to("ltc:0")
    with metrics.counted() as grown:
        for number in range(3 * SHORT_PATHS):
            kept = x[x > number % 5]
            found = (kept[:, None] - kept).atan().sum(-1)
            ltm.mark_step()
            assert found.shape == (11 - number % 5,)
    assert grown["ImmediateSteps"] >= 3 * SHORT_PATHS - 1  # a session is counted as it begins
    assert grown["UncachedCompile"] <= 2


@pytest.mark.noted_at_once("it counts steps until a program is asked for")
def test_what_marks_end_alone_is_compiled():
    x = torch.arange(12.0).to("ltc:0")
    with metrics.counted() as grown:
        for _ in range(4):
            x = (x + 1).atan()
            ltm.mark_step()
    assert grown["TierUp"] == 1


def test_what_marks_end_after_a_few_reads_is_compiled():
    """As a loop that begins with a look at its data, and then trains."""
    x = torch.arange(12.0).to("ltc:0")
    read(3)
    with metrics.counted() as grown:
        for _ in range(2 * SHORT_PATHS):
            x = (x + 1).tanh()
            ltm.mark_step()
    assert grown["TierUp"] == 1


@pytest.mark.noted_at_once("it counts steps until a program is asked for")
def test_short_reads_beside_long_programs_stay_immediate():
    """The long one is a program; what is read behind it is not worth a launch."""
    x = torch.arange(5.0).to("ltc:0")
    with metrics.counted() as grown:
        for _ in range(SHORT_PATHS + 4):
            y = x
            for _ in range(LAUNCH_CALLS + 4):
                y = y * 1.01
            ltm.mark_step(wait=True)
            assert (y.tanh() + 1).mean().item() > 1
    assert (grown["TierUp"], grown["ExecuteTime"]) == (1, SHORT_PATHS + 2)
    late = CORE is not None  # which counts a step where the next one begins
    assert grown["ImmediateSteps"] == SHORT_PATHS + 6 - late


def test_where_calls_may_not_run_at_once_reads_end_programs(monkeypatch):
    monkeypatch.setattr(first_runs, "has_peers", lambda: True)
    x = torch.arange(5.0).to("ltc:0")
    with metrics.counted() as grown:
        for number in range(4):
            assert (x * number).sinh().sum().item() >= 0
    assert (grown["ExecuteTime"], grown["ImmediateSteps"]) == (4, 0)


@pytest.mark.noted_at_once("it counts steps until a program is asked for")
def test_what_follows_without_a_read_is_a_program():
    read(2 * SHORT_PATHS)
    count = 2 * LAUNCH_CALLS + 20
    for _ in range(4):
        made = long_stretch(count)
        ltm.mark_step(wait=True)
        assert made.tolist() == [count + 1.0] * 5
    with metrics.counted() as grown:
        made = long_stretch(count)
        ltm.mark_step(wait=True)
    assert grown["ExecuteTime"] == 1 and made.tolist() == [count + 1.0] * 5


def test_acting_and_training_take_turns():
    torch.manual_seed(0)
    policies = [nn.Linear(4, 2), nn.Linear(4, 2).to("ltc:0")]
    policies[1].load_state_dict(policies[0].state_dict())
    optimizers = [torch.optim.AdamW(policy.parameters(), lr=0.1) for policy in policies]
    for _ in range(6):
        seen, taken = torch.randn(12, 4), []
        for policy, optimizer, device in zip(policies, optimizers, ("cpu", "ltc:0")):
            with torch.no_grad():
                taken.append([policy(one.to(device)).argmax().item() for one in seen])
            scores = policy(seen.to(device)).log_softmax(-1)
            chosen = torch.tensor(taken[-1]).to(device)
            optimizer.zero_grad()
            (-scores.gather(1, chosen[:, None]).mean()).backward()
            optimizer.step()
            ltm.mark_step()
        assert taken[0] == taken[1]
    for a, b in zip(policies[0].parameters(), policies[1].parameters(), strict=True):
        torch.testing.assert_close(a, b.cpu())


@pytest.mark.noted_at_once("it counts steps until they are followed")
@pytest.mark.parametrize("marks", [True, False])
def test_a_small_training_step_is_followed_though_a_read_follows_each(marks):
    model = nn.Linear(4, 2).to("ltc:0")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            scores = model(torch.ones(3, 4, device="ltc:0"))
            scores.square().mean().backward()
            optimizer.step()
            if marks:
                ltm.mark_step()
            (scores.detach() > 0).sum().item()

    read(2 * SHORT_PATHS)  # until these run at once
    for _ in range(2):
        train(2 * SHORT_PATHS)
        wait_for_the_compiler()
    with metrics.counted() as grown:
        train(5)
    is_apart = marks or CORE is not None  # else what is read belongs to the step that nobody marks
    reads = 5 if is_apart else 0
    assert (grown["ImmediateSteps"], grown["ExecuteTime"]) == (reads, 5)


def test_steps_of_which_nothing_is_read_are_followed_again():
    read(2 * SHORT_PATHS)
    for _ in range(4 * 2 * LAUNCH_CALLS // 5):
        made = long_stretch(4)
        ltm.mark_step(wait=True)
    with metrics.counted() as grown:
        made = long_stretch(4)
        ltm.mark_step(wait=True)
    assert (grown["ExecuteTime"], grown["ImmediateSteps"], made.tolist()) == (1, 0, [5.0] * 5)


@pytest.mark.parametrize("setting", [{"LTC_TIER": "native"}, {"LTC_VERIFY": 1}])
def test_not_where_programs_are_asked_for(setting):
    with config.override(**setting), metrics.counted() as grown:
        read(3 * SHORT_PATHS)
    assert (grown["ExecuteTime"], grown["ImmediateSteps"]) == (3 * SHORT_PATHS, 0)


@pytest.mark.noted_at_once("it counts steps until they are followed")
def test_a_setting_that_comes_later_is_obeyed():
    read(2 * SHORT_PATHS)
    with config.override(LTC_TIER="native"), metrics.counted() as grown:
        ltm.mark_step()
        read(5)
    assert (grown["ExecuteTime"], grown["ImmediateSteps"]) == (5, 0)


def test_a_setting_that_comes_behind_a_mark_is_obeyed_at_once(capsys):
    x = torch.arange(5.0).to("ltc:0")
    read(2 * SHORT_PATHS)
    ltm.mark_step()
    with config.override(LTC_DUMP="simplify"):
        made = (x * 3).erf().amax()
        ltm.mark_step()
    assert "%0 = input" in capsys.readouterr().out and made.item() > 0
    read(2 * SHORT_PATHS)
    ltm.mark_step()
    with config.override(LTC_DEBUG_NANS=1), pytest.raises(ltc.errors.NotFinite):
        made = x / 0
        ltm.mark_step(wait=True)


@pytest.mark.parametrize("goes_on", [True, False])
def test_who_profiles_sees_each_call(goes_on, tmp_path):
    """Of a session that is there, and of one that begins with a bound tensor."""
    x = torch.arange(5.0).to("ltc:0")
    read(2 * SHORT_PATHS)
    if not goes_on:
        end_what_runs_at_once(device_at(0))
    with ltc.profile(tmp_path / "profile.json") as profiled:
        for _ in range(3):
            assert (x * 2).sum().item() == 20
            ltm.mark_step()
    found = [one for one in profiled.trace["ltc"]["programs"] if one["tier"] == "op_by_op"]
    kernels = [kernel["ops"][0].split(".")[0] for one in found for kernel in one["kernels"]]
    assert {"aten::mul", "aten::sum"} <= set(kernels)
    assert (x * 2).sum().item() == 20


def test_what_a_marked_step_has_made_is_not_pending():
    """Though what follows goes on to run at once."""
    x = torch.arange(3.0).to("ltc:0")
    read(2 * SHORT_PATHS)
    made = x * 2
    ltm.mark_step()
    with ltc.no_sync():
        assert "[0., 2., 4.]" in repr(made) and made.tolist() == [0.0, 2.0, 4.0]
        with pytest.raises(ltc.errors.SyncForbidden):
            (x * 3).tolist()
        following = x * 4
        assert "pending" in repr(following)
        ltm.mark_step()
        assert following.tolist() == [0.0, 4.0, 8.0]
    read(2 * SHORT_PATHS)
    made = x * 5
    ltm.mark_step()
    with config.override(LTC_DEBUG=1):
        assert "[ 0.,  5., 10.]" in repr(made)


def test_random_numbers_are_those_of_every_other_tier():
    drawn = []
    for tier in ("auto", "native"):
        ltm.set_rng_state(7)
        with config.override(LTC_TIER=tier):
            drawn.append([torch.rand(3, device="ltc:0").sum().item() for _ in range(30)])
        ltm.mark_step()
    torch.testing.assert_close(drawn[0], drawn[1])


def test_numbers_of_every_kind_are_read():
    read(2 * SHORT_PATHS)
    for value in (2, 2.5, True, 1 + 2j):
        x = torch.full((2, 2), value)
        mine = x.to("ltc:0")
        assert (mine[0, 1].item(), type(mine[0, 1].item())) == (value, type(value))
        assert mine.t()[1, 0].item() == value and bool(mine[0, 0])
    z = torch.full((1,), 1 + 2j).to("ltc:0")
    assert (z.conj() * 1).item() == 1 - 2j and z.conj().imag.item() == -2
    with pytest.raises(RuntimeError, match="cannot be converted to Scalar"):
        mine.item()


GIVEN = [
    torch.arange(12.0).reshape(3, 4).t(), torch.full((2,), 7), torch.ones(0, 3), torch.tensor([3], dtype=torch.int16),
    torch.arange(6.0)[::2].expand(2, 3), torch.tensor([1 + 2j, 3 - 1j]).conj(),
    torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
]  # fmt: skip


@pytest.mark.parametrize("given", GIVEN, ids=lambda x: f"{x.dtype}-{list(x.shape)}")
def test_a_copy_to_the_device_is_what_a_call_has_made(given):
    expected = given.clone()
    read(2 * SHORT_PATHS)
    with metrics.counted() as grown:
        mine = given.to("ltc:0")
        view = mine[..., :1]
        assert mine.sum().item() == expected.sum().item()
        assert (grown["DeviceDataCacheMiss"], grown["ExecuteTime"]) == (1, 0)
    given.zero_()
    torch.testing.assert_close(mine.cpu(), expected.resolve_conj().resolve_neg())
    ltm.mark_step()
    mine.add_(1)
    ltm.mark_step()
    torch.testing.assert_close(mine.cpu(), (expected + 1).resolve_conj().resolve_neg())
    torch.testing.assert_close(view.cpu(), (expected + 1)[..., :1].resolve_conj().resolve_neg())


def test_a_copy_to_the_device_has_a_gradient_there_and_its_memory_is_counted_at_the_end():
    read(2 * SHORT_PATHS)
    before = torch.ltc.memory_allocated()
    x = torch.ones(256, requires_grad=True)
    mine = x.to("ltc:0")
    (mine * 3).sum().backward()
    assert x.grad.tolist() == [3.0] * 256
    assert not mine.is_leaf
    assert (mine + 1).sum().item() == 512
    ltm.mark_step()
    assert torch.ltc.memory_allocated() - before == 4 * 256
    del mine
    ltm.mark_step()
    assert torch.ltc.memory_allocated() == before


@pytest.mark.parametrize(
    "chosen",
    [
        lambda x: x[x > 1],
        lambda x: x.masked_select(x > 1),
        lambda x: x.nonzero(),
        lambda x: x.unique(),
        lambda x: x.round().long().bincount(),
    ],
    ids=["mask", "masked_select", "nonzero", "unique", "bincount"],
)
def test_a_size_that_depends_on_values_is_a_read(quick_calls, chosen):
    """A recording ends there, too: steps of it that nobody reads go on to run at once."""
    x = torch.rand(20) * 3
    read(2 * SHORT_PATHS)
    ltm.mark_step()
    with metrics.counted() as grown:
        for _ in range(4 * SHORT_PATHS):
            made = chosen(x.to("ltc:0")) * 2
            ltm.mark_step()
    assert (grown["ImmediateSteps"], grown["ExecuteTime"]) == (4 * SHORT_PATHS, 0)
    torch.testing.assert_close(made.cpu(), chosen(x) * 2)


def test_what_indices_choose_is_no_read():
    x, places = torch.rand(20), torch.tensor([3, 1])
    read(2 * SHORT_PATHS)
    mine, chosen = x.to("ltc:0"), places.to("ltc:0")
    for _ in range(4 * 2 * LAUNCH_CALLS // 2):
        made = mine[chosen] * 2
        ltm.mark_step()
    with metrics.counted() as grown:
        for _ in range(5):
            made = mine[chosen] * 2
            ltm.mark_step(wait=True)
    assert (grown["ImmediateSteps"], grown["ExecuteTime"]) == (0, 5)
    torch.testing.assert_close(made.cpu(), x[places] * 2)


def test_a_mark_leaves_calls_running_at_once_and_each_step_is_counted():
    read(2 * SHORT_PATHS)
    x = torch.zeros(3).to("ltc:0")
    ltm.mark_step()
    with metrics.counted() as grown:
        for number in range(10):
            x += 1
            assert x.sum().item() == 3 * (number + 1)
            ltm.mark_step()
    assert (grown["ImmediateSteps"], grown["ImmediateCalls"], grown["ExecuteTime"]) == (10, 20, 0)


def test_random_numbers_of_steps_between_marks_are_those_of_recorded_ones():
    def drawn() -> list[list[float]]:
        torch.ltc.manual_seed(5)
        steps = []
        for _ in range(6):
            steps.append(torch.rand(4, device="ltc:0").tolist())
            steps.append(torch.randn(4, device="ltc:0").tolist())
            ltm.mark_step()
        return steps

    recorded = drawn()
    read(2 * SHORT_PATHS)
    with metrics.counted() as grown:
        assert drawn() == recorded
    assert grown["ExecuteTime"] == 0


@pytest.mark.noted_at_once("it counts the sessions of calls in Python")
def test_what_runs_at_once_ends_after_many_calls_also_where_each_step_is_marked():
    """A loop that has begun to come back is then recorded."""
    read(2 * SHORT_PATHS)
    ltm.mark_step()
    x = torch.ones(3).to("ltc:0")
    recorder = device_at(0).recorder()
    sessions = set()
    for _ in range(2 * UNNOTED_CALLS // 4):
        x = x * 1.0 + 0.0
        assert (x * 2).sum().item() == 6
        ltm.mark_step()
        sessions.add(id(recorder.immediate))
    assert len(sessions) > 1


@pytest.mark.noted_at_once("it looks at the buffer that a noted step leaves")
def test_a_thread_that_begins_meanwhile_reads_what_was_there():
    """Its program may still be under way when a call of this thread updates what that reads."""
    kept, made = torch.ones(4).to("ltc:0"), []
    ltm.mark_step()
    read(2 * SHORT_PATHS)
    memory = state_of(kept).buffer.ready()

    def step() -> None:
        made.append(kept * 2 + 1)
        ltm.mark_step()

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    kept.add_(1)
    assert memory.tolist() == [1.0] * 4
    assert (kept.tolist(), made[0].tolist()) == ([2.0] * 4, [3.0] * 4)


def test_buffers_are_counted_when_somebody_asks_for_memory():
    read(2 * SHORT_PATHS)
    ltm.mark_step()
    before = torch.ltc.memory_allocated()
    kept = torch.ones(1000).to("ltc:0") + 1
    assert kept.sum().item() == 2000
    ltm.mark_step()
    assert torch.ltc.memory_allocated() - before == 4000
    free = ltm.get_memory_info()["kb_free"]
    more = torch.ones(1 << 20).to("ltc:0") + 1
    assert more[0].item() == 2
    ltm.mark_step()
    assert free - ltm.get_memory_info()["kb_free"] == 4096
