"""What `ltc.compile` replays is what the function would have done; what it cannot, it says."""

import itertools
import math
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

import ltc
import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics
from ltc.errors import StepDiffers

pytestmark = pytest.mark.native(
    "the bits of replayed calls are compared with those of recorded ones"
)


@pytest.fixture(autouse=True)
def replaying():
    """LTC_CHECK, which the tests run under, would record every call."""
    with config.override(LTC_CHECK=0):
        yield


def batch(number: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to("ltc")


def both(make, calls=8):
    """The results of `make(compile)` -> function of a call's number, replayed and not; they are equal.

    Returns what the replayed calls have counted.
    """
    torch.manual_seed(3)
    expected = run(make, lambda function: function, calls)
    with metrics.counted() as grown:
        found = run(make, ltc.compile, calls)
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert torch.equal(one, other)
    return grown


def run(make, compiled, calls) -> list[torch.Tensor]:
    torch.manual_seed(3)
    call = make(compiled)
    made = []
    for number in range(calls):
        made += [torch.as_tensor(x).detach().cpu().clone() for x in call(number)]
    return made


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.first, self.norm = nn.Linear(6, 12), nn.BatchNorm1d(12)
        self.drop, self.last = nn.Dropout(dropout), nn.Linear(12, 3)

    def forward(self, x):
        return self.last(self.drop(self.norm(self.first(x)).relu()))


def training(optimizer, dropout=0.0, **options):
    """make(compile) for a training whose every call gives its loss and all parameters."""

    def make(compiled):
        model = Net(dropout).to("ltc")
        stepper = optimizer(model.parameters(), **options)

        @compiled
        def step(x, y):
            stepper.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            stepper.step()
            return loss

        def call(number):
            loss = step(batch(number, 4, 6), batch(number + 100, 4, 3))
            return [loss, *model.parameters(), *model.buffers()]

        return call

    return make


OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (torch.optim.Adam, {}),
    (torch.optim.AdamW, {"foreach": False}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"capturable": True, "amsgrad": True}),
    (torch.optim.RMSprop, {"centered": True}),
    (torch.optim.Adagrad, {"lr_decay": 0.1}),
    (torch.optim.Adamax, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Rprop, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.NAdam, {"foreach": False, "weight_decay": 0.01, "decoupled_weight_decay": True}),
    (torch.optim.NAdam, {"momentum_decay": 0.0}),
    (torch.optim.ASGD, {"capturable": True}),
]


@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS)
def test_training_is_replayed(optimizer, options):
    grown = both(training(optimizer, **options), calls=10)
    assert grown["ReplayedCalls"] >= 4, dict(grown)


def test_a_learning_rate_may_change_beside_a_count_that_is_multiplied():
    def make(compiled):
        model = Net().to("ltc")
        stepper = torch.optim.NAdam(
            [{"params": model.first.parameters()}, {"params": model.last.parameters(), "lr": 0.1}]
        )

        @compiled
        def step(x):
            stepper.zero_grad()
            model(x).square().mean().backward()
            stepper.step()

        def call(number):
            stepper.param_groups[0]["lr"] = 0.01 / (number + 1)
            step(batch(number, 4, 6))
            counts = [state["mu_product"] for state in stepper.state.values()]
            return [*model.parameters(), *counts]

        return call

    grown = both(make, calls=10)
    assert grown["ReplayedCalls"] >= 4, dict(grown)


@pytest.mark.parametrize(
    ("optimizer", "place"),
    [
        (torch.optim.ASGD, r"torch/optim/optimizer.py:\d+ in _get_value"),
        (torch.optim.Adafactor, r"torch/optim/_adafactor.py:\d+ in _single_tensor_adafactor"),
    ],
)
def test_an_optimizer_that_reads_is_refused_and_its_line_named(optimizer, place):
    model = Net().to("ltc")
    stepper = optimizer(model.parameters())

    @ltc.compile
    def step(x):
        stepper.zero_grad()
        model(x).square().mean().backward()
        stepper.step()

    with pytest.warns(UserWarning, match=f"reads a value at .*test_replay.py.*, inside {place}"):
        for number in range(5):
            step(batch(number, 4, 6))


