"""What must have eager's bits: arithmetic, comparisons and casts of every dtype."""

import math

import numpy as np
import pytest
import torch

from ltc.backends.llvm.backend import LlvmBackend
from ltc.ir import ops
from ltc.ir.graph import Graph
from ltc.ir.node import make

HALVES = [torch.float16, torch.bfloat16]
FLOATS = [*HALVES, torch.float32, torch.float64]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SPECIAL = [
    0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 0.5, 3.0, 2.0**-149, 2.0**-126,
    -(2.0**-130), 2.0**-24, 2.0**-14, 65504.0, 65520.0, 1e-40, 3.3895314e38, 3.4028235e38, 1e300, 5e-324,
]  # fmt: skip
COUNT = 1 << 18


def run(op, *operands: torch.Tensor, **attributes) -> torch.Tensor:
    inputs = [
        make(ops.INPUT, index=i, dtype=x.dtype, shape=tuple(x.shape))
        for i, x in enumerate(operands)
    ]
    graph = Graph(tuple(inputs), (), (make(op, *inputs, **attributes),))
    return LlvmBackend().compile(graph, 0, frozenset()).launch(list(operands), [])[0]


def patterns(dtype: torch.dtype, seed: int, count: int = COUNT) -> torch.Tensor:
    """Numbers of random bits, the special ones among them."""
    generator = torch.Generator().manual_seed(seed)
    integer = BITS[dtype.itemsize]
    bounds = torch.iinfo(integer)
    bits = torch.randint(bounds.min, bounds.max, (count,), generator=generator, dtype=integer)
    x = bits.view(dtype)
    if dtype.is_floating_point:
        special = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
        rows = special.repeat(len(special)) if seed else special.repeat_interleave(len(special))
        x[: len(rows)] = rows
        x[1000 : COUNT // 2] = torch.randn(COUNT // 2 - 1000, generator=generator).to(dtype)
    return x


def assert_same_bits(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    """Equal, zeros with their signs, any NaN being like any other."""
    assert mine.dtype == theirs.dtype
    different = mine != theirs
    if mine.is_floating_point():
        different &= ~(mine.isnan() & theirs.isnan())
        different |= (mine.signbit() != theirs.signbit()) & ~mine.isnan()
    wrong = different.nonzero()[:5, 0]
    assert not len(wrong), (wrong.tolist(), mine[wrong].tolist(), theirs[wrong].tolist())


ARITHMETIC = {"add": torch.add, "sub": torch.sub, "mul": torch.mul}
COMPARISONS = {
    "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge,
}  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
@pytest.mark.parametrize("name", [*ARITHMETIC, *COMPARISONS, "maximum", "minimum"])
def test_pairs_give_eagers_bits(name, dtype):
    x, y = patterns(dtype, 0), patterns(dtype, 1)
    assert_same_bits(run(ops.ALL[name], x, y), getattr(torch, name)(x, y))


@pytest.mark.parametrize("dtype", FLOATS)
def test_quotients_give_eagers_bits(dtype):
    x, y = patterns(dtype, 0), patterns(dtype, 1)
    assert_same_bits(run(ops.DIV, x, y), torch.div(x, y))


@pytest.mark.parametrize("dtype", FLOATS)
def test_roots_are_rounded_as_ieee_754_wants(dtype):
    """Eager's, where MKL computes them, may be one unit off: its root of 65504 is, in float32."""
    x = patterns(dtype, 0)
    with np.errstate(invalid="ignore"):
        exact = torch.sqrt(x) if dtype in HALVES else torch.from_numpy(np.sqrt(x.numpy()))
    assert_same_bits(run(ops.SQRT, x), exact)


@pytest.mark.parametrize("target", FLOATS + [torch.bool])
@pytest.mark.parametrize("source", FLOATS + INTEGERS + [torch.bool])
def test_casts_to_floats_give_eagers_bits(source, target):
    x = torch.arange(COUNT) % 3 == 0 if source == torch.bool else patterns(source, 0)
    if source in HALVES:
        x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(source)  # all there are
    assert_same_bits(run(ops.CAST, x, dtype=target), x.to(target))


@pytest.mark.parametrize("target", INTEGERS)
@pytest.mark.parametrize("source", FLOATS + INTEGERS)
def test_casts_to_integers_give_eagers_numbers(source, target):
    """Of floats: those that the integer can hold; what others become, C leaves open."""
    x = patterns(source, 0)
    if source.is_floating_point:
        low, high = torch.iinfo(target).min, torch.iinfo(target).max
        x = torch.where((x >= low) & (x <= high / 2), x, torch.ones_like(x))
    assert_same_bits(run(ops.CAST, x, dtype=target), x.to(target))


def test_every_float_that_ends_in_a_tie_rounds_to_even():
    """All bfloat16 numbers and their midpoints, one float below and one above."""
    high = torch.arange(1 << 16, dtype=torch.int64)
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = ((high[:, None] << 16) + low).flatten()
    x = torch.where(bits < 1 << 31, bits, bits - (1 << 32)).to(torch.int32).view(torch.float32)
    for target in HALVES:
        assert_same_bits(run(ops.CAST, x, dtype=target), x.to(target))
