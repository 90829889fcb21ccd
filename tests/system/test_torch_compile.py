"""torch.compile around programs of ltc: it traces the user's code, and never looks into ltc's."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ltc
import ltc.core.lazy_model as ltm
from ltc.debug import metrics
from ltc.device.recording.recorder import device_at
from ltc.distributed.lazy_multiprocessing import spawn
from tests.autograd_functions import DoubledInPlace

BACKENDS = ("aot_eager", None)  # None records what "eager" runs, which others below name
pytestmark = pytest.mark.filterwarnings("ignore:.*Dynamo.*graph break.*")


@pytest.fixture(autouse=True)
def compiled_anew():
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dynamo does not know how to trace")
        warnings.filterwarnings("error", message="Dynamo detected a call")
        yield
    torch._dynamo.reset()


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu())

    def loss(self, x):
        return self(x).square().mean()

    def loss_with_a_break(self, x):
        hidden = self.first(x)
        if hidden.sum().item() > 1e6:
            return hidden.mean()
        return self.last(self.norm(hidden).relu()).square().mean()

    def trained(self, x):
        loss = self.loss(x)
        loss.backward()
        return loss


def reads_a_number(x):
    y = x * 2
    return y + 1 if y.sum().item() > 0 else y - y.sum().item()


def reads_a_condition(x):
    y = x * 2
    if y.sum() > 0:
        return y + 1
    return y - 1


def reads_a_list(x):
    return [x * number for number in (x + 1)[0].tolist()]


def goes_over_to_the_cpu(x):
    return (x * 2).cpu() + 1


def differentiates(x):
    weight = x.detach().clone().requires_grad_()
    (weight.exp() * x).sum().backward()
    return weight.grad


def asks_for_a_gradient(x):
    weight = x.detach().clone().requires_grad_()
    return torch.autograd.grad((weight.exp() * x).sum(), weight)[0]


def has_a_shape_that_depends_on_data(x):
    return x[x > 0].sum() + x.nonzero().shape[0]


def writes_through_a_view(x):
    y = x.clone()
    y[0].mul_(2)
    y.view(-1)[1:3] = 7
    return y


def draws(x):
    return torch.nn.functional.dropout(torch.ones_like(x), 0.5).ne(1).all()


PROGRAMS = [
    reads_a_number,
    reads_a_condition,
    reads_a_list,
    goes_over_to_the_cpu,
    differentiates,
    asks_for_a_gradient,
    has_a_shape_that_depends_on_data,
    writes_through_a_view,
    draws,
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_compiled_function_gives_what_it_gives_uncompiled(program, backend, equal):
    compiled = torch.compile(program, backend=backend)
    for sign in (1, -1, 1):
        x = torch.randn(4, 3, dtype=torch.float64).abs() * sign
        equal(compiled(x.to("ltc")), program(x))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["forward", "loss", "loss_with_a_break", "trained", "__call__"])
def test_a_compiled_method_gives_what_it_gives_uncompiled(name, backend, equal):
    model, plain = Network().double(), Network().double()
    plain.load_state_dict(model.state_dict())
    model.to("ltc")
    compiled, x = torch.compile(getattr(model, name), backend=backend), torch.randn(4, 3).double()
    for _ in range(2):
        equal(compiled(x.to("ltc")), getattr(plain, name)(x))
    equal(model.norm.running_mean, plain.norm.running_mean)
    equal([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", ["function", "module", "in place"])
def test_a_compiled_step_trains_as_an_uncompiled_one(way, backend, equal):
    def trained(device, compiled):
        torch.manual_seed(0)
        model = Network().double().to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        called = model
        if compiled and way == "in place":
            model.compile(backend=backend)
        elif compiled and way == "module":
            called = torch.compile(model, backend=backend)

        def step(x):
            optimizer.zero_grad()
            loss = called(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        if compiled and way == "function":
            step = torch.compile(step, backend=backend)
        losses = []
        for _ in range(3):
            losses.append(step(torch.randn(5, 3, dtype=torch.float64).to(device)).detach().cpu())
            if device == "ltc":
                ltm.mark_step()
        return losses, list(model.parameters())

    equal(trained("ltc", compiled=True), trained("cpu", compiled=False))


def test_a_compiled_function_may_mark_a_step_and_read_the_metrics(equal):
    def marked(x):
        y = x * 2
        ltm.mark_step()
        metrics.counter_value("aten::nonzero")
        device = ltc.device()
        return y + torch.ones(3, device=device)

    x = torch.randn(4, 3)
    equal(torch.compile(marked, backend="eager")(x.to("ltc")), x * 2 + 1)


def test_a_compiled_function_may_move_a_module(equal):
    def moved(module, x):
        return module.to("ltc")(x)

    module, x = nn.Linear(3, 2), torch.randn(4, 3)
    expected = module(x).detach()
    equal(torch.compile(moved, backend="eager")(module, x.to("ltc")), expected)


def test_dynamo_compiles_no_frame_of_ltc_nor_any_that_ltc_calls():
    seen = []

    def backend(graph, examples):
        seen.append(graph)
        return graph.forward

    x = torch.rand(4, 3).to("ltc")
    torch.compile(reads_a_number, backend=backend)(x)
    assert len(seen) == 2  # before the read and after it
    torch.compile(differentiates, backend=backend)(x)
    files = {code.co_filename for code in _codes_that_dynamo_met()}
    assert not [file for file in files if "ltc" in file.replace("\\", "/").split("/")[-3:-1]]
    assert not [file for file in files if "llvmlite" in file or file.startswith("<ltc")]


def _codes_that_dynamo_met():
    seen = torch._dynamo.convert_frame.input_codes.seen
    return [code for reference in seen if (code := reference()) is not None]


def test_a_compilation_that_fails_leaves_what_was_pending_before(equal):
    def fails(graph, examples):
        raise ValueError("this backend compiles nothing")

    x = torch.randn(4, 3)
    pending = x.to("ltc") + 1
    with pytest.raises(Exception, match="compiles nothing"):
        torch.compile(lambda x: x.exp().sum(), backend=fails)(pending)
    equal(pending * 2, (x + 1) * 2)


def test_the_dtype_and_shape_of_compiled_calls_may_change(equal):
    compiled = torch.compile(lambda x: (x * 2).sum(0), backend="aot_eager")
    for shape in ((4, 3), (5, 3), (0, 3), (1, 1)):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            x = torch.ones(shape, dtype=dtype)
            equal(compiled(x.to("ltc")), (x * 2).sum(0))


def test_compiled_functions_on_the_cpu_are_as_without_ltc():
    def program(x):
        y = x * 2
        y.data = y.data + 1
        return y.sum()

    assert torch.compile(program, backend="eager")(torch.ones(3)).item() == 9


# --- without a backend's name, and by ltc's ---------------------------------------------------------

WAYS = {
    "plain": {},
    "named": {"backend": "ltc"},
    "one graph": {"fullgraph": True},
    "any shape": {"dynamic": True},
    "mode": {"mode": "reduce-overhead"},
    "mode, named": {"mode": "max-autotune", "backend": "ltc"},
    "options": {"options": {"epilogue_fusion": True}},
    "options, named": {"options": {"epilogue_fusion": True}, "backend": "ltc"},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_ask_for_a_compilation_works_on_ltc(way, equal):
    def centred(x):
        return x - x.mean(0)

    for compiled in (torch.compile(centred, **WAYS[way]), torch.compile(**WAYS[way])(centred)):
        for rows in (3, 4, 5):
            x = torch.randn(rows, 2)
            equal(compiled(x.to("ltc")), centred(x))


def test_compilations_may_be_nested_and_stand_in_contexts(equal):
    inner = torch.compile(lambda x: x * 2)

    @torch.compile
    @torch.no_grad()
    def outer(x):
        with torch.autocast("ltc", dtype=torch.bfloat16):
            return inner(x) + torch.compile(torch.mm)(x, x).float()

    x = torch.eye(3)
    equal(outer(x.to("ltc").requires_grad_()), x * 3)


def test_tensors_on_the_cpu_keep_inductor_and_its_mode(monkeypatch):
    import torch._inductor.compile_fx as inductor

    asked = []

    def compile_fx(graph, inputs, config_patches=None, **rest):
        asked.append((inputs[0].device.type, config_patches))
        return graph.forward

    monkeypatch.setattr(inductor, "compile_fx", compile_fx)
    compiled = torch.compile(lambda x: x + 1, options={"max_autotune": True})
    for device in ("ltc", "cpu"):
        assert compiled(torch.ones(2).to(device)).tolist() == [2, 2]
    assert asked == [("cpu", {"max_autotune": True})]
    assert torch.compile(lambda x: x + 2, backend="inductor")(torch.ones(1)).item() == 3


def test_inductor_named_outright_says_what_to_write():
    compiled = torch.compile(lambda x: x + 1, backend="inductor")
    with pytest.raises(Exception, match=r'write torch.compile\(model\) or .*backend="ltc"'):
        compiled(torch.ones(2, device="ltc"))


def test_the_backend_is_listed():
    assert "ltc" in torch.compiler.list_backends()


@pytest.mark.native("it counts programs, and calls that run when made are none")
@pytest.mark.parametrize("what", ["model", "optimizer", "step"])
def test_a_compiled_step_is_one_program_that_is_compiled_once(what, equal):
    def losses(device, compiled):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 2)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        forward, update = model, optimizer.step
        if compiled == "model":
            forward = torch.compile(model)
        elif compiled == "optimizer":
            update = torch.compile(optimizer.step)

        def step(x):
            optimizer.zero_grad()
            loss = forward(x).square().mean()
            loss.backward()
            update()
            return loss

        step = torch.compile(step) if compiled == "step" else step
        x, found = torch.ones(4, 3, device=device), []
        for k in range(6):
            with metrics.counted() as grown:
                found.append(step(x).detach())
                if device == "ltc":
                    ltm.mark_step(wait=True)
            if device == "ltc" and k > 3:
                assert (grown["ExecuteTime"], grown["UncachedCompile"]) == (1, 0)
        return found, list(model.parameters())

    equal(losses("ltc", what), losses("cpu", None))


STEPPED = {
    "the step": lambda optimizer: torch.compile(optimizer.step),
    "a function": lambda optimizer: torch.compile(lambda: optimizer.step()),
    "a function of more": lambda optimizer: torch.compile(
        lambda: (torch.zeros(1, device="ltc"), optimizer.step())
    ),
}


@pytest.mark.parametrize("way", STEPPED)
def test_the_step_of_an_optimizer_is_recorded_as_without_compile(way, equal):
    def trained(update_of):
        torch.manual_seed(0)
        model = nn.Linear(3, 2).to("ltc")
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        rates = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        update = update_of(optimizer)
        for _ in range(12):  # more rates than Dynamo traces anew
            optimizer.zero_grad()
            model(torch.ones(4, 3, device="ltc")).square().mean().backward()
            update()
            rates.step()
            ltm.mark_step(wait=True)
        counts = [state["step"] for state in optimizer.state.values()]
        return [p.detach().cpu() for p in model.parameters()], counts

    parameters, counts = trained(STEPPED[way])
    expected = trained(lambda optimizer: optimizer.step)
    equal((parameters, counts), expected)
    assert {count.device.type for count in counts} == {"cpu"}  # where Python counts them


def test_the_step_of_an_optimizer_on_the_cpu_is_traced():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph.forward

    torch.compile(torch.optim.SGD([parameter], 0.5).step, backend=backend)()
    assert parameter.tolist() == [0.5, 0.5] and seen


def picks_too_far(x):
    y = x * 2
    z = y.view(-1)
    return z[torch.tensor([99], device="ltc")] + 1


@pytest.mark.parametrize("function", [picks_too_far, lambda x: picks_too_far(x)])
def test_errors_name_the_line_that_was_traced(function):
    first = picks_too_far.__code__.co_firstlineno
    with pytest.raises(IndexError) as caught:
        torch.compile(function)(torch.ones(2, 3, device="ltc")).cpu()
    note, *_ = caught.value.__notes__
    assert f"{__file__}:{first + 3} in " in note


# --- graphs inside a graph ------------------------------------------------------------------------


class Softened(torch.autograd.Function):
    """x * tanh(x), with a derivative of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.tanh()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        slope = 1 - x.tanh().square()
        return gradient * (x.tanh() + x * slope)


