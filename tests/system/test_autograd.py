"""Autograd, torch.func and autocast on ltc return what they return on the CPU."""

import threading

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import ltc
import ltc.core.lazy_model as ltm
from tests.autograd_functions import DoubledInPlace

pytestmark = pytest.mark.also_native


def ramp(*shape: int, device: str) -> torch.Tensor:
    """Distinct float64 values from 1 upwards."""
    count = torch.Size(shape).numel()
    return (torch.arange(count).reshape(shape).double() / 7 + 1).to(device)


def leaf(*shape: int, device: str) -> torch.Tensor:
    return ramp(*shape, device=device).requires_grad_()


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


# --- higher derivatives -------------------------------------------------------------------------


@pytest.mark.compared
def test_double_backward(device):
    x = leaf(3, device=device)
    (gradient,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    return gradient, torch.autograd.grad(gradient.sum(), x)


@pytest.mark.compared
def test_gradient_penalty(device):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double().to(device)
    x = leaf(2, 3, device=device)
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (gradient.norm(2, 1) - 1).pow(2).mean().backward()
    return gradients(model)


@pytest.mark.compared
def test_gradcheck_passes(device):
    x, y = leaf(2, 2, device=device), leaf(2, device=device)
    return (
        torch.autograd.gradcheck(lambda x: x.sin() * x.t(), (x,)),
        torch.autograd.gradgradcheck(torch.sin, (y,)),
    )


@pytest.mark.compared
def test_functional_jacobian_and_hessian(device):
    x = ramp(3, device=device)
    return (
        torch.autograd.functional.jacobian(lambda x: x**2, x),
        torch.autograd.functional.hessian(lambda x: (x**3).sum(), x),
    )


@pytest.mark.compared
def test_a_retained_graph_accumulates(device):
    x = leaf(3, device=device)
    y = (x * x).sum()
    y.backward(retain_graph=True)
    y.backward()
    return x.grad


@pytest.mark.compared
def test_a_graph_that_starts_and_ends_on_the_cpu_has_its_gradient(device):
    x = torch.ones(3, dtype=torch.double, requires_grad=True)
    ((x.to(device) * 2).sum().cpu() * 3).backward()
    return x.grad


# --- hooks --------------------------------------------------------------------------------------


@pytest.mark.compared
def test_tensor_hooks_run(device):
    x, seen = leaf(3, device=device), []
    x.register_hook(lambda gradient: gradient * 2)
    y = x * 3
    y.register_hook(lambda gradient: seen.append(gradient))
    y.retain_grad()
    x.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.clone()))
    y.sum().backward()
    return x.grad, y.grad, seen


@pytest.mark.compared
def test_module_hooks_run(device):
    model, seen = nn.Linear(2, 2).double().to(device), []
    model.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0]))
    model.register_forward_hook(lambda module, inputs, output: output * 2)
    model(leaf(2, 2, device=device)).sum().backward()
    return seen, model.weight.grad


@pytest.mark.compared
def test_a_multi_gradient_hook_gets_every_gradient(device):
    a, b, seen = leaf(2, device=device), leaf(2, device=device), []
    torch.autograd.graph.register_multi_grad_hook((a, b), seen.extend)
    (a * b).sum().backward()
    return seen


class Raised(Exception):
    """What the hooks below raise."""


def fail(*arguments):
    raise Raised("from a hook")


def by_tensor_hook(x):
    y = x * 2
    y.register_hook(fail)
    return y.sum()


def by_leaf_hook(x):
    x.register_hook(fail)
    return (x * 2).sum()


def by_post_accumulate_hook(x):
    x.register_post_accumulate_grad_hook(fail)
    return (x * 2).sum()


def by_node_hook(x):
    y = (x * 2).sum()
    y.grad_fn.register_hook(fail)
    return y


def by_node_prehook(x):
    y = (x * 2).sum()
    y.grad_fn.register_prehook(fail)
    return y


def by_module_hook(x):
    model = nn.Linear(3, 3).double().to(x.device)
    model.register_full_backward_hook(fail)
    return model(x).sum()


def by_saved_tensor_hook(x):
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, fail):
        return x.exp().sum()


