"""What is left of a base when the last tensor on it is a reordering: the reordering itself."""

import gc
from threading import Thread, get_ident
from threading import enumerate as enumerate_threads

import pytest
import torch

import ltc.core.lazy_model as ltm
from ltc.device.recording.recorder import device_at
from ltc.device.recording.tensors import state_of

pytestmark = pytest.mark.also_native


def use(number: float) -> None:
    (torch.ones(2, device="ltc") + number).sum().item()


def test_a_thread_that_has_ended_is_not_counted():
    use(1)  # starts what runs programs, which would be given an ended thread's number
    threads = [Thread(target=use, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    use(1)
    before = set(device_at(0).recorders)
    device_at(0).has_one_recorder()
    ended = {thread.ident for thread in threads} - {thread.ident for thread in enumerate_threads()}
    assert set(device_at(0).recorders) & ended == set()
    assert get_ident() in before


def test_the_gradient_of_a_linear_layer_is_made_in_the_order_of_its_weight():
    device = device_at(0)
    for thread in set(device.recorders) - {
        get_ident()
    }:  # of tests that ended in the midst of a step
        del device.recorders[thread]
    layer = torch.nn.Linear(5, 3).to("ltc")
    layer(torch.randn(7, 5, device="ltc")).sum().backward()
    ltm.mark_step()
    assert state_of(layer.weight.grad).base is None
    layer.weight.grad.add_(1)
    assert layer.weight.grad.shape == (3, 5)


def test_a_base_with_a_tensor_or_another_view_stays_one():
    x = torch.arange(6.0, device="ltc").reshape(2, 3) * 2
    turned = x.t()
    ltm.mark_step()
    turned.add_(1)
    assert x.cpu().tolist() == [[1, 3, 5], [7, 9, 11]]
    first, second = x.t(), x.view(6)
    del x, turned
    gc.collect()
    ltm.mark_step()
    first.add_(1)
    assert second.cpu().tolist() == [2, 4, 6, 8, 10, 12]


def test_writes_to_the_last_view_are_seen_by_its_own_views():
    turned = (torch.arange(6.0, device="ltc").reshape(2, 3) * 2).t()
    ltm.mark_step()
    row = turned[0]
    turned.mul_(10)
    ltm.mark_step()
    assert row.cpu().tolist() == [0, 60]
    row.zero_()
    assert turned.cpu().tolist() == [[0, 0], [20, 80], [40, 100]]
