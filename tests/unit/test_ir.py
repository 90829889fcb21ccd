"""Nodes, graphs, their text and their verifier."""

import gc
import math
import threading

import pytest
import torch

from ltc.backends.interface import LoweringContext, NodeLowering
from ltc.errors import InvalidGraph, Unsupported
from ltc.ir import build, node, ops
from ltc.ir.graph import Graph, schedule
from ltc.ir.node import Node, constant, constant_value, make
from ltc.ir.tensor_type import TensorType
from ltc.passes.pipeline import check


def given(*shape, index=0, dtype=torch.float32):
    return make(ops.INPUT, index=index, dtype=dtype, shape=shape)


def test_equal_expressions_are_one_node():
    x, y = given(2, 3), given(3, index=1)
    assert x * y + 1 is x * y + 1.0
    assert x * y is not y * x


def test_constants_are_keyed_by_their_text():
    zero, minus_zero = constant(0.0, torch.float32), constant(-0.0, torch.float32)
    assert zero is not minus_zero
    assert constant(math.nan, torch.float32) is constant(math.nan, torch.float32)
    assert constant(1, torch.float32) is constant(True, torch.float32)
    assert constant(1, torch.int64) is not constant(1, torch.float64)


@pytest.mark.parametrize("value", [0.1, -0.0, math.inf, -math.inf, 1e-45, 2.0**60])
def test_a_constant_keeps_its_value(value):
    read = constant_value(constant(value, torch.float64))
    assert math.copysign(1, read) == math.copysign(1, value) and read == value


def test_attributes_of_different_types_make_different_nodes():
    x = given(2)
    assert make(ops.BARRIER, x, position=1) is not make(ops.BARRIER, x, position=True)


def test_a_node_is_freed_with_its_last_reference():
    gc.collect()
    before = len(node._interned)
    x = build.exp(given(5, 7, 11, index=77))
    assert len(node._interned) == before + 2
    del x
    assert len(node._interned) == before


def test_a_chain_of_200_000_nodes_is_made_scheduled_shown_and_freed():
    gc.collect()
    before = len(node._interned)
    x = given(4, index=78)
    for _ in range(200_000):
        x = make(ops.NEG, x)
    order = schedule(x)
    assert len(order) == 200_001 and order[-1] is x
    assert str(Graph((order[0],), (), (x,))).count("\n") == 200_000
    del order, x
    assert len(node._interned) == before


def test_a_chain_is_freed_in_a_thread_with_a_small_stack():
    def make_and_free():
        x = given(4, index=79)
        for _ in range(200_000):
            x = make(ops.NEG, x)

    old = threading.stack_size(512 * 1024)
    try:
        thread = threading.Thread(target=make_and_free)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(old)


def test_a_graph_prints_as_text():
    x, y = given(64, 784), given(784, index=1)
    graph = Graph((x, y), (), (x * y * 0.5,))
    assert str(graph) == (
        "%0 = input            f32[64,784]    index=0\n"
        "%1 = input            f32[784]       index=1\n"
        "%2 = mul %0 %1        f32[64,784]\n"
        "%3 = constant         f32[]          literal=0.5\n"
        "%4 = mul %2 %3        f32[64,784]"
    )


def test_operands_of_different_dtype_are_refused_with_the_way_out():
    with pytest.raises(InvalidGraph, match=r"f32\[2\], i64\[2\] differ in dtype.*promote"):
        make(ops.ADD, given(2), given(2, index=1, dtype=torch.int64))


@pytest.mark.parametrize(
    "make_wrong",
    [
        lambda x: make(ops.RESHAPE, x, shape=(5,)),
        lambda x: make(ops.PERMUTE, x, dims=(0, 0)),
        lambda x: make(ops.SLICE, x, starts=(0, 0), limits=(2, 4), steps=(1, 1)),
        lambda x: make(ops.EXPAND, x, shape=(4, 3)),
        lambda x: make(ops.SUM, x, dims=(2,)),
        lambda x: make(ops.MATMUL, x, x),
        lambda x: make(ops.ADD, x, given(5, index=1)),
        lambda x: make(ops.AND, x, x),
        lambda x: make(ops.TAKE, x, x, dim=0),
    ],
)
def test_what_does_not_fit_is_refused(make_wrong):
    with pytest.raises(InvalidGraph):
        make_wrong(given(2, 3))


def test_the_verifier_finds_a_wrong_type():
    x = given(2, 3)
    wrong = Node(ops.NEG, (x,), (), TensorType(torch.float32, (3, 2)))
    with pytest.raises(InvalidGraph, match=r"after fuse: .* should have type f32\[2,3\]"):
        check(Graph((x,), (), (wrong,)), after="fuse")


def test_the_verifier_finds_an_undeclared_input():
    x, y = given(2), given(2, index=1)
    with pytest.raises(InvalidGraph, match="is not an input of the graph"):
        check(Graph((x,), (), (x + y,)), after="tracing")


def test_the_verifier_finds_a_tuple_among_the_outputs():
    x = given(1, 1, 4, 4)
    pooled = make(
        ops.MAX_POOL, x, shape=(1, 1, 2, 2), kernel=(2, 2), stride=(2, 2), padding=(0, 0),
        dilation=(1, 1),
    )  # fmt: skip
    with pytest.raises(InvalidGraph, match="is a tuple"):
        check(Graph((x,), (), (pooled,)), after="tracing")


def test_a_table_and_the_context_run_a_graph():
    x = given(2)
    table = {ops.ADD: lambda n, a, b: a + b, ops.MUL: lambda n, a, b: a * b}
    context = LoweringContext(NodeLowering(table), {x: 3})
    assert context.lower(x * x + x, x * x) == (12, 9)


def test_a_missing_row_is_named():
    x = given(2)
    lowering = NodeLowering({})
    assert not lowering.supports(x)
    with pytest.raises(Unsupported, match="neg giving .* has no row"):
        LoweringContext(lowering, {x: 1}).lower(-x)


def test_threads_that_make_the_same_nodes_share_them():
    barrier, made = threading.Barrier(4), []

    def run():
        for i in range(300):
            barrier.wait()
            made.append((i, given(3, index=1000 + i)))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(x) for _, x in made}) == 300