@pytest.mark.devices(2)
@pytest.mark.parametrize(
    "raising",
    [
        by_tensor_hook,
        by_leaf_hook,
        by_post_accumulate_hook,
        by_node_hook,
        by_node_prehook,
        by_module_hook,
        by_saved_tensor_hook,
    ],
)
@pytest.mark.parametrize("device", ["ltc:0", "ltc:1"])
def test_a_raising_hook_raises_in_the_caller(raising, device, equal):
    loss = raising(leaf(3, device=device))
    with pytest.raises(Raised, match="from a hook"):
        loss.backward()
    again = leaf(3, device=device)  # and the device is none the worse
    (again * 2).sum().backward()
    equal(again.grad, torch.full((3,), 2.0, dtype=torch.double))


def test_a_raising_function_raises_in_the_caller():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            raise Raised("from a hook")

    with pytest.raises(Raised):
        Fails.apply(leaf(3, device="ltc")).sum().backward()


def test_a_backward_on_another_accelerator_names_the_reason():
    """torch asserts so of tensors on a GPU, where ltc is the accelerator of the process."""

    class OnGpu(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("opt_ready_stream && opt_parent_stream INTERNAL ASSERT FAILED at 1")

    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="one accelerator .* does not import ltc") as raised:
        OnGpu.apply(x).sum().backward()
    assert "INTERNAL ASSERT" in str(raised.value.__cause__)


@pytest.mark.devices(2)
def test_backward_runs_in_the_callers_thread():
    threads, x = [], leaf(3, device="ltc:1")
    x.register_hook(lambda gradient: threads.append(threading.get_ident()))
    (x * 2).sum().backward()
    assert threads == [threading.get_ident()]


# --- checkpoints --------------------------------------------------------------------------------


@pytest.mark.compared
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(device, reentrant):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double().to(device)
    x = leaf(2, 3, device=device)
    checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    return x.grad, gradients(model)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_draws_the_same_dropout_again(reentrant):
    x = torch.ones(1000, device="ltc", requires_grad=True)
    y = checkpoint(lambda x: F.dropout(x, 0.5) * x, x, use_reentrant=reentrant)
    y.sum().backward()
    assert torch.equal(x.grad.cpu() > 0, y.detach().cpu() > 0)
    assert 300 < int((y > 0).sum()) < 700


# --- custom functions ---------------------------------------------------------------------------


class ScaledSine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x.sin() * factor

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x.cos() * ctx.factor, None


class Sorted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        values, order = x.sort()
        ctx.mark_non_differentiable(order)
        ctx.save_for_backward(order)
        ctx.set_materialize_grads(False)
        return values, order

    @staticmethod
    def backward(ctx, gradient, _):
        (order,) = ctx.saved_tensors
        return torch.zeros_like(gradient).scatter(0, order, gradient)


@pytest.mark.compared
def test_a_custom_function(device):
    x = leaf(3, device=device)
    ScaledSine.apply(x, 2.0).sum().backward()
    return x.grad


@pytest.mark.compared
def test_a_custom_function_that_writes_in_place(device):
    x = leaf(3, device=device)
    y = x * 1
    DoubledInPlace.apply(y).sum().backward()
    return x.grad, y


@pytest.mark.compared
def test_a_custom_function_with_an_output_without_gradient(device):
    x = (-ramp(3, device=device)).requires_grad_()
    values, order = Sorted.apply(x)
    (values * ramp(3, device=device)).sum().backward()
    return x.grad, order


# --- torch.func and forward mode ----------------------------------------------------------------


@pytest.mark.compared
def test_func_grad(device):
    cube = torch.func.grad(torch.func.grad(lambda x: x**3))
    return (
        torch.func.grad(lambda x: (x**3).sum())(ramp(3, device=device)),
        cube(torch.tensor(2.0).to(device)),
    )


@pytest.mark.compared
def test_vmap(device):
    a, b = ramp(3, 4, device=device), ramp(3, 4, device=device)
    return (
        torch.vmap(lambda a, b: (a * b).sum())(a, b),
        torch.vmap(torch.matmul, (0, None))(
            ramp(3, 2, 4, device=device), ramp(4, 2, device=device)
        ),
    )


