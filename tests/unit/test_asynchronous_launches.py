"""Launches that a device begins and ends later: how far the host runs ahead, and how errors are told.

The device of these tests finishes a launch when a thread waits for it, or when a test says so.
"""

import os
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import ltc
import ltc.core.lazy_model as ltm
from ltc import config
from ltc.backends.interface import BackendRegistrar
from ltc.runtime.executor import executor_of

sys.path.insert(0, str(Path(__file__).parents[1]))
from toy_vendor import ToyBackend, ToyComputation


class Device:
    """Counts launches.

    Attributes:
        most_ahead: The most launches that were begun and not finished.
        waits: The launches that a thread has waited for, by number.
        fails: The number of a launch that ends with an error.
    """

    def __init__(self):
        self.begun = self.finished = self.most_ahead = 0
        self.waits, self.fails = [], None

    def begin(self):
        self.begun += 1
        self.most_ahead = max(self.most_ahead, self.begun - self.finished)
        return Token(self, self.begun)


class Token:
    def __init__(self, device, number):
        self._device, self._number = device, number

    def is_finished(self):
        return self._number <= self._device.finished

    def wait(self):
        if not self.is_finished():
            assert self._number == self._device.finished + 1, "launches end in their order"
            self._device.waits.append(self._number)
            self._device.finished = self._number
        if self._number == self._device.fails:
            raise RuntimeError("the device has burnt down")


@pytest.fixture
def running():
    """A new device, whose backend is the process's."""
    device = Device()

    class Computation(ToyComputation):
        def begin(self, buffers, scalars):
            return self.launch(buffers, scalars), device.begin()

    class Backend(ToyBackend):
        computation = Computation

        def compile(self, graph, index, donated):
            return Computation(graph)

    name = f"asynchronous-{id(device)}"
    BackendRegistrar.register(name, Backend)
    with config.override(LTC_BACKEND=name):
        yield device
        ltm.wait_device_ops()


def step(x):
    """One launch, which the device has begun when this returns."""
    x = x * 2
    ltm.mark_step()
    while not executor_of(0).is_idle:  # it may have been handed to the executor's thread
        time.sleep(0)
    return x


@pytest.mark.parametrize("most", [1, 3])
def test_the_host_runs_ahead_by_as_many_launches_as_are_allowed(running, most):
    with config.override(LTC_MAX_IN_FLIGHT=most):
        x = torch.ones(3, device="ltc")
        for _ in range(10):
            x = step(x)
    assert running.begun == 10
    assert running.most_ahead == most
    assert running.finished == running.begun - most
    ltm.wait_device_ops()
    assert running.finished == running.begun
    assert x.tolist() == [1024.0] * 3


def test_nothing_is_waited_for_where_the_device_is_as_fast_as_the_host(running):
    x = torch.ones(3, device="ltc")
    for _ in range(10):
        x = step(x)
        running.finished = running.begun
    assert not running.waits


def test_a_read_waits_for_its_launch_and_no_later_one(running):
    with config.override(LTC_MAX_IN_FLIGHT=20):
        values = [torch.ones(3, device="ltc")]
        for _ in range(6):
            values.append(step(values[-1]))
        assert (running.begun, running.finished) == (6, 0)
        assert values[3].tolist() == [8.0] * 3
        assert running.finished == 3
        assert values[2].tolist() == [4.0] * 3
        assert running.finished == 3


def test_several_threads_wait_for_one_launch(running):
    with config.override(LTC_MAX_IN_FLIGHT=20):
        x = torch.ones(3, device="ltc")
        for _ in range(6):
            x = step(x)
        found = []
        threads = [threading.Thread(target=lambda: found.append(x.tolist())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [[64.0] * 3] * 4
    assert running.waits == sorted(set(running.waits))


def test_an_error_of_the_device_is_that_of_its_launch(running):
    with config.override(LTC_MAX_IN_FLIGHT=20):
        first = step(torch.ones(3, device="ltc"))
        running.fails = running.begun + 1
        second = step(first + 1)
        third = step(second)
        with pytest.raises(RuntimeError, match="burnt down") as raised:
            third.tolist()
        assert "while running" in " ".join(raised.value.__notes__)
        with pytest.raises(RuntimeError, match="burnt down"):
            second.tolist()
        assert first.tolist() == [2.0] * 3
        ltm.wait_device_ops()  # it was told


def test_an_error_that_nobody_has_read_is_raised_by_whoever_waits(running):
    running.fails = running.begun + 1
    x = step(torch.ones(3, device="ltc"))
    with pytest.raises(RuntimeError, match="burnt down"):
        ltm.wait_device_ops()
    assert step(torch.ones(3, device="ltc")).tolist() == [2.0] * 3
    del x


def test_what_was_replaced_by_a_failed_launch_is_lost_or_as_before(running):
    with config.override(LTC_MAX_IN_FLIGHT=20):
        weight, kept = torch.ones(3, device="ltc"), torch.ones(3, device="ltc")
        ltm.mark_step(wait=True)
        also = kept.detach().clone()
        ltm.mark_step(wait=True)
        running.fails = running.begun + 1
        weight.mul_(3)
        ltm.mark_step()
        with pytest.raises(RuntimeError, match="burnt down"):
            ltm.wait_device_ops()
        assert also.tolist() == [1.0] * 3
        with pytest.raises(RuntimeError, match="burnt down"):
            weight.tolist()


def test_a_profile_waits_for_each_launch(running):
    with config.override(LTC_MAX_IN_FLIGHT=20), ltc.profile(os.devnull):
        x = torch.ones(3, device="ltc")
        for _ in range(5):
            x = step(x)
        assert x.tolist() == [32.0] * 3
    assert running.begun == running.finished
