"""What `ltc.compile` makes of arguments that share memory with one another, or with what it closes over.

Each case is run on the CPU by Python alone, and replayed on ltc: all results and all tensors are equal.
"""

import types
from pathlib import Path

import pytest
import torch
from torch import nn

import ltc
from ltc import config
from ltc.debug import metrics

ORDER = (0, 0, 0, 1, 0, 2, 1, None, 0, None, None, 2)  # None: a tensor of its own


@pytest.fixture(autouse=True, params=["native", "auto"])
def replaying(request):
    """LTC_CHECK, which the tests run under, would record every call."""
    with config.override(LTC_CHECK=0, LTC_TIER=request.param):
        yield


def alike(case):
    """Run a case, a generator of tensors that is given a device and a compiler; what it has counted."""
    expected = values(case("cpu", lambda function: function))
    with metrics.counted() as grown:
        found = values(case("ltc", ltc.compile))
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), (number, one, other)
    return grown


def values(tensors) -> list[torch.Tensor]:
    return [torch.as_tensor(one).detach().cpu().clone() for one in tensors]


def numbers(device, *shape, first=1):
    """Whole numbers, so that no order of a sum rounds; each another one."""
    count = torch.Size(shape).numel()
    return torch.arange(float(first), first + count).reshape(shape).to(device)


VIEWS = {
    "the tensor itself": lambda w, k: w,
    "detached": lambda w, k: w.detach(),
    "data": lambda w, k: w.data[k],
    "a slice": lambda w, k: w[k : k + 2],
    "a column": lambda w, k: w[:, k],
    "steps": lambda w, k: w[:, k::2][:, :2],
    "transposed": lambda w, k: w[:, :4].t() if k else w[:, :4],
    "expanded": lambda w, k: w[k].expand(3, 6),
    "strided": lambda w, k: w.as_strided((2, 3), (6, 1), k),
    "a view of a view": lambda w, k: w[1:].t()[k],
    "a chunk": lambda w, k: w.chunk(4)[k],
    "a piece": lambda w, k: w.split([1, 1, 1, 1])[k],
    "unbound": lambda w, k: w.unbind()[k],
    "a diagonal": lambda w, k: w.diagonal(k)[:3],
    "windows": lambda w, k: w.unfold(1, 4, 2)[k],
    "other elements": lambda w, k: w[k].view(torch.int32),
    "complex": lambda w, k: torch.view_as_complex(w.view(4, 3, 2))[k],
    "a part of complex": lambda w, k: torch.view_as_real(torch.view_as_complex(w.view(4, 3, 2)))[k],
    "flat": lambda w, k: w.view(-1)[k : k + 5],
}
WRITABLE = [name for name in VIEWS if name not in ("expanded", "windows")]


def argument(view, w, k):
    """A view of w, or a tensor of its own like it."""
    return view(w, k) if k is not None else view(w, 0).detach().clone() + 1


# --- one view, read -----------------------------------------------------------------------------


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_of_what_is_closed_over_is_read_as_it_is(view):
    def case(device, compiled):
        w = numbers(device, 4, 6)
        step = compiled(lambda x: (x * 1).sum() + w.sum())
        for k in ORDER:
            yield step(argument(view, w, k))

    alike(case)


class Held:
    pass


def closed_over(w, compiled):
    step = compiled(lambda x: (x * 1).sum() + w.sum())
    return step, step


def parameter(w, compiled):
    module = nn.Linear(6, 4, bias=False).to(w.device)
    module.weight.data = w
    step = compiled(lambda x: (module(x.expand(2, 6)).sum() + x.sum()).detach())
    return step, step


def another_argument(w, compiled):
    step = compiled(lambda x, y: (x * 1).sum() + y.sum())
    return lambda x: step(x, w), step


def the_argument_before(w, compiled):
    step = compiled(lambda y, x: (x * 1).sum() + y.sum())
    return lambda x: step(w, x), step


def in_a_list(w, compiled):
    held = [w]
    step = compiled(lambda x: (x * 1).sum() + held[0].sum())
    return step, step


def in_a_table(w, compiled):
    held = {"w": w}
    step = compiled(lambda x: (x * 1).sum() + held["w"].sum())
    return step, step


def in_an_object(w, compiled):
    held = Held()
    held.w = w
    step = compiled(lambda x: (x * 1).sum() + held.w.sum())
    return step, step


