"""`module.to("ltc")` whatever else holds the module's tensors, and all of it or nothing."""

import copy
import weakref

import pytest
import torch
from torch import nn

import ltc

pytestmark = pytest.mark.devices(2)


def an_output_is_alive(layer, x):
    return layer(x)


def a_loss_was_differentiated(layer, x):
    layer(x).sum().backward()
    return layer(x)


def a_view_is_alive(layer, x):
    return layer.weight[0], layer.weight.detach(), layer.weight.data


def a_weak_reference_is_alive(layer, x):
    return weakref.ref(layer.weight), weakref.WeakKeyDictionary({layer.weight: 1})


def a_hook_on_its_gradient_is_alive(layer, x):
    node = torch.autograd.graph.get_gradient_edge(layer.weight).node
    return node, node.register_hook(lambda *gradients: None)


HOLDERS = [
    an_output_is_alive,
    a_loss_was_differentiated,
    a_view_is_alive,
    a_weak_reference_is_alive,
    a_hook_on_its_gradient_is_alive,
]


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("there, back", [("cpu", "ltc"), ("ltc", "cpu"), ("ltc:0", "ltc:1")])
@pytest.mark.parametrize("hold", HOLDERS, ids=lambda hold: hold.__name__)
def test_a_module_moves_and_trains_while(hold, there, back, equal):
    layer = nn.Linear(3, 3)
    plain = nn.Linear(3, 3)
    plain.load_state_dict(layer.state_dict())
    layer.to(there)
    weight, optimizer = layer.weight, torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9)
    held = hold(layer, torch.ones(2, 3, device=there))
    layer.to(back)
    assert held is not None and layer.weight is weight
    assert weight.device == torch.ones(0, device=back).device
    theirs = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    for module, its, device in ((layer, optimizer, back), (plain, theirs, "cpu")):
        for _ in range(2):
            its.zero_grad()
            module(torch.ones(2, 3, device=device)).square().sum().backward()
            its.step()
    equal(list(layer.parameters()), list(plain.parameters()))


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.parametrize("used_before", [False, True])
def test_a_module_with_a_computed_weight_moves(norm, used_before, equal):
    layers = {}
    for device in ("cpu", "ltc"):
        torch.manual_seed(0)
        layer = layers[device] = norm(nn.Linear(3, 2).double())
        if used_before:
            layer(torch.ones(2, 3).double())
        layer.to(device)
        layer(torch.ones(2, 3).double().to(device)).square().sum().backward()
    gradients = {device: [p.grad for p in layer.parameters()] for device, layer in layers.items()}
    equal(gradients["ltc"], gradients["cpu"])


@pytest.mark.filterwarnings("ignore:RNN module weights")
def test_gradients_dtypes_and_ties_move_along(equal):
    model = nn.ModuleList([nn.LSTM(3, 3), nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3)])
    model[2].weight = model[1].weight
    model[2](model[1](torch.ones(2, 3))).sum().backward()
    gradient = model[1].weight.grad
    values = [p.detach().clone() for p in model.parameters()]
    model.to("ltc", torch.float64)
    assert model[2].weight is model[1].weight
    assert model[1].weight.grad is gradient and gradient.dtype is torch.float64
    assert model[3].running_mean.is_ltc and model[3].num_batches_tracked.dtype is torch.int64
    equal(list(model.parameters()), [value.double() for value in values])


def test_a_gradient_that_no_longer_fits_moves_along(equal):
    parameter = nn.Parameter(torch.ones(2, device="ltc"))
    parameter.grad = gradient = torch.full((2,), 3.0, device="ltc")
    parameter.data = torch.arange(4.0, device="ltc")  # FSDP: the whole, where the part has been
    for place in ("cpu", "ltc"):
        parameter.data = parameter.detach().to(place)
        assert parameter.grad is gradient
        assert gradient.device.type == parameter.device.type == place
        equal([parameter, gradient], [torch.arange(4.0), torch.full((2,), 3.0)])


class _Refused(Exception):
    pass


def refusing_the(number: int, convert):
    left = iter(range(number))

    def conversion(tensor):
        if next(left, None) is None:
            raise _Refused
        return convert(tensor)

    return conversion


def shorter(tensor):
    return tensor.bfloat16() if tensor.dtype.is_floating_point else tensor


CONVERSIONS = {
    "to ltc": ("cpu", lambda t: t.to("ltc")),
    "to the cpu": ("ltc", lambda t: t.cpu()),
    "to another one": ("ltc", lambda t: t.to("ltc:1")),
    "to ltc, shorter": ("cpu", lambda t: shorter(t.to("ltc"))),
    "shorter": ("ltc", shorter),
}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("number", range(9))
@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_move_that_fails_leaves_the_module_as_it_was(name, number, overwrite, equal):
    device, convert = CONVERSIONS[name]
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(device)
    model(torch.randn(4, 3, device=device)).square().sum().backward()
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    values = [tensor.detach().clone().cpu() for tensor in tensors]
    torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
    try:
        with pytest.raises(_Refused):
            model._apply(refusing_the(number, convert))
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    after = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    assert all(one is other for one, other in zip(after, tensors))
    assert {tensor.device.type for tensor in after} == {device}
    equal(after, values)


def test_a_module_moves_in_inference_mode(equal):
    layer, x = nn.Linear(2, 3), torch.randn(4, 2)
    weight, expected = layer.weight, layer(x)
    with torch.inference_mode():
        for device in ("ltc", "cpu", "ltc"):
            assert layer.to(device).weight is weight
            assert weight.device.type == device and weight.requires_grad
            equal(layer(x.to(device)), expected)
    expected.sum().backward()  # a graph of before delivers where the weight is now
    equal(weight.grad, x.sum(0).expand(3, 2))


def profiled(layer, x):
    with torch.profiler.profile(record_shapes=True) as profiler:
        layer(x).sum().backward()
    return profiler


def test_a_profiler_that_is_gone_lets_a_module_move():
    layer = nn.Linear(2, 3).to("ltc")
    weight = layer.weight
    profiled(layer, torch.ones(4, 2, device="ltc"))
    layer.to("cpu")
    assert layer.weight is weight and weight.device.type == weight.grad.device.type == "cpu"


def test_a_module_whose_parameters_a_profiler_has_recorded_says_so_and_stays():
    layer = nn.Linear(2, 3).to("ltc")
    profiler = profiled(layer, torch.ones(4, 2, device="ltc"))
    with pytest.raises(RuntimeError, match="delete the profiler first") as caught:
        layer.to("cpu")
    assert "on ltc:0 cannot be moved to cpu" in str(caught.value)
    assert {p.device.type for p in layer.parameters()} == {"ltc"}
    assert copy.deepcopy(layer).to("cpu").weight.device.type == "cpu"
    del profiler
    assert layer.to("cpu").weight.device.type == "cpu"


def test_a_move_to_a_device_that_does_not_exist_says_so():
    model = nn.Linear(3, 3)
    with pytest.raises(RuntimeError, match=f"ltc:{ltc.device_count()} does not exist"):
        model.to(f"ltc:{ltc.device_count()}")
    assert model.weight.device.type == "cpu"
