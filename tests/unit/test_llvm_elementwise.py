"""Generated loops against the reference: dtypes, views, reductions, fusion, donation, threads."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given as examples
from hypothesis import strategies as st

from ltc.backends.eager import EagerBackend
from ltc.backends.interface import BackendImplInterface
from ltc.backends.llvm.backend import LlvmBackend
from ltc.backends.llvm.schedule import is_native
from ltc.debug import metrics
from ltc.ir import build, ops
from ltc.ir.graph import Graph
from ltc.ir.loop_nest import Kernel, Product
from ltc.ir.node import constant, make
from ltc.llvm.emit.builder import LANES
from ltc.llvm.emit.dtype import FORMS
from ltc.llvm.loop_schedule.iteration_space import nest_of
from ltc.llvm.loop_schedule.loop_schedule import schedule_of
from ltc.llvm.loops.emitter import kernel_code
from ltc.passes.fusion.fuse import fuse
from tests.drawn import drawn

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


def given(*shape, index=0, dtype=torch.float32):
    return make(ops.INPUT, index=index, dtype=dtype, shape=shape)


def scalar(slot=0, dtype=torch.float64):
    return make(ops.SCALAR, slot=slot, dtype=dtype, wrapped=True)


def graph_of(*outputs, inputs=(), scalars=()):
    return Graph(tuple(inputs), tuple(scalars), tuple(outputs))


def launched(backend, graph, buffers, numbers=(), donated=()):
    computation = backend.compile(graph, 0, frozenset(donated))
    return computation.launch([b.clone() for b in buffers], list(numbers))


def both(graph, buffers, numbers=()):
    """(results of generated code, results of the reference)"""
    return tuple(launched(b(), graph, buffers, numbers) for b in (LlvmBackend, EagerBackend))


def assert_same_bits(graph, buffers, numbers=()):
    for mine, theirs in zip(*both(graph, buffers, numbers), strict=True):
        assert mine.is_contiguous()
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def sample(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if dtype.is_floating_point:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * 3).to(dtype)
    low = 0 if dtype == torch.uint8 else -100
    return torch.randint(low, 100, shape, generator=generator, dtype=dtype)


def kernels_of(graph):
    return [unit for unit in fuse(graph, is_native) if isinstance(unit, Kernel)]


def test_llvm_is_a_backend():
    assert isinstance(LlvmBackend(), BackendImplInterface)


# --- elementwise ---------------------------------------------------------------------------------

SPECIAL = [
    0.0,
    -0.0,
    math.inf,
    -math.inf,
    math.nan,
    1.0,
    -1.5,
    2.5,
    1e-45,
    3e38,
    -7e-42,
    0.5,
    1e-39,
]
ARITHMETIC = [ops.ADD, ops.SUB, ops.MUL, ops.DIV, ops.MAXIMUM, ops.MINIMUM]
COMPARISONS = [ops.EQ, ops.NE, ops.LT, ops.LE, ops.GT, ops.GE]
EXACT_OF_ONE = [
    ops.NEG, ops.ABS, ops.SIGN, ops.FLOOR, ops.CEIL, ops.TRUNC, ops.ROUND,
]  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ARITHMETIC + COMPARISONS, ids=str)
def test_arithmetic_on_floats_has_the_bits_of_eager(op, dtype):
    x, y = given(13, 13, dtype=dtype), given(13, 13, index=1, dtype=dtype)
    values = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
    grid = [v.contiguous() for v in torch.meshgrid(values, values, indexing="ij")]
    assert_same_bits(graph_of(make(op, x, y), inputs=[x, y]), grid)
    many = [sample(13, 13, dtype=dtype, seed=s) for s in (1, 2)]
    assert_same_bits(graph_of(make(op, x, y), inputs=[x, y]), many)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", EXACT_OF_ONE, ids=str)
def test_exact_functions_have_the_bits_of_eager(op, dtype):
    x = given(113, dtype=dtype)
    values = torch.cat(
        [torch.tensor(SPECIAL, dtype=torch.float64).to(dtype), sample(100, dtype=dtype)]
    )
    assert_same_bits(graph_of(make(op, x), inputs=[x]), [values])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_square_roots_are_the_nearest(dtype):
    """As IEEE 754 wants; eager's library is sometimes one unit beside."""
    x, values = given(10_000, dtype=dtype), sample(10_000, dtype=dtype).abs()
    (mine,) = launched(LlvmBackend(), graph_of(make(ops.SQRT, x), inputs=[x]), [values])
    assert mine.tolist() == np.sqrt(values.numpy()).tolist()


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize(
    "op",
    [ops.ADD, ops.SUB, ops.MUL, ops.MAXIMUM, ops.MINIMUM, ops.AND, ops.OR, ops.XOR, *COMPARISONS],
    ids=str,
)
def test_integers_wrap_around_as_in_eager(op, dtype):
    x, y = given(77, dtype=dtype), given(77, index=1, dtype=dtype)
    edges = [torch.iinfo(dtype).max, torch.iinfo(dtype).min, 0, 1]
    left = torch.cat([torch.tensor(edges, dtype=dtype), sample(73, dtype=dtype)])
    right = torch.cat([torch.tensor(edges[::-1], dtype=dtype), sample(73, dtype=dtype, seed=1)])
    assert_same_bits(graph_of(make(op, x, y), inputs=[x, y]), [left, right])


