"""nn.LSTM, nn.GRU and nn.RNN on ltc: PyTorch's results and gradients, one call for all steps."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics
from ltc.device.policy import Policy
from ltc.device.recording.recorder import device_at
from ltc.llvm.ops import dispatch
from ltc.llvm.recurrence.recurrence_codes import recurrence_codes
from ltc.native.core import CORE
from ltc.runtime.background import compile_behind
from tests.recorders import process_of_one_device

pytestmark = pytest.mark.also_native


def relu_rnn(*args, **options):
    return nn.RNN(*args, nonlinearity="relu", **options)


LAYERS = {"lstm": nn.LSTM, "gru": nn.GRU, "tanh": nn.RNN, "relu": relu_rnn}
every_cell = pytest.mark.parametrize("cell", LAYERS)


def made(cell, device, inputs, width, dtype=torch.float64, **options):
    torch.manual_seed(1)
    return LAYERS[cell](inputs, width, dtype=dtype, **options).to(device)


def numbers(device, *shape, dtype=torch.float64):
    """The same for each device, with a gradient."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)
    return x.to(device).requires_grad_()


def weighed(*tensors):
    """A number to whose gradient each element brings another share."""
    shares = [torch.arange(x.numel()).double().sin().view(x.shape) for x in tensors]
    return sum((x * share.to(x)).sum() for x, share in zip(tensors, shares))


def tensors_of(found):
    return [x for one in found for x in (tensors_of(one) if isinstance(one, tuple) else [one])]


def results_and_gradients(model, run, *operands):
    results = tensors_of(run(model, *operands))
    wanted = [*operands, *model.parameters()]
    return *results, *torch.autograd.grad(weighed(*results), wanted)


def states_of(cell, device, number, batch, width, **options):
    first = numbers(device, number, batch, width, **options)
    return (first, numbers(device, number, batch, width, **options)) if cell == "lstm" else first


SHAPES = {  # steps, sequences, inputs, width
    "small": (4, 3, 5, 6),
    "one of each": (1, 1, 1, 1),
    "one sequence": (5, 1, 3, 7),
    "one step": (1, 4, 3, 9),
    "more rows than registers": (3, 21, 2, 8),
    "long sums": (2, 2, 3, 131),
}


@pytest.mark.compared
@every_cell
@pytest.mark.parametrize("name", SHAPES)
def test_outputs_last_states_and_gradients(device, name, cell):
    steps, batch, inputs, width = SHAPES[name]
    model = made(cell, device, inputs, width)
    states = states_of(cell, device, 1, batch, width)

    def run(model, x, *states):
        return model(x, states if cell == "lstm" else states[0])

    x = numbers(device, steps, batch, inputs)
    return results_and_gradients(model, run, x, *(states if cell == "lstm" else (states,)))


OPTIONS = {
    "two layers": {"num_layers": 2},
    "both directions": {"bidirectional": True},
    "two layers both ways": {"num_layers": 2, "bidirectional": True, "batch_first": True},
    "no bias": {"bias": False, "bidirectional": True},
}


@pytest.mark.compared
@every_cell
@pytest.mark.parametrize("name", OPTIONS)
def test_layers_directions_biases(device, name, cell):
    model = made(cell, device, 4, 5, **OPTIONS[name])
    return results_and_gradients(model, lambda model, x: model(x), numbers(device, 3, 2, 4))


@pytest.mark.compared
@every_cell
@pytest.mark.parametrize("is_sorted", [True, False])
def test_sequences_of_several_lengths(device, cell, is_sorted):
    model = made(cell, device, 4, 5, num_layers=2, bidirectional=True)
    lengths = [6, 4, 4, 1] if is_sorted else [1, 4, 6, 4]

    def run(model, x):
        packed = pack_padded_sequence(x, lengths, enforce_sorted=is_sorted)
        outputs, last = model(packed)
        return pad_packed_sequence(outputs)[0], last

    return results_and_gradients(model, run, numbers(device, 6, 4, 4))


@pytest.mark.compared
@every_cell
def test_one_sequence_without_a_batch(device, cell):
    model = made(cell, device, 4, 5, bidirectional=True)
    return results_and_gradients(model, lambda model, x: model(x), numbers(device, 3, 4))


@pytest.mark.compared
def test_an_input_that_does_not_lie_in_order(device):
    model = made("lstm", device, 4, 5)
    x = numbers(device, 4, 6, 2)

    def run(model, x):
        return model(x.permute(2, 1, 0)[:, ::2])

    return results_and_gradients(model, run, x)


@pytest.mark.compared
def test_outputs_of_a_projection(device):
    model = made("lstm", device, 4, 6, proj_size=3, num_layers=2, bidirectional=True)
    return results_and_gradients(model, lambda model, x: model(x), numbers(device, 3, 2, 4))


