"""What is decided without a guard while a program of symbols is made is right at all its sizes."""

from __future__ import annotations

import pytest
import torch

from ltc.llvm.emit.isa import AVX2, AVX512, SSE2
from ltc.llvm.gemm.blocking import GemmPlan, Matrix, Shape, plan_of, stored_plain
from ltc.support.sizes.choices import tracing
from ltc.support.sizes.extent import Size, SizeTrace

SIZES = range(2, 60)


def _columns_apart(s: Size) -> Shape:
    """The right operand's columns lie as far apart as a row is long, less one."""
    return Shape((), 5, 48, 40, Matrix(40, 1), Matrix(100, s - 1), stored_plain(5, 48))


def _columns_in_halves(s: Size) -> Shape:
    return Shape((), 5, 48, 40, Matrix(40, 1), Matrix(100, s // 2), stored_plain(5, 48))


def _some_columns(s: Size) -> Shape:
    return Shape((), 5, s, 40, Matrix(40, 1), stored_plain(40, s), stored_plain(5, s))


@pytest.mark.parametrize("isa", [AVX512, AVX2, SSE2], ids=lambda isa: isa.name)
@pytest.mark.parametrize("shape", [_columns_apart, _columns_in_halves, _some_columns])
@pytest.mark.parametrize("size", [2, 3, 4, 9, 16])
def test_a_right_operand_is_packed_at_all_sizes_where_it_has_to_be(size, shape, isa):
    """So few rows are packed for no other reason."""

    def planned(s: Size) -> GemmPlan:
        return plan_of(torch.float32, isa, shape(s), False)

    trace = SizeTrace()
    with tracing(trace):
        plan = planned(trace.symbol(size))
    serves = trace.function(" and ".join(f"({guard})" for guard in (*trace.guards, "True")))
    served = [other for other in SIZES if serves(other)]
    assert size in served
    assert [other for other in served if planned(other).packs and not plan.packs] == []


def test_polynomials_are_divided_where_that_leaves_no_rest():
    trace = SizeTrace()
    a, b = trace.symbol(7), trace.symbol(4)
    assert ((5 + a) // (5 + a), (25 + 5 * a) // (5 + a), (a * a - b * b) % (a + b)) == (1, 5, 0)
    exact = {
        (a * (5 + a)) // (5 + a): "s0",
        (a * a - b * b) // (a + b): "s0-1*s1",
        (a * b + b) // (a + 1): "s1",
    }
    assert {x.source for x in exact} == set(exact.values())
    assert not trace.parts and not trace.guards
    assert ((a * a + 1) // (a + 1)).source == "t0"