@pytest.mark.parametrize("target", list(FORMS), ids=str)
@pytest.mark.parametrize("source", list(FORMS), ids=str)
def test_casts_have_the_bits_of_eager(source, target):
    x = given(100, dtype=source)
    values = sample(100, dtype=source)
    if not source.is_signed or not target.is_signed:
        values = values.abs() if source.is_signed else values
    assert_same_bits(graph_of(make(ops.CAST, x, dtype=target), inputs=[x]), [values])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_low_precision_value_survives_and_every_sum_rounds_once(dtype):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    values = bits.view(dtype)
    x, y = given(2**16, dtype=dtype), given(2**16, index=1, dtype=dtype)
    assert_same_bits(graph_of(x + y, x * y, inputs=[x, y]), [values, values.flip(0) * 0.37])


@pytest.mark.parametrize("dtype", FLOATS)
def test_formulas_of_scalars_and_conditions_run_as_one_kernel(dtype):
    x, rate = given(5, 9, dtype=dtype), scalar()
    chosen = make(ops.WHERE, x > 0.0, x * rate, -x)
    graph = graph_of(chosen, inputs=[x], scalars=[rate])
    assert len(kernels_of(graph)) == 1
    assert_same_bits(graph, [sample(5, 9, dtype=dtype)], [0.37])


