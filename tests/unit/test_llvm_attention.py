"""Generated attention and its gradient against float64 formulas: shapes, masks, dtypes, strides."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ltc.backends.reference.attention import kept_of
from ltc.errors import Unsupported
from ltc.llvm.attention.backward import attention_gradient
from ltc.llvm.attention.forward import attention_kernel
from ltc.llvm.attention.scores import Attention
from ltc.llvm.conv.geometry import KernelSequence
from ltc.llvm.emit.isa import AVX2
from ltc.llvm.gemm.blocking import Matrix, stored_plain
from tests.drawn import drawn
from tests.unit.llvm_kernels import HOST, ISAS, guarded, is_untouched, run_all, tolerance

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
BIASES = [None, "mask", "padding", "number", "transposed"]
SEED = torch.tensor(77)


@dataclass
class Case:
    """One attention over random operands, and what it should give in float64."""

    batch: int
    queries: int
    keys: int
    extent: int
    width: int
    dtype: torch.dtype = torch.float32
    bias: str | None = None
    causal: bool = False
    dropped: float = 0.0

    def __post_init__(self):
        b, n, s, e, v = self.batch, self.queries, self.keys, self.extent, self.width
        shapes = {"query": (n, e), "key": (s, e), "value": (s, v), "gradient": (n, v)}
        self.given = {k: torch.randn(b, *shape).to(self.dtype) for k, shape in shapes.items()}
        self.given["scale"] = torch.tensor(1 / math.sqrt(e), dtype=torch.float64)
        self.bias_at = self._bias()
        if self.dropped:
            self.given["seed"] = SEED
            self.given["probability"] = torch.tensor(self.dropped, dtype=torch.float64)
        self._solve()

    def _bias(self) -> Matrix | None:
        b, n, s = self.batch, self.queries, self.keys
        if self.bias is None:
            return None
        if self.bias == "padding":
            self.given["bias"] = torch.rand(b, 1, s) > 0.4
            return Matrix(0, 1, (s,))
        mask = torch.rand(b, n, s) > 0.4
        mask[:, n // 2] = False  # a row of which no score counts
        if self.bias == "mask":
            self.given["bias"] = mask
            return stored_plain(n, s, (b,))
        numbers = torch.randn(b, n, s).masked_fill(~mask, -torch.inf).to(self.dtype)
        if self.bias == "number":
            self.given["bias"] = numbers
            return stored_plain(n, s, (b,))
        self.given["bias"] = numbers.mT.contiguous()
        return Matrix(1, n, (n * s,))

    def _solve(self) -> None:
        q, k, v, g = (self.given[x].double() for x in ("query", "key", "value", "gradient"))
        scale = float(self.given["scale"])
        scores = q @ k.mT * scale
        bias = self.given.get("bias")
        if bias is not None:
            bias = bias.mT if self.bias == "transposed" else bias
            is_mask = bias.dtype == torch.bool
            scores = scores.masked_fill(~bias, -torch.inf) if is_mask else scores + bias.double()
        if self.causal:
            seen = torch.ones(self.queries, self.keys, dtype=torch.bool).tril()
            scores = scores.masked_fill(~seen, -torch.inf)
        self.logarithms = torch.logsumexp(scores, -1)
        column = self.logarithms[..., None]
        weights = torch.where(column == -torch.inf, 0.0, torch.exp(scores - column))
        kept = 1.0
        if self.dropped:
            kept = kept_of(weights.shape, SEED, self.dropped, torch.float64)
        self.result = (weights * kept) @ v
        to_weights = (g @ v.mT) * kept
        along = (weights * to_weights).sum(-1, keepdim=True)
        to_scores = weights * (to_weights - along)
        self.gradients = {
            "query_gradient": to_scores @ k * scale, "key_gradient": to_scores.mT @ q * scale,
            "value_gradient": (weights * kept).mT @ g, "bias_gradient": to_scores,
        }  # fmt: skip

    @property
    def attention(self) -> Attention:
        b, n, s, e, v = self.batch, self.queries, self.keys, self.extent, self.width
        bias = self.given.get("bias")
        return Attention(
            self.dtype, (b,), n, s, e, v, self.plain(n, e), self.plain(s, e), self.plain(s, v),
            self.bias_at, bias is not None and bias.dtype == torch.bool, self.causal,
            bool(self.dropped),
        )  # fmt: skip

    def plain(self, rows: int, columns: int) -> Matrix:
        return stored_plain(rows, columns, (self.batch,))

    @property
    def summed(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32


def is_close(made: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, count: int) -> bool:
    scale = 1 + expected.abs().max() if expected.numel() else 1
    return bool(((made.double() - expected).abs() <= tolerance(dtype, count) * scale).all())


def check_forward(case: Case, isa=HOST):
    a = case.attention
    kernel = attention_kernel("kernel", a, case.plain(case.queries, case.width), isa)
    sequence = KernelSequence((kernel,), {})
    made = []
    for tasks in (3, 1):
        result, around = guarded(case.result.shape, case.dtype)
        logarithms, around_logarithms = guarded(case.logarithms.shape, case.summed)
        run_all(sequence, isa, tasks, **case.given, result=result, logarithms=logarithms)
        assert is_untouched(around) and is_untouched(around_logarithms)
        made.append((result, logarithms))
    assert all(torch.equal(x, y) for x, y in zip(*made)), "the number of tasks changed a result"
    result, logarithms = made[0]
    assert is_close(result, case.result, case.dtype, case.keys)
    finite = case.logarithms != -torch.inf
    assert torch.equal(logarithms != -torch.inf, finite)
    assert is_close(logarithms[finite], case.logarithms[finite], case.summed, case.keys)


def check_gradient(case: Case, isa=HOST, wants_bias: bool = False):
    a, n, s = case.attention, case.queries, case.keys
    rows = case.plain(n, case.width)
    gradients = (case.plain(n, case.extent), case.plain(s, case.extent), case.plain(s, case.width))
    sequence = attention_gradient(
        "kernel", a, rows, rows, Matrix(1, 1, (n,)), gradients, wants_bias, isa
    )
    names = list(case.gradients)[: 4 if wants_bias else 3]
    made = []
    for tasks in (3, 1):
        results = {x: guarded(case.gradients[x].shape, case.dtype) for x in names}
        run_all(
            sequence, isa, tasks, **case.given, factor=case.given["scale"],
            result=case.result.to(case.dtype),
            logarithms=case.logarithms.to(case.summed), **{x: t for x, (t, _) in results.items()},
        )  # fmt: skip
        assert all(is_untouched(around) for _, around in results.values())
        made.append({x: t for x, (t, _) in results.items()})
    for x in names:
        assert torch.equal(made[0][x], made[1][x]), "the number of tasks changed a result"
        assert is_close(made[0][x], case.gradients[x], case.dtype, n + s), x


extents = st.sampled_from([1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 65, 70])
lengths = st.sampled_from([1, 2, 5, 8, 16, 17, 31, 32, 33, 64, 65, 127, 130, 200])


@drawn(20)
@given(
    st.sampled_from(DTYPES), st.sampled_from([1, 2, 17]), lengths, lengths, extents, extents,
    st.sampled_from(BIASES), st.booleans(), st.sampled_from([0.0, 0.0, 0.3]),
)  # fmt: skip
def test_attention_of_any_shape(dtype, batch, n, s, e, v, bias, causal, dropped):
    case = Case(batch, n, s, e, v, dtype, bias, causal, dropped)
    check_forward(case)
    check_gradient(case, wants_bias=bias in ("number", "transposed") and not causal)


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("bias, causal, dropped", [(None, True, 0), ("mask", False, 0.2)])
def test_attention_on_every_instruction_set(isa, dtype, bias, causal, dropped):
    case = Case(2, 45, 70, 20, 37, dtype, bias, causal, dropped)
    check_forward(case, isa)
    check_gradient(case, isa)


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias, dropped", [(None, 0), ("mask", 0.2), ("padding", 0), ("number", 0)])
def test_a_few_queries_of_many_keys(queries, dtype, bias, dropped):
    check_forward(Case(3, queries, 301, 40, 70, dtype, bias, dropped == 0, dropped))


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("queries", [1, 2, 3, 5])
@pytest.mark.parametrize("keys", [1, 5, 70, 301])
def test_a_few_queries_in_narrow_vectors_see_their_own_keys(isa, queries, keys):
    """Two lanes of doubles are fewer queries than keys are taken at once."""
    case = Case(2, queries, keys, 70, 11, torch.float64, None, True, 0)
    check_forward(case, isa)
    check_gradient(case, isa)


def test_another_batch_size_has_the_same_kernels():
    texts = set()
    for batch in (17, 18, 40):
        for queries in (2, 50):
            a = Case(batch, queries, 50, 16, 16).attention
            rows = stored_plain(queries, 16, (batch,))
            gradient = attention_gradient(
                "kernel", a, rows, rows, Matrix(1, 1, (queries,)), (a.query, a.key, a.value), False,
                HOST,
            )  # fmt: skip
            texts.add(attention_kernel("kernel", a, rows, HOST).text)
            texts |= {kernel.text for kernel in gradient.kernels}
    assert len(texts) == 4


def test_large_and_infinite_scores_are_those_of_softmax():
    case = Case(2, 33, 300, 16, 16)
    case.given["query"] *= 1e3
    case.given["key"][:, 250] *= 50
    case._solve()
    check_forward(case)


def test_an_operand_that_is_not_a_number_spreads_to_its_rows_alone():
    case = Case(1, 40, 50, 8, 8)
    case.given["query"][0, 7, 0] = torch.nan
    kernel = attention_kernel("kernel", case.attention, case.plain(40, 8), HOST)
    result, logarithms = torch.empty(1, 40, 8), torch.empty(1, 40)
    run_all(KernelSequence((kernel,), {}), HOST, **case.given, result=result, logarithms=logarithms)
    assert result.isnan().any(-1).nonzero().tolist() == [[0, 7]]


def test_operands_and_results_may_lie_in_one_product():
    n, heads, e = 40, 3, 16
    joined = torch.randn(2, n, 3 * heads * e)
    slices = Matrix(3 * heads * e, 1, (n * 3 * heads * e, e))
    rows = Matrix(heads * e, 1, (n * heads * e, e))
    a = Attention(
        torch.float32, (2, heads), n, n, e, e, slices, slices, slices, None, False, True, False
    )
    kernel = attention_kernel("kernel", a, rows, HOST)
    flat, result = joined.view(-1), torch.empty(2, n, heads * e)
    run_all(
        KernelSequence((kernel,), {}), HOST, query=flat, key=flat[heads * e :],
        value=flat[2 * heads * e :], scale=torch.tensor(0.25, dtype=torch.float64), result=result,
        logarithms=torch.empty(2, heads, n),
    )  # fmt: skip
    q, k, v = (x.reshape(2, n, heads, e).transpose(1, 2).double() for x in joined.chunk(3, -1))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25)
    expected = expected.transpose(1, 2).reshape(2, n, heads * e)
    assert is_close(result, expected, torch.float32, n)


def test_heads_too_wide_for_a_threads_stack_are_refused():
    huge = Case(1, 2, 2, 30_000, 2)
    with pytest.raises(Unsupported):
        attention_kernel("kernel", huge.attention, huge.plain(2, 2), AVX2)
