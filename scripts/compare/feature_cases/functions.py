"""Derivatives: torch.func and autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils import checkpoint

from feature_cases.programs import drawn, feature, gradients, integers, made, perceptron, table

table(
    "torch.func",
    grad=lambda d: torch.func.grad(lambda x: x.sin().sum())(drawn(d, 4)),
    grad_and_value=lambda d: torch.func.grad_and_value(lambda x: (x**3).sum())(drawn(d, 4)),
    grad_of_grad=lambda d: torch.func.grad(torch.func.grad(lambda x: x**4))(
        torch.tensor(1.5, device=d)
    ),
    vmap=lambda d: torch.func.vmap(torch.dot)(drawn(d, 3, 4), drawn(d, 3, 4, seed=1)),
    vmap_over_other_dimensions=lambda d: torch.func.vmap(
        lambda x, y: x @ y, in_dims=(1, None), out_dims=1
    )(drawn(d, 4, 3), drawn(d, 4, 2)),
    vmap_in_chunks=lambda d: torch.func.vmap(torch.sin, chunk_size=2)(drawn(d, 5, 3)),
    vmap_of_gradients=lambda d: torch.func.vmap(
        torch.func.grad(lambda x, w: (x * w).sum().tanh()), in_dims=(0, None)
    )(drawn(d, 5, 3), drawn(d, 3, seed=1)),
    vmap_with_draws=lambda d: torch.func.vmap(
        lambda x: x + torch.rand(3, device=d) * 0, randomness="different"
    )(drawn(d, 2, 3)),
    jacrev=lambda d: torch.func.jacrev(lambda x: x.cumprod(0))(drawn(d, 4)),
    jacfwd=lambda d: torch.func.jacfwd(lambda x: x.cumsum(0).sin())(drawn(d, 4)),
    hessian=lambda d: torch.func.hessian(lambda x: (x.exp() * x).sum())(drawn(d, 3)),
    jvp=lambda d: torch.func.jvp(torch.tanh, (drawn(d, 3),), (drawn(d, 3, seed=1),)),
    vjp=lambda d: torch.func.vjp(torch.tanh, drawn(d, 3))[1](drawn(d, 3, seed=1)),
    linearize=lambda d: torch.func.linearize(torch.sin, drawn(d, 3))[1](drawn(d, 3, seed=1)),
    functionalize=lambda d: torch.func.functionalize(lambda x: x.clone().add_(1).view(-1).mul_(2))(
        drawn(d, 2, 3)
    ),
)


@feature("torch.func")
def functional_call_with_gradients_of_each_sample(d):
    module = made(perceptron, d)
    parameters = {n: p.detach() for n, p in module.named_parameters()}

    def loss(parameters, x, y):
        scores = torch.func.functional_call(module, parameters, (x[None],))
        return F.cross_entropy(scores, y[None])

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    return each(parameters, drawn(d, 5, 4), integers(d, 3, 5))


@feature("torch.func")
def ensemble_of_stacked_modules(d):
    modules = [made(perceptron, d) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(modules)

    def call(parameters, buffers, x):
        return torch.func.functional_call(modules[0], (parameters, buffers), (x,))

    return torch.func.vmap(call, in_dims=(0, 0, None))(parameters, buffers, drawn(d, 5, 4))


class Cube(torch.autograd.Function):
    """x ** 3 with a backward, a tangent and a batching rule of its own."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * x * x * gradient

    @staticmethod
    def jvp(ctx, tangent):
        (x,) = ctx.saved_tensors
        return 3 * x * x * tangent


table(
    "autograd",
    own_function=lambda d: gradients(Cube.apply, drawn(d, 4)),
    own_function_under_vmap=lambda d: torch.func.vmap(Cube.apply)(drawn(d, 3, 2)),
    own_function_with_a_tangent=lambda d: torch.func.jvp(
        Cube.apply, (drawn(d, 3),), (drawn(d, 3, seed=1),)
    ),
    double_backward=lambda d: torch.autograd.gradgradcheck(
        lambda x: (x * x.sin()).sum(), drawn(d, 3).double().requires_grad_()
    ),
    gradcheck=lambda d: torch.autograd.gradcheck(
        lambda x: F.softmax(x, -1), drawn(d, 2, 3).double().requires_grad_()
    ),
    jacobian=lambda d: torch.autograd.functional.jacobian(lambda x: x.sin() * x, drawn(d, 3)),
    hessian=lambda d: torch.autograd.functional.hessian(lambda x: (x**3).sum(), drawn(d, 3)),
    hvp=lambda d: torch.autograd.functional.hvp(
        lambda x: (x**3).sum(), drawn(d, 3), drawn(d, 3, seed=1)
    ),
    batched_gradients=lambda d: torch.autograd.functional.jacobian(
        lambda x: x.cumsum(0).exp(), drawn(d, 3), vectorize=True
    ),
    checkpoint=lambda d: gradients(
        lambda x: checkpoint.checkpoint(lambda y: y.sin().exp(), x, use_reentrant=False),
        drawn(d, 4),
    ),
    checkpoint_sequential=lambda d: gradients(
        lambda x: checkpoint.checkpoint_sequential(made(perceptron, d), 2, x, use_reentrant=False),
        drawn(d, 3, 4),
    ),
)


