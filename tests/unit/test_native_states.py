"""A tensor's value is in its State or in the core, and goes from one to the other where it is asked for."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics
from ltc.device.policy import LAUNCH_CALLS, Policy
from ltc.device.recording.recorder import device_at
from ltc.device.recording.tensors import state_of
from ltc.device.torch_device import storage_of
from ltc.errors import NotFinite
from ltc.native.core import CORE
from ltc.runtime.background import compile_behind
from tests.recorders import process_of_one_device

pytestmark = pytest.mark.skipif(CORE is None, reason="needs LTC_NATIVE and a core that is built")


@pytest.fixture(autouse=True)
def at_once():
    """Calls run when they are made."""
    with process_of_one_device(LTC_TIER="op_by_op"):
        yield


def test_a_state_whose_value_the_core_has_takes_it_where_it_is_asked_for():
    x = torch.arange(3.0).to("ltc")
    state = state_of(x)
    y = x + 1
    y = x + y
    z = y + x  # the core has both by now
    assert state.is_in_core
    assert "lazy" not in vars(storage_of(y))
    assert state.value is not None
    assert not state.is_in_core
    assert (z + x).tolist() == [1.0, 5.0, 9.0]


def test_what_a_thread_calls_is_summed_up_until_another_one_ends_that():
    x, session = torch.arange(3.0).to("ltc"), CORE.session()
    CORE.sketch(session)
    y = x + 1
    with ThreadPoolExecutor(1) as pool:
        pool.submit(CORE.leave, session).result()
    z = y + 1
    assert (CORE.sketched(session).calls, z.tolist()) == (1, [2.0, 3.0, 4.0])


def test_views_come_with_their_base():
    x = torch.zeros(3, 4).to("ltc") + 1
    row, columns = x[1], x.t()
    row.mul_(5)
    state = state_of(columns)
    base = state.base
    assert base is state_of(x) is state_of(row).base
    assert [link[0] for link in state.chain] == [torch.ops.aten.t.default]
    ltm.mark_step()
    x.add_(1)
    assert columns.tolist() == [[2.0, 6.0, 2.0]] * 4
    assert row.tolist() == [6.0] * 4


def test_a_view_outlives_its_base():
    x = torch.arange(6.0).to("ltc") * 2
    part = x[2:4]
    del x
    assert (part + 1).tolist() == [5.0, 7.0]
    with config.override(LTC_TIER="native"):
        ltm.mark_step()
        assert (part * 2).tolist() == [8.0, 12.0]


def test_what_the_core_has_is_recorded_by_programs():
    x = torch.arange(4.0).to("ltc") + 1
    x.mul_(2)
    ltm.mark_step()
    with config.override(LTC_TIER="native"):
        y = x * 3
        ltm.mark_step()
        x.sub_(1)
        ltm.mark_step()
    assert y.tolist() == [6.0, 12.0, 18.0, 24.0]
    assert (x + y).tolist() == [7.0, 15.0, 23.0, 31.0]


def test_bytes_are_given_back():
    before = CORE.bytes()
    x = torch.zeros(1000).to("ltc") + 1
    y = x[10:] + 1
    assert CORE.bytes() >= before + 4000 + 3960
    del x, y
    assert CORE.bytes() <= before + 4000  # that of the upload


def test_each_call_that_is_left_to_python_is_counted():
    x = torch.zeros(4).to("ltc") + 1
    before = CORE.left_to_python().get("aten::randn_like", 0)
    torch.randn_like(x)
    assert CORE.left_to_python()["aten::randn_like"] == before + 1


def asked_by_python(*tensors: torch.Tensor) -> None:
    """Python has their values, and of views those of their bases."""
    for tensor in tensors:
        assert storage_of(tensor).lazy.value is not None


def test_a_base_that_has_views_comes_back_to_the_core():
    x = torch.arange(6.0).to("ltc")
    flat, part = x.view(2, 3), x[4:]
    x.add_(1)
    asked_by_python(flat, part)
    before = CORE.left_to_python()
    x[2] = 7
    flat.mul_(2)
    part.sub_(1)
    total = (flat.sum() + part.sum()).item()
    assert CORE.left_to_python() == before
    assert x.tolist() == [2, 4, 14, 8, 9, 11] and flat.tolist() == [[2, 4, 14], [8, 9, 11]]
    assert part.tolist() == [9, 11] and total == 68


def test_a_view_outlives_the_base_whose_value_the_core_has():
    x = torch.arange(6.0).to("ltc")
    part = x[1:].view(5)
    asked_by_python(part)
    x.add_(1)
    del x
    assert part.tolist() == [2, 3, 4, 5, 6]


def test_a_view_of_what_lies_in_another_order_stays_in_python():
    x = torch.arange(6.0).view(2, 3).to("ltc")
    turned = x.t()
    flat = turned.view(-1)
    asked_by_python(flat)
    x.add_(1)
    assert (flat + 1).tolist() == [2, 5, 3, 6, 4, 7]
    flat[1] = 0
    assert x.tolist() == [[1, 2, 3], [0, 5, 6]]


def turned(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient arranged anew: a view of another one."""
    rows = gradient.view(6, 4)[1:]
    return torch.cat([rows[:1] * 2, rows]).transpose(0, 1)