LONG_ROWS = [(64,), (65,), (200,), (3, 127), (2, 5, 96)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_long_chains_give_the_bits_of_short_rows(dtype):
    """Several vectors are computed at once where rows have them: each as it would be alone."""
    for shape in LONG_ROWS:
        x = sample(*shape, dtype=dtype).abs() + 0.5
        pieces = x.reshape(-1).split(32)
        whole = launched(LlvmBackend(), long_chain(x.shape, dtype), [x], [0.25])[0]
        parts = [
            launched(LlvmBackend(), long_chain(p.shape, dtype), [p], [0.25])[0] for p in pieces
        ]
        assert torch.equal(whole.reshape(-1), torch.cat(parts)), shape


def test_the_rows_of_long_chains_are_vectors_of_many_lanes():
    texts = [kernel_code(*kernels_of(long_chain((n,), torch.float32))).text for n in (63, 64)]
    assert [f"<{4 * LANES} x float>" in text for text in texts] == [False, True]


def long_chain(shape, dtype):
    """exp, log, erf and tanh of one another, between a number and conditions."""
    x = given(*shape, dtype=dtype)
    y = x
    for op in (ops.LOG, ops.EXP, ops.ERF, ops.TANH, ops.EXP):
        y = make(ops.ADD, make(op, y), build.full_like(x, build.cast(scalar(), dtype)))
    result = make(ops.WHERE, make(ops.GT, y, x), y, make(ops.EXP2, x))
    return graph_of(result, inputs=[x], scalars=[scalar()])


# --- views ---------------------------------------------------------------------------------------


def moved(x):
    """Every view of an x [4, 6, 5], alone and in a chain."""
    turned = make(ops.PERMUTE, x, dims=(2, 0, 1))
    part = make(ops.SLICE, x, starts=(1, 0, 1), limits=(4, 6, 5), steps=(2, 3, 1))
    return [
        turned,
        part,
        make(ops.FLIP, x, dims=(0, 2)),
        make(ops.RESHAPE, turned, shape=(10, 12)),
        make(ops.RESHAPE, x, shape=(2, 2, 3, 10)),
        make(ops.EXPAND, make(ops.SLICE, x, starts=(0, 0, 0), limits=(1, 6, 1), steps=(1, 1, 1)),
             shape=(3, 4, 6, 5)),
        make(ops.PAD, part, constant(0.25, x.dtype), low=(1, 0, 2), high=(0, 3, 1)),
        make(ops.CONCAT, x, make(ops.FLIP, x, dims=(1,)), dim=1),
        make(ops.INSERT, x, part * 2.0, starts=(2, 1, 1), steps=(1, 1, 1)),
        make(ops.PAD, make(ops.PERMUTE, make(ops.FLIP, x, dims=(2,)), dims=(2, 1, 0)),
             constant(-1.0, x.dtype), low=(0, 1, 0), high=(17, 0, 2)),
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(10))
def test_views_are_index_maps(number):
    x = given(4, 6, 5)
    view = moved(x)[number]
    graph = graph_of(view, view * 3.0 + 1.0, moved(make(ops.ABS, x) + 1.0)[number], inputs=[x])
    assert_same_bits(graph, [sample(4, 6, 5)])


@pytest.mark.parametrize("dtype", list(FORMS), ids=str)
@pytest.mark.parametrize("shape", [(32, 48), (3, 16, 80), (64, 16), (2, 2, 160, 32)], ids=str)
def test_transposed_operands_are_turned_in_registers(shape, dtype):
    x, y = (
        given(*shape, dtype=dtype),
        given(*shape[:-2], shape[-1], shape[-2], index=1, dtype=dtype),
    )
    rank = len(shape)
    turned = build.transpose(y, rank - 2, rank - 1)
    graph = graph_of(make(ops.MAXIMUM, x, turned), turned, inputs=[x, y])
    assert_same_bits(graph, [sample(*shape, dtype=dtype), sample(*y.shape, dtype=dtype, seed=1)])


def test_a_barrier_is_never_fused_across():
    x = given(40)
    before = x * 2.0
    after = make(ops.BARRIER, before, position=0) + 1.0
    graph = graph_of(after, inputs=[x])
    assert [k.writes() for k in kernels_of(graph)] == [(before,), (after,)]
    assert_same_bits(graph, [sample(40)])


def test_positions_are_counted_in_registers():
    n = make(ops.IOTA, size=37)
    graph = graph_of(n, build.reshape(n, (37, 1)) * n)
    assert_same_bits(graph, [])


# --- reductions ----------------------------------------------------------------------------------

REDUCTIONS = [ops.SUM, ops.PROD, ops.MAX, ops.MIN]


@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("op", REDUCTIONS, ids=str)
def test_reductions_of_integers_have_the_bits_of_eager(op, dims):
    x = given(3, 37, 70, dtype=torch.int64)
    assert_same_bits(
        graph_of(make(op, x, dims=dims), inputs=[x]), [sample(3, 37, 70, dtype=torch.int64)]
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (7, 16), (4, 300), (300, 4), (33, 129)], ids=str)
def test_sums_are_near_the_sum_in_double(shape, dtype):
    x = given(*shape, dtype=dtype)
    values = sample(*shape, dtype=dtype)
    graph = graph_of(*[make(ops.SUM, x, dims=d) for d in ((0,), (1,), (0, 1))], inputs=[x])
    sums = launched(LlvmBackend(), graph, [values])
    for mine, dims in zip(sums, ((0,), (1,), (0, 1))):
        expected = values.double().sum(dims)
        # half a unit of the result's own rounding, and some units of float for the order of sums
        room = torch.finfo(dtype).eps * expected.abs() + 1e-5 * values.double().abs().sum(dims)
        assert ((mine.double() - expected).abs() <= room).all()