@feature("autograd")
def forward_mode(d):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(drawn(d, 3), drawn(d, 3, seed=1))
        return tuple(torch.autograd.forward_ad.unpack_dual(dual.sin() * dual))


@feature("autograd")
def hooks_of_tensors_and_nodes(d):
    x, seen = drawn(d, 3).requires_grad_(), []
    y = x * 2
    y.register_hook(lambda g: g * 10)
    y.retain_grad()
    y.grad_fn.register_prehook(lambda g: seen.append(g[0].clone()))
    y.grad_fn.register_hook(lambda gi, go: seen.append(gi[0].clone()))
    x.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    y.sum().backward()
    return x.grad, y.grad, seen


@feature("autograd")
def hooks_of_several_gradients(d):
    x, y, seen = drawn(d, 3).requires_grad_(), drawn(d, 3).requires_grad_(), []
    torch.autograd.graph.register_multi_grad_hook(
        [x, y], lambda g: seen.extend(t.clone() for t in g)
    )
    (x * y).sum().backward()
    return seen


@feature("autograd")
def saved_tensors_hooks(d):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.cpu(), lambda t: t.to(d)):
        return gradients(lambda x: x.exp() * x, drawn(d, 4))


@feature("autograd")
def save_on_cpu(d):
    with torch.autograd.graph.save_on_cpu():
        return gradients(lambda x: x.exp() * x, drawn(d, 4))


@feature("autograd")
def anomaly_detection(d):
    try:
        with torch.autograd.detect_anomaly(check_nan=True):
            x = torch.zeros(1, device=d, requires_grad=True)
            (x.sqrt() * 0).sum().backward()
    except RuntimeError as error:
        return "returned nan values" in str(error)


@feature("autograd")
def inference_mode(d):
    with torch.inference_mode():
        x = drawn(d, 3) * 2
    return x.is_inference(), x.requires_grad, x


@feature("autograd")
def grad_mode_switches(d):
    x = drawn(d, 3).requires_grad_()
    with torch.no_grad():
        y = x * 2
        with torch.enable_grad():
            z = x * 2
    with torch.set_grad_enabled(False):
        w = x * 2
    return y.requires_grad, z.requires_grad, w.requires_grad


@feature("autograd")
def gradients_of_unused_and_allowed(d):
    x, y = drawn(d, 3).requires_grad_(), drawn(d, 3).requires_grad_()
    return torch.autograd.grad((x * 2).sum(), (x, y), allow_unused=True, materialize_grads=True)


@feature("autograd")
def backward_through_views_and_in_place(d):
    x = drawn(d, 4, 3).requires_grad_()
    y = x * 1
    y[1:3, ::2].mul_(3)
    y.t()[0].add_(y[:, 1])
    (y**2).sum().backward()
    return x.grad


@feature("autograd")
def is_grads_batched(d):
    x = drawn(d, 3).requires_grad_()
    return torch.autograd.grad(x.exp(), x, torch.eye(3, device=d), is_grads_batched=True)


@feature("autograd")
def backward_of_chosen_inputs(d):
    x, y = drawn(d, 3).requires_grad_(), drawn(d, 3, seed=1).requires_grad_()
    (x * y).sum().backward(inputs=[x], retain_graph=True)
    return x.grad, y.grad is None


@feature("autograd")
def selective_checkpoint(d):
    policy = checkpoint.create_selective_checkpoint_contexts
    contexts = lambda: policy([torch.ops.aten.mm.default])  # noqa: E731
    w = drawn(d, 4, 4, seed=1)
    return gradients(
        lambda x: checkpoint.checkpoint(
            lambda y: (y @ w).relu(), x, use_reentrant=False, context_fn=contexts
        ),
        drawn(d, 2, 4),
    )