def softened(x):
    return Softened.apply(x).sum()


def softened_again(x):
    return checkpoint(lambda x: Softened.apply(x * 2).sin().sum(), x, use_reentrant=False)


# What is saved for a backward torch tells from 2.11 on; before, it applies functions itself.
IS_SILENT = torch.__version__ < "2.11"


@pytest.mark.parametrize(
    "function, is_module", [(softened, IS_SILENT), (softened_again, True)], ids=["applied", "again"]
)
def test_graphs_inside_a_graph_run_as_code_and_give_the_same(
    function, is_module, equal, monkeypatch
):
    interpreted = []
    run_node = torch.fx.Interpreter.run_node
    monkeypatch.setattr(
        torch.fx.Interpreter,
        "run_node",
        lambda self, node: interpreted.append(node.op) or run_node(self, node),
    )
    compiled = torch.compile(function)

    def gradients(function, device):
        x = torch.linspace(-2, 2, 6, device=device, requires_grad=True)
        loss = function(x)
        loss.backward()
        return loss, x.grad

    first = gradients(compiled, "ltc")
    interpreted.clear()
    equal((first, gradients(compiled, "ltc")), (gradients(function, "cpu"),) * 2)
    assert "call_method" not in interpreted and ("call_module" in interpreted) == is_module


