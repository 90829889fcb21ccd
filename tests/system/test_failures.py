"""What did not need the failing part of a program lives; the rest raises, and marks say it once."""

import contextlib
import random
import threading
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics
from ltc.runtime import program
from tests.drawn import seeds
from tests.random_programs import Program, drawn_program

pytestmark = pytest.mark.native(
    "errors of recorded steps come at their mark, and spare what is beside them"
)

PROGRAMS = 40
ROUNDING = 1e-9  # of float64, after some twenty calls that each round


def far(device: str = "ltc") -> torch.Tensor:
    return torch.tensor([7]).to(device)


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape).to("ltc")


# --- programs drawn at random -------------------------------------------------------------------

# Each gives 0 where it does not fail.
FAILURES = {
    "index": lambda: torch.ones(3).to("ltc")[far()].sum() - 1,
    "division": lambda: (torch.ones(3).long().to("ltc") // torch.zeros(3).long().to("ltc")).sum(),
    "extern": lambda: torch.full((3,), -1.0).to("ltc").multinomial(1).sum(),
}  # fmt: skip


def with_failures(drawn: Program, source: random.Random) -> tuple[Program, set[int]]:
    """The program with one to three calls that fail on a lazy device, and the values they give."""
    places = source.sample(range(len(drawn.calls)), source.randint(1, 3))
    calls = list(drawn.calls)
    for place in places:
        kind = source.choice(list(FAILURES))
        calls[place] = _failing(calls[place], kind)
    return replace(drawn, calls=tuple(calls)), {len(drawn.inputs) + place for place in places}


def _failing(call, kind: str):
    def run(*operands):
        value = call.run(*operands)
        return value if value.device.type == "cpu" else value + FAILURES[kind]()

    return replace(call, text=f"{call.text}, failing by {kind}", run=run)


def dependants(drawn: Program, values: set[int]) -> set[int]:
    found = set(values)
    for number, call in enumerate(drawn.calls, len(drawn.inputs)):
        if found.intersection(call.operands):
            found.add(number)
    return found


class Sums:
    """States that a program's values are added to: one for each of some values."""

    def __init__(self, device: str, watched: list[int]):
        self.device, self.watched = device, watched
        self.states = [torch.zeros((), dtype=torch.float64).to(device) for _ in watched]

    def add(self, number: int, value: torch.Tensor) -> None:
        for state, watched in zip(self.states, self.watched):
            if watched == number:
                state.add_(value.sin().sum())


def run(drawn: Program, device: str, sums: Sums, mark) -> list[torch.Tensor]:
    """Every value; the program ends with a mark."""
    values = [x.clone().to(device) for x in drawn.inputs]
    for k, call in enumerate(drawn.calls):
        values.append(call.run(*[values[n] for n in call.operands]))
        sums.add(len(values) - 1, values[-1])
        if k in drawn.marks:
            mark()
    mark()
    return values


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("seed", seeds(PROGRAMS))
def test_what_needs_no_failing_call_is_as_on_the_cpu(seed, behind, monkeypatch):
    if behind:
        monkeypatch.setattr(program, "SHORT_SECONDS", -1)  # every program is long
    source = random.Random(seed)
    drawn, failing = with_failures(drawn_program(seed), source)
    lost = dependants(drawn, failing)
    watched = source.sample(range(len(drawn.inputs), len(drawn.inputs) + len(drawn.calls)), 4)
    marks: list[BaseException] = []

    def mark():
        try:
            ltm.mark_step(wait=not behind)
        except (IndexError, RuntimeError) as error:
            marks.append(error)

    chosen = {"LTC_BACKEND": "eager"} if seed % 3 == 0 else {}
    with warnings.catch_warnings(), config.override(**chosen):
        warnings.simplefilter("ignore")
        ours, theirs = Sums("ltc", watched), Sums("cpu", watched)
        expected = run(drawn, "cpu", theirs, lambda: None)
        found = run(drawn, "ltc", ours, mark)
        with contextlib.suppress(IndexError, RuntimeError):
            ltm.wait_device_ops()
        ltm.mark_step(wait=True)  # it was said before
        read = [_value_or_error(x) for x in found]
        for number, (mine, theirs_) in enumerate(zip(read, expected)):
            if isinstance(mine, Exception):
                assert number in lost, f"value {number} raised {mine!r}\n{drawn}"
            else:  # one that needs only the shape of a value that failed may be there
                assert number not in failing, f"value {number} is there\n{drawn}"
                _assert_near(mine, theirs_, f"value {number}\n{drawn}")
        for number, mine, theirs_ in zip(watched, ours.states, theirs.states):
            if number not in lost:
                _assert_near(mine.cpu(), theirs_, f"the state of value {number}\n{drawn}")
            elif number in failing:
                assert mine.item() == 0, f"the state of value {number} is changed\n{drawn}"
        for state in ours.states:  # the next step is right
            before = state.item()
            state.add_(2)
            ltm.mark_step(wait=True)
            assert state.item() == before + 2
    assert len(marks) <= len(drawn.marks) + 1


def _value_or_error(x: torch.Tensor) -> torch.Tensor | Exception:
    try:
        return x.detach().cpu()
    except (IndexError, RuntimeError) as error:
        return error


def _assert_near(mine: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), what
    if mine.numel() and torch.isfinite(theirs).all():
        allowed = ROUNDING * max(1.0, float(theirs.abs().max()))
        assert float((mine - theirs).abs().max()) <= allowed, what


# --- who is told, and how often -----------------------------------------------------------------

CELLS = [
    "x = torch.arange(12.0).reshape(3, 4).to('ltc'); layer = torch.nn.Linear(4, 4).to('ltc')",
    "y = layer(x).relu(); bad = x[torch.tensor([7]).to('ltc')]; count = torch.zeros(2).to('ltc')",
    "z = y.sum(); count += 1",
    "z_found = z.item()",
    "bad.sum().item()",
    "y_found = y.detach().cpu()",
    "count += 1; count_found = count.tolist()",
    "bad_found = bad.cpu()",
    "del bad",
    "ltm.mark_step()",
    "y.mean().backward(); gradient = layer.weight.grad.cpu()",
    "layer.weight.data.sub_(layer.weight.grad); ltm.mark_step(wait=True)",
    "print(y, z, count)",
]


def test_in_a_notebook_only_the_cells_that_use_the_failed_value_fail(capsys):
    names: dict = {"torch": torch, "ltm": ltm}
    failed = []
    for number, cell in enumerate(CELLS):
        try:
            exec(compile(cell, f"<cell {number}>", "exec"), names)
        except IndexError as error:
            failed.append(number)
            note, _ = error.__notes__  # the other one tells the step
            assert note == "while running aten::index.Tensor called at <cell 1>:1 in <module>"
    assert failed == [4, 7]
    assert names["count_found"] == [2, 2]
    torch.testing.assert_close(names["z_found"], names["y_found"].sum().item())


def test_a_failure_that_nobody_read_is_raised_at_the_next_mark_and_at_no_other():
    bad, good = numbers(3, 4)[far()], numbers(3) + 1
    assert good.tolist() == [2, 3, 4]
    with pytest.raises(IndexError):
        ltm.mark_step()
    for _ in range(2):
        ltm.mark_step(wait=True)
        more = bad + 1
        ltm.mark_step(wait=True)  # who reads `more` is told
        with pytest.raises(IndexError):
            more.cpu()


def test_an_error_reaches_the_mark_of_the_thread_that_recorded_it():
    seen = []

    def work():
        bad = numbers(3, 4)[far()]
        try:
            ltm.mark_step(wait=True)
        except IndexError as error:
            seen.append(error)
        del bad

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    ltm.mark_step(wait=True)
    assert len(seen) == 1


@pytest.mark.parametrize("long", [False, True])
def test_an_update_that_does_not_need_what_failed_happens_once(long, monkeypatch):
    if long:
        monkeypatch.setattr(program, "SHORT_SECONDS", -1)
    table, good, bad = numbers(3, 4), numbers(2, 2), numbers(2, 2)
    ltm.mark_step(wait=True)

    def step(row: int) -> None:
        rows = table[torch.tensor([row]).to("ltc")]
        good.mul_(2)
        bad.add_(rows.sum())
        ltm.mark_step(wait=True)

    step(0)
    with pytest.raises(IndexError):
        step(7)
    step(1)
    assert good.tolist() == [[8, 16], [24, 32]]
    assert bad.tolist() == [[37, 38], [39, 40]]


def test_steps_behind_a_failed_one_leave_what_needs_it_and_do_the_rest(monkeypatch):
    monkeypatch.setattr(program, "SHORT_SECONDS", -1)
    table, weight, count = numbers(3, 4), numbers(4), torch.zeros(1).to("ltc")
    losses = []
    with pytest.raises(IndexError):
        for row in (0, 7, 1):
            loss = table[torch.tensor([row]).to("ltc")].sum() * weight.sum()
            weight.sub_(loss)
            count.add_(1)
            losses.append(loss)
            ltm.mark_step()
        ltm.wait_device_ops()
    assert losses[0].item() == 100
    with pytest.raises(IndexError):
        losses[1].item()
    assert weight.tolist() == [-99, -98, -97, -96]  # no step was done on a value that is missing
    told = len(losses)  # the mark that raised has started its step, too
    assert count.tolist() == [told]


def test_a_parameter_tells_once_that_its_update_failed_and_has_its_old_value_then():
    weight, table = numbers(4), numbers(3, 4)
    ltm.mark_step(wait=True)
    weight.add_(table[far()].sum())
    assert numbers(2).tolist() == [1, 2]  # the step has run
    with pytest.raises(IndexError):
        weight.tolist()
    assert weight.tolist() == [1, 2, 3, 4]
    ltm.mark_step(wait=True)


def test_an_update_on_top_of_one_that_failed_fails_until_somebody_is_told():
    weight, table = numbers(4), numbers(3, 4)
    ltm.mark_step(wait=True)
    weight.add_(table[far()].sum())
    assert numbers(2).tolist() == [1, 2]
    weight.add_(1)
    with pytest.raises(IndexError):
        ltm.mark_step(wait=True)
    assert weight.tolist() == [1, 2, 3, 4]
    weight.add_(1)
    ltm.mark_step(wait=True)
    assert weight.tolist() == [2, 3, 4, 5]


def test_of_several_errors_the_first_line_of_the_program_is_told_and_each_value_has_its_own():
    ones = torch.ones(3, dtype=int).to("ltc")
    rows = numbers(3)[far()]
    both = numbers(3, 5)[:, far()].sum() + rows
    columns = numbers(3, 4)[:, far()]
    divided = ones // (ones - 1)
    with pytest.raises(IndexError, match="dimension 0 with size 3"):
        ltm.mark_step(wait=True)
    ltm.mark_step(wait=True)
    for value, text in (
        (columns, "dimension 1 with size 4"),
        (rows, "dimension 0 with size 3"),
        (divided, "ZeroDivision"),
        (both, "dimension 0 with size 3"),
    ):
        with pytest.raises(RuntimeError, match=text):
            value.cpu()


def test_the_gradients_of_another_loss_live():
    torch.manual_seed(0)
    tower, other = torch.nn.Linear(4, 2), torch.nn.Embedding(3, 2)
    expected = torch.autograd.grad(tower(torch.ones(4)).sum(), tower.weight)[0]
    tower, other = tower.to("ltc"), other.to("ltc")
    tower(torch.ones(4).to("ltc")).sum().backward()
    other(far()).sum().backward()
    torch.testing.assert_close(tower.weight.grad.cpu(), expected)
    with pytest.raises(IndexError):
        other.weight.grad.cpu()
    with contextlib.suppress(IndexError):
        ltm.mark_step(wait=True)


def test_random_numbers_beside_a_failure_are_those_of_the_program():
    def drawn(row: int) -> torch.Tensor:
        torch.manual_seed(5)
        x = torch.rand(7, device="ltc")
        y = F.dropout(torch.ones(64, device="ltc")), torch.randn(5, device="ltc")
        rows = numbers(3)[torch.tensor([row]).to("ltc")]
        with contextlib.suppress(IndexError):
            ltm.mark_step(wait=True)
        del rows
        return torch.cat([x, *y]).cpu()

    torch.testing.assert_close(drawn(7), drawn(1))


def test_memory_that_there_is_not_fails_what_needs_it_alone():
    small = numbers(3) * 2
    huge = numbers(1).expand(2**46) + 1
    with pytest.raises((RuntimeError, OSError)):
        ltm.mark_step(wait=True)
    assert small.tolist() == [2, 4, 6]
    del huge


def test_what_was_saved_is_counted():
    good, bad = numbers(3) + 1, numbers(3)[far()]
    with metrics.counted() as grown, pytest.raises(IndexError):
        ltm.mark_step(wait=True)
    assert grown["SalvagedOutputs"] == 1
    del good, bad
