"""Printing a tensor reads it once, and gives the text that the CPU gives, but for the device."""

import contextlib

import pytest
import torch

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics

TENSORS = {
    "a matrix": lambda: torch.linspace(-3, 70, 900).reshape(30, 30),
    "a large tensor": lambda: torch.arange(3.0 * 2000).reshape(3, 2000),
    "a number": lambda: torch.tensor(2.5),
    "an empty tensor": lambda: torch.zeros(2, 0),
    "infinities": lambda: torch.tensor([1e30, float("inf"), float("nan"), -1e-20]),
    "whole floats": lambda: torch.arange(4.0),
    "bool": lambda: torch.tensor([[True, False]]),
    "integers": lambda: torch.tensor([-5, 1000], dtype=torch.int32),
    "complex": lambda: torch.tensor([1 + 2j, -3.5j]),
    "float64": lambda: torch.tensor([0.1], dtype=torch.float64),
    "bfloat16": lambda: torch.tensor([[0.1, 3.0]], dtype=torch.bfloat16),
    "float8": lambda: torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn),
    "a view": lambda: torch.arange(24.0).reshape(4, 6).t()[1:, ::2],
}


def without_device(text: str) -> str:
    """Lines are broken after so many letters, the device's among them: their number is no matter."""
    return " ".join(text.replace("device='ltc:0'", "").replace(", ,", ",").split()).replace(
        ", )", ")"
    )


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_is_read_once_and_prints_as_on_the_cpu(name):
    x = TENSORS[name]()
    on_ltc = x.to("ltc")
    with metrics.counted() as grown:
        text = str(on_ltc)
    assert grown["TransferFromDeviceTime"] == (x.numel() > 0)
    assert grown["ExecuteTime"] == 0 and "device='ltc:0'" in text
    assert without_device(text) == without_device(str(x))


@pytest.mark.native("it counts programs, and calls that run when made are none")
def test_a_pending_tensor_is_computed_by_one_program():
    x = torch.ones(30, 30).to("ltc")
    with metrics.counted() as grown:
        assert f"{x * 2}".startswith("tensor([[2., 2., 2.")
    assert grown["ExecuteTime"] == grown["TransferFromDeviceTime"] == 1


def test_a_parameter_and_a_result_of_autograd_say_what_they_are():
    weight = torch.nn.Parameter(torch.ones(3, device="ltc"))
    assert repr(weight) == (
        "Parameter containing:\ntensor([1., 1., 1.], device='ltc:0', requires_grad=True)"
    )
    with metrics.counted() as grown:
        assert repr(weight * 2) == "tensor([2., 2., 2.], device='ltc:0', grad_fn=<MulBackward0>)"
    assert grown["TransferFromDeviceTime"] == 1
    assert weight.grad is None


def test_print_options_hold():
    x = torch.full((3,), 1 / 3, device="ltc")
    torch.set_printoptions(precision=2)
    try:
        assert str(x) == "tensor([0.33, 0.33, 0.33], device='ltc:0')"
    finally:
        torch.set_printoptions(profile="default")


def test_tensors_of_other_kinds_print_as_ever():
    assert str(torch.eye(2).to_sparse()).startswith("tensor(indices=tensor([[0, 1],")
    assert str(torch.nested.nested_tensor([torch.ones(2)])).startswith("nested_tensor([")
    assert str(torch.ones(2, device="meta")) == "tensor(..., device='meta', size=(2,))"


@pytest.mark.native("the error is that of a step that was recorded")
@pytest.mark.parametrize("debug", [False, True])
def test_an_error_of_a_print_that_somebody_keeps_leaves_torch_func_as_it_was(debug, equal):
    def gradients():
        x = torch.arange(6.0).reshape(2, 3)
        return torch.func.vmap(torch.func.grad(lambda row: row.square().sum()))(x)

    expected = gradients()
    rows = torch.ones(3, 4).to("ltc")[torch.tensor([7]).to("ltc")]
    if debug:  # printing then reads only what was started
        with contextlib.suppress(IndexError):
            ltm.mark_step()
    with config.override(LTC_DEBUG=debug), pytest.raises(IndexError) as kept:
        str(rows)
    equal(gradients(), expected)
    assert kept.value.__traceback__ is not None
