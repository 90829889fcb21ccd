"""Graphs whose tensors are kept in narrower types than they are reported in."""

import torch

from ltc.backends.eager import EagerBackend
from ltc.backends.llvm.backend import LlvmBackend
from ltc.backends.llvm.compiling import prepared
from ltc.backends.llvm.schedule import planned_steps
from ltc.ir import build, ops
from ltc.ir.graph import Graph, schedule
from ltc.ir.node import make
from ltc.passes import pipeline
from ltc.passes.narrow_dtypes import narrow, round_values
from ltc.passes.pipeline import check

BF16 = {torch.float32: torch.bfloat16, torch.float64: torch.bfloat16}
DOWNCAST = {torch.float32: torch.bfloat16, torch.float64: torch.float32}


def graph_of(*outputs, inputs=()) -> Graph:
    return Graph(tuple(inputs), (), tuple(outputs))


def floats(index: int, *shape: int, dtype=torch.float32):
    return make(ops.INPUT, index=index, dtype=dtype, shape=shape)


def dtypes(graph: Graph) -> set[torch.dtype]:
    return {n.dtype for n in schedule(*graph.outputs)}


def test_without_a_mode_the_graph_is_the_same():
    x = floats(0, 4)
    graph = graph_of(x + 1.0, inputs=[x])
    assert narrow(graph, {}) is graph


def test_inputs_and_outputs_are_narrow_and_what_lies_between_is_float32():
    x, y = floats(0, 4), floats(1, 4, dtype=torch.float64)
    total = make(ops.CAST, x, dtype=torch.float64) * y + 1.0
    graph = narrow(graph_of(total, x, inputs=[x, y]), BF16)
    check(graph, "narrow")
    assert {n.dtype for n in (*graph.inputs, *graph.outputs)} == {torch.bfloat16}
    assert dtypes(graph) == {torch.bfloat16, torch.float32}


def test_double_is_float32_where_float_is_bfloat16():
    x = floats(0, 4, dtype=torch.float64)
    graph = pipeline.run(narrow(graph_of(x * x, inputs=[x]), DOWNCAST))
    assert dtypes(graph) == {torch.float32}


def test_a_product_reads_views_of_the_narrow_input():
    x, y = floats(0, 3, 5), floats(1, 4, 5)
    product = make(ops.MATMUL, x, make(ops.PERMUTE, y, dims=(1, 0)))
    graph = pipeline.run(narrow(graph_of(product, inputs=[x, y]), BF16))
    assert dtypes(graph) == {torch.bfloat16}
    values = [torch.randn(3, 5).bfloat16(), torch.randn(4, 5).bfloat16()]
    (got,) = EagerBackend().compile(graph, 0, frozenset()).launch(values, [])
    torch.testing.assert_close(got, values[0] @ values[1].t())


def test_rows_taken_by_index_stay_narrow_and_their_gradients_are_summed_in_float32():
    table, index = floats(0, 9, 4), make(ops.INPUT, index=1, dtype=torch.int64, shape=(6,))
    rows = make(ops.TAKE, table, index, dim=0)
    zeros = build.full((9, 4), 0.0, torch.float32)
    added = make(ops.PUT, zeros, index, rows, dim=0, mode="add")
    graph = pipeline.run(narrow(graph_of(rows, added, inputs=[table, index]), BF16))
    found = {n.op: n.dtype for n in schedule(*graph.outputs)}
    assert (found[ops.TAKE], found[ops.PUT]) == (torch.bfloat16, torch.float32)


def test_bits_are_those_of_the_reported_dtype():
    x = floats(0, 4, dtype=torch.float64)
    graph = narrow(graph_of(make(ops.BITCAST, x, dtype=torch.int64), inputs=[x]), BF16)
    check(graph, "narrow")
    value = torch.randn(4).bfloat16()
    (got,) = EagerBackend().compile(graph, 0, frozenset()).launch([value], [])
    assert torch.equal(got, value.double().view(torch.int64))


def test_a_value_that_is_rounded_is_rounded_for_every_reader():
    x = floats(0, 64)
    y = x * 1.1
    graph = narrow(graph_of(y + x, y * x, inputs=[x]), BF16)
    wide = next(n for n in schedule(*graph.outputs) if n.op is ops.MUL)
    rounded = pipeline.run(round_values(graph, {wide}))
    value = torch.randn(64).bfloat16()
    got = EagerBackend().compile(rounded, 0, frozenset()).launch([value], [])
    y = (value.float() * 1.1).bfloat16().float()
    assert torch.equal(got[0], (y + value.float()).bfloat16())
    assert torch.equal(got[1], (y * value.float()).bfloat16())


def test_what_kernels_leave_for_one_another_is_narrow():
    """A branch between two products is stored once, as bfloat16; the numbers of rows stay."""
    x, w = floats(0, 64, 64), floats(1, 64, 64)
    hidden = make(ops.TANH, make(ops.MATMUL, x, w))
    total = make(ops.SUM, hidden * hidden, dims=(1,)) + 1.0
    scaled = hidden / make(ops.RESHAPE, total, shape=(64, 1))
    out = make(ops.MATMUL, scaled, w) + hidden
    graph = prepared(pipeline.run(narrow(graph_of(out, inputs=[x, w]), BF16)))
    steps = planned_steps(graph, frozenset())
    written = [n for step in steps for n in step.writes]
    assert all(n.dtype == torch.bfloat16 for n in written if n.type.size == 64 * 64), written
    values = [torch.randn(64, 64).bfloat16(), (torch.randn(64, 64) / 8).bfloat16()]
    program = LlvmBackend().compile(narrow(graph_of(out, inputs=[x, w]), BF16), 0, frozenset())
    (got,) = program.launch(values, [])
    x, w = (v.float() for v in values)
    h = torch.tanh(x @ w)
    expected = (h / ((h * h).sum(1, keepdim=True) + 1)) @ w + h
    torch.testing.assert_close(got.float(), expected, rtol=2**-5, atol=2**-5)
