"""Every primitive in every dtype: the backends against the reference, which is torch's CPU."""

import math
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ltc.backends.eager import EagerBackend
from ltc.backends.interface import BackendRegistrar
from ltc.debug import metrics
from ltc.ir import build, ops
from ltc.ir.graph import Graph
from ltc.ir.node import Node, make
from ltc.runtime.partition import compiled
from tests.drawn import drawn

NO_JAX = pytest.mark.skipif(find_spec("jax") is None, reason="JAX is not installed")
BACKENDS = pytest.mark.parametrize("backend", ["llvm", pytest.param("xla", marks=NO_JAX)])
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)
SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, math.inf, -math.inf, math.nan, 3e-5, 70.0)

# Functions may differ by the last places of the dtype; everything else is equal in all bits.
# f16 and bf16 may fall to the neighbouring value; two of those are 2**-9 and 2**-6 apart.
ROUNDING = {
    torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6,
}  # fmt: skip
EXACT = {
    ops.NEG, ops.ABS, ops.SIGN, ops.FLOOR, ops.CEIL, ops.TRUNC, ops.ROUND, ops.NOT,
    ops.ADD, ops.SUB, ops.MUL, ops.DIV, ops.FMOD, ops.NEXTAFTER, ops.COPYSIGN, ops.MAXIMUM,
    ops.MINIMUM, ops.AND, ops.OR, ops.XOR, ops.SHIFT_LEFT, ops.SHIFT_RIGHT, ops.EQ, ops.NE,
    ops.LT, ops.LE, ops.GT, ops.GE,
}  # fmt: skip
WITH_ATTRIBUTES = (ops.WHERE, ops.CAST, ops.BITCAST, ops.WRAP_INDEX, ops.CHECK)
ELEMENTWISE = [
    op for op in ops.ALL.values() if op.kind == "elementwise" and op not in WITH_ATTRIBUTES
]
ONE_OPERAND = ELEMENTWISE[: ELEMENTWISE.index(ops.ADD)]