def test_a_number_of_a_cpu_tensor_is_refused_and_the_tensor_named():
    model = Net().to("ltc")
    stepper = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01))

    @ltc.compile
    def step(x):
        stepper.zero_grad()
        model(x).square().mean().backward()
        stepper.step()

    with pytest.warns(UserWarning, match="or step count: numbers of CPU tensors are not followed"):
        for number in range(6):
            step(batch(number, 4, 6))


def test_random_numbers_are_those_of_calls_that_are_recorded():
    grown = both(training(torch.optim.SGD, dropout=0.4, lr=0.1))
    assert grown["ReplayedCalls"] == 5  # the first call finds no gradients to put away


def test_the_shapes_of_arguments_decide_which_calls_are_alike():
    def make(compiled):
        step = compiled(lambda x: (x * 2).sum(0))
        return lambda number: [step(batch(number, 2 + number % 3, 5))]

    assert both(make, calls=12)["ReplayedCalls"] == 6


# --- numbers ------------------------------------------------------------------------------------


def test_a_learning_rate_that_changes_is_handed_over():
    def make(compiled):
        model = nn.Linear(3, 2).to("ltc")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

        @compiled
        def step(x):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()

        def call(number):
            step(batch(number, 4, 3))
            schedule.step()
            return list(model.parameters())

        return call

    grown = both(make, calls=12)
    assert grown["ReplayedCalls"] == 9  # the first makes the state, the next two are alike
    assert grown["ReplayRecordings"] == 3


def test_a_number_that_two_things_were_equal_to_is_told_apart_when_they_are_not():
    def make(compiled):
        weights = [nn.Parameter(torch.ones(3, device="ltc")) for _ in range(2)]
        groups = [{"params": [w], "lr": 0.5} for w in weights]
        optimizer = torch.optim.SGD(groups)

        @compiled
        def step(x):
            optimizer.zero_grad()
            sum((w * x).sum() for w in weights).backward()
            optimizer.step()
            return x * 0.25

        def call(number):
            rates = [
                (0.5, 0.5),
                (0.5, 0.5),
                (0.25, 0.25),
                (0.125, 0.125),
                (0.125, 1.0),
                (2.0, 0.25),
            ]
            for group, rate in zip(optimizer.param_groups, rates[min(number, 5)]):
                group["lr"] = rate
            return [step(batch(number, 3)), *weights]

        return call

    both(make, calls=9)


def test_float_arguments_are_handed_over_and_decisions_by_them_are_kept():
    def make(compiled):
        @compiled
        def step(x, scale, *, bias):
            y = x * (1 - scale) + bias / 3
            return y.relu() if scale > 0.5 else y.tanh()

        scales = [0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8, 0.2, 0.9, math.inf]
        return lambda number: [step(batch(number, 5), scales[number], bias=0.5 * number)]

    grown = both(make, calls=10)
    assert grown["ReplayedCalls"] >= 4


