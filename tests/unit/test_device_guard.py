"""The device guard, which C++ asks about devices while an error of Python's is on its way."""

import pytest
import torch


def test_an_error_of_a_hook_reaches_the_caller_and_the_next_backward_works():
    x = torch.ones(3, device="ltc:0", requires_grad=True)
    y = x * 2

    def fail(gradient):
        raise KeyError("from a hook")

    y.register_hook(fail)
    with pytest.raises(KeyError, match="from a hook"):
        y.sum().backward()
    other = torch.ones(2, device="ltc:1", requires_grad=True)
    (other * 3).sum().backward()
    assert other.grad.device == torch.device("ltc:1")
    assert other.grad.tolist() == [3.0, 3.0]