@pytest.mark.parametrize("op", [ops.MAX, ops.MIN], ids=str)
@pytest.mark.parametrize("dims", [(0,), (1,)])
def test_a_nan_is_the_extreme_of_its_row(op, dims):
    x = given(40, 50)
    values = sample(40, 50)
    values[3, 7] = values[20, 49] = math.nan
    assert_same_bits(graph_of(make(op, x, dims=dims), inputs=[x]), [values])


@pytest.mark.parametrize("op", [ops.ANY, ops.ALL_TRUE], ids=str)
def test_conditions_reduce(op):
    x = given(6, 45, dtype=torch.bool)
    values = sample(6, 45, dtype=torch.bool)
    values[2], values[4] = True, False
    assert_same_bits(graph_of(make(op, x, dims=(1,)), make(op, x, dims=(0,)), inputs=[x]), [values])


def softmax(x):
    row = (*x.shape[:-1], 1)
    dims = (len(x.shape) - 1,)
    e = make(ops.EXP, x - build.reshape(make(ops.MAX, x, dims=dims), row))
    return e / build.reshape(make(ops.SUM, e, dims=dims), row)


@pytest.mark.parametrize("shape", [(40, 37), (2, 20, 129), (64, 1)], ids=str)
def test_a_softmax_is_one_kernel(shape):
    x = given(*shape)
    graph = graph_of(softmax(x), inputs=[x])
    assert len(kernels_of(graph)) == 1
    (mine,), (theirs,) = both(graph, [sample(*shape)])
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)  # a few roundings


def test_a_value_of_one_tensor_and_its_small_statistics_is_not_kept():
    x, g = given(4096, 64), given(4096, 64, index=1)
    mean = build.sum_of(x, 1, keepdim=True) * constant(1 / 64, x.dtype)
    centred = x - mean
    graph = graph_of(build.exp(centred), build.sum_of(centred * g, 0), inputs=[x, g])
    assert centred not in {node for kernel in kernels_of(graph) for node in kernel.writes()}
    buffers = [sample(4096, 64), sample(4096, 64, seed=1)]
    for mine, theirs in zip(*both(graph, buffers)):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-2)  # 4096 products of size 10


def test_lanes_lie_side_by_side_in_what_is_large_whatever_the_small_operands_do():
    x, g = given(32, 128, 64), given(32, 128, 64, index=1)
    mean, scale = (given(32, 128, 1, index=k) for k in (2, 3))
    graph = graph_of(build.sum_of((x - mean) * scale * g, 1), inputs=[x, g, mean, scale])
    (kernel,) = kernels_of(graph)
    assert schedule_of(nest_of(kernel)).reduces_columns
    buffers = [sample(*node.shape, seed=node.attr("index")) for node in graph.inputs]
    (mine,), (theirs,) = both(graph, buffers)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-2)  # 128 products of size 100


# --- products ------------------------------------------------------------------------------------


