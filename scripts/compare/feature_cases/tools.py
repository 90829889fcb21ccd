"""Modes, subclasses, graphs and other tools; layouts."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn
from torch.utils import flop_counter, hooks, swap_tensors

from feature_cases.programs import drawn, feature, gradients, integers, made, perceptron, table


@feature("tools")
def flops_are_counted(d):
    with flop_counter.FlopCounterMode(display=False) as counter:
        made(perceptron, d)(drawn(d, 2, 4)).sum().backward()
    return counter.get_total_flops()


@feature("tools")
def torch_function_modes(d):
    class Names(torch.overrides.TorchFunctionMode):
        seen = 0

        def __torch_function__(self, function, types, args=(), kwargs=None):
            Names.seen += 1
            return function(*args, **(kwargs or {}))

    with Names():
        y = torch.sin(drawn("cpu", 2)).to(d)
    return y, Names.seen > 0


@feature("tools")
def torch_dispatch_modes(d):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.seen.append(str(function))
            return function(*args, **(kwargs or {}))

    x = drawn(d, 3)
    with Names() as names:
        y = (x * 2).sum()
    return y, names.seen


@feature("tools")
def tensor_subclasses(d):
    class Tagged(torch.Tensor):
        pass

    x = drawn(d, 3).as_subclass(Tagged)
    return type(x + 1).__name__, (x + 1).as_subclass(torch.Tensor)


@feature("tools")
def wrapper_subclasses(d):
    from torch.testing._internal.two_tensor import TwoTensor

    x = TwoTensor(drawn(d, 3), drawn(d, 3, seed=1))
    y = (x * 2).sin()
    return y.a, y.b


@feature("tools")
def masked_tensors(d):
    one = torch.masked.masked_tensor(drawn(d, 4), drawn(d, 4) > 0)
    return one.sum().get_data(), (one * 2).get_mask()


@feature("tools")
def custom_operators(d):
    name = f"features::double_{d}"

    @torch.library.custom_op(name, mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    double.register_fake(torch.empty_like)
    double.register_autograd(lambda ctx, gradient: gradient * 2)
    return gradients(double, drawn(d, 3))


@feature("tools")
def traced_by_fx(d):
    module = made(perceptron, d)
    return torch.fx.symbolic_trace(module)(drawn(d, 2, 4)).detach()


@feature("tools")
def made_a_graph_by_make_fx(d):
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(lambda x: x.sin() + 1)(drawn(d, 3))
    return graph(drawn(d, 3, seed=1))


@feature("tools")
def exported(d):
    module = made(perceptron, d)
    program = torch.export.export(module, (drawn(d, 2, 4),))
    return program.module()(drawn(d, 2, 4, seed=1)).detach()


@feature("tools")
def scripted(d):
    return torch.jit.script(made(perceptron, d))(drawn(d, 2, 4)).detach()


@feature("tools")
def compiled(d):
    function = torch.compile(lambda x: x.sin() * 2, backend="eager")
    return function(drawn(d, 3))


@feature("tools")
def profiled(d):
    with torch.profiler.profile() as profile:
        (drawn(d, 3) * 2).sum().item()
    return len(profile.key_averages()) > 0


@feature("tools")
def deterministic_algorithms(d):
    torch.use_deterministic_algorithms(True)
    try:
        return torch.zeros(4, device=d).index_add(0, integers(d, 4, 9), drawn(d, 9))
    finally:
        torch.use_deterministic_algorithms(False)


@feature("tools")
def compared_by_testing(d):
    torch.testing.assert_close(drawn(d, 3), drawn(d, 3) + 1e-9)
    return torch.allclose(drawn(d, 3), drawn(d, 3)), torch.equal(drawn(d, 3), drawn(d, 3))


@feature("tools")
def made_by_testing(d):
    x = torch.testing.make_tensor(3, 4, dtype=torch.float32, device=d, low=0, high=1)
    return x.shape, x.device.type == d, bool((x >= 0).all())


@feature("tools")
def swapped_tensors(d):
    x, y = drawn(d, 2), drawn(d, 3)
    swap_tensors(x, y)
    return x, y


@feature("tools")
def default_device(d):
    torch.set_default_device(d)
    try:
        return torch.arange(4).sum(), torch.zeros(2).device.type == d
    finally:
        torch.set_default_device(None)


@feature("tools")
def handles_are_removed(d):
    x, seen = drawn(d, 2).requires_grad_(), []
    handle = x.register_hook(seen.append)
    handle.remove()
    x.sum().backward()
    return len(seen), isinstance(handle, hooks.RemovableHandle)


@feature("tools")
def numpy_functions_and_indices(d):
    import numpy

    x = drawn(d, 3, 4)
    return x[numpy.array([2, 0])], x * numpy.float32(2), x[..., None, 1:].shape


@feature("tools")
def modules_with_names(d):
    module = made(lambda: nn.Sequential(OrderedDict(first=nn.Linear(4, 2))), d)
    return module.first(drawn(d, 3, 4)).detach(), [n for n, _ in module.named_parameters()]


table(
    "other layouts",
    sparse_coo=lambda d: torch.eye(3, device=d).to_sparse().to_dense(),
    sparse_csr=lambda d: torch.eye(3, device=d).to_sparse_csr().to_dense(),
    sparse_product=lambda d: torch.sparse.mm(
        torch.eye(3, device=d).to_sparse(), drawn(d, 3, 2)
    ),
    nested=lambda d: torch.nested.nested_tensor(
        [drawn(d, 2), drawn(d, 3)], layout=torch.jagged
    ).sin().unbind(),
    quantized=lambda d: torch.quantize_per_tensor(drawn(d, 3), 0.1, 0, torch.qint8).dequantize(),
    fake_quantized=lambda d: gradients(
        lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127), drawn(d, 5)
    ),
    channels_last=lambda d: drawn(d, 1, 3, 4, 4).to(memory_format=torch.channels_last).sum(1),
)  # fmt: skip


@feature("other layouts")
def quantization_aware_training(d):
    from torch.ao import quantization

    module = made(perceptron, d).train()
    module.qconfig = quantization.QConfig(
        activation=quantization.default_fake_quant, weight=quantization.default_weight_fake_quant
    )
    prepared = quantization.prepare_qat(nn.Sequential(module), inplace=False)
    return prepared(drawn(d, 3, 4)).detach()