def test_what_a_functions_backward_calls_makes_its_views_in_the_core():
    class Turned(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return turned(gradient)

    def gradients(device: str) -> torch.Tensor:
        leaf = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6).to(device)
        leaf.requires_grad_()
        for _ in range(2):
            Turned.apply(leaf).sin().sum().backward()
        leaf.grad.mul_(3)
        return leaf.grad.cpu()

    before = CORE.left_to_python()
    found = gradients("ltc")
    after = CORE.left_to_python()
    views = [f"aten::{name}" for name in ("view", "slice.Tensor", "transpose.int")]
    assert [after.get(name, 0) for name in views] == [before.get(name, 0) for name in views]
    torch.testing.assert_close(found, gradients("cpu"))


def test_views_of_a_hook_share_memory_in_the_core_and_repetitions_do_not():
    leaf = torch.ones(6).to("ltc").requires_grad_()
    whole = torch.zeros(2, 3).to("ltc")
    kept = []

    def hook(parameter: torch.Tensor) -> None:
        whole.copy_(parameter.grad.view(2, 3))
        kept.append(whole[0].expand(2, 3)[1:])
        parameter.grad = whole.view(6)

    leaf.register_post_accumulate_grad_hook(hook)
    (leaf * 3).sum().backward()
    leaf.grad.mul_(2)
    assert whole.tolist() == [[6.0] * 3] * 2
    kept[0].add_(1)
    assert kept[0].tolist() == [[4.0] * 3]


def train(device: str, steps: int, is_left: bool = False) -> list[torch.Tensor]:
    """The weights after some steps; one in its midst reads a value and writes through a view."""
    torch.manual_seed(0)
    weight = torch.randn(4, 3, dtype=torch.float64).to(device).requires_grad_()
    data = torch.randn(5, 4, dtype=torch.float64).to(device)
    for number in range(steps):
        hidden = (data * (number + 0.5)) @ weight
        loss = hidden.tanh().square().mean()
        loss.backward()
        with torch.no_grad():
            if is_left and number == steps - 2:
                assert loss.isfinite().item()
                weight[1].mul_(0.5)
            weight.sub_(weight.grad, alpha=0.1)
        weight.grad = None
        if device != "cpu":
            ltm.mark_step()
            compile_behind.wait()
    return [weight.detach().cpu(), loss.detach().cpu()]


@pytest.mark.parametrize("is_left", [False, True])
def test_a_path_that_came_back_is_followed_in_the_core(is_left):
    with process_of_one_device(LTC_TIER="auto"):
        before = CORE.followed()
        found = train("ltc", 12, is_left)
        assert CORE.followed() > before
    for mine, theirs in zip(found, train("cpu", 12, is_left)):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def train_on_batches(device: str, steps: int) -> list[torch.Tensor]:
    """The weights after some steps that upload their batch, and the losses."""
    weight = torch.linspace(-0.5, 0.5, 9, dtype=torch.float64).reshape(3, 3)
    weight = weight.to(device).requires_grad_()
    losses = []
    for number in range(steps):
        batch = torch.full((10, 3), 0.1 * number, dtype=torch.float64)
        hidden = batch.to(device) @ weight
        for _ in range(20):
            hidden = (hidden + 0.5).tanh()
        loss = (hidden - batch[:, :1].to(device)).square().mean()
        loss.backward()
        with torch.no_grad():
            weight.sub_(weight.grad, alpha=0.1)
        weight.grad = None
        losses.append(loss.detach())
        if device != "cpu":
            ltm.mark_step()
            compile_behind.wait()
    return [weight.detach().cpu(), torch.stack(losses).cpu()]


