"""Indices that are out of range where there may be no element: an error exactly where the CPU has one."""

import itertools

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.also_native

SHAPES = [(3, 0), (0, 3), (0, 0), (0,), (3, 0, 4), (3, 4)]
INDICES = [[7], [-9], [0], [-1, 2], []]


def along(x, index, dim):
    """The index, one for each element of a slice of x."""
    shape = [len(index) if d == dim else 1 for d in range(x.dim())]
    extents = [len(index) if d == dim else n for d, n in enumerate(x.shape)]
    return index.reshape(shape).expand(extents).contiguous()


def source(x, index, dim):
    return torch.ones([len(index) if d == dim else n for d, n in enumerate(x.shape)])


def gradient(read, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(read(x).sum(), x)[0]


OF_THE_FIRST = {
    "index": lambda x, i: x[i],
    "index's gradient": lambda x, i: gradient(lambda x: x[i], x),
    "index_put": lambda x, i: x.index_put((i,), torch.ones((), device=x.device)),
    "index_put of sums": lambda x, i: x.index_put((i,), torch.ones((), device=x.device), True),
    "take": lambda x, i: x.take(i),
    "put": lambda x, i: x.put(i, torch.ones(i.shape, device=x.device)),
    "embedding": lambda x, i: F.embedding(i, x) if x.dim() == 2 else x,
}
OF_A_DIM = {
    "index_select": lambda x, d, i, a, s: x.index_select(d, i),
    "index_add": lambda x, d, i, a, s: x.index_add(d, i, s),
    "index_copy": lambda x, d, i, a, s: x.index_copy(d, i, s),
    "index_fill": lambda x, d, i, a, s: x.index_fill(d, i, 2.0),
    "index_reduce": lambda x, d, i, a, s: x.index_reduce(d, i, s, "amax"),
    "index": lambda x, d, i, a, s: x[(slice(None),) * d + (i,)],
    "gather": lambda x, d, i, a, s: x.gather(d, a),
    "take_along_dim": lambda x, d, i, a, s: x.take_along_dim(a, d),
    "scatter": lambda x, d, i, a, s: x.scatter(d, a, s),
    "scatter of a number": lambda x, d, i, a, s: x.scatter(d, a, 3.0),
    "scatter_add": lambda x, d, i, a, s: x.scatter_add(d, a, s),
    "scatter_reduce": lambda x, d, i, a, s: x.scatter_reduce(d, a, s, "amax"),
}


def outcome(call, *operands):
    """The result, or the classes that an `except` may name."""
    try:
        return call(*operands).cpu()
    except (IndexError, RuntimeError) as error:
        return type(error)


def agree(on_ltc, on_cpu) -> bool:
    if isinstance(on_cpu, type):
        return isinstance(on_ltc, type) and issubclass(on_ltc, on_cpu)
    return not isinstance(on_ltc, type) and on_ltc.shape == on_cpu.shape and on_ltc.equal(on_cpu)


@pytest.mark.parametrize("name", OF_THE_FIRST)
def test_along_the_first_dimension(name):
    call = OF_THE_FIRST[name]
    for shape, indices in itertools.product(SHAPES, INDICES):
        x, index = torch.ones(shape), torch.tensor(indices, dtype=torch.int64)
        expected = outcome(call, x, index)
        found = outcome(call, x.to("ltc"), index.to("ltc"))
        assert agree(found, expected), f"{shape}, {indices}: {found}, the CPU {expected}"


@pytest.mark.parametrize("name", OF_A_DIM)
@pytest.mark.filterwarnings("ignore:index_reduce")
def test_along_any_dimension(name):
    call = OF_A_DIM[name]
    for shape, indices in itertools.product(SHAPES, INDICES):
        for dim in range(len(shape)):
            x, index = torch.ones(shape), torch.tensor(indices, dtype=torch.int64)
            rest = index, along(x, index, dim), source(x, index, dim)
            expected = outcome(call, x, dim, *rest)
            found = outcome(call, x.to("ltc"), dim, *[one.to("ltc") for one in rest])
            assert agree(found, expected), f"{shape}, {dim}, {indices}: {found}, CPU {expected}"
