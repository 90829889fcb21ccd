"""Passes for backends that compile: layouts, what is long in pieces, the plan of memory."""

import pytest
import torch
from hypothesis import given as examples
from hypothesis import strategies as st

from ltc.backends.eager import EagerBackend
from ltc.backends.llvm import backend, compiling
from ltc.backends.llvm.backend import LlvmBackend
from ltc.ir import build, ops
from ltc.ir.graph import Graph, schedule
from ltc.ir.node import make
from ltc.passes.layout import channels_last, layout
from ltc.passes.memory_planner import ALIGNMENT, BLOCK, Lifetime, OutputBuffer, plan
from ltc.passes.splits import MOST_PARTS, split_concats, split_reductions
from tests.drawn import drawn


def given(*shape, index=0, dtype=torch.float32):
    return make(ops.INPUT, index=index, dtype=dtype, shape=shape)


def count(graph, op):
    return sum(node.op is op for node in schedule(*graph.outputs))


def result(graph, *buffers):
    return EagerBackend().compile(graph, 0, frozenset()).launch(list(buffers), [])[0]


def all_results(graph, *buffers):
    return EagerBackend().compile(graph, 0, frozenset()).launch(list(buffers), [])


def test_a_product_read_transposed_is_the_product_of_the_transposed():
    x, g = given(8, 5), given(8, 3, index=1)
    gradient = build.transpose(build.matmul(build.transpose(x, 0, 1), g), 0, 1)
    graph = Graph((x, g), (), (gradient,))
    changed = layout(graph)
    (output,) = changed.outputs
    assert output.op is ops.MATMUL and output.inputs[1] is x
    buffers = torch.randn(8, 5), torch.randn(8, 3)
    torch.testing.assert_close(result(changed, *buffers), result(graph, *buffers))


def test_a_product_read_both_ways_stays():
    x, y = given(4, 5), given(5, 3, index=1)
    product = build.matmul(x, y)
    graph = Graph((x, y), (), (product, build.transpose(product, 0, 1)))
    assert layout(graph).outputs == graph.outputs


@pytest.mark.parametrize(
    "shape, dims", [((64, 1024), (0, 1)), ((4096, 8), (0,)), ((2, 65536), (1,))]
)
def test_a_long_sum_is_made_of_pieces(shape, dims):
    x = given(*shape)
    graph = Graph((x,), (), (make(ops.SUM, x, dims=dims),))
    changed = split_reductions(graph)
    assert count(changed, ops.SUM) == 2
    values = torch.randint(-9, 9, shape).float()  # every order of these additions is exact
    assert torch.equal(result(changed, values), result(graph, values))


def test_a_sum_of_low_precision_rounds_once_all_the_same():
    x = given(64, 1024, dtype=torch.bfloat16)
    changed = split_reductions(Graph((x,), (), (make(ops.SUM, x, dims=(0, 1)),)))
    assert changed.outputs[0].dtype == torch.bfloat16 and count(changed, ops.SUM) == 2
    values = torch.full((64, 1024), 1.0, dtype=torch.bfloat16)
    assert result(changed, values).item() == 65536


@pytest.mark.parametrize("parts", [MOST_PARTS + 1, 100, MOST_PARTS**2, MOST_PARTS**2 + 1])
@pytest.mark.parametrize("dim", [0, 1])
def test_many_parts_are_joined_in_groups(parts, dim):
    inputs = tuple([given(2, 1 + k % 3, index=k) for k in range(parts)])
    given_parts = inputs if dim else [build.transpose(x, 0, 1) for x in inputs]
    graph = Graph(inputs, (), (build.concat(given_parts, dim),))
    changed = split_concats(graph)
    concats = [node for node in schedule(*changed.outputs) if node.op is ops.CONCAT]
    assert max(len(node.inputs) for node in concats) <= MOST_PARTS
    buffers = [torch.randn(2, 1 + k % 3) for k in range(parts)]
    assert torch.equal(result(changed, *buffers), result(graph, *buffers))


def test_a_few_parts_stay_one_concatenation():
    parts = [given(2, 3, index=k) for k in range(MOST_PARTS)]
    graph = Graph(tuple(parts), (), (build.concat(parts, 0),))
    assert split_concats(graph).outputs == graph.outputs


