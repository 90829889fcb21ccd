"""What comes back at other sizes is one path and one program, and gives what the CPU gives."""

import random
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ltc
import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics
from ltc.device import policy
from ltc.device.recording.recorder import device_at
from ltc.errors import OutOfRangeIndexError, Unsupported
from ltc.llvm.ops import dispatch
from ltc.runtime import graph_compiler, program_of_sizes
from tests.drawn import seeds
from tests.recorders import in_a_new_thread, process_of_one_device
from tests.resized_programs import ResizedProgram, sequence
from tests.unit import llvm_kernels

pytestmark = pytest.mark.noted_at_once("it counts steps until they are followed")

DRAWN, STEPS = 16, 12
COUNTED = (
    "SymbolicPaths",
    "SymbolicPrograms",
    "SymbolicSizes",
    "ImmediateSteps",
    "RecordedEntries",
)
# A float32 result passes through some tens of sums; a float64 one is only added in another order.
ROUNDING = {torch.float32: 2e-4, torch.float64: 1e-9}


@pytest.fixture(autouse=True)
def auto() -> Iterator[None]:
    """As in a process of one device that was told nothing."""
    with process_of_one_device(LTC_TIER="auto", LTC_CACHE=0):
        yield


def assert_like_the_cpu(got: list[torch.Tensor], wanted: list[torch.Tensor], what: object) -> None:
    assert [x.shape for x in got] == [x.shape for x in wanted], what
    for mine, theirs in zip(got, wanted):
        if theirs.numel():
            most = theirs[theirs.isfinite()].abs().max().item() if theirs.isfinite().any() else 1
            allowed = ROUNDING[theirs.dtype]
            torch.testing.assert_close(
                mine.cpu(), theirs, rtol=allowed, atol=allowed * max(1, most), equal_nan=True,
                msg=lambda text: f"{what}: {text}",
            )  # fmt: skip


# --- drawn at random -----------------------------------------------------------------------------


def compare(seed: int) -> None:
    """A program at a dozen sizes: the same values and gradients, or refused on both."""
    program = ResizedProgram(seed, random.Random(seed).choice((2, 4, 7)))
    for number, extents in enumerate(sequence(seed, STEPS)):
        try:
            wanted = program.run("cpu", extents, number)
        except (RuntimeError, IndexError, ValueError):
            with pytest.raises((RuntimeError, IndexError, ValueError)):
                [x.cpu() for x in program.run("ltc:0", extents, number)]
            continue
        got = program.run("ltc:0", extents, number)
        ltm.mark_step()
        assert_like_the_cpu(got, wanted, f"seed {seed}, step {number}, {extents}")


@pytest.mark.parametrize("seed", seeds(DRAWN))
def test_a_random_program_of_other_sizes_equals_the_cpu(seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        in_a_new_thread(lambda: compare(seed))


def test_most_random_programs_become_symbolic():
    with metrics.counted() as grown, config.override(LTC_CHECK=0):
        for seed in range(100, 104):
            in_a_new_thread(lambda seed=seed: compare(seed))
    assert grown["SymbolicPaths"] >= 3
    assert grown["SymbolicSizes"] >= 6


# --- training ------------------------------------------------------------------------------------


def trained(device: str, sizes: list[int], make_loss) -> list[float]:
    """The losses of steps at those sizes, and what the model keeps of them."""
    torch.manual_seed(0)
    model, loss_of = make_loss()
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for number, n in enumerate(sizes):
        torch.manual_seed(number)
        optimizer.zero_grad()
        loss = loss_of(model, n, device)
        loss.backward()
        optimizer.step()
        if device != "cpu":
            ltm.mark_step()
        losses.append(loss.item())
    return losses + [buffer.double().sum().item() for buffer in model.buffers()]


def perceptron():
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 5))

    def loss_of(m, n, device):
        x, wanted = torch.randn(n, 6).to(device), (torch.arange(n) % 5).to(device)
        return F.cross_entropy(m(x), wanted)

    return model, loss_of


