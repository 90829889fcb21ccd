"""The device guard, which C++ asks about devices while an error of Python's is on its way."""

import threading

import pytest
import torch

from ltc.device import torch_device
from ltc.native.core import CORE

pytestmark = pytest.mark.devices(4)


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


class Stash:
    """Where the guard leaves an error, which meanwhile has another thread ask the guard."""

    def __init__(self):
        self.__dict__["answers"] = []

    def __setattr__(self, name, value):
        def ask():
            try:
                self.answers.append(torch_device.DeviceGuard.type_())
            except Exception as error:
                self.answers.append(error)

        other = threading.Thread(target=ask)
        other.start()
        other.join()
        self.__dict__[name] = value


@pytest.mark.skipif(CORE is not None, reason="the guard of the core is C++, and keeps nothing back")
def test_another_thread_is_answered_while_an_error_is_stashed(monkeypatch):
    x = torch.ones(3, device="ltc:0", requires_grad=True)
    y = x * 2

    def fail(gradient):
        raise KeyError("from a hook")

    y.register_hook(fail)
    stash = Stash()
    monkeypatch.setattr(torch_device, "_stash", stash)
    for count in (1, 2):  # by the generator that the first error has put in its place as well
        with pytest.raises(KeyError, match="from a hook"):
            y.sum().backward(retain_graph=True)
        assert len(stash.answers) >= count
    assert set(stash.answers) == {torch_device.PRIVATE_USE_1}


def test_more_errors_than_the_guard_has_spare_generators():
    x = torch.ones(3, device="ltc:0", requires_grad=True)

    def fail(gradient):
        raise KeyError("from a hook")

    for _ in range(2 * torch_device._SPARES):
        y = x * 2
        y.register_hook(fail)
        with pytest.raises(KeyError, match="from a hook"):
            y.sum().backward()
    assert torch_device.DeviceGuard.type_() == torch_device.PRIVATE_USE_1