@pytest.mark.parametrize("shape, dims", [((128, 10), (0,)), ((64, 64), (1,)), ((7,), (0,))])
def test_a_short_sum_stays_whole(shape, dims):
    x = given(*shape)
    graph = Graph((x,), (), (make(ops.SUM, x, dims=dims),))
    assert split_reductions(graph).outputs == graph.outputs


@pytest.mark.parametrize("m, k, n", [(16, 4096, 16), (10, 8192, 10), (1, 65536, 4)])
@pytest.mark.parametrize("turned", [False, True])
def test_a_product_of_few_elements_is_a_sum_of_products(m, k, n, turned):
    x, y = given(*((k, m) if turned else (m, k))), given(k, n, index=1)
    left = make(ops.PERMUTE, x, dims=(1, 0)) if turned else x
    graph = Graph((x, y), (), (make(ops.MATMUL, left, y),))
    changed = split_reductions(graph)
    assert count(changed, ops.SUM) == 1 and changed.outputs[0].shape == (m, n)
    a = torch.randint(-9, 9, x.shape).float()  # every order of these additions is exact
    b = torch.randint(-9, 9, y.shape).float()
    expected = (a.T if turned else a) @ b
    for one in (EagerBackend(), LlvmBackend()):
        (found,) = one.compile(changed, 0, frozenset()).launch([a, b], [])
        assert torch.equal(found, expected)


@pytest.mark.parametrize("m, k, n", [(16, 4099, 16), (64, 4096, 64), (16, 512, 16), (0, 4096, 16)])
def test_a_product_of_many_elements_or_a_short_or_prime_sum_stays_whole(m, k, n):
    x, y = given(m, k), given(k, n, index=1)
    graph = Graph((x, y), (), (make(ops.MATMUL, x, y),))
    assert split_reductions(graph).outputs == graph.outputs


def test_stages_are_named_before_anything_that_compiles_is_imported():
    assert (*[one.name for one in compiling.PASSES], *compiling.AFTER_PASSES) == backend.STAGES


@st.composite
def lifetimes(draw):
    found = []
    for name in range(draw(st.integers(0, 12))):
        first = draw(st.integers(0, 20))
        last = first + draw(st.integers(0, 8))
        found.append(Lifetime(name, draw(st.integers(1, 5000)), first, last))
    return found


def hosts():
    one = st.builds(OutputBuffer, st.text(max_size=3), st.integers(1, 8000), st.integers(0, 28))
    return st.lists(one, max_size=4, unique_by=lambda host: host.name)


@drawn(100)
@examples(lifetimes(), hosts(), st.integers(0, 9))
def test_values_that_live_at_one_time_do_not_overlap(values, hosts, long):
    places, total = plan(values, hosts, long)
    room = {BLOCK: total, **{host.name: host.nbytes for host in hosts}}
    for a in values:
        where, offset = places[a.name]
        assert offset % ALIGNMENT == 0 and offset + a.nbytes <= room[where]
        for b in values:
            together = a.first <= b.last and b.first <= a.last
            if a is not b and together and places[b.name][0] == where:
                ends_before = offset + a.nbytes <= places[b.name][1]
                assert ends_before or places[b.name][1] + b.nbytes <= offset


@drawn(100)
@examples(lifetimes(), hosts(), st.integers(0, 9))
def test_guests_are_gone_before_their_host_is_written(values, hosts, long):
    places, _ = plan(values, hosts, long)
    first = {host.name: host.first for host in hosts}
    for value in values:
        where, _ = places[value.name]
        assert where is BLOCK or (value.last < first[where] and value.last - value.first >= long)


def test_what_must_lie_in_the_block_does():
    value = Lifetime("x", 100, 0, 5, in_block=True)
    assert plan([value], [OutputBuffer("output", 1000, 9)])[0] == {"x": (BLOCK, 0)}


def test_memory_is_used_again_when_its_value_is_dead():
    chain = [Lifetime(i, 1000, i, i + 1) for i in range(10)]
    assert plan(chain)[1] == 2 * 1024


