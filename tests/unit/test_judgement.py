"""What is within rounding of the right value, and what is not."""

import pytest
import torch

from ltc.backends.verification.double_precision import Formula
from ltc.backends.verification.judgement import difference, unequal
from ltc.ir import ops
from ltc.ir.node import constant, make

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def given(*shape, dtype=torch.float32, index=0):
    return make(ops.INPUT, index=index, dtype=dtype, shape=shape)


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def judged(result, known, found):
    return difference(Formula([result], known), known, [], [found])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_torch_computes_in_that_type_is_right(dtype):
    x, w = given(5, 40, dtype=dtype), given(40, 3, dtype=dtype, index=1)
    a, b = drawn(5, 40, dtype=dtype), drawn(40, 3, dtype=dtype, seed=1)
    known = {x: a, w: b}
    assert judged(make(ops.MATMUL, x, w), known, a @ b) is None
    assert judged(make(ops.SUM, x, dims=(1,)), known, a.sum(1)) is None
    assert judged(make(ops.EXP, x), known, a.exp()) is None


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_term_too_few_is_wrong(dtype):
    x, w = given(5, 40, dtype=dtype), given(40, 3, dtype=dtype, index=1)
    a, b = drawn(5, 40, dtype=dtype), drawn(40, 3, dtype=dtype, seed=1)
    known = {x: a, w: b}
    assert judged(make(ops.MATMUL, x, w), known, a[:, :-1] @ b[:-1]).count > 0
    assert judged(make(ops.SUM, x, dims=(1,)), known, a[:, :-1].sum(1)).count > 0


def test_a_difference_names_the_element_and_both_values():
    x = given(2, 3)
    value = drawn(2, 3)
    found = value.exp()
    found[1, 2] = 7
    wrong = judged(make(ops.EXP, x), {x: value}, found)
    assert (wrong.position, wrong.found, wrong.count) == ((1, 2), 7, 1)
    assert wrong.expected == pytest.approx(value[1, 2].exp().item())
    assert 0 < wrong.tolerance < 1e-5


@pytest.mark.parametrize("other", [1.0, torch.inf, -torch.inf])
def test_nan_is_nan_alone(other):
    x = given(1)
    nan = torch.tensor([torch.nan])
    assert judged(make(ops.NEG, x), {x: nan}, nan) is None
    assert judged(make(ops.NEG, x), {x: nan}, torch.tensor([other])).count == 1


def test_infinities_are_told_by_their_sign():
    x = given(2)
    value = torch.tensor([torch.inf, -torch.inf])
    assert judged(make(ops.NEG, x), {x: value}, -value) is None
    assert judged(make(ops.NEG, x), {x: value}, value).count == 2
    assert judged(make(ops.NEG, x), {x: value}, torch.full((2,), 3e38)).count == 2


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool], ids=str)
def test_integers_are_exact(dtype):
    x = given(3, dtype=dtype)
    value = torch.tensor([0, 1, 1]).to(dtype)
    flipped = make(ops.FLIP, x, dims=(0,))
    assert judged(flipped, {x: value}, value.flip(0)) is None
    assert judged(flipped, {x: value}, value).count == 2


def test_large_integers_that_differ_by_one_differ():
    x = given(1, dtype=torch.int64)
    value = torch.tensor([2**62])
    assert judged(make(ops.NEG, x), {x: value}, -value - 1).count == 1


def test_complex_numbers_are_judged_in_both_parts():
    x = given(4, dtype=torch.complex64)
    value = torch.complex(drawn(4), drawn(4, seed=1))
    square = make(ops.MUL, x, x)
    assert judged(square, {x: value}, value * value) is None
    assert judged(square, {x: value}, (value * value).conj()).count == 4


def test_what_is_ill_conditioned_may_be_further_off():
    """(x + 1e4) - 1e4 in float32: a thousandth is a unit in the last place of the sum."""
    x = given(100)
    value = drawn(100)
    big = constant(1e4, torch.float32)
    back = make(ops.SUB, make(ops.ADD, x, big), big)
    assert judged(back, {x: value}, value) is None
    assert judged(back, {x: value}, value + 0.1).count == 100
    assert judged(make(ops.ADD, x, x), {x: value}, value + value + 1e-3).count == 100


def test_what_hangs_on_rounding_may_be_either():
    """A mean that is rounded up or down, compared with what it is nearly equal to."""
    x = given(3, 7)
    value = torch.full((3, 7), 0.1)
    mean = make(ops.DIV, make(ops.SUM, x, dims=(1,)), constant(7, torch.float32))
    above = make(ops.GT, mean, constant(float(torch.tensor(0.1)), torch.float32))
    for either in (True, False):
        assert judged(above, {x: value}, torch.full((3,), either)) is None
    below = make(ops.LT, mean, constant(0.05, torch.float32))
    assert judged(below, {x: value}, torch.ones(3, dtype=torch.bool)).count == 3


def test_numbers_that_are_exact_are_compared_exactly():
    """A class that is a float by now is still one class and no other."""
    index = given(4, dtype=torch.int64)
    number = make(ops.ADD, make(ops.CAST, index, dtype=torch.float32), constant(1, torch.float32))
    is_three = make(ops.EQ, number, constant(3, torch.float32))
    value = torch.arange(4)
    assert judged(is_three, {index: value}, value == 2) is None
    assert judged(is_three, {index: value}, value == 1).count == 2


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,)])
def test_every_shape_is_judged(shape):
    x = given(*shape)
    value = drawn(*shape)
    assert judged(make(ops.SQRT, make(ops.ABS, x)), {x: value}, value.abs().sqrt()) is None


def test_random_draws_are_the_same_numbers():
    seed = given(dtype=torch.int64)
    bits = make(ops.RANDOM_BITS, seed, shape=(9,), bits=24, stream=0)
    known = {seed: torch.tensor(5)}
    (drawn_bits,) = Formula([bits], known).values(known, [])
    assert judged(bits, known, drawn_bits) is None
    assert judged(bits, known, drawn_bits + 1).count == 9


def test_a_known_value_on_the_way_is_used_as_it_is():
    x = given(4)
    half = make(ops.EXP, x)
    result = make(ops.NEG, half)
    formula = Formula([result], {x, half})
    assert formula.operands == (half,)
    assert formula.nodes == (result,)
    (value,) = formula.values({x: drawn(4), half: torch.ones(4)}, [])
    assert value.tolist() == [-1.0] * 4


def test_unequal_finds_any_other_number():
    x = given(3)
    value = torch.tensor([1.0, torch.nan, -0.0])
    assert unequal(x, value, torch.tensor([1.0, torch.nan, 0.0])) is None
    other = torch.tensor([1.0, torch.nan, 1e-30])
    assert unequal(x, value, other).position == (2,)