def test_a_float_that_python_rounds_is_part_of_the_guard():
    def make(compiled):
        step = compiled(lambda x, scale: x * int(scale))
        return lambda number: [step(batch(number, 5), 1.5 + 0.25 * (number // 3))]

    both(make, calls=12)


def test_integer_arguments_are_part_of_the_guard():
    def make(compiled):
        step = compiled(lambda x, n: x[: min(n, 3)] * n)
        return lambda number: [step(batch(number, 5), number // 4)]

    assert both(make, calls=12)["ReplayedCalls"] == 6


def test_a_number_that_changes_by_itself_is_refused():
    numbers = iter(range(100))
    step = ltc.compile(lambda x: x * next(numbers))
    with pytest.warns(UserWarning, match="follows from no float argument"):
        for _ in range(6):
            step(batch(0, 3))
    assert "the number" in step.refusal


class Counting(torch.optim.Optimizer):
    """Each parameter has a step count, which `advance(count, group)` changes and reads."""

    def __init__(self, parameters, advance, first, is_shared=False):
        super().__init__(parameters, {"lr": 0.5})
        self.advance, count = advance, first()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["step"] = count if is_shared else first()

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.5).add_(self.advance(self.state[p], group))


def adds_one(state, group):
    state["step"] += 1
    return state["step"].item() * group["lr"]


def adds_by_the_overload(state, group):
    torch.ops.aten.add_.Tensor(state["step"], torch.tensor(2.0))
    return 1 / state["step"].item()


def adds_twice(state, group):
    state["step"].add_(1)
    before = state["step"].item()
    state["step"].add_(1)
    return before / state["step"].item()


def multiplies(state, group):
    state["step"] *= 0.9 - group["lr"] / 10
    return state["step"].item()


def multiplies_lists(state, group):
    torch._foreach_mul_([state["step"]], [0.75])
    return state["step"].item() - 1


def adds_the_rate(state, group):
    state["step"].add_(group["lr"])
    return state["step"].item()


def decides_by_the_tensor(state, group):
    state["step"] += 1
    return 2.0 if state["step"] > 4 else 0.25


def decides_by_the_number(state, group):
    state["step"] += 1
    return 2.0 if state["step"].item() > 4 else 0.25


def converts(state, group):
    state["step"] += 1
    return float(state["step"]) + int(state["step"])


def computes_by_a_keyword(state, group):
    state["step"] += 1
    return torch.add(input=state["step"], other=3).item()


def replaces(state, group):
    state["step"] = state["step"] + 1
    return state["step"].item()


def fills(state, group):
    state["step"].fill_(state["step"].item() * 2)
    return state["step"].item()


HANDED_OVER = [adds_one, adds_by_the_overload, adds_twice, multiplies, multiplies_lists,
               decides_by_the_number]  # fmt: skip
LOOKED_AT = [adds_the_rate, decides_by_the_tensor, converts, computes_by_a_keyword, replaces, fills]


def counting(device, compiled, advance, first, is_shared=False):
    weights = [nn.Parameter(torch.ones(2, device=device)) for _ in range(2)]
    optimizer = Counting(weights, advance, first, is_shared)
    step = compiled(lambda: optimizer.step())
    found = []
    for number in range(10):
        optimizer.param_groups[0]["lr"] = 0.5 if number < 7 else 0.25
        step()
        found += [w.tolist() for w in weights]
        found += [optimizer.state[w]["step"].item() for w in weights]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("advance", [*HANDED_OVER, *LOOKED_AT])
@pytest.mark.filterwarnings("ignore:ltc.compile")
def test_step_counts_go_on_as_they_would(advance, dtype):
    def first():
        return torch.ones((), dtype=dtype, device="cpu")

    try:
        expected = counting("cpu", lambda function: function, advance, first)
    except RuntimeError:  # an integer times a float
        pytest.skip("PyTorch has no such update of this dtype")
    with metrics.counted() as grown:
        assert counting("ltc", ltc.compile, advance, first) == expected
    if advance in HANDED_OVER and dtype in (torch.float32, torch.float64):
        assert grown["ReplayedCalls"] >= 3, dict(grown)


def test_a_step_count_may_be_shared():
    def first():
        return torch.ones((), device="cpu")

    expected = counting("cpu", lambda function: function, adds_one, first, True)
    with metrics.counted() as grown:
        assert counting("ltc", ltc.compile, adds_one, first, True) == expected
    assert grown["ReplayedCalls"] >= 3, dict(grown)


# --- what the function closes over --------------------------------------------------------------


def closing_over(change):
    """make(compile) for a step between whose calls `change(model, optimizer, number)` is called."""

    def make(compiled):
        model = Net(0.5).to("ltc")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

        @compiled
        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        def call(number):
            change(model, optimizer, number)
            return [step(batch(number, 4, 6)), *model.parameters()]

        return call

    return make


def eval_mode(model, optimizer, number):
    model.train(number % 6 < 3)


def freezing(model, optimizer, number):
    model.first.requires_grad_(number % 8 < 4)


def another_parameter(model, optimizer, number):
    if number == 5:
        model.last.weight = nn.Parameter(torch.ones(3, 12, device="ltc"))
        optimizer.add_param_group({"params": [model.last.weight]})


def other_values(model, optimizer, number):
    with torch.no_grad():
        model.last.weight.mul_(0.5)


def other_data(model, optimizer, number):
    if number % 5 == 0:
        model.last.weight.data = torch.full((3, 12), 0.1 * number, device="ltc")


def a_hyperparameter(model, optimizer, number):
    model.drop.p = 0.5 if number < 4 else 0.0
    model.norm.momentum = 0.1 if number < 8 else 0.3


def a_loaded_state(model, optimizer, number):
    if number == 5:
        optimizer.load_state_dict(optimizer.state_dict())


def a_hook(model, optimizer, number):
    if number == 5:
        model.last.register_forward_hook(lambda module, args, output: output * 2)


def a_gradient(model, optimizer, number):
    if number % 4 == 3:
        model.last.weight.grad = None


@pytest.mark.parametrize(
    "change",
    [eval_mode, freezing, another_parameter, other_values, other_data, a_hyperparameter,
     a_loaded_state, a_hook, a_gradient],
)  # fmt: skip
def test_what_is_different_is_recorded(change):
    grown = both(closing_over(change), calls=12)
    assert grown["ReplayedCalls"] >= 2, dict(grown)


@pytest.mark.parametrize("mode", ["no_grad", "autocast", "float64"])
def test_modes_of_torch_are_looked_at(mode):
    def make(compiled):
        model = nn.Linear(3, 2).to("ltc")

        @compiled
        def step(x):
            return model(x).detach() + torch.ones(2, device="ltc")

        def call(number):
            if number % 2 == 0:
                return [step(batch(number // 2, 4, 3))]
            if mode == "no_grad":
                with torch.no_grad():
                    return [step(batch(number, 4, 3))]
            if mode == "autocast":
                with torch.autocast("ltc"):
                    return [step(batch(number, 4, 3))]
            torch.set_default_dtype(torch.float64)
            try:
                return [step(batch(number, 4, 3))]
            finally:
                torch.set_default_dtype(torch.float32)

        return call

    both(make, calls=12)


def test_a_step_that_leaves_another_default_dtype_is_not_replayed():
    model = nn.Linear(3, 2).to("ltc")

    @ltc.compile
    def step(x):
        torch.set_default_dtype(torch.float64)
        return model(x).detach()

    try:
        for number in range(8):
            torch.set_default_dtype(torch.float32)
            step(batch(number, 4, 3))
            assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_objects_and_globals_are_looked_at(monkeypatch):
    class Settings:
        scale = 2.0

    class Work:
        def __init__(self):
            self.settings, self.table = Settings(), {"bias": torch.ones(3, device="ltc")}

        def scaled(self, x):
            return x * self.settings.scale + self.table["bias"]

    def make(compiled):
        work = Work()
        step = compiled(lambda x: work.scaled(x))

        def call(number):
            if number == 4:
                work.settings.scale = 3.0
            if number == 8:
                work.table["bias"] = torch.zeros(3, device="ltc")
            return [step(batch(number, 3))]

        return call

    assert both(make, calls=12)["ReplayedCalls"] == 6


def test_gradients_add_up_over_replayed_calls():
    def make(compiled):
        model = nn.Linear(3, 2).to("ltc")
        accumulate = compiled(lambda x: model(x).square().sum().backward())

        def call(number):
            accumulate(batch(number, 4, 3))
            kept = [p.grad for p in model.parameters()]
            if number % 5 == 4:
                model.zero_grad()
            return kept

        return call

    assert both(make, calls=20)["ReplayedCalls"] >= 10


# --- arguments and results ----------------------------------------------------------------------


def test_nested_arguments_and_results():
    def make(compiled):
        @compiled
        def step(parts, *, factor):
            x, y = parts["x"], parts["others"][0]
            return {"sum": x + y, "parts": [x * factor, (y.detach(), None, "name")], "x": x}

        def call(number):
            x, y = batch(number, 3), batch(number + 50, 3)
            made = step({"x": x, "others": (y,)}, factor=2.0)
            assert made["x"] is x
            assert made["parts"][1][1:] == (None, "name")
            return [made["sum"], made["parts"][0], made["parts"][1][0], made["x"]]

        return call

    assert both(make)["ReplayedCalls"] == 6


def test_tensors_on_the_cpu_may_be_moved_inside():
    def make(compiled):
        step = compiled(lambda x: x.to("ltc").exp())
        return lambda number: [step(batch(number, 3).cpu())]

    assert both(make)["ReplayedCalls"] == 6


def test_a_cpu_tensor_that_is_written_to_is_not_replayed():
    def in_place(x):
        return x.mul_(2).to("ltc") + 1

    step = ltc.compile(in_place)
    with pytest.warns(UserWarning, match="writes to a CPU tensor"):
        for number in range(5):
            x = batch(number, 3).cpu()
            assert torch.equal(step(x.clone()).cpu(), 2 * x + 1)


def test_what_a_cpu_tensor_holds_may_have_become_a_number():
    def make(compiled):
        scale = torch.tensor([2.0, 3.0])
        step = compiled(lambda x: x * scale.max().item())

        def call(number):
            if number == 4:
                scale[0] = 5.0
            return [step(batch(number, 3))]

        return call

    assert both(make)["ReplayedCalls"] == 4


def test_what_is_made_on_the_cpu_may_be_moved_where_it_is_always_the_same():
    def make(compiled):
        @compiled
        def step(x):
            weights = torch.tensor([0.5, 0.25, 2.0], device="ltc")
            weights.add_(1)
            third = torch.arange(6.0)[2::2][:1]  # contiguous, though its stride is 2
            return torch.cat([x * weights * third.to("ltc"), torch.tensor([], device="ltc")])

        return lambda number: [step(batch(number, 3))]

    assert both(make)["ReplayedCalls"] == 6


def test_arguments_may_be_written_to():
    def make(compiled):
        step = compiled(lambda x, y: x.add_(y).mul_(2))
        state = torch.zeros(3, device="ltc")
        return lambda number: [step(state, batch(number, 3)), state]

    assert both(make)["ReplayedCalls"] == 6


def test_one_tensor_for_two_arguments_is_another_call():
    def make(compiled):
        step = compiled(lambda x, y: (x.add_(1), y * 2)[1])

        def call(number):
            x = batch(number, 3)
            y = x if number in (3, 4, 5, 9) else batch(number + 9, 3)
            return [step(x, y), x, y]

        return call

    both(make, calls=12)


def test_what_a_call_has_made_lives_on():
    step = ltc.compile(lambda x: x * 2)
    made = [step(torch.full((3,), float(n), device="ltc")) for n in range(8)]
    assert [y.tolist() for y in made] == [[2.0 * n] * 3 for n in range(8)]


def test_what_nobody_holds_is_freed():
    model = nn.Linear(64, 64).to("ltc")
    step = ltc.compile(lambda x: model(x).detach())
    for number in range(6):
        step(batch(number, 8, 64))
    ltc.sync(wait=True)
    held = ltm.get_memory_info("ltc:0")
    for number in range(6):
        step(batch(number, 8, 64))
    ltc.sync(wait=True)
    assert ltm.get_memory_info("ltc:0") == held


def test_a_step_mark_inside_is_made_again():
    def make(compiled):
        model = Net(0.3).to("ltc")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @compiled
        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            ltm.optimizer_step(optimizer, barrier=True)
            return loss

        return lambda number: [step(batch(number, 4, 6)), *model.parameters()]

    grown = both(make)
    assert grown["ReplayedCalls"] == 5
    assert grown["MarkStep"] == 8


class Trainer:
    def __init__(self, rate: float) -> None:
        self.model = nn.Linear(3, 2).to("ltc")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=rate)

    @ltc.compile
    def step(self, x):
        self.optimizer.zero_grad()
        loss = self.model(x).square().sum()
        loss.backward()
        self.optimizer.step()
        return loss


def test_a_method_is_replayed_for_its_instance():
    torch.manual_seed(0)
    first, second = Trainer(0.001), Trainer(0.002)
    second.model.load_state_dict(first.model.state_dict())
    with metrics.counted() as grown:
        losses = [(first.step(x).item(), second.step(x).item()) for x in [batch(7, 4, 3)] * 6]
    assert grown["ReplayedCalls"] == 6
    assert losses[0][0] == losses[0][1]
    assert losses[5][0] > losses[5][1]


def test_a_module_may_be_given():
    def make(compiled):
        model = compiled(Net().to("ltc").eval())

        def call(number):
            if number == 5:
                with torch.no_grad():
                    next(iter(model.parameters())).mul_(2)
            with torch.no_grad():
                return [model(batch(number, 4, 6))]

        return call

    assert both(make)["ReplayedCalls"] == 6


def test_a_function_inside_another_is_a_part_of_it():
    scale = torch.full((3,), 2.0, device="ltc")

    def make(compiled):
        inner = compiled(lambda x: x * scale)
        outer = compiled(lambda x: inner(x) + 1)
        return lambda number: [outer(batch(number, 3))]

    assert both(make)["ReplayedCalls"] == 6


def test_each_thread_records_for_itself():
    step = ltc.compile(lambda x: x * 2)
    found = []

    def work():
        found.extend(step(torch.full((2,), float(n), device="ltc")).tolist() for n in range(5))

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert found == [[2.0 * n] * 2 for n in range(5)] * 2


@pytest.mark.parametrize("is_held", [False, True])
def test_what_an_ended_thread_has_left_pending_keeps_nobody_from_replaying(is_held):
    x, left = torch.ones(2, 3).to("ltc"), []

    def work():
        made = x * 3
        if is_held:
            left.append(made)

    weight = torch.ones(3, device="ltc", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.5)

    @ltc.compile
    def step(x):
        optimizer.zero_grad()
        (x * weight).sum().backward()
        optimizer.step()
        x.add_(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    with metrics.counted() as grown:
        for _ in range(8):
            step(x)
    assert grown["ReplayedCalls"] > 0
    assert x.tolist() == [[9.0] * 3] * 2
    assert [made.tolist() for made in left] == [[[3.0] * 3] * 2] * is_held


def test_threads_that_train_on_a_device_each_replay_beside_the_main_one():
    model = nn.Linear(3, 2).to("ltc")  # this thread has a recorder of the device as well
    step = ltc.compile(lambda x: model(x).detach())
    counts = []

    def work():
        with metrics.counted() as grown:
            for number in range(5):
                assert torch.equal(step(batch(number, 4, 3)), model(batch(number, 4, 3)))
        counts.append(grown["ReplayedCalls"])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert counts == [3]


def test_what_fails_in_a_replayed_call_is_raised_to_who_reads_it():
    step = ltc.compile(lambda x, index: x[index])
    x = batch(0, 5)
    for n in range(4):
        step(x, torch.tensor([n], device="ltc"))
    with metrics.counted() as grown:
        y = step(x, torch.tensor([9], device="ltc"))
        with pytest.raises(IndexError):
            y.cpu()
    assert grown["ReplayedCalls"] == 1
    assert step(x, torch.tensor([2], device="ltc")).item() == x[2].item()


def test_a_graph_that_saved_what_a_replayed_call_wrote_to_is_refused():
    """As behind a recorded call: its gradients would be those of other weights."""
    weight, buffer = torch.ones(3, device="ltc", requires_grad=True), batch(1, 3)

    @ltc.compile
    def step(x, written):
        with torch.no_grad():
            weight.sub_(x)
            buffer.mul_(2)
            written.add_(x)
            return x * 2

    for _ in range(3):
        step(batch(0, 3), batch(2, 3))
    one_written = batch(3, 3)
    versions = [weight._version, buffer._version, one_written._version]
    graph = (weight * weight).sum()
    with metrics.counted() as grown:
        step(batch(0, 3), one_written)
    assert grown["ReplayedCalls"] == 1
    assert [weight._version, buffer._version, one_written._version] == [n + 1 for n in versions]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        graph.backward()


def test_tangents_and_hooks_on_what_graphs_save_are_seen():
    weight = torch.ones(3, device="ltc", requires_grad=True)

    @ltc.compile
    def gradient(x):
        return torch.autograd.grad((weight * x).square().sum(), weight)[0]

    square = ltc.compile(lambda x: x * x)
    for number in range(5):
        x = batch(number, 3)
        square(x), gradient(x)
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept * 0, lambda kept: kept):
        assert gradient(x).tolist() == [0, 0, 0]
    with forward_ad.dual_level():
        found = square(forward_ad.make_dual(x, torch.ones(3, device="ltc")))
        assert torch.equal(forward_ad.unpack_dual(found).tangent, 2 * x)


# --- refusals and checks ------------------------------------------------------------------------

kept: list[torch.Tensor] = []


def prints(x):
    print("loss")
    return x * 2


def reads(x):
    return x * (x.sum().item() > 0)


def keeps(x):
    kept.append(x * 3)
    return x * 2


def draws_on_the_cpu(x):
    return x + torch.rand(3).to("ltc")


def needs_its_graph(x):
    return x * torch.ones(3, device="ltc", requires_grad=True)


def returns_a_view(x):
    y = x * 2
    kept[:] = [y]
    return y[0:1]


def adds_a_closure(x):
    ltm.add_step_closure(lambda: None)
    return x * 2


@pytest.mark.parametrize(
    ("function", "reason"),
    [(prints, "calls print"), (reads, "reads a value at"), (keeps, "is kept by more than"),
     (draws_on_the_cpu, "it has made on the CPU"), (needs_its_graph, "needs a graph"),
     (adds_a_closure, "adds a step closure at")],
)  # fmt: skip
def test_what_cannot_be_replayed_runs_as_it_is_and_says_why(function, reason):
    step = ltc.compile(function)
    with pytest.warns(UserWarning, match=reason) as warned:
        for number in range(5):
            assert step(batch(number, 3)).shape == (3,)
    assert len(warned) == 1
    assert "test_replay.py" in warned[0].filename
    assert reason in step.refusal
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(batch(9, 3))
    kept.clear()
    ltm.mark_step()


def test_an_impure_function_is_found_by_the_check():
    calls = itertools.count()

    @ltc.compile
    def step(x):
        return x.exp() if next(calls) > 1 else x.sin()

    with (
        config.override(LTC_REPLAY_CHECK=4),
        pytest.raises(StepDiffers, match=r"aten::exp at .*test_replay.py"),
    ):
        for number in range(12):
            step(batch(number, 3))
    assert torch.equal(step(batch(0, 3)).cpu(), batch(0, 3).exp().cpu())


def test_calls_of_many_kinds_are_checked_as_often_as_those_of_one():
    counted = itertools.count()

    @ltc.compile
    def counts(x):
        return x * (1 + next(counted) // 2)

    with (
        config.override(LTC_REPLAY_CHECK=4),
        metrics.counted() as grown,
        pytest.raises(StepDiffers, match="counts.*is different"),
    ):
        for rows in range(1, 20):  # more kinds than are kept
            for _ in range(3):  # of each kind one call is replayed
                counts(torch.ones(rows, device="ltc"))
    assert (grown["ReplayedCalls"], grown["ReplayChecks"]) == (3, 1)


def test_every_call_is_compared_under_ltc_check():
    step = ltc.compile(lambda x: x * 2)
    with config.override(LTC_CHECK=1), metrics.counted() as grown:
        for number in range(6):
            step(batch(number, 3))
    assert (grown["ReplayedCalls"], grown["ReplayChecks"]) == (0, 4)


def test_forgotten_paths_are_recorded_again():
    step = ltc.compile(lambda x: (x * 2).tanh())
    with config.override(LTC_MAX_RECORDED=20, LTC_REPLAY_CHECK=3):
        for number in range(30):
            x = batch(number, 3)
            for _ in range(number % 5):
                x = x + 1
            assert torch.equal(step(x).cpu(), (x * 2).tanh().cpu())


def test_calls_that_are_never_alike_are_given_up():
    step = ltc.compile(lambda x: x.sum())
    with pytest.warns(UserWarning, match="64 calls in a row were different"):
        for number in range(70):
            step(torch.ones(number + 1, device="ltc"))


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="takes a function, not a int"):
        ltc.compile(3)
    assert ltc.compile()(torch.exp)(torch.zeros(1, device="ltc")).item() == 1.0