@pytest.mark.compared
@pytest.mark.skipif(torch.__version__ < "2.11", reason="torch 2.10 reads the index")
def test_vmap_over_an_index(device):
    rows = torch.tensor([0, 1, 2]).to(device)
    return torch.vmap(lambda x, i: x[i], (0, 0))(ramp(3, 4, device=device), rows)


@pytest.mark.compared
def test_vmap_over_a_write_in_place(device):
    def written(x):
        y = x.clone()
        y[0] = 5
        y.add_(1)
        return y

    return torch.vmap(written)(ramp(3, 4, device=device))


def test_vmap_draws_differently_for_each_sample():
    add_noise = torch.vmap(lambda x: x + torch.randn_like(x), randomness="different")
    drawn = add_noise(torch.ones(3, 2, device="ltc")).cpu()
    assert len(set(drawn.flatten().tolist())) == 6


@pytest.mark.compared
def test_jacobians_and_hessian(device):
    x = ramp(3, device=device)

    def f(x):
        return x.sin() * x.sum()

    return (
        torch.func.jacrev(f)(x),
        torch.func.jacfwd(f)(x),
        torch.func.hessian(lambda x: (x**3).sum())(x),
    )


@pytest.mark.compared
def test_jvp_and_vjp(device):
    x = ramp(3, device=device)
    value, tangent = torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))
    _, pull_back = torch.func.vjp(torch.sin, x)
    return value, tangent, pull_back(torch.ones_like(x))


@pytest.mark.compared
def test_gradients_per_sample(device):
    model = nn.Linear(3, 2).double().to(device)

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).pow(2).sum()

    each = torch.vmap(torch.func.grad(loss), (None, 0))
    return each(dict(model.named_parameters()), ramp(5, 3, device=device))


@pytest.mark.compared
def test_an_ensemble_of_stacked_modules(device):
    models = [nn.Linear(3, 2).double().to(device) for _ in range(3)]
    parameters, _ = torch.func.stack_module_state(models)
    base = nn.Linear(3, 2).double().to("meta")

    def one(parameters, x):
        return torch.func.functional_call(base, parameters, (x,))

    return torch.vmap(one, (0, None))(parameters, ramp(5, 3, device=device))


@pytest.mark.compared
def test_functionalize(device):
    return torch.func.functionalize(lambda x: (x[0].add_(1), x)[1])(ramp(3, 4, device=device))


@pytest.mark.compared
def test_forward_mode(device):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(ramp(3, device=device), torch.ones(3).double().to(device))
        return forward_ad.unpack_dual(dual.sin() * dual).tangent


# --- saved tensors, modes, subclasses -----------------------------------------------------------


@pytest.mark.compared
def test_saved_tensors_pass_through_their_hooks(device):
    x, packed = leaf(3, device=device), []

    def pack(saved):
        packed.append(saved.shape)
        return saved.cpu()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.to(device)):
        y = (x.exp() * x).sum()
    y.backward()
    return x.grad, len(packed)


@pytest.mark.compared
def test_tensors_can_be_saved_on_the_cpu(device):
    x = leaf(3, device=device)
    with torch.autograd.graph.save_on_cpu():
        y = (x.exp() * x).sum()
    y.backward()
    return x.grad


@pytest.mark.compared
def test_anomaly_mode_passes_what_is_finite(device):
    x = leaf(3, device=device)
    with torch.autograd.detect_anomaly(check_nan=True):
        (x * 2).sum().backward()
    return x.grad


@pytest.mark.compared
@pytest.mark.filterwarnings("ignore:Error detected")
def test_anomaly_mode_names_the_function_that_made_a_nan(device, error_of):
    x = torch.zeros(3, device=device, requires_grad=True)
    with torch.autograd.detect_anomaly(check_nan=True):
        y = (x.sqrt() * 0).sum()
        return error_of(y.backward)


@pytest.mark.compared
def test_inference_mode(device):
    with torch.inference_mode():
        x = ramp(3, device=device)
        x.add_(1)
        view = x[0:2]
        view.mul_(2)
        return x.clone(), view.clone(), x.is_inference()


