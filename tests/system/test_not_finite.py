"""LTC_DEBUG_NANS names the first node that makes NaN or infinities, its line, and its operands."""

import pytest
import torch

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.errors import NotFinite
from tests.explained import line_to_blame


@pytest.fixture(autouse=True, params=["native", "auto"])
def looked_for(request):
    with config.override(LTC_DEBUG_NANS=1, LTC_TIER=request.param, LTC_NUM_DEVICES=1):
        yield


def error_of(step, *arguments) -> NotFinite:
    with pytest.raises(NotFinite) as caught:
        result = step(*arguments)
        ltm.mark_step(wait=True)
        del result
    return caught.value


def lazy(*numbers, dtype=torch.float32):
    return torch.tensor(numbers, dtype=dtype).to("ltc")


def test_the_first_node_of_a_forward_is_named_with_its_line_and_operands():
    def forward(x):
        h = x - 3
        y = h.log()  # here
        return y.sum().exp()

    error = error_of(forward, lazy(1.0, 5.0, 2.0))
    assert f"aten::log called at {line_to_blame(forward)}: the node log gives NaN" in str(error)
    assert "2 of 3 elements of f32[3], the first at [0]" in str(error)
    assert "from -2 to 2, mean -0.333333" in str(error)
    assert error.origin.line == line_to_blame(forward)


def test_an_infinity_is_named_where_it_is_made():
    def forward(x):
        y = x.exp()  # here
        return y * 2

    error = error_of(forward, lazy(1.0, 100.0))
    assert "aten::exp called at" in str(error) and "gives Inf: 1 of 2" in str(error)
    assert error.origin.line == line_to_blame(forward)


def test_nan_of_an_infinity_is_blamed_where_it_becomes_nan():
    def forward(x):
        large = x.exp()
        return large - large  # here

    error = error_of(forward, lazy(1.0, 100.0))
    assert "gives NaN: 1 of 2" in str(error) and "1 infinite" in str(error)
    assert error.origin.line == line_to_blame(forward)


def test_a_backward_is_blamed_and_the_parameters_stay():
    weight = lazy(0.0, 4.0).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step():
        (weight.sqrt() * weight).sum().backward()  # here
        optimizer.step()

    error = error_of(step)
    assert "gives NaN" in str(error)
    assert error.origin.line == line_to_blame(step)
    assert weight.tolist() == [0.0, 4.0]


def test_an_optimizer_is_blamed():
    weight = lazy(1.0, 3e38).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=10.0, maximize=True)

    def step():
        (weight * weight.detach()).sum().backward()
        optimizer.step()  # here

    error = error_of(step)
    assert "gives Inf" in str(error)
    assert error.origin.line == line_to_blame(step)
    assert weight.tolist() == pytest.approx([1.0, 3e38])


def test_nan_that_the_program_was_given_is_told_as_such():
    error = error_of(lambda x: x + 1, lazy(1.0, float("nan")))
    assert str(error).startswith("An input of the program has NaN: 1 of 2 elements of f32[2]")


@pytest.mark.parametrize(
    "meant",
    [
        lambda x: torch.full((3,), float("-inf"), device="ltc"),
        lambda x: torch.softmax(x.masked_fill(x > 1, float("-inf")), 0),
        lambda x: x.masked_fill(x > 1, float("inf")),
        lambda x: lazy(1.0, float("inf")) + 1,
        lambda x: x[:0].log(),
        lambda x: (x > 1).sum(),
        lambda x: x.to(torch.complex64) * 1j,
        lambda x: x.to(torch.float8_e4m3fn),
        lambda x: torch.nan_to_num(x.log() - 9).clamp(max=1),
    ],
)
def test_what_is_meant_or_finite_raises_nothing(meant):
    result = meant(lazy(0.5, 1.0, 2.0))
    ltm.mark_step(wait=True)
    assert result.device.type == "ltc"


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64], ids=str
)
def test_every_kind_of_number_is_looked_at(dtype):
    error = error_of(lambda x: x / (x - x), lazy(1.0, 2.0, dtype=dtype))
    assert "gives" in str(error) and "called at" in str(error)


def test_the_next_step_is_right():
    error_of(lambda x: x.log(), lazy(-1.0))
    assert (lazy(1.0) * 3).tolist() == [3.0]


def test_random_numbers_are_the_same_when_it_is_looked_for_the_node():
    def forward():
        x = torch.rand(100, device="ltc") - 0.5
        return x, x.sqrt()

    error = error_of(forward)
    assert "aten::sqrt" in str(error)


def test_it_may_be_asked_for_together_with_verification():
    with config.override(LTC_VERIFY=1):
        assert "aten::log" in str(error_of(lambda x: x.log(), lazy(-1.0, 2.0)))


def test_nobody_looks_unasked():
    with config.override(LTC_DEBUG_NANS=0):
        assert torch.isnan(lazy(-1.0).log()).item()
