"""The device guard answers C++ without Python where it can, and as before where it cannot."""

import ctypes
import os
import platform
import subprocess
import sys

import pytest
import torch

from ltc.device import native_guard, torch_api
from ltc.device.torch_api import Guard

IS_KNOWN = sys.platform == "linux" and platform.machine() == "x86_64"
known = pytest.mark.skipif(not IS_KNOWN, reason="the guard asks Python on this machine")
IS_USED = IS_KNOWN and torch_api._version() in torch_api.GUARDS_KNOWN
METHODS = 12


class Interface:
    """A C++ object whose methods ask Python and answer `answer`."""

    def __init__(self, answer: int):
        self.asked = 0

        def method(self_address, argument):
            self.asked += 1
            return answer

        self._method = native_guard._METHOD(method)
        place = ctypes.cast(self._method, ctypes.c_void_p).value
        # what stands before the table and after it is copied too
        self._table = (ctypes.c_uint64 * native_guard._WORDS)(*[place] * native_guard._WORDS)
        first = ctypes.addressof(self._table) + native_guard._BEFORE * 8
        self._object = ctypes.c_uint64(first)
        self.address = ctypes.addressof(self._object)

    def call(self, place: int, argument: int = 0) -> int:
        method = ctypes.c_uint64.from_address(self._object.value + 8 * place).value
        return native_guard._METHOD(method)(self.address, argument)


@known
def test_methods_that_ask_for_the_type_answer_without_asking():
    guard = Interface(20)
    assert native_guard.install(guard.address, 20, lambda: guard.asked)
    guard.asked = 0
    answers = [guard.call(place) for place in range(METHODS)]
    assert answers == [20] * METHODS
    assert guard.asked == METHODS - 5  # the others are the object's own


@known
@pytest.mark.parametrize("answer", [19, 20 + (1 << 8), 0])
def test_methods_that_answer_otherwise_stay(answer):
    guard = Interface(answer)
    before = guard._object.value
    assert not native_guard.install(guard.address, 20, lambda: guard.asked)
    assert guard._object.value == before


def test_methods_that_do_not_ask_python_stay():
    guard = Interface(20)
    assert not native_guard.install(guard.address, 20, lambda: 0)


def test_an_object_that_was_not_found_is_left_alone():
    assert not native_guard.install(0, 20, lambda: 0)


@pytest.mark.skipif(not IS_USED, reason="the guard asks Python on this machine or with this torch")
def test_python_is_not_asked_in_a_step():
    model = torch.nn.Linear(3, 2).to("ltc")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = Guard.times_asked
    model(torch.ones(4, 3, device="ltc")).sum().backward()
    optimizer.step()
    assert model.weight.grad.tolist() == [[4.0] * 3] * 2
    assert Guard.times_asked == before


STEP = """
import platform
platform.machine = lambda: {machine!r}
import torch, ltc
from ltc.device.torch_api import Guard

x = torch.ones(3, device="ltc:0", requires_grad=True)
(x * x).sum().backward()
print(x.grad.tolist(), Guard.times_asked > 10)

def fail(gradient):
    raise KeyError("from a hook")

y = x * 2
y.register_hook(fail)
try:
    y.sum().backward()
except KeyError as error:
    print(repr(error))
other = torch.ones(2, device="ltc:1", requires_grad=True)
(other * 3).sum().backward()
print(other.grad.device, other.grad.tolist())
"""


@pytest.mark.parametrize("machine", [platform.machine(), "a machine of another kind"])
def test_gradients_and_errors_of_hooks_are_the_same_with_and_without(machine):
    ran = subprocess.run(
        [sys.executable, "-c", STEP.format(machine=machine)],
        env={**os.environ, "LTC_NUM_DEVICES": "2"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    asks = not IS_USED or machine != platform.machine()
    assert ran.stdout.splitlines() == [
        f"[2.0, 2.0, 2.0] {asks}",
        "KeyError('from a hook')",
        "ltc:1 [3.0, 3.0]",
    ]