@pytest.mark.compared
def test_parametrizations(device):
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2).double()).to(device)
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2).double()).to(device)
    x = ramp(2, 3, device=device)
    out = normed(x).sum() + spectral(x).sum()
    out.backward()
    return out, gradients(normed), gradients(spectral)


@pytest.mark.compared
def test_a_dispatch_mode_sees_the_operations(device):
    seen = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Names():
        y = ramp(2, 2, device=device) @ ramp(2, 2, device=device)
    return y, "aten.mm.default" in seen


@pytest.mark.compared
def test_floating_point_operations_are_counted(device):
    with FlopCounterMode(display=False) as counter:
        ramp(2, 2, device=device) @ ramp(2, 2, device=device)
    return counter.get_total_flops()


class Attention(nn.Module):
    def forward(self, x):
        return (F.scaled_dot_product_attention(x, x, x),)


TRACED = {
    "attention": Attention,
    "gru": lambda: nn.GRU(4, 3),
    "lstm": lambda: nn.LSTM(4, 3, 2, bidirectional=True),
    "rnn": lambda: nn.RNN(4, 3),
}


@pytest.mark.parametrize("name", TRACED)
def test_a_graph_that_make_fx_traces_computes_gradients_anew(name):
    layer = TRACED[name]().double()

    def gradient(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(layer(x)[0].square().sum(), x)[0]

    first, second = torch.randn(2, 5, 3, 4, dtype=torch.float64)
    expected = gradient(second)
    layer.to("ltc")
    traced = make_fx(gradient)(first.to("ltc"))
    torch.testing.assert_close(traced(second.to("ltc")).cpu(), expected)


@pytest.mark.compared
def test_a_subclass_keeps_its_type(device):
    class Tagged(torch.Tensor):
        pass

    y = ramp(3, device=device).as_subclass(Tagged) + 1
    return type(y).__name__, y.as_subclass(torch.Tensor)


# --- autocast -----------------------------------------------------------------------------------


@pytest.mark.compared
def test_autocast_chooses_the_dtypes_of_the_cpu(device):
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)).to(device)
    x = torch.randn(3, 8).to(device)
    with torch.autocast(device.split(":")[0], dtype=torch.bfloat16):
        hidden, out = model[0](x), model(x)
        loss = F.cross_entropy(out, torch.tensor([0, 1, 2]).to(device))
    loss.backward()
    return hidden.dtype, out.dtype, loss.dtype, [g.bfloat16() for g in gradients(model)]


@pytest.mark.compared
def test_a_gradient_scaler_skips_a_step_that_overflowed(device):
    model = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler(device.split(":")[0], init_scale=1024.0)
    x, scales = torch.ones(2, 4).to(device), []
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(x).sum() * factor).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return model.weight, scales


@pytest.mark.compared
def test_inference_mode_takes_views_of_ordinary_tensors(device):
    layer, x = nn.Linear(3, 2).double().to(device), ramp(2, 3, device=device)
    with torch.inference_mode():
        out, turned = layer(x), x.t()
        out[0].add_(1)
    return out, turned, turned.is_inference()


@pytest.mark.compared
def test_packed_sequences_pass_through_an_lstm(device):
    torch.manual_seed(1)
    lstm = nn.LSTM(4, 6, batch_first=True).double().to(device)
    x = torch.rand(3, 5, 4, dtype=torch.double).to(device).requires_grad_()
    packed = nn.utils.rnn.pack_padded_sequence(
        x, torch.tensor([2, 5, 3]), batch_first=True, enforce_sorted=False
    )
    out, lengths = nn.utils.rnn.pad_packed_sequence(lstm(packed)[0], batch_first=True)
    out.square().sum().backward()
    return out, lengths, x.grad, gradients(lstm)


