"""Writes to a part of a tensor: what they give, that no step needs Python, and what they visit."""

import pytest
import torch

import ltc.core.lazy_model as ltm
from ltc.backends.llvm.schedule import planned_steps
from ltc.debug import metrics
from ltc.ir import ops
from ltc.ir.graph import Graph
from ltc.ir.loop_nest import Kernel
from ltc.ir.node import make
from tests.ops.against_float64 import assert_as_near_as_eager

pytestmark = pytest.mark.also_native

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
PARTS = [
    (slice(None), slice(2, 5)), (slice(None), slice(None, None, 2)), 0, -1,
    (slice(1, None, 3), slice(None, None, 2)), (..., slice(1, None, 7)), (..., 3),
]  # fmt: skip
SHAPES = [(1, 8), (7, 8), (7, 9), (16, 17), (5, 8, 33), (3, 31, 9)]


def drawn(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def replaced(part):
    def write(x, y):
        z = x * 1
        z[part] = y
        return z

    return write


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_part_is_replaced(part, dtype):
    for shape in SHAPES:
        x = drawn(*shape, dtype=dtype)
        assert_as_near_as_eager(replaced(part), [x, x[part].clone() + 1])
        assert_as_near_as_eager(replaced(part), [x.t().contiguous().t() if x.dim() == 2 else x,
                                                 torch.tensor(2.0, dtype=dtype)])  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool], ids=str)
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_part_of_whole_numbers_is_replaced(part, dtype):
    x = drawn(5, 8, 33).mul(3).to(dtype)

    def write(x, y):
        z = x.clone()
        z[part] = y
        return z

    assert_as_near_as_eager(write, [x, ~x[part]])


SCATTERS = {
    "slice": lambda x, y: torch.slice_scatter(x, y[:, :4], 1, 1, 8, 2),
    "select": lambda x, y: torch.select_scatter(x, y[:, 0], 1, 2),
    "diagonal": lambda x, y: torch.diagonal_scatter(x, y[:8, 0], 1),
    "diagonal below": lambda x, y: torch.diagonal_scatter(x, y[:6, 0], -2),
    "diag_embed": lambda x, y: torch.diag_embed(y, 2) * x[0, 0],
    "diag": lambda x, y: torch.diag(y[:, 1], -1) * x[0, 0],
    "diagonal in place": lambda x, y: (z := x * 1, z.diagonal().mul_(y[0, 0]))[0],
    "fill_diagonal_": lambda x, y: (x * y[0, 0]).fill_diagonal_(2.0),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SCATTERS)
def test_functional_writes(name, dtype):
    assert_as_near_as_eager(SCATTERS[name], [drawn(8, 9, dtype=dtype), drawn(8, 9, dtype=dtype)])


@pytest.mark.native("it counts the programs that are compiled")
def test_what_is_written_to_a_part_in_place_changes_nothing_else():
    x, y = drawn(64, 9, 40), drawn(64, 3, 40)
    lazy, new = x.to("ltc"), y.to("ltc")
    for k in range(3):
        with metrics.counted() as grown:
            lazy[:, 2:5] = new + k
            lazy[0, ::2] += 1
            ltm.mark_step(wait=True)
        x[:, 2:5] = y + k
        x[0, ::2] += 1
    assert torch.equal(lazy.cpu(), x)
    assert not grown.get("extern.python", 0) and not grown.get("UncachedCompile", 0)