def in_a_list_of_arguments(w, compiled):
    step = compiled(lambda parts: (parts[0] * 1).sum() + parts[1].sum())
    return lambda x: step([x, w]), step


def in_a_table_of_arguments(w, compiled):
    step = compiled(lambda parts: (parts["x"] * 1).sum() + parts["w"].sum())
    return lambda x: step({"x": x, "w": w}), step


def by_a_keyword(w, compiled):
    step = compiled(lambda x, *, w: (x * 1).sum() + w.sum())
    return lambda x: step(x, w=w), step


def by_a_default(w, compiled):
    step = compiled(lambda x, w=w: (x * 1).sum() + w.sum())
    return step, step


def by_another_view(w, compiled):
    half = w[1:, 2:]
    step = compiled(lambda x: (x * 1).sum() + half.sum())
    return step, step


def in_a_cache_that_is_written_to(w, compiled):
    cache = {"k": w}

    def read_and_write(x):
        found = (x * 1).sum() + cache["k"].sum()
        cache["k"][1].add_(1)
        return found

    step = compiled(read_and_write)
    return step, step


def of_a_global(w, compiled):
    module = types.ModuleType("steps_with_a_global")
    exec("def step(x):\n    return (x * 1).sum() + w.sum()", module.__dict__)
    module.w = w
    step = compiled(module.step)
    return step, step


HOLDERS = [closed_over, parameter, another_argument, the_argument_before, in_a_list, in_a_table,
           in_an_object, in_a_list_of_arguments, in_a_table_of_arguments, by_a_keyword, by_a_default,
           by_another_view, in_a_cache_that_is_written_to, of_a_global]  # fmt: skip


@pytest.mark.parametrize("holder", HOLDERS)
def test_wherever_its_base_is_found(holder):
    def case(device, compiled):
        w = numbers(device, 4, 6)
        call, step = holder(w, compiled)
        steps.append(step)
        for k in ORDER:
            yield call(argument(lambda w, k: w[k], w, k))
        yield w

    steps = []
    grown = alike(case)
    assert grown["ReplayedCalls"] >= 3, (dict(grown), steps[-1].refusal)


# --- writes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITABLE)
def test_a_write_through_a_view_reaches_what_it_shows(name):
    view = VIEWS[name]

    def case(device, compiled):
        w = numbers(device, 4, 6)

        @compiled
        def step(x):
            x.mul_(2)
            return (x * 1).sum() + w.sum()

        for k in ORDER:
            x = argument(view, w, k)
            yield step(x)
            yield x
            yield w

    alike(case)


@pytest.mark.parametrize("name", WRITABLE)
def test_a_write_to_the_base_is_seen_in_the_view(name):
    view = VIEWS[name]

    def case(device, compiled):
        w = numbers(device, 4, 6)

        @compiled
        def step(x):
            w.add_(1)
            return (x * 1).sum()

        for k in ORDER:
            x = argument(view, w, k)
            yield step(x)
            yield x
            yield w

    alike(case)


def test_slots_of_a_cache_are_written_where_they_are():
    def case(device, compiled):
        keys, values = torch.zeros(6, 2, device=device), torch.zeros(6, 2, device=device)

        @compiled
        def step(key, value, x):
            key.copy_(x)
            value.copy_(x * 2)
            return (keys * values).sum()

        for number in range(24):
            slot = number % 3
            yield step(keys[slot], values[slot], numbers(device, 2, first=number))
        yield keys
        yield values

    assert alike(case)["ReplayedCalls"] >= 15


def test_a_base_that_only_its_view_holds_is_written_to():
    def case(device, compiled):
        @compiled
        def step(x):
            x.mul_(2)
            return x.sum()

        for number in range(8):
            x = numbers(device, 2, 3, first=number).t()
            yield step(x)
            yield x
            yield x.add_(1)
            yield step(x)
            yield x

    alike(case)


# --- two arguments ------------------------------------------------------------------------------

PAIRS = {
    "one tensor twice": lambda a, b: (a[0], a[0]),
    "one tensor, shown twice": lambda a, b: (a, a),
    "another object of one": lambda a, b: (a, a.detach()),
    "two tensors": lambda a, b: (a, b),
    "two rows": lambda a, b: (a[0], a[1]),
    "two rows, turned": lambda a, b: (a[1], a[0]),
    "rows of two": lambda a, b: (a[0], b[0]),
    "rows that overlap": lambda a, b: (a[:2], a[1:3]),
    "a part and the whole": lambda a, b: (a[:2].view(2, 3), a),
}