def test_a_linear_layer_is_one_product_with_an_epilogue():
    x, w, b = given(20, 30), given(40, 30, index=1), given(40, index=2)
    y = make(ops.MAXIMUM, build.matmul(x, build.transpose(w, 0, 1)) + b, constant(0.0, x.dtype))
    graph = graph_of(y, inputs=[x, w, b])
    units = fuse(graph, is_native, lambda n: n.op is ops.MATMUL, lambda n: True)
    assert [type(u) for u in units] == [Product] and units[0].epilogue is not None
    buffers = [sample(20, 30), sample(40, 30, seed=1), sample(40, seed=2)]
    (mine,), (theirs,) = both(graph, buffers)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)  # 30 products of size 10


def test_an_update_of_many_buffers_is_a_kernel_of_its_own():
    x, g = given(20, 30), given(20, 40, index=1)
    p, average, square = (given(30, 40, index=k) for k in (2, 3, 4))
    gradient = build.matmul(build.transpose(x, 0, 1), g)
    new_average, new_square = average + gradient, square + gradient * gradient
    new = [p - new_average * new_square, new_average, new_square]
    graph = graph_of(*new, inputs=[x, g, p, average, square])
    units = fuse(graph, is_native, lambda n: n.op is ops.MATMUL, lambda n: True)
    assert sorted(type(u).__name__ for u in units) == ["Kernel", "Product"]
    assert next(u for u in units if isinstance(u, Product)).epilogue is None


# --- programs ------------------------------------------------------------------------------------


def test_an_update_is_written_over_the_donated_buffer():
    p, g, rate = given(100), given(100, index=1), scalar()
    graph = graph_of(p - rate * g, inputs=[p, g], scalars=[rate])
    computation = LlvmBackend().compile(graph, 0, frozenset([0]))
    old, grad = torch.ones(100), torch.full((100,), 2.0)
    (new,) = computation.launch([old, grad], [0.5])
    assert new.data_ptr() == old.data_ptr() and new.sum() == 0


def test_two_parameters_that_exchange_values_do_so():
    p, q = given(50), given(50, index=1)
    graph = graph_of(q + 0.0, p + 0.0, inputs=[p, q])
    new = launched(LlvmBackend(), graph, [torch.zeros(50), torch.ones(50)], donated=[0, 1])
    assert [n.mean().item() for n in new] == [1, 0]


def test_a_donated_buffer_that_is_read_transposed_is_left_alone():
    p = given(20, 20)
    graph = graph_of(p + build.transpose(p, 0, 1), inputs=[p])
    old = sample(20, 20)
    (new,) = LlvmBackend().compile(graph, 0, frozenset([0])).launch([old.clone()], [])
    assert torch.equal(new, old + old.t())


def test_an_error_leaves_donated_buffers_as_they_were():
    x, index, p = given(3), given(2, index=1, dtype=torch.int64), given(3, index=2)
    checked = make(ops.WRAP_INDEX, index, size=3, lowest=-3, message="{} is outside")
    graph = graph_of(p + 1.0, build.take(x, checked, 0), inputs=[x, index, p])
    parameter = torch.zeros(3)
    computation = LlvmBackend().compile(graph, 0, frozenset([2]))
    with pytest.raises(IndexError, match="9 is outside") as raised:
        computation.launch([torch.zeros(3), torch.tensor([0, 9]), parameter], [])
    assert raised.value.overwritten == () and parameter.tolist() == [0, 0, 0]


def test_outputs_share_no_memory_but_with_the_twins_that_are_named():
    x = given(20, 3)
    y = -x
    outputs = [x, y, build.transpose(y, 0, 1), build.reshape(y, (60,)), y, constant(1.0, x.dtype)]
    buffer = sample(20, 3)
    computation = LlvmBackend().compile(graph_of(*outputs, inputs=[x]), 0, frozenset())
    made = computation.launch([buffer], [])
    assert (
        computation.capabilities.aliased_outputs == ((1, 4),)
        and made[1].data_ptr() == made[4].data_ptr()
    )
    assert len({m.data_ptr() for m in [*made, buffer]}) == len(made)
    assert all(m.is_contiguous() for m in made)


