"""Operands that are one number, however often: each reader takes it once or finds it everywhere."""

import pytest
import torch

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.bool]
ROWS, COLUMNS = 10, 5


@pytest.fixture(autouse=True)
def llvm(monkeypatch):
    monkeypatch.setenv("LTC_BACKEND", "llvm")


def full(shape, value, like):
    """The number is part of the graph where it is 0 or 1, else an argument of the program."""
    if value in (0, 1):
        make = torch.ones if value else torch.zeros
        return make(shape, dtype=like.dtype, device=like.device)
    return torch.full(shape, value, dtype=like.dtype, device=like.device)


WRITES = {
    "scatter_add": lambda x, i, n: x.scatter_add(0, i, full((n, COLUMNS), 1, x)),
    "scatter_add along rows": lambda x, i, n: x.T.scatter_add(1, i.T, full((COLUMNS, n), 1, x)),
    "scatter": lambda x, i, n: x.scatter(0, i, full((n, COLUMNS), 1, x)),
    "scatter of a number": lambda x, i, n: x.scatter(0, i, 1),
    "index_add": lambda x, i, n: x.index_add(0, i[:, 0], full((n, COLUMNS), 1, x)),
    "index_copy": lambda x, i, n: x.index_copy(0, i[:, 0], full((n, COLUMNS), 1, x)),
    "index_fill": lambda x, i, n: x.index_fill(0, i[:, 0], 1),
    "index_put": lambda x, i, n: x.index_put((i[:, 0],), full((), 1, x)),
    "accumulate": lambda x, i, n: x.index_put((i,), full((), 1, x), accumulate=True),
    "a constant index": lambda x, i, n: x.scatter_add(0, i * 0, full((n, COLUMNS), 1, x)),
    "an index that is one number": lambda x, i, n: x.scatter_add(
        0, torch.full((n, COLUMNS), 3, device=x.device), full((n, COLUMNS), 1, x)
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("base", ["constant", "data", "computed"])
@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_may_be_one_number(name, base, dtype):
    adds = any(word in name for word in ("add", "accumulate", "index that", "constant index"))
    if dtype is torch.bool and adds:
        return  # the CPU adds no truths
    data = torch.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS).to(dtype)
    for n in (1, 4, 7):
        indices = torch.randint(ROWS, (n, COLUMNS), generator=torch.Generator().manual_seed(n))

        def result(device, n=n, indices=indices):
            x = data.to(device)
            if base == "constant":
                x = full((ROWS, COLUMNS), 0, x)
            if base == "computed":
                x = (x != 1) if dtype is torch.bool else x * 2
            return WRITES[name](x, indices.to(device), n)

        assert torch.equal(result("ltc").cpu(), result("cpu")), n


def test_the_gradient_of_a_mean_by_index_equals_the_cpu():
    index = torch.randint(ROWS, (7, COLUMNS), generator=torch.Generator().manual_seed(0))
    source = torch.randn(7, COLUMNS, dtype=torch.float64)

    def gradient(device):
        given = source.to(device).requires_grad_()
        base = torch.zeros(ROWS, COLUMNS, dtype=torch.float64, device=device)
        means = base.scatter_reduce(0, index.to(device), given, "mean", include_self=False)
        return torch.autograd.grad(means.exp().sum(), given)[0].cpu()

    torch.testing.assert_close(gradient("ltc"), gradient("cpu"), rtol=1e-12, atol=1e-12)


OPERANDS = {
    "product": lambda one, x: x @ full((COLUMNS, 3), one, x),
    "product on the left": lambda one, x: full((3, ROWS), one, x) @ x,
    "cumsum": lambda one, x: full((4, 6), one, x).cumsum(0),
    "sum": lambda one, x: full((4, 6), one, x).sum(0),
    "sort": lambda one, x: full((4, 6), one, x).sort(1).values,
    "argmax": lambda one, x: full((4, 6), one, x).argmax(1),
    "gather": lambda one, x: full((4, 6), one, x).gather(1, full((4, 2), 1, x).long()),
    "index_select": lambda one, x: full((4, 6), one, x).index_select(
        0, torch.full((3,), 2, device=x.device)
    ),
    "convolution": lambda one, x: torch.nn.functional.conv2d(
        full((2, 3, 5, 5), one, x), full((4, 3, 3, 3), 2, x), full((4,), 1, x), padding=1
    ),
    "max_pool": lambda one, x: torch.nn.functional.max_pool2d(full((2, 3, 6, 6), one, x), 2),
    "avg_pool": lambda one, x: torch.nn.functional.avg_pool2d(full((2, 3, 6, 6), one, x), 3, 2, 1),
    "attention": lambda one, x: torch.nn.functional.scaled_dot_product_attention(
        *[full((1, 2, 6, 8), one, x)] * 3
    ),
    "embedding": lambda one, x: torch.nn.functional.embedding(
        torch.full((3,), 2, device=x.device), full((4, 6), one, x)
    ),
    "cat": lambda one, x: torch.cat([full((2, COLUMNS), one, x), x, full((1, COLUMNS), 7, x)]),
    "softmax": lambda one, x: full((4, 6), one, x).softmax(1),
    "flip": lambda one, x: full((4, 6), one, x).flip(0).cumsum(1),
    "slice written": lambda one, x: x.slice_scatter(full((2, COLUMNS), one, x), 0, 1, 3),
}


@pytest.mark.parametrize("one", [1, 3])
@pytest.mark.parametrize("name", OPERANDS)
def test_any_operand_may_be_one_number(name, one):
    x = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
    ours, exact = OPERANDS[name](one, x.to("ltc")), OPERANDS[name](one, x)
    assert ours.shape == exact.shape and ours.dtype == exact.dtype
    torch.testing.assert_close(ours.cpu(), exact, rtol=1e-5, atol=1e-5)