def changing(device):
    """Pairs of arguments that share memory otherwise from call to call."""
    for names in (PAIRS, reversed(PAIRS), PAIRS, PAIRS):
        for name in names:
            a, b = numbers(device, 4, 3), numbers(device, 4, 3, first=50)
            yield PAIRS[name](a, b), (a, b)


def read(a, b):
    return a.sum() * 2 + b.sum()


def read_one(a, b):
    return a.sum() * 2


def write_one(a, b):
    a.add_(1)
    return b.sum()


def write_both(a, b):
    a.add_(1)
    b.mul_(2)
    return a.sum() + b.sum()


def fill_one(a, b):
    b.zero_()
    return a.sum() + 1


@pytest.mark.parametrize("function", [read, read_one, write_one, write_both, fill_one])
def test_two_arguments_share_memory_otherwise_in_each_call(function):
    def case(device, compiled):
        step = compiled(function)
        for pair, bases in changing(device):
            yield step(*pair)
            yield from bases

    assert alike(case)["ReplayedCalls"] >= 5


@pytest.mark.parametrize("first", ["one tensor twice", "two tensors"])
def test_arguments_on_the_cpu_may_be_one_tensor_or_two(first):
    def case(device, compiled):
        step = compiled(lambda a, b: a.to(device) * 2 + b.to(device))
        for number in range(9):
            a, b = numbers("cpu", 3, first=number), numbers("cpu", 3, first=number + 50)
            is_one = (number < 4 or number == 7) == (first == "one tensor twice")
            yield step(a, a if is_one else b)

    alike(case)


def test_a_view_of_an_argument_on_the_cpu_is_not_taken_for_a_constant():
    def case(device, compiled):
        step = compiled(lambda x: x.to(device).sum() * 2 + x[1:].to(device).sum())
        for number in (1, 1, 1, 5, 1, 7):
            yield step(numbers("cpu", 4, first=number))

    alike(case)


def test_a_cpu_tensor_that_is_closed_over_is_no_argument():
    def case(device, compiled):
        w = numbers("cpu", 4)
        step = compiled(lambda x: x.to(device).sum() * 2 + w.to(device).sum())
        for x in (w, w, w, numbers("cpu", 4, first=7), w[:], w):
            yield step(x)

    alike(case)


# --- two views of what each call makes anew -----------------------------------------------------