class Ranked(torch.autograd.Function):
    """Sorted values, and where they were, which has no gradient."""

    @staticmethod
    def forward(ctx, x, scale):
        values, places = x.sort()
        ctx.mark_non_differentiable(places)
        ctx.save_for_backward(places)
        ctx.scale = scale
        return values * scale, places

    @staticmethod
    def backward(ctx, gradient, _):
        (places,) = ctx.saved_tensors
        return torch.zeros_like(gradient).scatter(0, places, gradient * ctx.scale), None


def ranked(x):
    values, places = Ranked.apply(x.sin(), 2.0)
    return (values * places).sum()


def doubled(x):
    return (DoubledInPlace.apply(x * 3) * x).sum()


def one_after_the_other(x):
    return Softened.apply(Softened.apply(Ranked.apply(x, 0.5)[0])).sum()


@pytest.mark.parametrize("function", [ranked, doubled, one_after_the_other])
def test_functions_with_derivatives_are_applied_as_without_compilation(function, equal):
    def gradients(function, device):
        x = torch.linspace(-2, 2, 6, device=device, requires_grad=True)
        loss = function(x)
        loss.backward()
        return loss, x.grad

    compiled = torch.compile(function)
    equal([gradients(compiled, "ltc") for _ in range(2)], [gradients(function, "cpu")] * 2)