def values(shape, dtype: torch.dtype) -> torch.Tensor:
    """Random elements of about 1, with a few special ones among them."""
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    if not dtype.is_floating_point:
        low = 0 if dtype == torch.uint8 else -9
        return torch.randint(low, 10, shape, dtype=dtype)
    x = torch.randn(shape, dtype=torch.float64) * 3
    flat = x.view(-1)
    chosen = torch.randperm(flat.numel())[: min(flat.numel() // 3, len(SPECIAL))]
    flat[chosen] = torch.tensor(SPECIAL, dtype=torch.float64)[: len(chosen)]
    return x.to(dtype)


def inputs_of(*tensors: torch.Tensor) -> list[Node]:
    return [
        make(ops.INPUT, index=k, dtype=t.dtype, shape=tuple(t.shape)) for k, t in enumerate(tensors)
    ]


def on(backend, outputs: list[Node], nodes: list[Node], tensors) -> list[torch.Tensor]:
    computation = compiled(backend, Graph(tuple(nodes), (), tuple(outputs)), 0, frozenset())
    results = computation.launch([computation.upload(t, 0) for t in tensors], [])
    return [computation.download(result).clone() for result in results]


def on_both(backend: str, outputs: list[Node], nodes: list[Node], tensors) -> list[tuple]:
    """(what the backend gives, what the reference gives) of each output."""
    expected = on(EagerBackend(), outputs, nodes, tensors)
    with metrics.counted() as grown:
        found = on(BackendRegistrar.get(backend), outputs, nodes, tensors)
    assert not [name for name in grown if name.startswith("CutOut::")]
    return list(zip(found, expected, strict=True))


def assert_same(op, found: torch.Tensor, expected: torch.Tensor, tolerance: float = 0.0) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    torch.testing.assert_close(
        found, expected, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda t: f"{op}: {t}"
    )


@BACKENDS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ELEMENTWISE, ids=lambda op: op.name)
def test_elementwise(backend, op, dtype):
    tensors = [values((37, 3), dtype)]
    if op not in ONE_OPERAND:
        tensors.append(values((3,), dtype))  # broadcast, and its vectors have a tail
    if op in (ops.FLOOR_DIVIDE, ops.TRUNC_DIVIDE, ops.REMAINDER, ops.FMOD) and (dtype in INTEGERS):
        tensors[1] = torch.where(tensors[1] == 0, torch.ones_like(tensors[1]), tensors[1])
    try:
        nodes = inputs_of(*tensors)
        result = make(op, *nodes)
        on(EagerBackend(), [result], nodes, tensors)
    except Exception as error:  # what the op's type rule or torch itself refuses
        refused = ("defined on", "not implemented", "not supported", "Boolean", "bool")
        assert any(word in str(error) for word in refused), error
        pytest.skip(str(error)[:60])
    tolerance = 0.0 if op in EXACT or not dtype.is_floating_point else ROUNDING[dtype] * 4
    if op is ops.FLOOR_DIVIDE and dtype in (torch.float16, torch.bfloat16):
        tolerance = 1.0  # torch rounds the quotient before it takes the floor
    assert_same(op, *on_both(backend, [result], nodes, tensors)[0], tolerance)


@BACKENDS
@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("target", DTYPES, ids=str)
def test_cast(backend, source, target):
    x = values((5, 33), source)
    if source.is_floating_point and not target.is_floating_point:
        x = x.nan_to_num(0, 1, 1).abs()  # any other conversion to an integer is undefined in C
    nodes = inputs_of(x)
    assert_same(ops.CAST, *on_both(backend, [make(ops.CAST, *nodes, dtype=target)], nodes, [x])[0])


@BACKENDS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_choice(backend, dtype):
    tensors = [values((4, 7), torch.bool), values((4, 7), dtype), values((7,), dtype)]
    nodes = inputs_of(*tensors)
    assert_same(ops.WHERE, *on_both(backend, [make(ops.WHERE, *nodes)], nodes, tensors)[0])


@BACKENDS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reductions(backend, dtype):
    x = values((5, 6, 33), dtype)
    nodes, made = inputs_of(x), []
    if dtype == torch.bool:
        names = (ops.ANY, ops.ALL_TRUE, ops.MAX, ops.MIN)
    else:
        names = (ops.SUM, ops.PROD, ops.MAX, ops.MIN)
    made += [make(op, *nodes, dims=dims) for op in names for dims in ((2,), (0,), (0, 1, 2))]
    if dtype != torch.bool:
        made += [make(op, *nodes, dim=d) for op in (ops.ARGMAX, ops.ARGMIN) for d in range(3)]
    if dtype not in (torch.bool, torch.float16):
        made += [make(op, *nodes, dim=d) for op in (ops.CUMSUM, ops.CUMPROD) for d in range(3)]
    for node, (found, expected) in zip(made, on_both(backend, made, nodes, [x])):
        sums = node.op in (ops.SUM, ops.PROD) and dtype.is_floating_point
        # XLA scans in pieces: its sums are those of another order
        sums |= backend == "xla" and node.op.kind == "scan" and dtype.is_floating_point
        if sums:  # a product may overflow on its way, or not, by the order of its factors
            small = expected.abs() < 1e4
            found, expected = found[small], expected[small]
        assert_same(node.op, found, expected, ROUNDING[dtype] * 40 if sums else 0.0)


@BACKENDS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lookups_and_what_undoes_them(backend, dtype):
    x, new = values((9, 5, 17), dtype), values((4, 3, 5, 17), dtype)
    rows, places = torch.randint(9, (4, 3)), torch.randint(5, (9, 2, 17))
    tensors = [x, rows, places, new, values((9, 2, 17), dtype)]
    nodes = inputs_of(*tensors)
    base, index, at, more, single = nodes
    modes = ("set", "add", "multiply", "maximum", "minimum")[: 1 if dtype == torch.bool else None]
    made = [make(ops.TAKE, base, index, dim=0), make(ops.GATHER, base, at, dim=1)]
    made += [make(ops.PUT, base, index, more, dim=0, mode=mode) for mode in modes]
    made += [make(ops.SCATTER, base, at, single, dim=1, mode=mode) for mode in modes]
    for node, (found, expected) in zip(made, on_both(backend, made, nodes, tensors)):
        finite = expected.isfinite() if dtype.is_floating_point else None
        tolerance = ROUNDING[dtype] * 8 if dtype.is_floating_point else 0.0
        if finite is not None:  # inf - inf depends on the order
            found, expected = found[finite], expected[finite]
        assert_same(node.op, found, expected, tolerance)


@BACKENDS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_movements(backend, dtype):
    x, y = values((4, 6, 5), dtype), values((4, 2, 5), dtype)
    nodes = inputs_of(x, y)
    a, b = nodes
    made = [
        make(ops.PERMUTE, a, dims=(2, 0, 1)), make(ops.RESHAPE, a, shape=(5, 24)),
        make(ops.SLICE, a, starts=(1, 0, 1), limits=(4, 6, 5), steps=(2, 3, 1)),
        make(ops.FLIP, a, dims=(0, 2)), make(ops.CONCAT, a, b, a, dim=1),
        make(ops.EXPAND, make(ops.SLICE, a, starts=(0, 0, 0), limits=(4, 1, 5), steps=(1, 1, 1)),
             shape=(3, 4, 7, 5)),
        make(ops.PAD, a, build.cast(make(ops.CONSTANT, literal="1", dtype=torch.int64), dtype),
             low=(1, 0, 2), high=(0, 3, 1)),
        make(ops.INSERT, a, b, starts=(0, 3, 0), steps=(1, 1, 1)),
        make(ops.INSERT, a, b, starts=(0, 1, 0), steps=(1, 3, 1)),
    ]  # fmt: skip
    for node, pair in zip(made, on_both(backend, made, nodes, [x, y])):
        assert_same(node.op, *pair)


# --- random graphs -------------------------------------------------------------------------------

SAFE_ONE = (ops.NEG, ops.ABS, ops.SIGN, ops.FLOOR, ops.TANH, ops.SIN, ops.ERF)
SAFE_TWO = (ops.ADD, ops.SUB, ops.MUL, ops.MAXIMUM, ops.MINIMUM)


@BACKENDS
@drawn(25)
@given(st.data())
def test_random_graphs_give_what_the_reference_gives(backend, data):
    rows, columns = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 70))
    size = rows * columns
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    tensors = [
        torch.randn(rows, columns, generator=generator, dtype=torch.float64),
        torch.randn(columns, generator=generator, dtype=torch.float64),
        torch.randint(rows, (rows,), generator=generator),
    ]
    nodes = inputs_of(*tensors)
    whole = [nodes[0], build.expand(nodes[1], (rows, columns))]
    for _ in range(data.draw(st.integers(1, 12))):
        x, y = (data.draw(st.sampled_from(whole)) for _ in range(2))
        step = data.draw(st.integers(0, 6))
        if step == 0:
            new = make(data.draw(st.sampled_from(SAFE_ONE)), x)
        elif step == 1:
            new = make(data.draw(st.sampled_from(SAFE_TWO)), x, y)
        elif step == 2:
            total = build.reduce(ops.SUM, x, (data.draw(st.integers(0, 1)),), keepdim=True)
            new = build.expand(total, (rows, columns)) * (1.0 / size)
        elif step == 3:
            new = make(ops.TAKE, x, nodes[2], dim=0)
        elif step == 4:
            new = make(ops.PUT, x, nodes[2], y, dim=0, mode="add")
        elif step == 5:
            turned = make(ops.RESHAPE, make(ops.PERMUTE, x, dims=(1, 0)), shape=(rows, columns))
            new = make(ops.FLIP, turned, dims=(data.draw(st.integers(0, 1)),))
        else:
            new = make(ops.CUMSUM, x, dim=data.draw(st.integers(0, 1))) * (1.0 / size)
        whole.append(new)
    outputs = list(dict.fromkeys(whole[-3:]))
    for found, expected in on_both(backend, outputs, nodes, tensors):
        # Values grow by products: what is compared is the error relative to the largest.
        scale = float(expected.nan_to_num(0, 0, 0).abs().max()) + 1.0
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11 * scale, equal_nan=True)