def test_a_language_model_is_given_two_views_of_its_tokens():
    def case(device, compiled):
        torch.manual_seed(0)
        table = nn.Embedding(12, 4).to(torch.float64).to(device)
        head = nn.Linear(4, 12).to(torch.float64).to(device)
        optimizer = torch.optim.SGD([*table.parameters(), *head.parameters()], lr=0.1)

        @compiled
        def step(x, y):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(head(table(x)).flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            return loss.detach()

        for number in range(10):
            tokens = (torch.arange(21).reshape(3, 7) * (number + 3)).remainder(12).to(device)
            yield step(tokens[:, :-1], tokens[:, 1:]).float()
        yield from (one.float() for one in table.parameters())

    expected = values(case("cpu", lambda function: function))
    with metrics.counted() as grown:
        found = values(case("ltc", ltc.compile))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert grown["ReplayedCalls"] == 7, dict(grown)  # the first call finds no gradients


@pytest.mark.parametrize("size", [3, 4])
def test_two_halves_of_one_argument_and_of_another_size(size):
    def case(device, compiled):
        step = compiled(lambda x, y: x - 2 * y)
        for number in range(10):
            whole = numbers(device, size if number % 4 < 3 else 2 * size, 4, first=number)
            yield step(*whole.chunk(2, 1))

    assert alike(case)["ReplayedCalls"] >= 6


def test_pieces_in_a_list_and_a_table():
    def case(device, compiled):
        step = compiled(lambda parts, named: sum(parts) + named["last"] * 2)
        for number in range(8):
            whole = numbers(device, 4, 3, first=number)
            yield step([whole[0], whole[1]], {"last": whole[3]})

    assert alike(case)["ReplayedCalls"] == 6


# --- gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a slice", "a column", "transposed", "flat", "detached"])
def test_gradients_of_a_parameter_beside_views_of_it(name):
    view = VIEWS[name]

    def case(device, compiled):
        p = nn.Parameter(numbers(device, 4, 6))

        @compiled
        def step(x):
            p.grad = None
            (p * x.sum()).sum().backward()

        for k in ORDER:
            step(argument(view, p.detach(), k))
            yield p.grad

    assert alike(case)["ReplayedCalls"] >= 2


def test_gradients_that_go_on_into_the_graph_of_an_argument():
    def case(device, compiled):
        p = nn.Parameter(numbers(device, 4, 6))

        @compiled
        def step(x):
            p.grad = None
            (x * x).sum().backward()

        for k in ORDER:
            step(p[k] if k is not None else (p * 3)[0])
            yield p.grad

    alike(case)


def test_an_argument_is_a_leaf_or_has_a_graph():
    def case(device, compiled):
        p = nn.Parameter(numbers(device, 4))
        step = compiled(lambda x: (x * 3).sum().backward())
        for number in range(12):
            leaf = number < 4 or number == 7
            x = numbers(device, 4).requires_grad_() if leaf else p * 2
            step(x)
            yield x.grad if leaf else p.grad

    alike(case)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_a_view_of_a_parameter_is_written_to(mode):
    def case(device, compiled):
        p = nn.Parameter(numbers(device, 4, 3))

        @compiled
        def step(x):
            with torch.no_grad():
                x.mul_(2)
            return p.detach() * 1

        for k in (0, 0, 0, 1, 0, 2):
            with mode():
                x = p[k]
            yield step(x)
            yield step(x)
            yield step(p.data[k])
            yield p

    alike(case)


def test_gradients_that_go_on_into_another_graph():
    def case(device, compiled):
        p = nn.Parameter(numbers(device, 4))

        @compiled
        def step(x):
            p.grad = None
            x.sum().backward()

        for number in range(9):
            step(p * p if number < 5 else p * p * p)
            yield p.grad

    alike(case)


@pytest.mark.parametrize("is_one", [True, False])
def test_two_leaves_of_one_memory_have_gradients_of_their_own(is_one):
    def case(device, compiled):
        step = compiled(lambda a, b: (a * 2 + b * 3).sum().backward())
        for number in range(9):
            a = numbers(device, 3).requires_grad_()
            b = a if is_one == (number < 5) else a.detach().requires_grad_()
            step(a, b)
            yield a.grad
            yield b.grad

    alike(case)


@pytest.mark.parametrize("holder", ["fresh", "view"])
def test_gradients_that_are_views_of_one_flat_tensor(holder):
    def case(device, compiled):
        flat = torch.zeros(6, device=device)
        weights = [nn.Parameter(numbers(device, 3)) for _ in range(2)]
        optimizer = torch.optim.SGD(weights, lr=0.5)

        @compiled
        def step(x):
            flat.zero_()
            sum((w * x).sum() for w in weights).backward()
            optimizer.step()
            return flat * 2

        for number in range(10):
            for place, w in enumerate(weights):
                if holder == "view" or number % 4 == 1:
                    w.grad = flat[3 * place : 3 * place + 3]
                elif number % 4 == 0:
                    w.grad = torch.zeros(3, device=device)
            yield step(numbers(device, 3, first=number))
            yield from weights
            yield from (w.grad for w in weights)
            yield flat

    alike(case)


def test_a_gradient_that_the_function_sets_to_a_view():
    def case(device, compiled):
        flat, p = numbers(device, 6), nn.Parameter(numbers(device, 3))

        @compiled
        def step(x):
            p.grad = flat[:3]
            flat.add_(1)
            return x * 2

        for number in range(10):
            if number % 2 or number > 6:
                p.grad = None
            yield step(numbers(device, 3, first=number))
            yield p.grad
            yield flat

    alike(case)


def test_the_gradient_before_is_returned():
    def case(device, compiled):
        p = nn.Parameter(numbers(device, 3))

        @compiled
        def step(x):
            before, p.grad = p.grad, None
            (p * x).sum().backward()
            return before

        for number in range(8):
            yield step(numbers(device, 3, first=number)) if number else step(p.detach()) or p
            yield p.grad

    alike(case)


def test_a_gradient_is_an_argument():
    def case(device, compiled):
        p = nn.Parameter(numbers(device, 3))
        p.grad = numbers(device, 3)

        @compiled
        def step(x):
            (p * x).sum().backward()
            return x * 2

        for number in range(9):
            yield step(p.grad if number % 4 < 2 else p.grad.clone())
            yield p.grad
            p.grad = p.grad / 2 if number % 3 else p.grad

    alike(case)


# --- results ------------------------------------------------------------------------------------


def test_results_are_given_again():
    def case(device, compiled):
        step = compiled(lambda x, y: (x + 1, y + 2))
        x, y = numbers(device, 3), numbers(device, 3, first=9)
        for number in range(12):
            made = step(x, y)
            yield from made
            x, y = [(made[0], made[1]), (made[0], made[0]), (made[1], made[0][:])][number % 3]

    alike(case)


def with_a_part_of_it(made):
    return made, made[:1]


RESULTS = {
    "the argument": lambda x, w: x,
    "the argument, detached": lambda x, w: x.detach(),
    "a part of it": lambda x, w: x[:1],
    "a part of what is closed over": lambda x, w: w[:1],
    "its base": lambda x, w: w,
    "both": lambda x, w: (x, w, x),
    "a part of a result": lambda x, w: (x * 2)[:1],
    "a result and a part of it": lambda x, w: with_a_part_of_it(x * 2),
}


@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)
def test_what_is_written_to_a_result_is_seen_where_it_is_a_view(result):
    def case(device, compiled):
        w = numbers(device, 4, 3)

        @compiled
        def step(x):
            w.add_(1)
            return result(x, w)

        for k in ORDER:
            x = argument(lambda w, k: w[k : k + 2], w, k)
            made = step(x)
            for one in made if isinstance(made, tuple) else (made,):
                yield one.mul_(2)
            yield x
            yield w

    alike(case)