@pytest.mark.compared
@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_loss_of_some_of_the_results(device, part):
    model = made("lstm", device, 4, 5)

    def run(model, x):
        return tensors_of(model(x))[part]

    x = numbers(device, 3, 2, 4)
    result = run(model, x)
    return result, *torch.autograd.grad(weighed(result), [x, *model.parameters()])


@pytest.mark.compared
@every_cell
def test_a_frozen_weight_and_an_input_without_a_gradient(device, cell):
    model = made(cell, device, 4, 5)
    model.weight_hh_l0.requires_grad_(False)
    model.bias_hh_l0.requires_grad_(False)
    x = numbers(device, 3, 2, 4).detach()
    outputs, _ = model(x)
    weighed(outputs).backward()
    return outputs, model.weight_ih_l0.grad, model.bias_ih_l0.grad


@pytest.mark.compared
@every_cell
def test_gradients_of_gradients(device, cell):
    model = made(cell, device, 3, 4)
    x = numbers(device, 3, 2, 3)
    outputs, _ = model(x)
    (first,) = torch.autograd.grad(weighed(outputs), x, create_graph=True)
    return first, *torch.autograd.grad(weighed(first), [x, *model.parameters()])


def test_its_gradient_is_that_of_its_result():
    model = made("lstm", "ltc", 2, 3)

    def run(x, *parameters):
        named = dict(zip(dict(model.named_parameters()), parameters))
        return torch.func.functional_call(model, named, (x,))[0]

    assert torch.autograd.gradcheck(run, (numbers("ltc", 2, 2, 2), *model.parameters()))


