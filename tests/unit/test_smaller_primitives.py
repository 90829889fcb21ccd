"""Formulas for backends without rows of large primitives: computed by the reference, as it computes those."""

import itertools

import pytest
import torch

from ltc.backends.eager import EagerBackend
from ltc.ir import build, ops
from ltc.ir.graph import Graph, schedule
from ltc.ir.node import make
from ltc.passes.smaller_primitives import FORMULAS, in_smaller_primitives

ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def inputs_of(tensors) -> list:
    return [
        make(ops.INPUT, index=k, dtype=t.dtype, shape=tuple(t.shape)) for k, t in enumerate(tensors)
    ]


def assert_same_in_smaller_ones(outputs, nodes, tensors, rounding=0.0) -> None:
    graph = Graph(tuple(nodes), (), tuple(outputs))
    written_out = in_smaller_primitives(graph, lambda node: True)
    assert not [node for node in schedule(*written_out.outputs) if node.op in FORMULAS]
    made = [
        EagerBackend().compile(one, 0, frozenset()).launch([t.clone() for t in tensors], [])
        for one in (written_out, graph)
    ]
    for found, expected in zip(*made, strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=rounding, atol=rounding, equal_nan=True)


@pytest.mark.parametrize("bits", [1, 24, 32, 33, 53, 63])
@pytest.mark.parametrize("shape", [(), (7, 9), (0, 3)])
def test_random_bits(bits, shape):
    seed = torch.tensor(-1234567890123456789)
    (node,) = inputs_of([seed])
    made = [build.random_bits(node, shape, bits, stream) for stream in (0, 3)]
    assert_same_in_smaller_ones(made, [node], [seed])


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("bias", ["none", "numbers", "mask"])
def test_attention_and_its_gradient(dtype, bias):
    torch.manual_seed(0)
    for causal, dropped, safe in itertools.product((False, True), repeat=3):
        tensors = [torch.randn(2, 3, 5, 4), torch.randn(2, 3, 6, 4), torch.randn(2, 3, 6, 7)]
        tensors = [*[t.to(dtype) for t in tensors], torch.tensor(0.5, dtype=torch.float64)]
        if bias != "none":
            mask = torch.randn(2, 3, 5, 6).to(dtype)
            mask[0, 0, 1] = -torch.inf
            tensors.append(mask if bias == "numbers" else mask > 0)
        if dropped:
            tensors += [torch.tensor(77), torch.tensor(0.3, dtype=torch.float64)]
        tensors.append(torch.randn(2, 3, 5, 7).to(dtype))
        nodes = inputs_of(tensors)
        query, key, value, scale, *rest, gradient = nodes
        of = {"causal": causal, "biased": bias != "none", "dropped": dropped, "safe": safe}
        first = query, key, value
        made = make(ops.ATTENTION, *first, scale, *rest, order=(0, 1, 2, 3), **of)
        turned = make(ops.ATTENTION, *first, scale, *rest, order=(0, 2, 1, 3), **of)
        gradients = make(
            ops.ATTENTION_GRADIENT, gradient, *first, build.get(made, 0), build.get(made, 1),
            scale, scale, *rest, orders=((0, 2, 1, 3), (0, 1, 2, 3), (0, 1, 2, 3)),
            wants_bias=bias == "numbers", **of,
        )  # fmt: skip
        outputs = [
            build.get(node, k) for node in (turned, gradients) for k in range(len(node.type))
        ]
        assert_same_in_smaller_ones(outputs, nodes, tensors, ROUNDING[dtype])


WINDOWS = {  # of 2 dimensions, and of 3: kernel, stride, padding, whether the last may lie outside
    "apart": ((2, 2), (2, 2), (0, 0), False),
    "beside": ((3, 2), (2, 3), (1, 0), True),
    "across": ((3, 3), (1, 1), (1, 1), False),
    "blocks": ((2, 3, 2), (2, 1, 2), (1, 1, 0), True),
}