def test_a_path_with_uploads_is_followed_in_the_core():
    with process_of_one_device(LTC_TIER="auto"):
        before = CORE.followed()
        found = train_on_batches("ltc", 12)
        assert CORE.followed() - before > 4 * 60
    for mine, theirs in zip(found, train_on_batches("cpu", 12)):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def summed_gradients(device: str, steps: int) -> torch.Tensor:
    data = torch.linspace(-1, 1, 30).reshape(10, 3).to(device)
    weight = torch.linspace(-0.5, 0.5, 9).reshape(3, 3).to(device).requires_grad_()
    for _ in range(steps):
        hidden = data @ weight
        (hidden.tanh() * hidden + hidden.sin()).mean().backward()
        with torch.no_grad():
            weight -= 0.1 * weight.grad
        weight.grad = None
        if device != "cpu":
            ltm.mark_step()
            compile_behind.wait()
    return weight.detach().cpu()


def test_a_gradient_that_is_a_sum_is_one_call_whoever_makes_its_addends():
    """Autograd adds to the first in place, if nothing but autograd holds that."""
    with process_of_one_device(LTC_TIER="auto"), metrics.counted() as grown:
        before = CORE.followed()
        found = summed_gradients("ltc", 14)
        assert CORE.followed() - before > 4 * 15
    assert grown["TracksLeft"] <= 1  # at the last read
    torch.testing.assert_close(found, summed_gradients("cpu", 14), rtol=1e-5, atol=1e-6)


def test_a_value_that_is_asked_for_ends_a_walk():
    with process_of_one_device(LTC_TIER="native"):
        for number in range(8):
            x = torch.arange(3.0).to("ltc")
            y = x + number
            row = y[1:]
            row.mul_(2)
            kept = row * 1
            if number == 7:
                assert y.tolist() == [7.0, 16.0, 18.0]
            z = y * y
            ltm.mark_step()
            assert z.tolist() == [number**2, (2 * (number + 1)) ** 2, (2 * (number + 2)) ** 2]
            assert kept.tolist() == [2 * (number + 1), 2 * (number + 2)]


def hash_of(function, x):
    """The sum of a path of one call, and of a second one on what it gives."""
    session = CORE.session()
    CORE.sketch(session)
    made = function(x)
    made + 0
    return CORE.sketched(session)


ORDINARY = [
    lambda x: x + 1,
    lambda x: 2 * x,
    lambda x: x - x,
    lambda x: x.add_(x),
    lambda x: x.mul_(2.5),
    lambda x: x.zero_(),
    lambda x: x.view(3, 2),
    lambda x: x.t(),
    lambda x: x.transpose(0, 1),
    lambda x: x[1:],
    lambda x: x[0],
    lambda x: x.unsqueeze(0),
    lambda x: x.squeeze(0),
    lambda x: x.expand(4, 2, 3),
    lambda x: x.permute(1, 0),
    lambda x: x.detach(),
    lambda x: x.sum(),
    lambda x: x.sum(0, keepdim=True),
    lambda x: x.mean(1),
    lambda x: x.argmax(),
    lambda x: x.clamp(min=0.5),
    lambda x: x.softmax(-1),
    lambda x: x.clone(),
    lambda x: x > 1,
    lambda x: x @ x.t(),
    lambda x: torch.where(x > 0, x, x),
    lambda x: torch.nn.functional.linear(x, x),
    lambda x: torch.nn.functional.layer_norm(x, (3,)),
]


@pytest.mark.parametrize("function", ORDINARY)
def test_a_path_has_one_hash_whichever_kernel_runs_its_calls(function):
    """A call whose operand Python has is not ordinary: the general kernel runs it."""
    start = torch.arange(6.0).reshape(2, 3)
    of_python, of_core = start.to("ltc") + 0, start.to("ltc") + 0
    assert state_of(of_python).value is not None  # which takes it
    assert hash_of(function, of_python) == hash_of(function, of_core)
    made = function(start.to("ltc")), function(start.to("ltc") + 0)
    wanted = function(start.clone())
    for one in made:
        torch.testing.assert_close(one.cpu(), wanted)


def test_the_mark_that_an_optimizer_implies_goes_on_with_the_session():
    weight = torch.ones(3).to("ltc").requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.25)
    sessions = []
    with metrics.counted() as grown:
        for _ in range(4):
            optimizer.zero_grad()
            (weight * weight).sum().backward()
            optimizer.step()
            sessions.append(device_at(0).recorder().immediate)
    assert grown["ImpliedMark"] >= 2
    assert sessions[0] is not None
    assert len({id(one) for one in sessions}) == 1
    assert weight.tolist() == [0.0625] * 3