def transformer():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    model = nn.Sequential(nn.Embedding(20, 16), layer, nn.Linear(16, 4))

    def loss_of(m, n, device):
        tokens = torch.randint(0, 20, (3, n)).to(device)
        return F.cross_entropy(m(tokens).mean(1), torch.tensor([0, 1, 2]).to(device))

    return model, loss_of


def graph():
    model = nn.ModuleList([nn.Linear(6, 16), nn.Linear(16, 4)])

    def loss_of(m, n, device):
        edges = 3 * n + n % 7
        source, target = torch.randint(0, n, (2, edges)).to(device)
        h = m[0](torch.randn(n, 6).to(device))
        h = torch.zeros_like(h).index_add(0, target, h[source]).relu()
        return F.cross_entropy(m[1](h), (torch.arange(n) % 4).to(device))

    return model, loss_of


def attention_over_edges():
    """The softmax of each node's edges: largest, sum and mean by index."""
    model = nn.ModuleList([nn.Linear(6, 16), nn.Linear(16, 1), nn.Linear(16, 4)])

    def loss_of(m, n, device):
        edges = 3 * n + n % 7
        source, target = torch.randint(0, n, (2, edges)).to(device)
        h = m[0](torch.randn(n, 6).to(device))
        scores = m[1](h[source] + h[target]).tanh().squeeze(1)
        nothing = torch.zeros(n, device=device)
        largest = nothing.scatter_reduce(0, target, scores, "amax", include_self=False)
        shares = (scores - largest[target]).exp()
        shares = shares / nothing.scatter_reduce(0, target, shares, "sum")[target]
        h = torch.zeros_like(h).index_add(0, target, h[source] * shares[:, None])
        spread = nothing.scatter_reduce(0, target, scores, "mean") + (nothing + 1).scatter_reduce(
            0, target, scores, "prod"
        )
        return F.cross_entropy(m[2](h), (torch.arange(n) % 4).to(device)) + spread.square().mean()

    return model, loss_of


def regression():
    """A column of results, whose gradient is divided by their number."""
    model = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 1))

    def loss_of(m, n, device):
        return F.mse_loss(m(torch.randn(n, 6).to(device)), torch.randn(n, 1).to(device))

    return model, loss_of


def regression_behind_a_product():
    """The gradient of the loss may be computed where the product stores its results."""
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))

    def loss_of(m, n, device):
        y, wanted = m(torch.randn(n, 6).to(device)), torch.randn(n, 3).to(device)
        return F.huber_loss(y, wanted) + F.smooth_l1_loss(y, wanted)

    return model, loss_of


def classes_along_the_second_dimension():
    model = nn.Sequential(nn.Embedding(20, 12), nn.Linear(12, 7))

    def loss_of(m, n, device):
        words, wanted = torch.randint(0, 20, (3, n)), torch.randint(0, 7, (3, n))
        wanted[0, : n // 2] = -100
        return F.cross_entropy(m(words.to(device)).transpose(1, 2), wanted.to(device))

    return model, loss_of


def convolutions():
    """Of any number of images."""
    body = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
    )
    model = nn.Sequential(body, nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))

    def loss_of(m, n, device):
        x, wanted = torch.randn(n, 3, 16, 16).to(device), (torch.arange(n) % 5).to(device)
        return F.cross_entropy(m(x), wanted)

    return model, loss_of


@pytest.mark.parametrize(
    "make_loss",
    [
        perceptron, transformer, graph, attention_over_edges, regression,
        regression_behind_a_product, classes_along_the_second_dimension, convolutions,
    ],
)  # fmt: skip
def test_training_on_sizes_that_change_is_one_program(make_loss):
    sizes = [20, 9, 33, 14, 25, 48, 31, 40, 23, 29, 36, 26, 45, 21]
    expected = trained("cpu", sizes, make_loss)
    with metrics.counted() as grown:
        found = trained("ltc:0", sizes, make_loss)
    assert found == pytest.approx(expected, rel=1e-3)
    assert grown["SymbolicPaths"] == 1
    assert 1 <= grown["SymbolicPrograms"] <= 3
    assert grown["SymbolicSizes"] >= 6
    assert grown["ImmediateSteps"] <= 7  # the first step makes the optimizer's state