@pytest.mark.parametrize("dtype", [*ROUNDING, torch.int32], ids=str)
@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("dilation", [1, 2])
def test_the_first_of_the_largest_and_its_gradient(dtype, windows, dilation):
    torch.manual_seed(0)
    x = torch.randint(-3, 4, (2, 3, 7, 9, 5)[: 2 + len(WINDOWS[windows][0])]).to(dtype)
    if dtype.is_floating_point:
        x[0, 0, 2], x[1, 1, 3] = torch.nan, -torch.inf
    window, shape = window_of(windows, x, dilation)
    (node,) = inputs_of([x])
    made = make(ops.MAX_POOL, node, shape=shape, **window)
    values, places = build.get(made, 0), build.get(made, 1)
    assert_same_in_smaller_ones([values, places], [node], [x])
    if dtype.is_floating_point:
        back = make(ops.MAX_POOL_GRADIENT, values * 0.5, places, shape=tuple(x.shape), **window)
        assert_same_in_smaller_ones([back], [node], [x], ROUNDING[dtype])


OF_MEANS = [  # the reference has no mean of three dimensions in bfloat16
    (windows, dtype)
    for windows in WINDOWS
    for dtype in ROUNDING
    if windows != "blocks" or dtype != torch.bfloat16
]


@pytest.mark.parametrize(("windows", "dtype"), OF_MEANS, ids=str)
@pytest.mark.parametrize("counts", [(True, 0), (False, 0), (False, 5)], ids=str)
def test_means_and_their_gradient(windows, dtype, counts):
    torch.manual_seed(0)
    x = torch.randn((2, 3, 7, 9, 5)[: 2 + len(WINDOWS[windows][0])]).to(dtype)
    window, shape = window_of(windows, x)
    window |= dict(zip(("count_padding", "divisor"), counts))
    (node,) = inputs_of([x])
    made = make(ops.AVERAGE_POOL, node, shape=shape, **window)
    back = make(ops.AVERAGE_POOL_GRADIENT, made, shape=tuple(x.shape), **window)
    assert_same_in_smaller_ones([made, back], [node], [x], ROUNDING[dtype])


@pytest.mark.parametrize("op", [ops.MAX_POOL, ops.AVERAGE_POOL], ids=lambda op: op.name)
def test_channels_may_come_last(op):
    torch.manual_seed(0)
    x = torch.randn(2, 7, 9, 3)
    window, shape = window_of("beside", x.movedim(-1, 1))
    shape = (shape[0], *shape[2:], shape[1])
    extra = {} if op is ops.MAX_POOL else {"count_padding": True, "divisor": 0}
    (node,) = inputs_of([x])
    made = make(op, node, shape=shape, **window, **extra, channels_last=True)
    back_of = {"shape": tuple(x.shape), **window, **extra, "channels_last": True}
    if op is ops.MAX_POOL:
        values, places = build.get(made, 0), build.get(made, 1)
        outputs = [values, places, make(ops.MAX_POOL_GRADIENT, values, places, **back_of)]
    else:
        outputs = [made, make(ops.AVERAGE_POOL_GRADIENT, made, **back_of)]
    assert_same_in_smaller_ones(outputs, [node], [x], 1e-5)


def test_a_pooling_of_a_large_window_stays_whole():
    (node,) = inputs_of([torch.ones(1, 1, 70, 70)])
    of = {"kernel": (40, 40), "stride": (40, 40), "padding": (0, 0), "dilation": (1, 1)}
    made = make(ops.AVERAGE_POOL, node, shape=(1, 1, 1, 1), count_padding=True, divisor=0, **of)
    graph = Graph((node,), (), (made,))
    assert in_smaller_primitives(graph, lambda node: True).outputs == graph.outputs


def window_of(name, x, dilation=1):
    """The attributes of a pooling, and the shape of its result."""
    kernel, stride, padding, rounds_up = WINDOWS[name]
    window = {"kernel": kernel, "stride": stride, "padding": padding}
    window["dilation"] = (dilation,) * len(kernel)
    pool = {2: torch.nn.functional.max_pool2d, 3: torch.nn.functional.max_pool3d}[len(kernel)]
    arguments = kernel, stride, padding, dilation, rounds_up
    return window, tuple(pool(torch.zeros(x.shape), *arguments).shape)


def test_what_is_not_lacking_stays():
    (node,) = inputs_of([torch.tensor(5)])
    graph = Graph((node,), (), (build.random_bits(node, (3,), 8),))
    assert in_smaller_primitives(graph, lambda node: False).outputs == graph.outputs