# --- channels last -------------------------------------------------------------------------------


def block(x, w, scale):
    """Convolution, normalization, relu, pooling, and a sum over positions."""
    window = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
    y = make(ops.CONVOLUTION, x, w, groups=1, **window)
    mean = build.mean_of(y, [0, 2, 3])
    y = (y - build.reshape(mean, (1, -1, 1, 1))) * build.reshape(scale, (1, -1, 1, 1))
    y = build.cast(make(ops.MAXIMUM, y, build.full(y.shape, 0, y.dtype)), y.dtype)
    return y, make(ops.SUM, y, dims=(2, 3))


def turned(graph):
    return channels_last(graph, lambda node: True)


def test_everything_between_convolutions_has_its_channels_last():
    x, w, scale = given(2, 3, 6, 5), given(8, 3, 3, 3, index=1), given(8, index=2)
    y, total = block(x, w, scale)
    again = block(y, given(4, 8, 3, 3, index=3), given(4, index=4))[1]
    graph = Graph((x, w, scale, given(4, 8, 3, 3, index=3), given(4, index=4)), (), (total, again))
    changed = turned(graph)
    assert count(changed, ops.PERMUTE) == 1  # of the input, at the edge
    buffers = [torch.randn(n.shape) for n in graph.inputs]
    for one, other in zip(all_results(changed, *buffers), all_results(graph, *buffers)):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


def test_a_graph_without_convolutions_stays():
    x = given(2, 3, 4, 4)
    graph = Graph((x,), (), (make(ops.SUM, x, dims=(2, 3)),))
    assert turned(graph) is graph


def test_what_has_no_channels_last_form_reads_the_plain_one():
    x, w = given(2, 3, 6, 5), given(8, 3, 3, 3, index=1)
    y = block(x, w, given(8, index=2))[0]
    outputs = (
        build.reshape(y, (2, -1)),
        make(ops.PERMUTE, y, dims=(3, 2, 1, 0)),
        make(ops.SLICE, y, starts=(0, 1, 0, 2), limits=(2, 7, 6, 5), steps=(1, 2, 1, 1)),
        make(ops.CONCAT, y, build.full(y.shape, 2, y.dtype), dim=1),
        make(ops.SUM, y, dims=(3,)),
        make(ops.MAX, y, dims=(0, 2)),
        make(ops.FLIP, y, dims=(1, 3)),
    )
    graph = Graph((x, w, given(8, index=2)), (), outputs)
    buffers = [torch.randn(n.shape) for n in graph.inputs]
    for one, other in zip(all_results(turned(graph), *buffers), all_results(graph, *buffers)):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("op", ["max", "average"])
def test_gradients_and_pools_with_channels_last(op):
    x, w, g = given(2, 3, 8, 6), given(8, 3, 3, 3, index=1), given(2, 8, 4, 3, index=2)
    geometry = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    pool = {"kernel": (2, 2), "stride": (2, 2), "padding": (0, 0), "dilation": (1, 1)}
    y = make(ops.CONVOLUTION, x, w, **geometry)
    if op == "max":
        both = make(ops.MAX_POOL, y, shape=(2, 8, 4, 3), **pool)
        pooled, indices = (make(ops.GET, both, index=i) for i in range(2))
        back = make(ops.MAX_POOL_GRADIENT, g, indices, shape=y.shape)
    else:
        counted = {"count_padding": True, "divisor": 0}
        pooled = make(ops.AVERAGE_POOL, y, shape=(2, 8, 4, 3), **pool, **counted)
        back = make(ops.AVERAGE_POOL_GRADIENT, g, shape=y.shape, **pool, **counted)
        back = back * y
    outputs = (
        pooled,
        make(ops.CONVOLUTION_INPUT_GRADIENT, back, w, shape=x.shape, **geometry),
        make(ops.CONVOLUTION_WEIGHT_GRADIENT, back, x, shape=w.shape, **geometry),
    )
    graph = Graph((x, w, g), (), outputs)
    buffers = [torch.randn(n.shape) for n in graph.inputs]
    for one, other in zip(all_results(turned(graph), *buffers), all_results(graph, *buffers)):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)
