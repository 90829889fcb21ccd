"""Adam and AdamW as torch has them by default: one recorded call, with the same results."""

import copy
import io

import numpy as np
import pytest
import torch

import ltc
from ltc import config
from ltc.debug import metrics
from ltc.runtime.background import compile_behind
from ltc.support.torch_private import ADAM_ON_LISTS

pytestmark = pytest.mark.also_native

FORMS = {
    "decoupled": (torch.optim.AdamW, {}),
    "largest": (torch.optim.AdamW, {"amsgrad": True}),
    "up": (torch.optim.AdamW, {"maximize": True, "weight_decay": 0}),
    "added": (torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    "other_betas": (torch.optim.Adam, {"betas": (0.4, 0.9)}),
}
SIZES = (5, 0, 100, 3000)


def parameters_on(device: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(n, dtype=dtype).to(device).requires_grad_() for n in SIZES]


def train(parameters: list, optimizer: torch.optim.Optimizer, steps: int = 5) -> None:
    for step in range(steps):
        for place, parameter in enumerate(parameters):
            parameter.grad = torch.sin(parameter.detach() * (step + 1) + place)
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        ltc.sync()


@pytest.mark.parametrize("number", [float, np.float64, int])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_numbers_of_other_classes(kind, number):
    """A schedule that numpy computes gives its own; a decay may be a whole number."""
    made = []
    for device in ("cpu", "ltc:0"):
        parameters = parameters_on(device)
        optimizer = kind(parameters, lr=number(1), weight_decay=number(2), eps=number(1))
        optimizer.param_groups[0]["betas"] = (number(0), 0.5)
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.sin(parameter.detach())
            optimizer.step()
        made.append([p.detach().cpu() for p in parameters])
    for mine, theirs in zip(*reversed(made), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_step_is_replayed():
    parameters = parameters_on("ltc:0")
    optimizer = torch.optim.AdamW(parameters, lr=0.1)

    @ltc.compile
    def step() -> None:
        for parameter in parameters:
            parameter.grad = torch.sin(parameter.detach())
        optimizer.step()

    expected = parameters_on("cpu")
    plain = torch.optim.AdamW(expected, lr=0.1)
    with config.override(LTC_CHECK=0), metrics.counted() as grown:
        for number in range(7):
            optimizer.param_groups[0]["lr"] = plain.param_groups[0]["lr"] = 0.1 / (number + 1)
            for parameter in expected:
                parameter.grad = torch.sin(parameter.detach())
            plain.step()
            step()
    assert grown["ReplayedCalls"] >= 3
    for mine, theirs in zip(parameters, expected, strict=True):
        torch.testing.assert_close(mine.detach().cpu(), theirs.detach())


def outcome(parameters: list, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters, and what the optimizer has for each."""
    kept = [value for p in parameters for value in optimizer.state.get(p, {}).values()]
    return [value.detach().cpu() for value in parameters + kept]


def trained(device: str, form: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    maker, options = FORMS[form]
    parameters = parameters_on(device, dtype)
    optimizer = maker(parameters, lr=0.01, **options)
    train(parameters, optimizer)
    return outcome(parameters, optimizer)


def assert_close(ours: list, theirs: list, **tolerances: float) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **tolerances)


@pytest.fixture
def torchs_own():
    """Puts torch's own way in the place of ltc's until the test ends."""
    ours = ADAM_ON_LISTS.current
    yield lambda: ADAM_ON_LISTS.replace(ours.__wrapped__)
    ADAM_ON_LISTS.replace(ours)


def calls_of(step) -> list[str]:
    """The overloads of ltc's and of torch's lists that a step calls, those on the CPU left out."""
    with torch.profiler.profile() as profile:
        step()
    names = [event.name for event in profile.events()]
    return [name for name in names if name == "ltc::adam_" or name == "aten::_foreach_addcdiv_"]


@pytest.mark.native("bits are compared with those of the calls that it stands for")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_it_trains_to_the_bit_as_torchs_own_way_does(form, dtype, torchs_own):
    ours = trained("ltc", form, dtype)
    torchs_own()
    assert_close(ours, trained("ltc", form, dtype), rtol=0, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_it_trains_as_eager_does(form):
    assert_close(trained("ltc", form), trained("cpu", form), rtol=1e-5, atol=1e-6)


def prepared(device: str = "ltc", dtypes=(torch.float32,), **options):
    parameters = [p for dtype in dtypes for p in parameters_on(device, dtype)]
    optimizer = torch.optim.AdamW(parameters, **({"lr": 0.01} | options))
    train(parameters, optimizer, 1)
    return parameters, optimizer


@pytest.mark.native("it looks at the calls that are recorded")
def test_a_step_is_one_call():
    _, optimizer = prepared()
    assert calls_of(optimizer.step) == ["ltc::adam_"]


@pytest.mark.noted_at_once("it counts entries behind the third step")
def test_a_new_learning_rate_and_count_record_nothing():
    parameters, optimizer = prepared()
    train(parameters, optimizer, 2)
    compile_behind.wait()
    train(parameters, optimizer, 1)  # which takes the program that was asked for
    with metrics.counted() as grown:
        train(parameters, optimizer, 3)
    assert grown["RecordedEntries"] == grown["UncachedCompile"] == 0


class Marked(torch.nn.Parameter):
    """A user's own kind of parameter."""


REFUSED = {
    "two_types": lambda: prepared(dtypes=(torch.float32, torch.float64)),
    "narrow": lambda: prepared(dtypes=(torch.bfloat16,)),
    "capturable": lambda: prepared(capturable=True),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_does_not_hold_for_goes_torchs_own_way(case):
    _, optimizer = REFUSED[case]()
    names = calls_of(optimizer.step)
    assert names and "ltc::adam_" not in names


def test_a_kind_of_parameter_of_the_users_own_goes_torchs_own_way():
    parameter = Marked(torch.ones(3).to("ltc"))
    parameter.grad = torch.ones(3).to("ltc")
    names = calls_of(torch.optim.AdamW([parameter], foreach=True).step)
    assert names and "ltc::adam_" not in names


def trained_with_a_late_start(device: str) -> list[torch.Tensor]:
    """The last parameter has its first gradient when the others have made three steps."""
    parameters = parameters_on(device)
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    train(parameters[:-1], optimizer, 3)
    train(parameters, optimizer, 2)
    assert {float(optimizer.state[p]["step"]) for p in parameters} == {5, 2}
    return outcome(parameters, optimizer)


def test_parameters_that_have_made_fewer_steps_keep_their_own_count():
    ours, eagers = trained_with_a_late_start("ltc"), trained_with_a_late_start("cpu")
    assert_close(ours, eagers, rtol=1e-5, atol=1e-6)


def went_through_a_file(optimizer: torch.optim.Optimizer) -> dict:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, map_location="cpu")


@pytest.mark.native("bits are compared with those of the calls that it stands for")
def test_what_the_optimizer_keeps_moves_to_the_cpu_and_back():
    parameters, optimizer = prepared()
    kept = went_through_a_file(optimizer)
    assert all(state["step"].device.type == "cpu" for state in kept["state"].values())
    there = [p.detach().cpu().requires_grad_() for p in parameters]
    on_cpu = torch.optim.AdamW(there, lr=0.01)
    on_cpu.load_state_dict(kept)
    back = [p.detach().clone().requires_grad_() for p in parameters]
    again = torch.optim.AdamW(back, lr=0.01)
    again.load_state_dict(went_through_a_file(on_cpu))
    for chosen, made in ((parameters, optimizer), (there, on_cpu), (back, again)):
        train(chosen, made, 3)
    assert_close(outcome(parameters, optimizer), outcome(there, on_cpu), rtol=1e-5, atol=1e-6)
    assert_close(outcome(parameters, optimizer), outcome(back, again), rtol=0, atol=0)


@pytest.mark.native("bits are compared with those of the calls that it stands for")
def test_a_copy_goes_its_own_way():
    parameters, optimizer = prepared()
    theirs, copied = copy.deepcopy((parameters, optimizer))
    train(theirs, copied, 2)
    assert {float(state["step"]) for state in optimizer.state.values()} == {1}
    train(parameters, optimizer, 2)
    # the rate that the copy has used up is its own as well
    assert_close(outcome(parameters, optimizer), outcome(theirs, copied), rtol=0, atol=0)
