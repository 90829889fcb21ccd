"""Generated recurrences and their gradients against the reference's formulas in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ltc.backends.eager import COMPUTE
from ltc.ir import ops
from ltc.ir.infer import GATES
from ltc.ir.node import make
from ltc.llvm.recurrence.recurrence_codes import operand_names, recurrence_kernels, result_names
from tests.drawn import drawn
from tests.unit.llvm_kernels import HOST, ISAS, guarded, is_untouched, run_all, tolerance

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def node_of(op, operands, sizes, cell, reverse, packed):
    if packed:
        operands = [*operands, torch.tensor(sizes)]
    inputs = [
        make(ops.INPUT, index=k, dtype=x.dtype, shape=tuple(x.shape))
        for k, x in enumerate(operands)
    ]
    return make(op, *inputs, cell=cell, steps=len(sizes), reverse=reverse, packed=packed), operands


def checked(node, operands, isa, dtype):
    """The results in float64, after those of the kernels were compared with them."""
    exact = COMPUTE[node.op](node)(*[x.double() if x.is_floating_point() else x for x in operands])
    given = dict(zip(operand_names(node), operands))
    names, made = result_names(node), []
    for tasks in (3, 1):
        results = {name: guarded(x.shape, dtype) for name, x in zip(names, exact)}
        buffers = given | {name: x for name, (x, _) in results.items()}
        run_all(recurrence_kernels(node, tuple(buffers), isa), isa, tasks, **buffers)
        assert all(is_untouched(around) for _, around in results.values())
        made.append([x for x, _ in results.values()])
    width, steps = operands[-1].shape[-1], node.attr("steps")
    for name, one, other, right in zip(names, *made, exact):
        assert torch.equal(one, other), f"the number of tasks changed {name}"
        error, scale = (one.double() - right).abs().max(), right.abs().max().clamp(min=1)
        assert error <= tolerance(dtype, width * steps) * scale, name
    return exact


def check(cell, dtype, sizes, width, reverse, packed, isa=HOST):
    generator = torch.Generator().manual_seed(width)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype) / 2

    rows, batch, columns = sum(sizes), sizes[0], GATES[cell] * width
    pre, weight, hidden = random(rows, columns), random(columns, width), random(batch, width)
    weight = (weight / width**0.5).to(dtype)
    rest = {"lstm": [random(batch, width)], "gru": [random(width)]}.get(cell, [])
    order = (sizes, cell, reverse, packed)
    node, operands = node_of(ops.RECURRENCE, [pre, weight, hidden, *rest], *order)
    outputs, _, *kept = [x.to(dtype) for x in checked(node, operands, isa, dtype)]
    gradients = [random(rows, width), random(batch, width), weight, hidden, outputs]
    if cell == "lstm":
        gradients += [random(batch, width), rest[0], *kept[1:]]
    elif cell == "gru":
        gradients += kept
    node, operands = node_of(ops.RECURRENCE_GRADIENT, gradients, *order)
    checked(node, operands, isa, dtype)


@drawn(20)
@given(
    st.sampled_from(list(GATES)), st.sampled_from(DTYPES),
    st.lists(st.sampled_from([1, 2, 5, 9, 16, 17]), min_size=1, max_size=5),
    st.sampled_from([1, 2, 7, 8, 15, 16, 17, 33, 64, 65, 130]), st.booleans(), st.booleans(),
)  # fmt: skip
def test_recurrences_of_any_shape(cell, dtype, sizes, width, reverse, packed):
    sizes = sorted(sizes, reverse=True) if packed else [sizes[0]] * len(sizes)
    check(cell, dtype, sizes, width, reverse, packed)


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("cell", GATES)
def test_recurrences_on_every_instruction_set(isa, dtype, cell):
    check(cell, dtype, [11, 11, 4, 1], 21, cell == "gru", True, isa)
    check(cell, dtype, [3, 3], 32, cell != "gru", False, isa)


def test_what_nobody_reads_is_not_stored():
    shapes = ((8, 12), (12, 3), (4, 3), (4, 3))
    node, operands = node_of(
        ops.RECURRENCE, [torch.randn(shape) for shape in shapes], [4, 4], "lstm", False, False
    )
    last, given = torch.zeros(4, 3), dict(zip(operand_names(node), operands))
    sequence = recurrence_kernels(node, (*given, "last"), HOST)
    assert "gates" not in sequence.kernels[1].arguments
    run_all(sequence, HOST, **given, last=last)
    torch.testing.assert_close(last, COMPUTE[node.op](node)(*operands)[1])