def scaled_losses(device: str) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.partition(":")[0], init_scale=8.0, growth_interval=3)
    found = []
    for rows in (20, 9, 33, 14, 25, 48, 31, 40, 23, 29, 36, 26, 45, 21):
        loss = model(torch.randn(rows, 6).to(device)).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(loss.item())
    return [*found, scaler.get_scale()]


def test_scaled_training_on_sizes_that_change_is_one_program():
    expected = scaled_losses("cpu")
    with metrics.counted() as grown:
        found = scaled_losses("ltc:0")
    assert found == pytest.approx(expected, rel=1e-3)
    assert grown["SymbolicProgramsRefused"] == grown["SymbolicPathsRefused"] == 0
    assert grown["SymbolicPrograms"] >= 1


def test_a_loss_over_what_a_mask_selects_is_one_program_at_all_sizes(monkeypatch):
    """How many are selected is a symbol too, also in the gradient of the selection."""
    monkeypatch.setattr(policy, "LAUNCH_CALLS", 0)  # no path is short

    def gradient(device: str, rows: int, selected: int) -> torch.Tensor:
        x = torch.linspace(-2, 3, 5 * rows, dtype=torch.float64).sin().view(rows, 5)
        x = x.to(device).requires_grad_()
        mask = torch.arange(rows) % (rows // selected) == 0
        mask[mask.cumsum(0) > selected] = False
        (x * 2)[mask.to(device)].square().sum().backward()
        return x.grad

    def run_all() -> None:
        for rows in (40, 90, 60, 77, 52, 99, 45, 81, 66, 93, 70, 55, 84, 63):
            selected = 17 + rows % 3 if rows > 50 else 20
            got = gradient("ltc:0", rows, selected)
            ltm.mark_step()
            assert_like_the_cpu([got], [gradient("cpu", rows, selected)], rows)

    with metrics.counted() as grown:
        in_a_new_thread(run_all)
    assert grown["SymbolicProgramsRefused"] == 0
    assert grown["SymbolicPrograms"] >= 1 and grown["SymbolicSizes"] >= 3


def test_a_mask_that_selects_none_is_right_on_a_path_of_symbols(monkeypatch):
    monkeypatch.setattr(policy, "LAUNCH_CALLS", 0)  # no path is short

    def gradient(device: str, selected: int) -> torch.Tensor:
        x = torch.linspace(-2, 3, 30).view(6, 5).to(device).requires_grad_()
        mask = torch.arange(30).view(6, 5) < selected
        (x * 2)[mask.to(device)].square().sum().backward()
        return x.grad

    def run_all() -> None:
        for selected in (20, 17, 21, 9, 12, 25, 14, 0, 0, 8, 0, 11):
            got = gradient("ltc:0", selected)
            ltm.mark_step()
            assert_like_the_cpu([got], [gradient("cpu", selected)], selected)

    with metrics.counted() as grown:
        in_a_new_thread(run_all)
    assert grown["SymbolicPrograms"] >= 1


def test_sizes_at_which_code_changes_are_right():
    sizes = [
        5,
        6,
        7,
        8,
        2,
        3,
        4,
        9,
        15,
        16,
        17,
        31,
        32,
        33,
        63,
        64,
        65,
        127,
        128,
        129,
        257,
        1,
        0,
        300,
    ]
    weight = torch.linspace(-1, 1, 48, dtype=torch.float64).view(6, 8)

    def step(n: int, device: str) -> list[torch.Tensor]:
        x = torch.linspace(-2, 3, 6 * n, dtype=torch.float64).view(n, 6).to(device).requires_grad_()
        y = (x @ weight.to(device)).tanh().softmax(1)
        (y * y.sum(0)).sum().backward()
        return [y.detach(), x.grad]

    for n in sizes:
        got = step(n, "ltc:0")
        ltm.mark_step()
        assert_like_the_cpu(got, step(n, "cpu"), n)


def turned(x: torch.Tensor) -> torch.Tensor:
    return (x.transpose(1, 2) * 2).contiguous()


def turned_and_joined(x: torch.Tensor) -> torch.Tensor:
    return x.permute(0, 2, 1).reshape(x.shape[0], -1).cos()


def turned_and_reduced(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2) + x.transpose(1, 2).sum(0)


def of_each_channel(x: torch.Tensor) -> torch.Tensor:
    weight = torch.linspace(-1, 1, 9 * x.shape[1], dtype=x.dtype).sin().view(-1, 1, 3, 3)
    images = x[:, :, :36].reshape(*x.shape[:2], 6, 6)
    return F.conv2d(images, weight.to(x.device), groups=x.shape[1])


@pytest.mark.parametrize(
    "compute", [turned, turned_and_joined, turned_and_reduced, of_each_channel]
)
@pytest.mark.parametrize("names", ["l", "m", "nl", "nml"])
def test_squares_of_lanes_that_are_turned_are_those_of_this_size(compute, names):
    """Where whole vectors cover rows and columns, a row's number counts squares, not rows."""
    draws = random.Random(names)

    def run_all() -> None:
        for number in range(9):
            images = draws.choice((2, 3, 4, 5, 6)) if "n" in names else 4
            rows = draws.choice((16, 32, 48, 80, 96)) if "m" in names else 48
            columns = draws.choice((48, 64, 80, 96)) if "l" in names else 64
            x = torch.linspace(-2, 3, images * rows * columns).sin().view(images, rows, columns)
            got = compute(x.to("ltc:0"))
            ltm.mark_step()
            assert_like_the_cpu([got], [compute(x)], (number, tuple(x.shape)))

    with metrics.counted() as grown:
        in_a_new_thread(run_all)
    assert grown["SymbolicSizes"] >= 1


def summed_over_windows(x: torch.Tensor, taps: int) -> torch.Tensor:
    weight = torch.linspace(-1, 1, 18 * taps**2, dtype=x.dtype).sin().view(6, 3, taps, taps)
    return F.conv2d(x, weight.to(x.device)).relu()


def largest_of_windows(x: torch.Tensor, taps: int) -> torch.Tensor:
    return F.max_pool2d(x, taps).tanh()


def stepped_over(x: torch.Tensor, taps: int) -> torch.Tensor:
    weight = torch.linspace(-1, 1, 72, dtype=x.dtype).sin().view(6, 3, 2, 2)
    return F.conv2d(x, weight.to(x.device), stride=taps).relu()


@pytest.mark.parametrize("compute", [summed_over_windows, largest_of_windows, stepped_over])
def test_windows_of_other_sizes_are_one_program(compute):
    x = torch.linspace(-2, 3, 2 * 3 * 16 * 17).sin().view(2, 3, 16, 17)

    def run_all() -> None:
        for number in range(24):
            taps = 2 + number % 4
            got = compute(x.to("ltc:0"), taps)
            ltm.mark_step()
            assert_like_the_cpu([got], [compute(x, taps)], taps)

    with metrics.counted() as grown:
        in_a_new_thread(run_all)
    assert grown["SymbolicProgramsRefused"] == 0
    assert grown["SymbolicPrograms"] >= 1 and grown["SymbolicSizes"] >= 1


def with_columns_written(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, 2:4] = x[:, :2] * 3
    return y


def with_rows_written(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[2 : x.shape[0] - 1] = x[: x.shape[0] - 3].exp()
    return y


@pytest.mark.parametrize("compute", [with_columns_written, with_rows_written])
def test_writes_to_a_part_of_other_sizes_are_one_program(compute):
    """Whether all of the value is computed, or the part alone, is right at any size."""

    def run_all() -> None:
        for rows in (9, 12, 5, 31, 7, 4, 64, 8, 5, 100):
            x = torch.linspace(-2, 3, 6 * rows).sin().view(rows, 6)
            got = compute(x.to("ltc:0"))
            ltm.mark_step()
            assert_like_the_cpu([got], [compute(x)], rows)

    with metrics.counted() as grown:
        in_a_new_thread(run_all)
    assert grown["SymbolicProgramsRefused"] == 0
    assert grown["SymbolicPrograms"] >= 1 and grown["SymbolicSizes"] >= 5


# --- what else holds ------------------------------------------------------------------------------


def run(n: int, shift: float = 2.0) -> torch.Tensor:
    x = torch.linspace(-1, 1, 3 * n).view(n, 3)
    y = (x.to("ltc:0") * shift).tanh().sum(1)
    ltm.mark_step()
    torch.testing.assert_close(y.cpu(), (x * shift).tanh().sum(1))
    return y


def test_sizes_are_filled_in_and_numbers_are_handed_over():
    for n in (20, 21, 22, 23):
        run(n)
    with metrics.counted() as grown:
        for n in range(30, 60):
            run(n, shift=n / 10)
    assert {name: grown[name] for name in COUNTED} == {
        "SymbolicPaths": 0,
        "SymbolicPrograms": 0,
        "SymbolicSizes": 30,
        "ImmediateSteps": 0,
        "RecordedEntries": 0,
    }
    assert grown["UncachedCompile"] == grown["CallByCallRuns"] == 0


def test_it_can_be_switched_off():
    with config.override(LTC_SYMBOLIC=0), metrics.counted() as grown:
        for n in range(10, 20):
            run(n)
    assert grown["SymbolicPaths"] == grown["SymbolicPrograms"] == 0
    assert grown["ImmediateSteps"] == 10


def test_a_size_that_stays_is_recorded_for_itself():
    for n in (5, 6, 7, 8, 9):
        run(n)
    with metrics.counted() as grown:
        for _ in range(8):
            run(12)
        ltm.wait_device_ops()
    assert grown["RecordedEntries"] > 0
    assert grown["UncachedCompile"] == 1


def test_an_error_of_a_size_is_as_on_the_cpu():
    weight = torch.ones(4, 2)

    def step(n: int, columns: int) -> torch.Tensor:
        y = (
            torch.ones(n, columns).to("ltc:0") @ weight.to("ltc:0")
            + torch.arange(n).to("ltc:0")[:, None]
        )
        ltm.mark_step()
        return y

    for n in (5, 6, 7, 8, 9, 10):
        step(n, 4)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        step(11, 3)
    ltm.mark_step()
    torch.testing.assert_close(step(12, 4).cpu(), 4 + torch.arange(12.0)[:, None].expand(12, 2))


def test_sizes_that_must_be_equal_are_looked_at():
    """The second operand comes at the size of the run before: its entry does not tell."""

    def step(n: int, m: int) -> torch.Tensor:
        y = torch.ones(n, 3).to("ltc:0").exp() + torch.ones(m, 3).to("ltc:0")
        ltm.mark_step()
        return y

    for n in (5, 6, 7, 8, 9):
        step(n, n)
    with pytest.raises(RuntimeError, match="must match the size"):
        step(10, 9)
    ltm.mark_step()
    assert step(11, 11).cpu().shape == (11, 3)


def test_a_number_that_was_an_expression_by_chance_may_be_none_at_another_size():
    """Of strides 2 and 1 at widths 7 and 8 the expression 9 - width is 0 at 9, and divides by it."""
    weight = torch.linspace(-1, 1, 4 * 3 * 9, dtype=torch.float64).sin().view(4, 3, 3, 3)

    def step(height: int, width: int, stride: int) -> None:
        x = torch.linspace(-1, 1, 6 * height * width, dtype=torch.float64).cos()
        x = x.view(2, 3, height, width)
        got = F.conv2d(x.to("ltc:0"), weight.to("ltc:0"), stride=stride)
        ltm.mark_step()
        assert_like_the_cpu([got], [F.conv2d(x, weight, stride=stride)], (height, width, stride))

    for height, width, stride in ((9, 7, 2), (12, 8, 1), (10, 9, 1), (11, 9, 2), (13, 10, 2)):
        step(height, width, stride)


def test_an_index_out_of_range_names_the_size_of_this_time():
    def step(n: int, index: int) -> torch.Tensor:
        y = torch.arange(float(n)).to("ltc:0").exp()[torch.tensor([0, index]).to("ltc:0")]
        ltm.mark_step(wait=True)
        return y

    for n in (5, 6, 7, 8, 9):
        step(n, n - 1)
    with pytest.raises(OutOfRangeIndexError, match=r"17.*size 13|size 13"):
        step(13, 17)
    torch.testing.assert_close(step(14, 13).cpu()[1], torch.tensor(13.0).exp())


def test_a_program_that_is_of_symbols_no_more_runs_otherwise(monkeypatch):
    """What the passes can not do with expressions leaves the path, and says why."""

    def refuse(*args):
        raise Unsupported("no expressions here")

    monkeypatch.setattr(graph_compiler.pipeline, "run", refuse)
    with metrics.counted() as grown:
        for n in range(10, 20):
            run(n)
    assert grown["SymbolicProgramsRefused"] == 1
    assert grown["ImmediateSteps"] >= 4
    assert any("no expressions here" in str(one) for one in ltc.explain(20))


def test_memory_is_bounded_for_any_number_of_sizes():
    for n in range(5, 9):
        run(n)
    (path,) = device_at(0).recorder().root.symbolic
    entries = device_at(0).recorder().entries
    for n in range(10, 400):
        run(n)
    (end,) = path.ends.values()
    assert len(end._ready) <= program_of_sizes.MOST_READY
    assert len(end._variants) <= policy.MAX_VARIANTS
    assert device_at(0).recorder().entries == entries


def test_programs_that_begin_alike_have_a_path_each():
    weight = torch.linspace(-1, 1, 12).view(3, 4)

    def step(n: int, kind: str, device: str) -> torch.Tensor:
        x = torch.linspace(-1, 1, 3 * n).view(n, 3).to(device)
        y = (x * 2).tanh()
        if kind == "sum":
            return y.sum(1)
        if kind == "product":
            return (y @ weight.to(device)).softmax(1)
        return y[1:].cos()

    def both(n: int, kind: str) -> None:
        got = step(n, kind, "ltc:0")
        ltm.mark_step()
        assert_like_the_cpu([got], [step(n, kind, "cpu")], (n, kind))

    sizes = (25, 30, 27, 22, 35, 40, 21, 33, 28, 45)
    for n in sizes:
        for kind in ("sum", "product", "cos"):
            both(n, kind)
    for n in range(50, 54):
        for kind in ("product", "cos", "sum"):
            both(n, kind)
    with metrics.counted() as grown:
        for n in range(60, 70):
            for kind in ("sum", "product", "cos"):
                both(n, kind)
    assert grown["ImmediateSteps"] == grown["RecordedEntries"] == grown["CallByCallRuns"] == 0
    assert grown["SymbolicSizes"] == 30


def test_views_and_writes_keep_their_sizes():
    def step(n: int, device: str) -> list[torch.Tensor]:
        x = torch.arange(float(4 * n)).view(n, 4).to(device)
        y = x * 2
        view = y[1:, :2]
        view.add_(100)
        y.t()[0].mul_(-1)
        return [y, view.contiguous(), y.view(-1)[n : 2 * n]]

    for n in (5, 6, 7, 8, 11, 19, 3, 30):
        got = step(n, "ltc:0")
        ltm.mark_step()
        assert_like_the_cpu(got, step(n, "cpu"), n)


def test_state_that_is_replaced_keeps_its_memory():
    totals = torch.zeros(3).to("ltc:0")
    expected = torch.zeros(3)
    for n in (5, 6, 7, 8, 11, 19, 3, 30):
        x = torch.linspace(0, 1, 3 * n).view(n, 3)
        totals += x.to("ltc:0").exp().sum(0)
        expected += x.exp().sum(0)
        ltm.mark_step()
    torch.testing.assert_close(totals.cpu(), expected)


def test_a_path_that_ends_at_a_call_of_unknown_shape_is_not_left_there(monkeypatch):
    """What a mask cuts out is another number of rows each time: it ends the path, and is no other way."""
    monkeypatch.setattr(policy, "LAUNCH_CALLS", 0)  # no path is short
    draws = random.Random(0)

    def step(rows: int) -> None:
        x = torch.randn(rows, 5)
        mine = x.to("ltc:0")
        kept = mine[mine[:, 0] > 0]
        total = (kept * 2).sum(1).cos()
        ltm.mark_step()
        torch.testing.assert_close(total.cpu(), (x[x[:, 0] > 0] * 2).sum(1).cos())

    for _ in range(8):
        step(draws.randint(40, 90))
    with metrics.counted() as grown:
        for _ in range(6):
            step(draws.randint(40, 90))
    assert (grown["RecordedEntries"], grown["SymbolicPaths"], grown["ImmediateSteps"]) == (0, 0, 0)
    assert grown["SymbolicSizes"] >= 9  # some sizes had been recorded for themselves


def test_a_cache_that_begins_without_elements_is_one_path():
    """Keys of transformers' caches are torch.tensor([]) until the first come."""

    def step(device: str, length: int) -> torch.Tensor:
        keys = torch.tensor([], device=device)
        for _ in range(2):
            new = torch.arange(2.0 * length).reshape(1, length, 2).to(device)
            keys = torch.cat([keys, new.sin()], dim=-2)
        made = keys.sum(-1).cumsum(-1)
        if device == "ltc":
            ltm.mark_step()
        return made

    with metrics.counted() as grown:
        for length in (3, 4, 5, 9, 7, 12):
            torch.testing.assert_close(step("ltc", length).cpu(), step("cpu", length))
    assert (grown["SymbolicPaths"], grown["ImmediateSteps"]) == (1, 3)


def looked_up_at_places(device: str, length: int) -> torch.Tensor:
    """Rows and columns by tensors, as transformers makes masks: positions are row * columns + column."""
    x = torch.arange(3.0 * length).reshape(3, length).to(device)
    rows = torch.arange(3)[:, None].to(device)
    columns = (torch.arange(length) * 7 % length).to(device)
    return (x[rows, columns] * 2).tanh()


def biased_by_distance(device: str, length: int) -> torch.Tensor:
    """A table's row for each pair, brought in front: neighbours lie length * length apart."""
    table = torch.linspace(-1, 1, 3 * 40).reshape(40, 3).to(device)
    distance = (torch.arange(length)[:, None] - torch.arange(length)).abs().to(device)
    scores = torch.linspace(-2, 2, 3 * length * length).reshape(length, length, 3).to(device)
    bias = table[distance.clamp(max=39)].permute(2, 0, 1)
    return (scores.permute(2, 0, 1).exp() + bias).softmax(-1) * scores.sum(-1)


def turned(device: str, length: int) -> torch.Tensor:
    """Of every length: squares of vectors cover no more than some."""
    x = torch.linspace(-2, 2, length * 48).reshape(length, 48).to(device)
    y = torch.linspace(0, 1, 48 * length).reshape(48, length).to(device)
    return (x.t().exp() + y).sin()


@pytest.mark.parametrize("step", [looked_up_at_places, biased_by_distance, turned])
def test_places_that_depend_on_sizes_need_no_program_for_each(step):
    with metrics.counted() as grown:
        for length in (12, 13, 14, 16, 7, 32, 33, 15, 48, 64):
            made = step("ltc", length)
            ltm.mark_step()
            torch.testing.assert_close(made.cpu(), step("cpu", length), rtol=1e-4, atol=1e-5)
    assert (grown["SymbolicPrograms"], grown["ImmediateSteps"]) == (1, 3)
    assert grown["SymbolicSizes"] >= 6


def gram(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    return [x @ x.mT, (x @ x.mT + 1).tanh()]


def wide(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Columns that lie side by side, rows of them, and both with a formula behind."""
    return [y.mT @ x.mT, y.mT @ x.mT.contiguous(), (y.mT @ x.mT.contiguous()).relu() * 2]


def of_many_terms(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Sums over the size that changes, and over more terms than are packed at once."""
    long = x.repeat(1, 1, 200)
    return [x.mT @ x, long @ long.mT, x.sum(-1) @ x]


@pytest.fixture(params=llvm_kernels.ISAS, ids=lambda isa: isa.name)
def isa(request, monkeypatch) -> Iterator[None]:
    """Kernels are of its instructions alone."""
    monkeypatch.setattr(dispatch, "host_isa", lambda has_feature: request.param)
    dispatch.isa.cache_clear()
    yield
    dispatch.isa.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("products", "most"), [(gram, 3), (wide, 3), (of_many_terms, 8)])
def test_products_of_any_number_of_columns_are_few_programs(
    products, most, dtype, isa, monkeypatch
):
    """Attention that is written out, or a loss of all pairs: of each size it was a program.

    Sums over the size that changes are made in ways of their own where they are long.
    """
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(3, 11, 5, dtype=dtype, generator=generator)
    with metrics.counted() as grown:
        for rows in (12, 13, 14, 16, 7, 32, 33, 15, 48, 64, 100, 129, 3, 2, 257):
            x = torch.randn(3, rows, 11, dtype=dtype, generator=generator)
            made = products(x.to("ltc"), y.to("ltc"))
            ltm.mark_step()
            assert_like_the_cpu([one.cpu() for one in made], products(x, y), rows)
    assert 1 <= grown["SymbolicPrograms"] <= most
    assert grown["SymbolicProgramsRefused"] == 0
    assert (
        grown["ImmediateSteps"] <= 5
    )  # sizes of which a guard tells that another variant is needed
    assert grown["SymbolicSizes"] >= 9


def gated(device: str, rows: int) -> list[torch.Tensor]:
    x = torch.linspace(-3, 3, rows * 8).reshape(rows, 8).to(device).requires_grad_()
    weight = torch.full((4,), 0.3).to(device).requires_grad_()
    others = 1 - torch.eye(rows, device=device)
    made = F.prelu(F.glu(x), weight)
    loss = ((made @ made.mT) * others + torch.eye(rows, 4, device=device).sum()).square().mean()
    loss.backward()
    return [loss.detach(), x.grad, weight.grad]


def test_gates_and_identities_are_one_program():
    """Units that gate a half by the other, slopes that are learned, all pairs but those of one."""
    with metrics.counted() as grown:
        for rows in (5, 6, 7, 9, 12, 16, 17, 30, 33, 8):
            made = gated("ltc", rows)
            ltm.mark_step()
            assert_like_the_cpu(made, gated("cpu", rows), rows)
    assert (grown["SymbolicPaths"], grown["ImmediateSteps"]) == (1, 3)
    assert grown["SymbolicProgramsRefused"] == 0 and 1 <= grown["SymbolicPrograms"] <= 3


def test_a_row_that_is_padded_is_normalized_at_all_sizes():
    """Its length is a sum of sizes, by which its strides are divided."""

    def step(n: int, device: str) -> torch.Tensor:
        x = torch.linspace(-1, 1, n * n).view(n, n, 1, 1).sin().to(device)
        padded = F.pad(x, (2, 2, 0, 0, 3, 2), mode="replicate") * torch.arange(5, device=device)
        return F.layer_norm(padded, (5,))

    with metrics.counted() as grown:
        for n in (15, 7, 23, 8, 10, 23, 9, 10):
            got = step(n, "ltc:0")
            ltm.mark_step()
            torch.testing.assert_close(got.cpu(), step(n, "cpu"), rtol=1e-4, atol=1e-4)
    assert grown["SymbolicSizes"] > 0