@pytest.mark.parametrize("part", [0, -1, slice(1, 3), (slice(None), slice(1, 5))], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_a_result_beside_a_part_that_is_written_lies_in_memory_of_its_own(part, turned):
    """Both are made at one point of a kernel, and read the tensor on one side of their choices."""

    def trained(device, mark):
        p = drawn(7, 7, 7).to(device).requires_grad_()
        x = p.clone()
        mark()
        x[part].zero_()
        seen = x.mT if turned else x
        seen.square().mean().backward()
        mark()
        return x.detach().cpu(), seen.detach().cpu(), p.grad.cpu()

    for ours, eagers in zip(trained("ltc", ltm.mark_step), trained("cpu", lambda: None)):
        torch.testing.assert_close(ours, eagers)


def kernel_of(starts, steps, donated):
    x = make(ops.INPUT, index=0, dtype=torch.float32, shape=(64, 9, 40))
    new = make(ops.INPUT, index=1, dtype=torch.float32, shape=(64, 3, 40))
    written = make(ops.INSERT, x, new, starts=starts, steps=steps)
    (step,) = planned_steps(Graph((x, new), (), (written,)), donated)
    assert isinstance(step.unit, Kernel)
    return step


@pytest.mark.parametrize("steps", [(1, 1, 1), (1, 2, 1)])
def test_a_kernel_visits_what_it_changes(steps):
    in_place = kernel_of((0, 2, 0), steps, frozenset({0}))
    assert in_place.unit.space == (64, 3, 40) and len(in_place.codes) == 1
    copied = kernel_of((0, 2, 0), steps, frozenset())
    assert copied.unit.space == (64, 3, 40) and len(copied.codes) == 2


def test_a_large_part_is_written_with_all_the_rest():
    x = make(ops.INPUT, index=0, dtype=torch.float32, shape=(64, 9, 40))
    new = make(ops.INPUT, index=1, dtype=torch.float32, shape=(64, 8, 40))
    written = make(ops.INSERT, x, new, starts=(0, 1, 0), steps=(1, 1, 1))
    (step,) = planned_steps(Graph((x, new), (), (written,)), frozenset({0}))
    assert step.unit.space == (64, 9, 40) and len(step.codes) == 1


def test_what_moves_within_a_tensor_is_not_read_where_it_was_written():
    x = drawn(8, 40)
    lazy = x.to("ltc")
    for _ in range(2):
        lazy[1:3] = lazy[2:4] * 2
        ltm.mark_step(wait=True)
        x[1:3] = x[2:4].clone() * 2
    assert torch.equal(lazy.cpu(), x)


def written(place, accumulate=False):
    """Writes values where a mask of some of the dimensions of x says."""

    def write(x, values, mask):
        indices = [None] * place + [mask]
        return torch.ops.aten.index_put(x, indices, values, accumulate)

    return write


MASKS = [
    (0, (7,), (5,)), (0, (7,), (1, 5)), (0, (7,), ()), (0, (7, 5), ()), (1, (5,), ()),
    (1, (5,), (7, 1)), (0, (7, 5), (1,)),
]  # fmt: skip


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("place", "shape", "values"), MASKS, ids=str)
def test_a_masked_write_of_the_same_everywhere(place, shape, values, accumulate):
    mask = drawn(*shape) > 0
    for dtype in (torch.float32, torch.int64):
        x, new = drawn(7, 5).mul(9).to(dtype), drawn(*values).mul(9).to(dtype)
        write = written(place, accumulate)
        with metrics.counted() as grown:
            found = write(x.to("ltc"), new.to("ltc"), mask.to("ltc")).cpu()
        assert torch.equal(found, write(x, new, mask))
        assert not grown.get("extern.python", 0)


def test_values_that_do_not_fit_are_refused_as_on_the_cpu():
    x, mask = drawn(7, 5), torch.ones(7, dtype=torch.bool)
    for values in (drawn(1, 4), drawn(1, 1, 5), drawn(3, 5)):
        for device in ("cpu", "ltc"):
            with pytest.raises((RuntimeError, IndexError), match="shape mismatch"):
                written(0)(x.to(device), values.to(device), mask.to(device)).cpu()


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    ("place", "shape", "rest"), [(0, (7,), (5,)), (1, (5,), ()), (0, (7, 5), ())]
)
def test_a_masked_write_of_one_value_for_each_selected_is_recorded(place, shape, rest, accumulate):
    mask = drawn(*shape) > 0
    x, write = drawn(7, 5), written(place, accumulate)
    new = drawn(*(7,) * place, int(mask.sum()), *rest)
    with metrics.counted() as grown:
        found = write(x.to("ltc"), new.to("ltc"), mask.to("ltc")).cpu()
    assert torch.equal(found, write(x, new, mask))
    assert not [name for name in grown if name.startswith(("aten::", "extern"))]


@pytest.mark.parametrize("count", [1, -1])
def test_more_or_fewer_values_than_a_mask_selects_are_refused_as_on_the_cpu(count):
    x, mask = drawn(7, 5), drawn(7, 5) > 0
    new = drawn(int(mask.sum()) + count)
    texts = []
    for device in ("cpu", "ltc"):
        with pytest.raises(RuntimeError, match="shape mismatch") as error:
            written(0)(x.to(device), new.to(device), mask.to(device)).cpu()
        texts.append(str(error.value))
    assert texts[0] == texts[1]
