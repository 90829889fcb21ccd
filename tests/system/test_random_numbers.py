"""Calls that draw: the numbers are a program's, whoever runs them."""

from collections.abc import Callable

import pytest
import torch

from ltc import config
from ltc.native.core import CORE

FLOATS = torch.float32, torch.float64, torch.float16, torch.bfloat16
SHAPES = (), (0, 3), (1,), (5, 7), (3, 1000), (70_001,)
PROBABILITIES = 0.0, 0.1, 0.3, 0.5 + 1e-10, 0.5 - 1e-10, 0.999, 1.0


def values(shape: tuple, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()).reshape(shape) % 13 - 6).to(dtype).to("ltc")


def dropped(shape: tuple, dtype: torch.dtype) -> list[torch.Tensor]:
    x = values(shape, dtype)
    kept = [torch.native_dropout(x, p, True) for p in PROBABILITIES]
    return [one for pair in kept for one in pair] + [*torch.native_dropout(x, 0.5, False)]


def written(shape: tuple, dtype: torch.dtype) -> list[torch.Tensor]:
    x = values(shape, dtype)
    writes = [
        lambda: x.bernoulli_(0.37), lambda: x.uniform_(), lambda: x.uniform_(0, 2.5),
        lambda: x.random_(10), lambda: x.random_(-5, 17),
    ]  # fmt: skip
    return [write().clone() for write in writes]


def made(shape: tuple, dtype: torch.dtype) -> list[torch.Tensor]:
    x = torch.rand(shape, dtype=dtype, device="ltc")
    whole = [torch.int8, torch.uint8, torch.int32, torch.int64, torch.float32]
    return [
        x, torch.bernoulli(x),
        *[torch.randint(100, shape, dtype=one, device="ltc") for one in whole],
        torch.randint(-1000, 1000, shape, dtype=torch.int16, device="ltc"),
    ]  # fmt: skip


def rounded(shape: tuple, dtype: torch.dtype) -> list[torch.Tensor]:
    """By logarithms and cosines: the core launches a program for all but the first of each kind."""
    x, found = values(shape, dtype), []
    for number in (0.3, 2.0, 1e-3):
        found += [
            torch.randn(shape, dtype=dtype, device="ltc"), torch.randn_like(x),
            torch.randn_like(x.mT if x.dim() > 1 else x),
            torch.normal(-number, number, shape, dtype=dtype, device="ltc"),
            x.normal_(1, number).clone(), x.exponential_(number).clone(),
        ]  # fmt: skip
    return [*found, torch.normal(1.0, 0.0, shape, dtype=dtype, device="ltc"), x.normal_(2.0, 0.0)]


