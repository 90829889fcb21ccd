"""Generated matrix products against float64 ones: shapes, strides, dtypes, instruction sets."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ltc.backends.llvm.compiling import prepared
from ltc.backends.llvm.schedule import units_of
from ltc.ir import ops
from ltc.ir.graph import Graph
from ltc.ir.loop_nest import Product
from ltc.ir.node import make
from ltc.llvm.emit.isa import AVX2, AVX512, AVX512_BF16, NEON, SSE2, host_isa
from ltc.llvm.gemm import blocking
from ltc.llvm.gemm.blocking import (
    Blocking,
    Matrix,
    Shape,
    plan_of,
    stored_plain,
    stored_transposed,
)  # fmt: skip
from ltc.llvm.gemm.kernel import matmul
from ltc.llvm.ops.dispatch import can_multiply, product_codes
from tests.drawn import drawn
from tests.unit.llvm_kernels import HOST, ISAS, guarded, is_untouched, run, tolerance

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def operand(batch, rows, columns, is_transposed, dtype):
    """A random matrix as torch sees it, its memory, and its strides."""
    if is_transposed:
        memory = torch.randn(*batch, columns, rows).to(dtype)
        return memory.mT, memory, stored_transposed(rows, columns, batch)
    memory = torch.randn(*batch, rows, columns).to(dtype)
    return memory, memory, stored_plain(rows, columns, batch)


def check(isa, dtype, batch, m, n, k, transposes=(False, False)):
    x, left, left_matrix = operand(batch, m, k, transposes[0], dtype)
    y, right, right_matrix = operand(batch, k, n, transposes[1], dtype)
    kernel = matmul(
        "kernel", dtype, batch, (m, n, k), left_matrix, right_matrix, stored_plain(m, n, batch), isa
    )
    result, memory = guarded((*batch, m, n), dtype)
    run(kernel, isa, left, right, result)
    error = (result.double() - x.double() @ y.double()).abs()
    assert is_untouched(memory)
    assert not error.numel() or error.max() <= tolerance(dtype, k)
    again, _ = guarded((*batch, m, n), dtype)
    run(kernel, isa, left, right, again, tasks=1)
    assert torch.equal(result, again), "the number of tasks changed a result"


extents = st.sampled_from([0, 1, 2, 3, 5, 8, 13, 16, 17, 31, 33, 64, 65, 70])


@drawn(60)
@given(
    st.sampled_from(DTYPES), st.sampled_from([(), (3,), (2, 2)]), extents, extents, extents,
    st.tuples(st.booleans(), st.booleans()),
)  # fmt: skip
def test_products_of_any_shape(dtype, batch, m, n, k, transposes):
    check(HOST, dtype, batch, m, n, k, transposes)


@pytest.mark.parametrize("dtype, k", [(torch.float32, 1024), (torch.float64, 512)])
def test_rows_that_share_a_set_of_the_cache_are_read_by_few_at_a_time(dtype, k):
    """More than eight lines of one set would put each other out at every step."""

    def height(k):
        matrices = stored_plain(70, k), stored_transposed(k, 70), stored_plain(70, 70)
        return plan_of(dtype, AVX512, Shape((), 70, 70, k, *matrices), False).height

    assert height(k) < height(k + 8)
    check(HOST, dtype, (), 70, 70, k, (False, True))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("m, n, k", [(5, 7, 80), (13, 35, 999), (32, 130, 513), (64, 17, 2049)])
def test_few_rows_times_rows_are_read_in_place(dtype, m, n, k):
    """Their sums end anywhere in a vector, a square of rows and columns, and a strip of squares."""
    check(HOST, dtype, (2,), m, n, k, (False, True))


def test_no_right_operand_is_packed_for_few_rows_of_many_steps():
    def is_packed(m, k):
        matrices = stored_plain(m, k), stored_transposed(k, 70), stored_plain(m, 70)
        plan = plan_of(torch.float32, AVX512, Shape((), m, 70, k, *matrices), False)
        return not plan.by_dot_tiles

    assert not is_packed(16, 256) and not is_packed(64, 1024)
    assert is_packed(16, 128) and is_packed(65, 9216)


@pytest.mark.parametrize("m, n, k", [(0, 70, 70), (70, 0, 70), (70, 70, 0), (0, 0, 0)])
@pytest.mark.parametrize("transposes", [(False, False), (False, True), (True, False), (True, True)])
def test_products_without_rows_columns_or_steps(m, n, k, transposes):
    check(HOST, torch.float32, (3,), m, n, k, transposes)


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposes", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("m, n, k", [(33, 37, 50), (3, 40, 100), (1, 33, 70), (64, 65, 34)])
def test_every_transposition_on_every_instruction_set(isa, dtype, transposes, m, n, k):
    check(isa, dtype, (2,), m, n, k, transposes)


@pytest.mark.parametrize("transposes", [(False, False), (True, True)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_sum_is_packed_in_pieces(dtype, transposes):
    check(HOST, dtype, (), 61, 35, 9000, transposes)


def test_any_strides():
    x, y = torch.randn(7, 2, 9, 2), torch.randn(11, 3, 9)
    result = torch.empty(7, 11)
    kernel = matmul(
        "kernel", torch.float32, (), (7, 11, 9), Matrix(36, 2), Matrix(1, 27), Matrix(11, 1), HOST
    )
    run(kernel, HOST, x, y, result)
    assert torch.allclose(result, x[:, 0, :, 0] @ y[:, 0, :].T, atol=1e-5)
    every_other = torch.randn(9, 11, 2)
    kernel = matmul(
        "kernel", torch.float32, (), (7, 11, 9), Matrix(36, 2), Matrix(22, 2), Matrix(11, 1), HOST
    )
    run(kernel, HOST, x, every_other, result)
    assert torch.allclose(result, x[:, 0, :, 0] @ every_other[:, :, 0], atol=1e-5)


@pytest.mark.parametrize(
    "m, n, k, transposes",
    [(30, 37, 64, False), (3, 37, 64, True), (30, 37, 64, True), (30, 37, 500, True)],
)
def test_an_epilogue_sees_every_element_once(m, n, k, transposes):
    """Adds a column's bias and an element's residual, both read with the mask it is given."""
    x, left, left_matrix = operand((2,), m, k, False, torch.float32)
    y, right, right_matrix = operand((2,), k, n, transposes, torch.float32)
    bias, residual = torch.randn(n), torch.randn(2, m, n)

    def load(builder, pointer, offset, mask):
        width = builder.width
        vector, lanes = builder.of("float"), builder.of("i1")
        at = builder.address(pointer, offset, "float")
        name = f"llvm.masked.load.v{width}f32.p0"
        builder.declare(name, vector, "ptr", "i32", lanes, vector)
        return builder.effect(
            f"call {vector} @{name}(ptr {at}, i32 4, {lanes} {mask or 'splat (i1 true)'}, "
            f"{vector} zeroinitializer)"
        )

    def epilogue(builder, value, row, column, mask):
        flat = builder.value(f"mul i64 {row}, {n}")
        flat = builder.value(f"add i64 {flat}, {column}")
        for term in (load(builder, "%p3", column, mask), load(builder, "%p4", flat, mask)):
            value = builder.binary("fadd", "float", value, term)
        return value

    kernel = matmul(
        "kernel", torch.float32, (2,), (m, n, k), left_matrix, right_matrix,
        stored_plain(m, n, (2,)), HOST, epilogue, operands=2,
    )  # fmt: skip
    result = torch.empty(2, m, n)
    run(kernel, HOST, left, right, result, bias, residual)
    assert torch.allclose(result, x @ y + bias + residual, atol=1e-4)


def test_rows_have_the_same_bits_whatever_rows_are_beside_them():
    x, y = torch.randn(70, 50), torch.randn(50, 33)
    results = []
    for m in (70, 29):
        result = torch.empty(m, 33)
        strides = stored_plain(m, 50), stored_plain(50, 33), stored_plain(m, 33)
        kernel = matmul("kernel", torch.float32, (), (m, 33, 50), *strides, HOST)
        run(kernel, HOST, x, y, result)
        results.append(result)
    assert torch.equal(results[0][:29], results[1])


@pytest.mark.parametrize("transposes", [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_twenty_batch_sizes_have_one_text(dtype, transposes):
    texts = set()
    for m in range(64, 104, 2):
        left = Matrix(1, 512) if transposes[0] else stored_plain(m, 66)
        right = (stored_transposed if transposes[1] else stored_plain)(66, 40)
        kernel = matmul("kernel", dtype, (), (m, 40, 66), left, right, stored_plain(m, 40), HOST)
        assert kernel.numbers[:2] == (m, 66)
        texts.add(kernel.text)
    assert len(texts) == 1


def test_steps_of_a_weight_gradient_are_a_number():
    texts = {
        matmul(
            "kernel", torch.float32, (), (48, 40, k), stored_transposed(48, k),
            stored_plain(k, 40), stored_plain(48, 40), HOST,
        ).text
        for k in range(64, 104)
    }  # fmt: skip
    assert len(texts) == 1


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [7, 13, 29, 300])
def test_strips_of_packed_rows(isa, dtype, m):
    for k in (64, 130, 1500):
        check(isa, dtype, (2,), m, 70, k, (True, False))
        check(isa, dtype, (), m, 33, k, (True, True))


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_strips_whose_steps_collide(isa, dtype):
    """More columns than a strip keeps the sums of, and more steps than it packs at once."""
    for m, n, k in ((512, 1101, 401), (1024, 90, 901)):
        for transposed in (False, True):
            check(isa, dtype, (), m, n, k, (True, transposed))


def test_rows_of_a_weight_gradient_are_packed_where_registers_are_few():
    def packs(isa, m):
        matrices = stored_transposed(m, 700), stored_plain(700, 256), stored_plain(m, 256)
        return plan_of(torch.float32, isa, Shape((), m, 256, 700, *matrices), False).packs_left

    assert packs(AVX2, 512) and packs(AVX2, 500)
    assert not packs(AVX2, 6), "one block reads them once"
    assert not packs(AVX512, 512)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposes", [(False, False), (True, False), (False, True)])
def test_one_column_is_a_row_turned(dtype, transposes):
    for m in (1, 5, 70):
        check(HOST, dtype, (3,), m, 1, 40, transposes)


def products_of(node, *inputs):
    units = list(units_of(prepared(Graph(inputs, (), (node,)))))
    assert all(isinstance(unit, Product) for unit in units), "an operand is copied"
    return units


def test_a_node_reads_through_permuted_expanded_and_reshaped_operands():
    x = make(ops.INPUT, index=0, dtype=torch.float32, shape=(2, 9, 4, 8))
    weight = make(ops.INPUT, index=1, dtype=torch.float32, shape=(5, 8))
    heads = make(ops.PERMUTE, x, dims=(0, 2, 1, 3))
    turned = make(ops.EXPAND, make(ops.PERMUTE, weight, dims=(1, 0)), shape=(2, 4, 8, 5))
    (product,) = products_of(make(ops.MATMUL, heads, turned), x, weight)
    assert product.reads() == (x, weight)


def test_a_batch_times_one_matrix_is_one_tall_product():
    x = make(ops.INPUT, index=0, dtype=torch.float32, shape=(4, 6, 8))
    weight = make(ops.INPUT, index=1, dtype=torch.float32, shape=(8, 5))
    node = make(ops.MATMUL, x, make(ops.EXPAND, weight, shape=(4, 8, 5)))
    flat = make(ops.MATMUL, make(ops.RESHAPE, x, shape=(24, 8)), weight)
    (batched,), (tall,) = (products_of(n, x, weight) for n in (node, flat))
    assert [c.text for c in product_codes(batched)] == [c.text for c in product_codes(tall)]


def test_integers_have_no_kernel():
    x = make(ops.INPUT, index=0, dtype=torch.int64, shape=(4, 4))
    assert not can_multiply(make(ops.MATMUL, x, x))


def test_a_host_is_described_by_its_features():
    avx512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16", "avx2", "fma"}
    assert host_isa(avx512.__contains__) is AVX512_BF16
    assert host_isa({"avx2", "fma"}.__contains__) is AVX2
    assert host_isa({"neon"}.__contains__) is NEON
    assert host_isa({"sse2"}.__contains__) is SSE2


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "m, n, k, is_transposed",
    [(70, 90, 300, False), (70, 90, 300, True), (70, 50, 9000, True), (1, 200, 300, False),
     (61, 40, 9000, False)],
)  # fmt: skip
def test_every_blocking_has_the_same_bits(isa, dtype, m, n, k, is_transposed, monkeypatch):
    _, left, left_matrix = operand((), m, k, False, dtype)
    _, right, right_matrix = operand((), k, n, is_transposed, dtype)

    def product() -> torch.Tensor:
        result = torch.empty(m, n, dtype=dtype)
        strides = left_matrix, right_matrix, stored_plain(m, n)
        run(matmul("kernel", dtype, (), (m, n, k), *strides, isa), isa, left, right, result)
        return result

    expected = product()
    must_pack = is_transposed or dtype is torch.bfloat16 or n % isa.lanes(dtype.itemsize)
    for vectors in (4, 8, 16) if m == 1 else (1, 2, 3, 4):
        for packs in (True,) if must_pack else (True, False):
            one = Blocking(vectors, packs)
            monkeypatch.setattr(blocking, "blocking_of", lambda *_, one=one: one)
            assert torch.equal(product(), expected), one


@pytest.mark.parametrize("k, streams", [(1024, 4), (512, 8), (1040, 16), (100, 16), (4096, 4)])
def test_rows_of_one_set_of_a_cache_take_half_of_its_lines(k, streams):
    shape = Shape((), 1, 64, k, stored_plain(1, k), stored_transposed(k, 64), stored_plain(1, 64))
    plan = plan_of(torch.float32, AVX512, shape, is_transposed=False)
    assert plan.by_dots and plan.streams == streams