@pytest.mark.compared
@pytest.mark.parametrize("training", [True, False])
def test_a_norm_trains_whose_operand_needs_no_gradient(training, device):
    x = ramp(4, 3, 2, 2, device=device)
    norms = nn.ModuleList([nn.BatchNorm2d(3), nn.GroupNorm(3, 3), nn.LayerNorm(2)])
    norms.train(training).double().to(device)
    for norm in norms:
        norm(x).square().sum().backward()
    norms[0].requires_grad_(False)
    leaf = x.clone().requires_grad_()
    norms[0](leaf).square().sum().backward()
    return gradients(norms[1]), gradients(norms[2]), norms[0].weight.grad, leaf.grad


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.l1_loss])
@pytest.mark.compared
def test_losses_of_no_elements(device, loss, reduction):
    x = torch.zeros(2, 0).to(device).requires_grad_()
    y = loss(x, torch.zeros(2, 0).to(device), reduction=reduction)
    return y, *torch.autograd.grad(y.sum(), x)


# --- gradients that are views of one memory -------------------------------------------------------


def positions(device):
    """Two parameters whose sum is used, one of them turned: one gradient, seen in two ways."""
    rows = torch.randn(4, 6).to(device).requires_grad_()
    columns = torch.randn(6, 4).to(device).requires_grad_()
    return rows, columns, (rows.reshape(2, 12) + columns.t().reshape(2, 12)).sin().sum()


@pytest.mark.compared
def test_a_second_backward_adds_to_each_gradient_alone(device):
    rows, columns, loss = positions(device)
    loss.backward(retain_graph=True)
    loss.backward()
    return rows.grad, columns.grad


def test_gradients_are_apart_where_the_step_was_cut_within_the_backward():
    def gradients(device):
        torch.manual_seed(0)
        rows, columns, loss = positions(device)
        rows.register_post_accumulate_grad_hook(lambda leaf: ltm.mark_step())
        loss.backward(retain_graph=True)
        loss.backward()
        return [rows.grad.cpu(), columns.grad.cpu()]

    torch.testing.assert_close(gradients("ltc"), gradients("cpu"))


@pytest.mark.compared
def test_a_write_to_one_gradient_leaves_the_other(device):
    rows, columns, loss = positions(device)
    loss.backward()
    torch.nn.utils.clip_grad_norm_([rows, columns], 0.1)
    first = torch.autograd.grad(positions(device)[2] + (rows * columns.t()).sum(), (rows, columns))
    first[0].zero_()
    return rows.grad, columns.grad, *first


def test_gradients_of_one_memory_on_the_cpu_are_apart_on_ltc():
    """PyTorch's CPU adds twice where both leaves are reshaped: there autograd shares them."""
    a, b = (torch.zeros(shape, device="ltc", requires_grad=True) for shape in ((4, 6), (2, 12)))
    for _ in range(2):
        (a.reshape(24) + b.reshape(24)).sum().backward()
    assert a.grad.unique().tolist() == [2] and b.grad.unique().tolist() == [2]