def drawn(draw: Callable, shape: tuple, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(3)
    return [one.cpu() for one in draw(shape, dtype)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("draw", [dropped, written, made, rounded])
def test_the_core_draws_what_a_program_draws(draw, dtype):
    for shape in SHAPES:
        at_once = drawn(draw, shape, dtype)
        with config.override(LTC_TIER="native"):
            compiled = drawn(draw, shape, dtype)
        for ours, theirs in zip(at_once, compiled, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_the_core_draws_into_views():
    x = torch.zeros(6, 8, device="ltc")
    x.t()[::2].bernoulli_(0.5)
    x[:, 1::3].uniform_()
    assert set(x[:, 0].tolist()) <= {0.0, 1.0} and (x[:, 1::3] > 0).all() and not x[:, 3].any()


@pytest.mark.skipif(CORE is None, reason="there is no native core")
def test_draws_do_not_come_to_python():
    x = values((64,), torch.float32)
    for _ in range(3):
        before = CORE.left_to_python()
        made(x.shape, torch.float32), written(x.shape, torch.float32)
        torch.native_dropout(x, 0.5, True)
        (x + 1).sum().item()
    assert CORE.left_to_python() == before


@pytest.mark.skipif(CORE is None, reason="there is no native core")
def test_of_draws_by_a_program_the_first_alone_comes_to_python(quick_calls):
    """Where the numbers differ the program is the same; where sizes, dtypes or defaults do it is not."""

    def came(*draws: Callable[[], torch.Tensor]) -> int:
        before = sum(CORE.left_to_python().values())
        for draw in draws:
            draw()
        return sum(CORE.left_to_python().values()) - before

    shape = 13, 17  # no other test's
    assert came(*[lambda k=k: torch.normal(k, 1.0 + k, shape, device="ltc") for k in range(9)]) == 1
    assert came(*[lambda: torch.randn(shape, device="ltc")] * 9) == 1
    assert came(lambda: torch.randn(shape[::-1], device="ltc")) == 1
    assert came(lambda: torch.randn(shape, dtype=torch.float16, device="ltc")) == 1
    torch.set_default_dtype(torch.float64)
    try:
        assert (
            came(lambda: torch.randn(shape, device="ltc"), lambda: torch.randn(shape, device="ltc"))
            == 1
        )
        assert torch.randn(shape, device="ltc").dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "draw", [torch.randn, lambda *_, **k: torch.randn_like(values((3, 19), FLOATS[0]), **k)]
)
def test_the_default_dtype_is_told_from_each_that_is_named(draw):
    for dtype in (*FLOATS, None) * 3:
        assert draw(3, 19, device="ltc", dtype=dtype).dtype is (dtype or torch.float32)


@pytest.mark.parametrize("number", [-1.0, float("nan")])
def test_a_program_does_not_draw_what_is_refused(number):
    x = torch.zeros(6, device="ltc")
    for _ in range(3):
        x.normal_(0, 1), x.exponential_(1)
    for draw in (lambda: x.normal_(0, number), lambda: x.exponential_(number)):
        with pytest.raises(RuntimeError):
            draw().cpu()


@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")])
def test_no_probability_is_refused(p):
    with pytest.raises((RuntimeError, ValueError)):
        torch.zeros(4, device="ltc").bernoulli_(p).cpu()
    with pytest.raises((RuntimeError, ValueError)):
        torch.bernoulli(torch.full((4,), p, device="ltc")).cpu()


def test_a_generator_of_its_own_is_asked():
    first, second = (torch.Generator(device="ltc").manual_seed(5) for _ in range(2))
    x = torch.zeros(100, device="ltc")
    one = x.bernoulli_(0.5, generator=first).clone()
    torch.rand(4, device="ltc")
    assert torch.equal(one.cpu(), x.bernoulli_(0.5, generator=second).cpu())


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.zeros(5, dtype=torch.int8, device="ltc").random_(0, 70_000),
        lambda: torch.randint(-5, 300, (5,), dtype=torch.uint8, device="ltc"),
        lambda: torch.zeros(5, dtype=torch.bool, device="ltc").random_(-3, 100),
        lambda: torch.randint(2, (2,), device="ltc", dtype=torch.cfloat),
        lambda: torch.zeros(4, dtype=torch.float16, device="ltc").uniform_(0, 1e6),
        lambda: torch.zeros(4, device="ltc").uniform_(0, float("inf")),
    ],
)
def test_what_a_dtype_does_not_hold_is_refused(draw):
    with pytest.raises(RuntimeError):
        draw().cpu()


def test_a_draw_that_fails_takes_one_seed():
    def next_one(fails: bool) -> list[float]:
        torch.manual_seed(0)
        if fails:
            with pytest.raises(RuntimeError):
                torch.multinomial(torch.zeros(5, device="ltc"), 2).cpu()
        else:
            torch.multinomial(torch.ones(5, device="ltc"), 2)
        return torch.rand(2, device="ltc").tolist()

    assert next_one(fails=True) == next_one(fails=False)


def test_pytorchs_kernels_draw_as_the_numbers_lie():
    x = (torch.arange(30.0).reshape(6, 5) % 7 + 1).to("ltc") * 1
    for draw in (lambda p: torch.multinomial(p, 3), torch.poisson):
        torch.manual_seed(0)
        ours = draw(x.t())
        torch.manual_seed(0)
        torch.testing.assert_close(ours.cpu(), draw(x.t().contiguous()).cpu(), rtol=0, atol=0)
