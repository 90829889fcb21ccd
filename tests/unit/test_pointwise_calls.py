"""Convolutions of single positions that PyTorch's product computes: results, and when it is called."""

import pytest
import torch
from torch import nn

import ltc
from ltc import config
from ltc.backends.llvm.schedule import planned_steps
from ltc.debug import metrics
from ltc.ir import ops
from ltc.ir.graph import Graph
from ltc.ir.node import make
from ltc.llvm.conv.geometry import Geometry
from ltc.llvm.gemm.blocking import Shape, stored_plain
from ltc.llvm.ops import kernel_choice
from ltc.llvm.ops.product_call import can_call
from ltc.llvm.ops.product_choice import called_pointwise
from tests.unit.llvm_kernels import HOST, guarded, is_untouched, run_all

ABLE = Shape((), 128, 128, 128, *[stored_plain(128, 128)] * 3)
KINDS = (ops.CONVOLUTION, ops.CONVOLUTION_INPUT_GRADIENT, ops.CONVOLUTION_WEIGHT_GRADIENT)
BOUNDS = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 1e-2}
IMAGES, CHANNELS, OUTPUTS, EXTENT = 5, 70, 130, 17

pytestmark = pytest.mark.skipif(
    not can_call(torch.float32, ABLE), reason="this build of PyTorch exports no product for C"
)


@pytest.fixture
def seconds(monkeypatch, tmp_path):
    """The seconds that trials seem to take, [generated, called], and a count of trials."""
    found = {"trials": 0, "takes": [2.0, 1.0]}

    def fastest(ways):
        found["trials"] += 1
        for way in ways:
            way()
        return found["takes"]

    monkeypatch.setattr(kernel_choice, "_fastest", fastest)
    kernel_choice._ratios.clear()
    with config.override(LTC_CACHE_DIR=str(tmp_path), LTC_CACHE="1"):
        yield found
    kernel_choice._ratios.clear()


def geometry_of(kernel=1, stride=1, images=IMAGES):
    extents, result = (EXTENT,) * 2, ((EXTENT - kernel) // stride + 1,) * 2
    window = (stride,) * 2, (0, 0), (1, 1)
    weight = (OUTPUTS, CHANNELS, kernel, kernel)
    return Geometry((images, CHANNELS, *extents), weight, (images, OUTPUTS, *result), *window, 1)


def last(x):
    return x.movedim(1, -1).contiguous()


@pytest.mark.parametrize("dtype", BOUNDS)
def test_the_three_products_of_a_convolution(seconds, dtype):
    geometry = geometry_of()
    x, weight, gradient = (
        torch.randn(extents).to(dtype)
        for extents in (geometry.operand, geometry.weight, geometry.result)
    )
    rest = (None, (1, 1), (0, 0), (1, 1), False, [0, 0], 1)
    exact_x, exact_weight, _ = torch.ops.aten.convolution_backward(
        gradient.double(), x.double(), weight.double(), *rest, [True, True, False]
    )
    exact = torch.ops.aten.convolution(x.double(), weight.double(), *rest)
    given = {"operand": last(x), "gradient": last(gradient), "weight": weight}
    for op, expected in zip(KINDS, (last(exact), last(exact_x), exact_weight)):
        kernel = called_pointwise(op, dtype, geometry, HOST, None, 0)
        assert kernel.is_call
        result, memory = guarded(expected.shape, dtype)
        sequence = type("Sequence", (), {"kernels": (kernel,), "scratch": {}})
        run_all(sequence, HOST, result=result, **given)
        error = (result.double() - expected).abs().max()
        assert error <= BOUNDS[dtype] * expected.abs().max()
        assert is_untouched(memory)


def test_a_class_of_shapes_is_tried_once(seconds):
    for op in KINDS:
        assert called_pointwise(op, torch.float32, geometry_of(), HOST, None, 0)
        assert called_pointwise(op, torch.float32, geometry_of(images=6), HOST, None, 0)
    assert seconds["trials"] == 3
    kernel_choice._ratios.clear()  # as in another process
    seconds["takes"] = [1.0, 2.0]
    assert called_pointwise(KINDS[2], torch.float32, geometry_of(), HOST, None, 0)
    assert seconds["trials"] == 3


def test_a_gain_of_three_hundredths_is_none(seconds):
    seconds["takes"] = [1.03, 1.0]
    for op in KINDS:
        assert called_pointwise(op, torch.float32, geometry_of(), HOST, None, 0) is None


@pytest.mark.parametrize("geometry", [geometry_of(kernel=3), geometry_of(stride=2)])
def test_other_convolutions_are_no_products(seconds, geometry):
    for op in KINDS:
        assert called_pointwise(op, torch.float32, geometry, HOST, None, 0) is None
    assert seconds["trials"] == 0


@pytest.mark.parametrize("reproducible", [False, True])
def test_a_reproducible_graph_calls_nothing(seconds, reproducible):
    shapes = (8, 64, 16, 16), (64, 64, 1, 1)
    x, weight = (
        make(ops.INPUT, index=i, dtype=torch.float32, shape=s) for i, s in enumerate(shapes)
    )
    window = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
    x = make(ops.PERMUTE, x, dims=(0, 2, 3, 1))
    node = make(ops.CONVOLUTION, x, weight, channels_last=True, **window)
    graph = Graph((x.inputs[0], weight), (), (node,), reproducible=reproducible)
    steps = planned_steps(graph, frozenset())
    called = [code.is_call for step in steps for code in step.codes if code.is_call]
    assert len(called) == (not reproducible)
    assert seconds["trials"] == (0 if reproducible else 1)


def trained(device, dtype, steps):
    """The weights of a small network after some steps, with an epilogue behind each product."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(16, 64, 1), nn.ReLU(), nn.Conv2d(64, 64, 1), nn.Tanh(), nn.Conv2d(64, 16, 1)
    ).to(dtype)
    x = torch.randn(8, 16, 20, 20).to(dtype).to(device)
    net = net.to(device)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        (net(x) - x).square().mean().backward()
        optimizer.step()
        ltc.sync()
    return [p.detach().cpu().double() for p in net.parameters()]


def test_a_network_trains_with_calls_as_without(seconds):
    exact = trained("cpu", torch.float64, 8)
    with config.override(LTC_TIER="auto", LTC_COMPILE_BEHIND=0), metrics.counted() as grown:
        found = trained("ltc", torch.float32, 8)
    assert grown["CalledProducts"] >= 6
    for one, other in zip(found, exact):
        assert (one - other).abs().max() < 1e-5