def test_a_copy_from_the_cpu_replaces_the_value_that_the_core_has():
    x = torch.ones(4).to("ltc")
    state = state_of(x)
    x.add_(1)
    x.add_(1)
    assert state.is_in_core
    part = x[1:3]
    x.copy_(torch.full((4,), 7.0))
    assert (x.cpu().tolist(), part.tolist()) == ([7.0] * 4, [7.0] * 2)


def test_sparse_results_are_left_to_python():
    weight = torch.ones(5, 3).to("ltc").requires_grad_()
    for _ in range(3):
        weight.grad = None
        rows = torch.tensor([[0, 2], [2, 4]]).to("ltc")
        torch.nn.functional.embedding_bag(rows, weight, sparse=True, mode="sum").sum().backward()
        assert weight.grad.to_dense().cpu()[:, 0].tolist() == [1.0, 0.0, 2.0, 0.0, 1.0]


def test_a_copy_over_an_input_binds_the_inputs_of_a_path_in_python():
    """A copy binds its source alone: a side exit behind it gives each tensor its own value."""

    def step(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, last) -> torch.Tensor:
        x.copy_(y)
        z.add_(2)
        return last(x[:2] * z)

    with config.override(LTC_TIER="native"):
        for last in (torch.exp,) * 5 + (torch.sin, torch.exp):
            x, y, z = (torch.full((n,), float(n)) for n in (3, 3, 2))
            on_ltc = [one.to("ltc") for one in (x, y, z)]
            ltm.mark_step()
            made = step(*on_ltc, last)
            z_of_ltc = on_ltc[2].clone()
            ltm.mark_step()
            torch.testing.assert_close(made.cpu(), step(x, y, z, last))
            torch.testing.assert_close(z_of_ltc.cpu(), z)
            assert on_ltc[0].tolist() == [3.0] * 3


def test_a_walk_that_has_not_begun_ends_where_calls_run_at_once():
    """As where a setting has changed since the mark: its inputs would get values of no session."""
    weight = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)
    on_ltc = weight.to("ltc")
    recorder = device_at(0).recorder()
    with process_of_one_device(LTC_TIER="auto"):
        for _ in range(20):
            made = (on_ltc * 2).tanh() + on_ltc[1]
            ltm.mark_step()
            compile_behind.wait()
            if recorder.walk is not None:
                break
        assert recorder.walk is not None
        recorder.run_at_once()
        assert recorder.walk is None
        (on_ltc * 2).tanh()
        made = (on_ltc * 3).sin() + on_ltc[1]
        recorder.catch_up()
        ltm.mark_step()
        torch.testing.assert_close(made.cpu(), (weight * 3).sin() + weight[1])


@pytest.fixture
def heard(monkeypatch):
    """The ends of recordings that the policy hears of."""
    ends, tell = [], Policy.sketched

    def sketched(self, path, behind, weight, of_symbols, is_of_reads, *others):
        ends.append(is_of_reads)
        return tell(self, path, behind, weight, of_symbols, is_of_reads, *others)

    monkeypatch.setattr(Policy, "sketched", sketched)
    return ends


def trained_once(weight: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    loss = (weight * weight).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def test_the_ends_of_a_short_loop_are_passed_and_its_steps_counted(quick_calls, heard):
    weight = torch.ones(3).to("ltc").requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.01)
    with process_of_one_device(LTC_TIER="auto"):
        counts = []
        for number in range(200):
            loss = trained_once(weight, optimizer)
            ltm.mark_step()
            assert float(loss * 2) == pytest.approx(6 * 0.98 ** (2 * number), rel=1e-4)
            counts.append(metrics.counter_value("ImmediateSteps"))
    assert counts[-1] - counts[49] == 300  # two recordings each
    assert len(heard) < 100
    assert any(heard) and not all(heard)


def test_a_read_in_the_recording_of_an_optimizers_step_is_no_read_alone(quick_calls, heard):
    weight = torch.ones(3).to("ltc").requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.01)
    with process_of_one_device(LTC_TIER="auto"), metrics.counted() as grown:
        for number in range(60):
            loss = trained_once(weight, optimizer)
            assert float(loss) == pytest.approx(3 * 0.98 ** (2 * number), rel=1e-4)
    assert 0 < len(heard) < 20 and not any(heard)  # the core passes those that are settled
    assert not grown["ImpliedMark"]  # each read has ended the recording of one step