def test_results_do_not_depend_on_the_number_of_threads():
    x = given(700, 900)
    total = make(ops.SUM, make(ops.EXP, x), dims=(0, 1))
    columns, rows = make(ops.SUM, x, dims=(0,)), make(ops.SUM, x, dims=(1,))
    graph = graph_of(total, columns, rows, softmax(x), inputs=[x])
    values, before, found = sample(700, 900), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            found.append(launched(LlvmBackend(), graph, [values]))
    finally:
        torch.set_num_threads(before)
    for one in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], one))


def test_random_bits_are_those_of_the_reference():
    seed = scalar(dtype=torch.int64)
    for bits in (1, 24, 32, 33, 53, 63):
        made = make(ops.RANDOM_BITS, seed, shape=(5, 37), bits=bits, stream=2)
        turned = build.transpose(made, 0, 1) + 0
        assert_same_bits(graph_of(made, turned, scalars=[seed]), [], [0x1234_5678_9ABC_DEF0])


@pytest.mark.parametrize("shape", [(64,), (5, 64), (3, 8, 12), (4, 20, 6), (6, 36)])
def test_random_bits_of_whole_blocks_are_those_of_the_reference(shape):
    seed = scalar(dtype=torch.int64)
    for bits in (1, 24, 32):
        made = make(ops.RANDOM_BITS, seed, shape=shape, bits=bits, stream=1)
        longer = make(ops.RANDOM_BITS, seed, shape=(shape[0] + 4, *shape[1:]), bits=bits, stream=1)
        later = build.slice_dim(longer, 0, 4, shape[0] + 4)
        graph = graph_of(made, later + 0, scalars=[seed])
        assert_same_bits(graph, [], [0x1234_5678_9ABC_DEF0])


def test_what_random_numbers_decide_is_stored_and_not_the_numbers():
    x, w, seed = given(64, 128), given(128, 32, index=1), scalar(dtype=torch.int64)
    bits = make(ops.RANDOM_BITS, seed, shape=(64, 128), bits=24, stream=0)
    numbers = build.cast(bits, torch.float32) * 2.0**-24
    kept = build.cast(make(ops.GE, numbers, constant(0.25, torch.float32)), torch.float32)
    result = build.matmul(x * kept, w)
    back = build.matmul(result, build.transpose(w, 0, 1)) * kept
    graph = graph_of(result, back, inputs=[x, w], scalars=[seed])
    units = fuse(graph, is_native, lambda n: n.op is ops.MATMUL, lambda n: True)
    kernels = [u.epilogue if isinstance(u, Product) else u for u in units]
    stored = [store.node.dtype for kernel in kernels if kernel for store in kernel.stores]
    assert torch.bool in stored and torch.int64 not in stored
    (mine, again), (theirs, expected) = both(graph, [sample(64, 128), sample(128, 32)], [7])
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-3)  # 128 products of size 10
    torch.testing.assert_close(again, expected, rtol=1e-5, atol=1e-2)


def test_equal_kernels_are_compiled_once():
    x, y = given(1234), given(1234, index=1)
    # What drives a program's kernels is compiled with the first one.
    launched(LlvmBackend(), graph_of(x - y, inputs=[x, y]), [sample(1234)] * 2)
    with metrics.counted() as grown:
        for a, b in ((x, y), (y, x)):
            launched(LlvmBackend(), graph_of(a * b + 0.125, inputs=[x, y]), [sample(1234)] * 2)
    assert grown.get("llvm.compiled", 0) == 1


# --- random graphs -------------------------------------------------------------------------------

ONE = [ops.NEG, ops.ABS, ops.FLOOR, ops.SIGN]
TWO = [ops.ADD, ops.SUB, ops.MUL, ops.MAXIMUM, ops.MINIMUM]