@pytest.mark.parametrize("function", [softened, *[torch.compile(softened)] * (not IS_SILENT)])
def test_a_write_to_what_a_function_has_saved_is_noticed(function):
    x = torch.linspace(-2, 2, 6, device="ltc", requires_grad=True) * 1
    loss = function(x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Halved(torch.autograd.Function):
    """One that transforms know."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x / 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        """It keeps nothing."""

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 2


def mapped(x):
    return torch.func.vmap(lambda row: Halved.apply(row.sin()).sum())(x)


def test_a_function_with_a_derivative_may_be_mapped_inside(equal):
    x = torch.linspace(-2, 2, 6).reshape(2, 3)
    equal(torch.compile(mapped)(x.to("ltc")), mapped(x))


@pytest.mark.native("it looks at the calls that are recorded")
def test_calls_of_a_function_with_a_derivative_stand_at_the_users_lines():
    x = torch.linspace(-2, 2, 6, device="ltc", requires_grad=True)
    compiled = torch.compile(softened)
    compiled(x).backward()
    lines = {call.name: call.line for call in device_at(0).recorder().path()}
    ltm.mark_step()
    first = Softened.backward.__code__.co_firstlineno
    assert lines["aten::rsub.Scalar"] == f"{__file__}:{first + 3} in softened"
    assert lines["aten::tanh"] == f"{__file__}:{first + 4} in softened"


# --- stand-ins and exported programs --------------------------------------------------------------


@pytest.fixture
def no_stand_in(monkeypatch):
    """No tensor of a tracer, which holds no values, is given to a kernel of ltc."""

    def refuse(tensor):
        raise AssertionError(f"a {type(tensor).__name__} reached a kernel")

    monkeypatch.setattr("ltc.device.recording.tensors._uninitialised", refuse)


NETWORKS = {
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
    "lstm": lambda: nn.LSTM(4, 5, batch_first=True),
    "gru": lambda: nn.GRU(4, 5, batch_first=True),
    "convolution": lambda: nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4), nn.Dropout(0.0)),
}


@pytest.mark.usefixtures("no_stand_in")
@pytest.mark.parametrize("network", NETWORKS)
def test_tracers_run_no_kernel_of_ltc(network, equal):
    model, x = NETWORKS[network](), torch.randn(2, 3, 4)
    plain = copy.deepcopy(model)
    compiled = torch.compile(model.to("ltc"))
    with torch._dynamo.config.patch(allow_rnn=True):
        equal(compiled(x.to("ltc")), plain(x))
    if network != "lstm" and network != "gru":
        equal(torch.compile(model, backend="aot_eager")(x.to("ltc")), plain(x))


@pytest.mark.usefixtures("no_stand_in")
@pytest.mark.parametrize("network", NETWORKS)
def test_an_exported_program_runs_and_is_saved(network, equal, tmp_path):
    model, x = NETWORKS[network]().eval(), torch.randn(2, 3, 4)
    expected = model(x)
    program = torch.export.export(model.to("ltc"), (x.to("ltc"),))
    equal(program.module()(x.to("ltc")), expected)
    torch.export.save(program, tmp_path / "program.pt2")
    equal(torch.export.load(tmp_path / "program.pt2").module()(x.to("ltc")), expected)


class DecidesByValue(nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x - 1


DRAFTS = {
    "norm": lambda: nn.Sequential(nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4), nn.MaxPool1d(2)),
    "branch": DecidesByValue,
}


@pytest.mark.usefixtures("no_stand_in")
@pytest.mark.parametrize("network", DRAFTS)
def test_a_draft_is_exported_with_the_values_of_the_device(network, equal):
    """torch compares what its formulas say with what each call gives, statistics included."""
    model, x = DRAFTS[network]().eval(), torch.linspace(0, 1, 24).view(2, 3, 4)
    expected = model(x)
    program = torch.export.draft_export(model.to("ltc"), (x.to("ltc"),))
    equal(program.module()(x.to("ltc")), expected)


def exchanges(x):
    from torch.distributed import _functional_collectives as functional

    everybody = torch.distributed.group.WORLD
    total = functional.all_reduce(x * 2, "sum", everybody)
    return total + 1, functional.all_gather_tensor(x, 0, everybody)


def a_compiled_exchange(rank):
    torch.distributed.init_process_group("ltc", init_method="ltc://")
    x = torch.full((2,), rank + 1.0, device="ltc")
    compiled = torch.compile(exchanges, fullgraph=True)
    compiled(x)
    ltm.mark_step(wait=True)
    with metrics.counted() as grown:
        made = compiled(x)
        ltm.mark_step(wait=True)
    return [tensor.tolist() for tensor in made], grown["ExecuteTime"]


def test_collectives_inside_of_compiled_functions_are_part_of_the_step():
    for made, programs in spawn(a_compiled_exchange, nprocs=2, start_method="fork"):
        assert made == [[7, 7], [1, 1, 2, 2]] and programs == 1
