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


def test_what_is_not_lacking_stays():
    (node,) = inputs_of([torch.tensor(5)])
    graph = Graph((node,), (), (build.random_bits(node, (3,), 8),))
    assert in_smaller_primitives(graph, lambda node: False).outputs == graph.outputs