@st.composite
def random_graphs(draw):
    """Nodes over small exact numbers, so that every order of operations gives the same bits."""
    extents = draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    nodes = [given(*extents), given(*extents, index=1), given(extents[-1], index=2)]
    for _ in range(draw(st.integers(1, 14))):
        x = nodes[draw(st.integers(0, len(nodes) - 1))]
        nodes.append(draw(one_more(x, nodes)))
    count = draw(st.integers(1, 4))
    outputs = [nodes[-1 - k] for k in range(min(count, len(nodes) - 3))]
    return graph_of(*outputs, inputs=nodes[:3]), extents


@st.composite
def one_more(draw, x, nodes):
    rank = len(x.shape)
    kinds = [
        "one",
        "two",
        "reduce",
        "permute",
        "slice",
        "flip",
        "pad",
        "concat",
        "reshape",
        "expand",
    ]
    kind = draw(st.sampled_from(kinds))
    if kind == "two":
        fitting = [n for n in nodes if n.shape == x.shape or n.type.size == 1] + [x]
        return make(draw(st.sampled_from(TWO)), x, draw(st.sampled_from(fitting)))
    if rank and kind == "reduce":
        dims = draw(st.sets(st.integers(0, rank - 1), min_size=1))
        op = draw(st.sampled_from([ops.MAX, ops.MIN]))
        return make(op, x, dims=tuple(sorted(dims)))
    if rank and kind == "permute":
        return make(ops.PERMUTE, x, dims=tuple(draw(st.permutations(range(rank)))))
    if rank and kind == "slice":
        starts = [draw(st.integers(0, n - 1)) for n in x.shape]
        limits = [draw(st.integers(a + 1, n)) for a, n in zip(starts, x.shape)]
        steps = [draw(st.integers(1, 3)) for _ in starts]
        return make(ops.SLICE, x, starts=tuple(starts), limits=tuple(limits), steps=tuple(steps))
    if rank and kind == "flip":
        return make(ops.FLIP, x, dims=(draw(st.integers(0, rank - 1)),))
    if rank and kind == "pad":
        low, high = ([draw(st.integers(0, 3)) for _ in x.shape] for _ in range(2))
        return make(ops.PAD, x, constant(0.5, x.dtype), low=tuple(low), high=tuple(high))
    if rank and kind == "concat":
        return make(ops.CONCAT, x, -x, dim=draw(st.integers(0, rank - 1)))
    if rank and kind == "reshape":
        shape = draw(st.permutations(x.shape))
        return make(ops.RESHAPE, x, shape=draw(st.sampled_from([(x.type.size,), tuple(shape)])))
    if kind == "expand" and x.type.size < 2000:
        return make(ops.EXPAND, x, shape=(draw(st.integers(1, 4)), *x.shape))
    return make(draw(st.sampled_from(ONE)), x)


@drawn(60)
@examples(random_graphs(), st.integers(0, 1000))
def test_random_graphs_have_the_bits_of_the_reference(case, seed):
    graph, extents = case
    generator = torch.Generator().manual_seed(seed)
    shapes = [extents, extents, extents[-1:]]
    buffers = [torch.randint(-3, 4, s, generator=generator).float() for s in shapes]
    assert_same_bits(graph, buffers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.float32])
@pytest.mark.parametrize("columns", [17, 33])
def test_a_tail_of_one_element_leaves_the_next_one_alone(dtype, columns):
    """Rows are written from the last to the first: what goes over the end of one is seen."""
    x = given(5, columns, index=0, dtype=dtype)
    graph = graph_of(make(ops.CUMSUM, make(ops.FLIP, x, dims=(0,)), dim=0), inputs=[x])
    value = torch.ones(5, columns, dtype=dtype)
    (found,) = LlvmBackend().compile(graph, 0, frozenset()).launch([value], [])
    assert torch.equal(found, value.cumsum(0).to(dtype))