# --- what is not read ---------------------------------------------------------------------------


def test_the_shape_of_an_argument_that_is_not_read():
    def case(device, compiled):
        step = compiled(lambda x: torch.ones(x.shape[0], device=device) * 2)
        for size in (3, 3, 3, 4, 3, 5, 4):
            yield step(numbers(device, size))

    assert alike(case)["ReplayedCalls"] >= 2


def test_the_dtype_of_an_argument_that_is_not_read():
    def case(device, compiled):
        w = numbers(device, 3)
        step = compiled(lambda x: w.to(x.dtype) / 2)
        for dtype in (torch.float32,) * 3 + (torch.float64, torch.int64, torch.float32):
            yield step(torch.zeros(3, dtype=dtype, device=device))

    alike(case)


def test_a_tensor_that_is_only_written_to():
    def case(device, compiled):
        w = numbers(device, 3)

        @compiled
        def step(x):
            x.fill_(7)
            return w * 2

        for number in range(12):
            x = w if number % 4 == 3 else numbers(device, 3 + number // 6)
            yield step(x)
            yield x
            yield w

    alike(case)


# --- memory that the function exchanges ---------------------------------------------------------


def test_two_tensors_exchange_their_memory():
    def case(device, compiled):
        a, b = numbers(device, 3), numbers(device, 3, first=20)

        @compiled
        def step(x):
            a.add_(x)
            a.data, b.data = b.data, a.data
            return a * 2

        for number in range(9):
            yield step(numbers(device, 3, first=number))
            yield a
            yield b

    alike(case)


def test_memory_that_is_exchanged_between_the_calls():
    def case(device, compiled):
        a, b = numbers(device, 3), numbers(device, 6, first=20)

        @compiled
        def step(x):
            a.add_(x)
            return a * 2 + b[:3]

        for number in range(12):
            a.data = (b[3:], b[:3], numbers(device, 3))[number % 3]
            yield step(numbers(device, 3, first=number))
            yield a
            yield b

    alike(case)


# --- what a call changes besides elements -------------------------------------------------------


class Buffers:
    def __init__(self, device):
        self.one, self.other, self.turn = numbers(device, 3), numbers(device, 3, first=10), 0
        self.listed = [self.one, self.other]
        self.table = {"one": self.one, "other": self.other}


def exchanges_attributes(held, x):
    held.one, held.other = held.other, held.one
    return held.one.add_(x) * 2


def turns_a_list(held, x):
    held.listed.reverse()
    return held.listed[0].add_(x) * 2


def exchanges_items(held, x):
    table = held.table
    table["one"], table["other"] = table["other"], table["one"]
    return table["one"].add_(x) * 2


def counts_to_two(held, x):
    held.turn = (held.turn + 1) % 2
    return held.listed[held.turn].add_(x) * 2


def keeps_its_argument(held, x):
    before, held.one = held.one, x
    return before + x


def keeps_a_view(held, x):
    before, held.one = held.one, held.other[:]
    held.other.add_(x)
    return before * 2


CHANGES = [exchanges_attributes, turns_a_list, exchanges_items, counts_to_two, keeps_its_argument]


@pytest.mark.parametrize("function", CHANGES)
def test_a_call_that_changes_what_the_next_one_finds_is_refused(function):
    def case(device, compiled):
        held = Buffers(device)
        step = compiled(lambda x: function(held, x))
        given = [numbers(device, 3), numbers(device, 3, first=7)]
        for number in (0, 1, 0, 1, 0, 1, 0, 0, 1, 1, 0, 1):
            yield step(given[number])
            yield from (held.one, held.other, *held.listed, *held.table.values())

    with pytest.warns(
        UserWarning, match="it changes a constant that it uses, and a replayed call would not"
    ):
        alike(case)


@pytest.mark.parametrize("name", ["StepLR", "ExponentialLR", "LambdaLR"])
def test_a_schedule_that_steps_inside_is_refused(name):
    arguments = {"StepLR": (3, 0.5), "ExponentialLR": (0.5,), "LambdaLR": (lambda n: 0.5**n,)}

    def case(device, compiled):
        p = nn.Parameter(numbers(device, 3))
        optimizer = torch.optim.SGD([p], lr=1.0)
        schedule = getattr(torch.optim.lr_scheduler, name)(optimizer, *arguments[name])

        @compiled
        def step(x):
            optimizer.zero_grad()
            (p * x).sum().backward()
            optimizer.step()
            schedule.step()

        for _ in range(9):
            step(numbers(device, 3))
            yield p
            yield optimizer.param_groups[0]["lr"]

    alike(case)


def test_a_call_that_keeps_another_view_each_time_is_never_like_one_before():
    def case(device, compiled):
        held = Buffers(device)
        step = compiled(lambda x: keeps_a_view(held, x))
        for number in range(9):
            yield step(numbers(device, 3, first=number))
            yield held.one

    assert not alike(case)["ReplayedCalls"]


def test_a_mode_that_each_call_sets_is_set():
    def case(device, compiled):
        model = nn.BatchNorm1d(3).to(device)

        @compiled
        def evaluate(x):
            model.eval()
            return model(x).detach()

        for number in range(9):
            if number % 2 or number > 5:
                model.train()
            yield evaluate(numbers(device, 2, 3, first=number))
            yield model.training

    alike(case)


# --- the table of docs/how_a_step_runs.md -------------------------------------------------------


def reading(w):
    """A function that is given tensors, and uses w as well."""
    return ltc.compile(lambda *given: sum((x * 1).sum() for x in given) + w.sum())


def calls_with(*arguments):
    """Calls, each with the arguments that a function of w and the call's number gives."""
    w = numbers("ltc", 6, 4)
    step = reading(w)
    return step, [lambda n=n, given=given: step(*given(w, n)) for n, given in enumerate(arguments)]


def anew(n):
    return numbers("ltc", 4, 4, first=n)


def two_parts(t):
    return t[:, :-1], t[:, 1:]


def gradients(before, inside):
    """Calls of a function that sets gradients, before each of which they are set."""
    p, flat = nn.Parameter(numbers("ltc", 4)), numbers("ltc", 8)
    step = ltc.compile(lambda x: inside(p, flat, x))

    def call():
        before(p, flat)
        step(p.detach()[:2] if before is not_set else p[:2])

    return step, [call] * 6


def not_set(p, flat):
    p.grad = None


def set_to_a_part(p, flat):
    p.grad = flat[:4]


def adds_to_it(p, flat, x):
    (p * p).sum().backward()


def sets_it(p, flat, x):
    p.grad = flat.add_(1)[:4]


def goes_on(p, flat, x):
    (x * x).sum().backward()


def returning(result):
    w = numbers("ltc", 6, 4)
    step = ltc.compile(lambda x: result(w.add_(1), x, x * 2))
    return step, [lambda: step(numbers("ltc", 2))] * 6


def exchanging(exchange):
    held = Buffers("ltc")
    step = ltc.compile(lambda x: (held.one.add_(x), exchange(held))[0] * 1)
    return step, [lambda: step(numbers("ltc", 3))] * 8


def exchange_data(held):
    held.one.data, held.other.data = held.other.data, held.one.data


def exchange_attributes(held):
    held.one, held.other = held.other, held.one


FORMS = {
    "the same part of the same tensor in each call: `f(w[:3])`": (
        "replayed", lambda: calls_with(*[lambda w, n: [w[:3]]] * 4)),
    "the same parts of a tensor that is another one in each call: `f(t[:, :-1], t[:, 1:])`": (
        "replayed",
        lambda: calls_with(*[lambda w, n: two_parts(anew(n))] * 4)),
    "one tensor twice in each call: `f(x, x)`": (
        "replayed", lambda: calls_with(*[lambda w, n: [anew(n).add_(1)] * 2] * 4)),
    "another part: `f(w[:3])`, then `f(w[1:4])`": (
        "recorded", lambda: calls_with(*[lambda w, n: [w[:3]]] * 4, lambda w, n: [w[1:4]])),
    "a part of another tensor: `f(w[:3])`, then `f(v[:3])`": (
        "recorded", lambda: calls_with(*[lambda w, n: [w[:3]]] * 4, lambda w, n: [anew(n)[:3]])),
    "a tensor of its own after a view, or the reverse: `f(w[:3])`, then `f(w[:3].clone())`": (
        "recorded", lambda: calls_with(*[lambda w, n: [w[:3]]] * 4, lambda w, n: [w[:3].clone()])),
    "one tensor after two, or the reverse: `f(x, y)`, then `f(x, x)`": (
        "recorded",
        lambda: calls_with(*[lambda w, n: [anew(n), anew(n)]] * 4, lambda w, n: [anew(n)] * 2)),
    "a tensor that the function uses after one that it does not: `f(x)`, then `f(w)`": (
        "recorded", lambda: calls_with(*[lambda w, n: [anew(n)]] * 4, lambda w, n: [w])),
    "another part in each of 65 calls in a row": (
        "refused", lambda: calls_with(*[lambda w, n: [w.as_strided((2,), (n % 20 + 1,), n // 20)]] * 66)),
    "returns an argument, or a tensor that it uses: `return w`": (
        "replayed", lambda: returning(lambda w, x, y: (w, x, y))),
    "returns a view of one, or of another result: `return w[:1]`": (
        "refused", lambda: returning(lambda w, x, y: w[:1])),
    "adds to a gradient that is a view: `p.grad = flat[:4]` before the call": (
        "replayed", lambda: gradients(set_to_a_part, adds_to_it)),
    "makes a gradient a view: `p.grad = flat[:4]` inside": (
        "refused", lambda: gradients(not_set, sets_it)),
    "its backward goes on into the graph of an argument: `f(p[:2])`": (
        "refused", lambda: gradients(lambda p, flat: setattr(p, "grad", None), goes_on)),
    "gives a tensor other memory: `a.data = b`": (
        "refused", lambda: exchanging(exchange_data)),
    "changes what the next call finds: `held.a, held.b = held.b, held.a`": (
        "refused", lambda: exchanging(exchange_attributes)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:ltc.compile")
@pytest.mark.parametrize(("outcome", "make"), FORMS.values(), ids=FORMS)
def test_what_becomes_of_a_form(outcome, make):
    step, calls = make()
    for call in calls[:-1]:
        call()
    with metrics.counted() as grown:
        calls[-1]()
    if step.refusal:
        found = "refused"
    else:
        found = "replayed" if grown["ReplayedCalls"] else "recorded"
    assert found == outcome, step.refusal


def test_the_docs_tell_what_becomes_of_each_form():
    page = (Path(__file__).parents[2] / "docs" / "how_a_step_runs.md").read_text()
    for form, (outcome, _) in FORMS.items():
        assert f"| {form} | {outcome} |\n" in page


# --- words --------------------------------------------------------------------------------------


def test_a_view_that_is_another_one_in_each_call_is_named():
    data = numbers("ltc", 100, 3)
    step = ltc.compile(lambda x: x * 2)
    with pytest.warns(UserWarning, match=r"args\[0\] is a view .*slice.*of a tensor of \(100, 3\)"):
        for number in range(70):
            step(data[number : number + 2])


def test_a_view_that_is_returned_is_named_with_its_base():
    w = numbers("ltc", 4, 3)
    step = ltc.compile(lambda x: w.add_(x)[1:])
    with pytest.warns(UserWarning, match="returns a view of w"):
        for _ in range(4):
            step(numbers("ltc", 1))