@pytest.mark.compared
def test_gradients_that_a_users_function_turns_are_apart(device):
    class Turned(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            return x + y.t()

        @staticmethod
        def backward(ctx, gradient):
            return gradient.view(4, 6), gradient.t()

    x, y = (
        torch.ones(4, 6).to(device).requires_grad_(),
        torch.ones(6, 4).to(device).requires_grad_(),
    )
    for _ in range(2):
        Turned.apply(x, y).sin().sum().backward()
    return x.grad, y.grad


def test_what_a_hook_makes_a_view_stays_one():
    whole, parameter = torch.zeros(2, 12, device="ltc"), torch.ones(24, device="ltc")
    parameter.requires_grad_()

    def hook(leaf):
        whole.copy_(leaf.grad.view(2, 12))
        leaf.grad = whole.view(24)

    parameter.register_post_accumulate_grad_hook(hook)
    (parameter * 3).sum().backward()
    parameter.grad.mul_(2)
    assert whole.unique().tolist() == [6]


@pytest.mark.compared
@pytest.mark.parametrize("read", ["the base", "something else"])
def test_a_view_whose_base_was_written_to_keeps_its_history_where_the_step_is_cut(device, read):
    weight = torch.arange(15.0).reshape(3, 5).to(device).requires_grad_()
    base = weight * 2
    view = base[:, :-1]
    view.mul_(3)
    base[:, 0].fill_(0.25)  # the view's history is made anew when it is asked for
    (base if read == "the base" else torch.ones(3, device=device) * 3).detach().cpu()
    view.sin().sum().backward()
    return weight.grad


@pytest.mark.compared
@pytest.mark.parametrize(
    "turn",
    [
        lambda y: y.t_(),
        lambda y: y.transpose_(0, 1),
        lambda y: y.swapaxes_(0, 1),
        lambda y: y.swapdims_(0, 1),
        lambda y: y.unsqueeze_(1).squeeze_(1),
        lambda y: y.as_strided_((2,), (2,), 1),
    ],
)
def test_a_value_turned_in_place_keeps_its_history(device, turn):
    weight = torch.arange(12.0).reshape(3, 4).to(device).requires_grad_()
    turned = weight * 2
    turn(turned)
    turned[0] = 1
    turned.sin().sum().backward()
    return turned, weight.grad, type(turned.grad_fn).__name__


# --- what was written to since it was saved -----------------------------------------------------


def refused_after(write, device) -> tuple[bool, int]:
    """Whether a backward is refused once `write` has changed what it needs; how often it wrote."""
    x = leaf(3, device=device)
    x.grad = ramp(3, device=device)
    kept = x.detach()
    loss = (x * kept).square().sum()
    with torch.no_grad():
        write(x)
    try:
        loss.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return True, x._version
    return False, x._version


@pytest.mark.compared
@pytest.mark.parametrize(
    "optimizer", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam"]
)
def test_a_backward_behind_an_optimizers_step_is_refused(device, optimizer):
    def step(x):
        getattr(torch.optim, optimizer)([x], lr=0.1, foreach=True).step()

    refused, writes = refused_after(step, device)
    return refused, writes > 0


WRITES_TO_LISTS = {
    "a number": lambda x: torch._foreach_mul_([x], 2.0),
    "numbers": lambda x: torch._foreach_add_([x], [2.0]),
    "tensors": lambda x: torch._foreach_addcdiv_([x], [x * 1], [x * 2]),
    "no operand": lambda x: torch._foreach_zero_([x, x.clone()]),
    "a copy": lambda x: torch._foreach_copy_([x], [x * 2]),
    "out": lambda x: torch.split_copy(torch.ones_like(x), 3, out=[x]),
}


@pytest.mark.compared
@pytest.mark.parametrize("write", WRITES_TO_LISTS.values(), ids=WRITES_TO_LISTS.keys())
def test_writes_to_lists_are_counted_and_refused(device, write):
    return [refused_after(write, device) for _ in range(3)]


def test_writes_to_lists_are_counted_where_nothing_is_recorded():
    with ltc.config.override(LTC_FORCE_FALLBACK="aten::_foreach_erf_"):  # its kernel is built here
        assert refused_after(lambda x: torch._foreach_erf_([x]), "ltc") == (True, 1)
    with torch.inference_mode():
        x = torch.ones(2, device="ltc")
        torch._foreach_mul_([x], 2.0)
    assert x.tolist() == [2, 2]


@pytest.mark.compared
def test_writes_of_custom_operations_are_counted(device):
    def halve(xs):
        for x in xs:
            x.div_(2)

    with torch.library._scoped_library("counted", "DEF") as library:
        library.define("halve_(Tensor(a!) x) -> ()")
        library.define("halve_all_(Tensor(a!)[] xs) -> ()")
        library.impl("halve_", lambda x: halve([x]), "CPU")
        library.impl("halve_all_", halve, "CPU")
        ops = torch.ops.counted
        return (
            refused_after(ops.halve_, device),
            refused_after(lambda x: ops.halve_all_([x]), device),
        )


@pytest.mark.parametrize("devices", [("ltc", "cpu"), ("cpu", "ltc"), ("ltc", "ltc")])
def test_a_dual_tensor_is_copied_to_another_device_with_its_tangent(devices):
    source, target = devices
    with forward_ad.dual_level():
        tangent = torch.tensor([3.0, 4.0]).to(source)
        dual = forward_ad.make_dual(torch.tensor([1.0, 2.0]).to(source), tangent)
        copied = torch.zeros(2).to(target).copy_(dual)
        primal, found = forward_ad.unpack_dual(copied)
        assert (primal.tolist(), found.tolist()) == ([1.0, 2.0], [3.0, 4.0])
        assert found.device.type == target