def test_a_long_path_among_short_ones_gets_its_program(quick_calls, heard):
    x = torch.linspace(-1, 1, 8, dtype=torch.float64)
    on_ltc = x.to("ltc")
    with process_of_one_device(LTC_TIER="auto"):
        before = CORE.followed()
        for number in range(60):
            short = on_ltc * number
            ltm.mark_step()
            y = short
            for _ in range(150):
                y = (y + 0.5).tanh()
            ltm.mark_step()
            compile_behind.wait()
        assert CORE.followed() - before > 300
        expected = x * 59
        for _ in range(150):
            expected = (expected + 0.5).tanh()
        torch.testing.assert_close(y.cpu(), expected, rtol=1e-9, atol=1e-12)


def test_a_long_path_is_heard_of_however_short_the_one_behind_it(quick_calls, monkeypatch):
    """Each comes behind the other, and the short one behind the long one changes nothing."""
    weights, tell = [], Policy.sketched
    monkeypatch.setattr(Policy, "sketched", lambda *given: weights.append(given[3]) or tell(*given))
    x = torch.linspace(-1, 1, 8).to("ltc")
    with process_of_one_device(LTC_TIER="auto"):
        for number in range(100):
            _ = x * number
            ltm.mark_step()
            y = x * number
            for _ in range(60):
                y = (y + 0.5).tanh()
            del y  # nothing lives on: there is no program to ask for
            ltm.mark_step()
    assert len([one for one in weights if one > LAUNCH_CALLS]) >= LAUNCH_CALLS


def test_a_setting_of_the_environment_is_heeded_at_the_next_mark(quick_calls, monkeypatch):
    weight = torch.ones(3).to("ltc").requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.01)
    with process_of_one_device(LTC_TIER="auto"):
        for _ in range(40):
            trained_once(weight, optimizer)
            ltm.mark_step()
        monkeypatch.setenv("LTC_DEBUG_NANS", "1")
        trained_once(weight, optimizer)
        ltm.mark_step()
        with pytest.raises(NotFinite):
            _ = torch.log(weight.detach() - 2).sum() * 2
            ltm.mark_step(wait=True)


LISTS = {
    "expanded": lambda a: torch._foreach_mul_([a], [a[0:1].expand(4, 4)]),
    "transposed": lambda a: torch._foreach_add_([a], [a.t()]),
    "copied": lambda a: torch._foreach_copy_([a], [a.t()]),
    "scalars": lambda a: torch._foreach_addcmul_([a, a + 1], [a] * 2, [a] * 2, a[0, ::2]),
}


@pytest.mark.parametrize("name", LISTS)
def test_operands_of_a_list_that_lie_in_what_is_written_to_are_read_first(name):
    x = torch.arange(16.0).reshape(4, 4) + 1
    made = []
    for tier in ("op_by_op", "native"):
        with process_of_one_device(LTC_TIER=tier):
            a = x.to("ltc") * 1
            LISTS[name](a)
            ltm.mark_step()
            made.append(a.cpu())
    assert torch.equal(*made)


def test_copies_between_tensors_of_the_device_are_the_cores():
    def copied(device: str) -> list[torch.Tensor]:
        rows = torch.zeros(4, 3).to(device) + 1
        row = torch.arange(3.0).to(device) * 2
        rows[1] = row
        rows[2].copy_(rows[1] + 1)
        rows.t()[0] = torch.arange(4).to(device) + 5
        rows[:, 1:].copy_(rows[:, :2] * 3)
        rows[3].copy_(row[:1])
        return [rows.cpu(), (rows * 2).cpu()]

    before = CORE.left_to_python().get("aten::copy_", 0)
    found = copied("ltc")
    assert CORE.left_to_python().get("aten::copy_", 0) == before
    torch.testing.assert_close(found, copied("cpu"))


def test_a_value_outlives_a_tensor_that_is_set_to_its_storage():
    x = torch.arange(6.0).to("ltc") + 1
    for _ in range(2):
        part = torch.empty(0, device="ltc").set_(x.untyped_storage(), 2, (2,), (2,))
        assert (part + 0).tolist() == [3, 5]
        part.mul_(1)
        del part
    assert (x * 2).tolist() == [2, 4, 6, 8, 10, 12]


def test_a_view_that_negates_stays_in_python():
    x = torch.arange(4.0).to("ltc") + 1
    negated = torch._neg_view(x)
    assert (negated * 2).tolist() == [-2, -4, -6, -8]
    x.add_(1)
    assert (negated * 2).tolist() == [-4, -6, -8, -10]