@pytest.mark.compared
@every_cell
def test_no_batch_and_no_gradient(device, cell):
    model = made(cell, device, 4, 5)
    with torch.no_grad():
        empty = model(torch.zeros(3, 0, 4, dtype=torch.float64, device=device))[0]
        return empty, model(numbers(device, 3, 2, 4))[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_cell
def test_narrow_numbers_are_as_near_to_double_as_pytorch_s(cell, dtype):
    def run(device, dtype, rounded_to):
        model = made(cell, "cpu", 8, 16, torch.float32).to(rounded_to).to(dtype).to(device)
        x = numbers("cpu", 6, 5, 8).detach().to(rounded_to).to(dtype).to(device)
        outputs, _ = model(x.requires_grad_())
        return [outputs, *torch.autograd.grad(weighed(outputs), [x, *model.parameters()])]

    exact, theirs = run("cpu", torch.float64, dtype), run("cpu", dtype, dtype)
    for one, other, right in zip(run("ltc", dtype, dtype), theirs, exact):
        error = (one.cpu().double() - right).abs().max()
        allowed = (other.double() - right).abs().max()
        assert one.dtype == dtype
        assert error <= 2 * allowed + torch.finfo(dtype).eps * right.abs().max()


def test_what_is_not_a_number_reaches_its_own_sequence_alone():
    model = made("lstm", "ltc", 3, 4, torch.float32)
    x = torch.zeros(3, 2, 3)
    x[1, 0, 0] = torch.nan
    outputs = model(x.to("ltc"))[0].cpu()
    assert outputs[1:, 0].isnan().all() and not outputs[:, 1].isnan().any()
    assert not outputs[0].isnan().any()


def test_dropout_between_layers_drops_some_of_it_and_in_training_alone():
    model = made("gru", "ltc", 3, 50, torch.float32, num_layers=2, dropout=0.5)
    x = numbers("ltc", 3, 2, 3, dtype=torch.float32)
    assert not torch.equal(model(x)[0].cpu(), model(x)[0].cpu())
    model.eval()
    expected = copy.deepcopy(model).cpu()(x.cpu())[0]
    torch.testing.assert_close(model(x)[0].cpu(), expected)


@pytest.mark.compared
@pytest.mark.parametrize("cell", ["gru", "tanh", "relu"])
def test_a_tangent_and_a_function_s_gradient(device, cell):
    model = made(cell, device, 3, 4)
    x = numbers(device, 2, 1, 3).detach()
    _, tangent = torch.func.jvp(lambda one: model(one)[0], (x,), (torch.ones_like(x),))
    outputs, pulled = torch.func.vjp(lambda one: model(one)[0], x)
    return tangent, *pulled(torch.ones_like(outputs))


@pytest.mark.compared
@pytest.mark.parametrize(
    "cell", ["gru", "tanh", "relu"]
)  # the CPU's LSTM is another overload there
def test_types_under_autocast(device, cell):
    model = made(cell, device, 3, 4, torch.float32)
    x = numbers(device, 3, 2, 3, dtype=torch.float32)
    with torch.autocast(x.device.type, torch.bfloat16):
        return [torch.empty(0, dtype=one.dtype) for one in tensors_of(model(x))]


@every_cell
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_and_gradients_under_autocast(cell, dtype):
    """Of the dtype of the states where these are sums, else of the products."""

    def run(device, enabled):
        model = made(cell, device, 8, 16, torch.float32, num_layers=2, bidirectional=True)
        x = numbers("cpu", 6, 5, 8).detach().to(dtype).to(torch.float32 if not enabled else dtype)
        x = x.to(device).requires_grad_()
        with torch.autocast("ltc", torch.bfloat16, enabled=enabled):
            outputs, _ = model(x)
        return outputs, torch.autograd.grad(weighed(outputs), [x, *model.parameters()])

    outputs, gradients = run("ltc", True)
    expected, right = run("cpu", False)
    assert outputs.dtype == (torch.bfloat16 if cell in ("tanh", "relu") else dtype)
    assert [x.dtype for x in gradients] == [dtype] + [torch.float32] * (len(gradients) - 1)
    pairs = list(zip((outputs, *gradients), (expected, *right)))
    # Of relu the outputs alone: its slope is 0 or 1, and rounding turns some of them over.
    for one, other in pairs[:1] if cell == "relu" else pairs:
        assert (one.cpu().float() - other).norm() <= 0.03 * other.norm()


def recorded_calls(cell, steps, enabled=False):
    ltm.mark_step(wait=True)
    model = made(cell, "ltc", 3, 4, torch.float32)
    with torch.autocast("ltc", torch.bfloat16, enabled=enabled):
        outputs, _ = model(numbers("ltc", steps, 2, 3, dtype=torch.float32))
    outputs.sum().backward()
    count = len(list(device_at(0).recorder().path()))
    ltm.mark_step(wait=True)
    return count


@every_cell
@pytest.mark.parametrize("enabled", [False, True], ids=["float32", "autocast"])
def test_as_many_calls_are_recorded_for_few_steps_as_for_many(cell, enabled):
    assert recorded_calls(cell, 4, enabled) == recorded_calls(cell, 50, enabled) < 60


@pytest.mark.native("it reads the kernels of a compiled scan")
@every_cell
def test_the_code_of_a_scan_is_the_same_for_any_number_of_steps_and_sequences(cell, monkeypatch):
    def texts(steps, batch):
        found = []
        monkeypatch.setattr(dispatch, "recurrence_codes", lambda *given: noted(found, *given))
        model = made(cell, "ltc", 16, 16, torch.float32)
        model(numbers("ltc", steps, batch, 16, dtype=torch.float32))[0].sum().backward()
        with config.override(LTC_CACHE=0):
            ltm.mark_step(wait=True)
        return found

    def noted(found, *given):
        codes = recurrence_codes(*given)
        found.extend(code.text for code in codes)
        return codes

    few = texts(8, 4)
    assert len(few) == 4 and few == texts(64, 40)


@every_cell
def test_the_backend_has_kernels_for_it(cell):
    with metrics.counted() as grown:
        model = made(cell, "ltc", 3, 4, torch.float32, bidirectional=True)
        model(numbers("ltc", 3, 2, 3, dtype=torch.float32))[0].sum().backward()
        ltm.mark_step(wait=True)
    assert grown["extern.python"] == 0


def called(
    device, cell="gru", states=(1, 2, 4), count=1, number=4, layers=1, dropout=0.0, biases=True
):
    """An overload called by itself; `count` states and `number` weights are passed."""
    gates = 4 if cell == "lstm" else 3
    shapes = [(gates * 4, 3), (gates * 4, 4), (gates * 4,), (gates * 4,)][:number]
    weights = [torch.ones(shape, device=device) for shape in shapes] * max(layers, 1)
    hidden = [torch.zeros(states, device=device) for _ in range(count)]
    x = torch.ones(5, 2, 3, device=device)
    options = (biases, layers, dropout, True, False, False)
    return getattr(torch, cell)(x, hidden if cell == "lstm" else hidden[0], weights, *options)


WRONG = {
    "too few states": {"cell": "lstm"},
    "too many states": {"cell": "lstm", "count": 3},
    "states of one dimension less": {"states": (2, 4)},
    "biases that are not announced": {"biases": False},
    "a probability above one": {"dropout": 1.5, "layers": 2, "states": (2, 2, 4)},
    "states of another width": {"states": (1, 2, 5)},
    "no layer": {"layers": 0, "states": (0, 2, 4), "number": 0},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_refused_in_pytorch_s_words(name):
    with pytest.raises(Exception) as theirs:
        called("cpu", **WRONG[name])
    with pytest.raises(type(theirs.value)) as ours:
        called("ltc", **WRONG[name])
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("sizes", [[[2, 2, 1]], [2.0, 2.0, 1.0]], ids=["a matrix", "floats"])
def test_sizes_that_are_no_vector_of_numbers(sizes):
    def run(device):
        model = made("gru", device, 3, 4)
        data = torch.ones(5, 3, dtype=torch.float64, device=device)
        weights, hidden = list(model.parameters()), torch.zeros(1, 2, 4, dtype=torch.float64)
        sized = (data, torch.tensor(sizes), hidden.to(device))
        try:
            return torch.gru(*sized, weights, True, 1, 0.0, True, False)[0].shape
        except RuntimeError as error:
            return str(error).split("\n")[0]

    assert run("ltc") == run("cpu")


@pytest.mark.compared
@every_cell
def test_a_batch_of_gradients(device, cell):
    """`is_grads_batched`, as vectorized jacobians have it, is no transformation of torch.func."""
    model = made(cell, device, 3, 4)
    x = numbers(device, 5, 2, 3)
    of_input = torch.autograd.functional.jacobian(
        lambda x: model(x)[0].sum((0, 1)), x, vectorize=True
    )
    total = model(x)[0].sum((0, 1))
    of_weight = torch.autograd.grad(
        total, model.weight_hh_l0, torch.eye(4).to(total), is_grads_batched=True
    )
    assert not of_input.requires_grad
    return of_input, *of_weight


@pytest.mark.compared
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("bias", [True, False])
def test_tangents_of_one_step(device, kind, bias):
    """The fused kernels of torch, which other devices than the CPU are given, have none."""
    torch.manual_seed(1)
    model = kind(3, 4, bias=bias, dtype=torch.float64).to(device)
    x, hidden = numbers(device, 2, 3).detach(), numbers(device, 2, 4).detach()
    states = (hidden, hidden.sin()) if kind is nn.LSTMCell else hidden
    made, tangents = torch.func.jvp(model, (x, states), (x.cos(), states))
    return tensors_of((made, tangents))


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
@pytest.mark.parametrize(("inputs", "width"), [(5, 4), (3, 5)])
def test_a_cell_of_another_size_is_refused_in_the_words_of_the_cpu(kind, inputs, width):
    said = []
    for device in ("cpu", "ltc"):
        model, hidden = kind(3, 4).to(device), torch.zeros(2, width).to(device)
        states = (hidden, hidden) if kind is nn.LSTMCell else hidden
        with pytest.raises(RuntimeError, match="inconsistent") as caught:
            model(torch.zeros(2, inputs).to(device), states)
        said.append(str(caught.value).splitlines()[0])
    assert said[0] == said[1]


@pytest.mark.skipif(CORE is None, reason="it counts the calls of the core")
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_a_cell_and_its_gradient_run_in_the_core(kind):
    assert CORE is not None
    with process_of_one_device(LTC_TIER="auto"):
        model, x = kind(3, 4).to("ltc"), torch.randn(2, 3).to("ltc")
        for _ in range(3):
            before = CORE.left_to_python()
            made = model(x)
            (made[0] if kind is nn.LSTMCell else made).sum().backward()
        assert CORE.left_to_python() == before


@pytest.mark.skipif(CORE is None, reason="without the core every path of some calls gets a program")
def test_each_step_of_a_recurrence_counts_as_a_call_of_the_core(monkeypatch):
    """Else the path of a small layer would be too short to be worth a program."""
    counted, weight = [], Policy.weight

    def weighed(policy: Policy, calls: int, *others: int, **named: bool) -> int:
        counted.append(calls)
        return weight(policy, calls, *others, **named)

    monkeypatch.setattr(Policy, "weight", weighed)
    layer, x = nn.GRU(4, 8).to("ltc"), torch.randn(256, 2, 4).to("ltc")
    with config.override(LTC_TIER="auto"):
        for _ in range(3):
            layer(x)
            ltm.mark_step()
    assert max(counted) >= 256


@pytest.mark.skipif(CORE is None, reason="without the core every path of some calls gets a program")
def test_a_recurrence_alone_gets_its_program(quick_calls):
    """It is a call, of as many steps as are worth it."""
    layer, x = nn.GRU(4, 8).to("ltc"), torch.randn(256, 2, 4).to("ltc")
    with process_of_one_device(LTC_TIER="auto"), torch.no_grad():
        for _ in range(10):
            with metrics.counted() as grown:
                made, _ = layer(x)
                ltm.mark_step(wait=True)
            compile_behind.wait()
        assert grown["ExecuteTime"] == 1 and not grown["ImmediateSteps"]
    torch.testing.assert_close(made.cpu(), layer.cpu()(x.cpu())[0].detach())
