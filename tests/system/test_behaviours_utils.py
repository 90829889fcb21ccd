"""Section 6.12 of the parity inventory on the device; the rest of it is in tests/unit."""

import time

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import ltc  # noqa: F401
import ltc.core.lazy_model as ltm
import ltc.utils.utils as xu
from ltc.debug import metrics


def test_164_an_upload_keeps_requires_grad_and_values_of_every_dtype():
    data = {
        "float": torch.randn(2, 3, requires_grad=True),
        "others": [torch.arange(4), (torch.tensor([True, False]), torch.randn(2).half())],
    }
    device = ltm.lazy_device()
    sent = ltm.send_cpu_data_to_device(data, device)
    assert sent["float"].requires_grad and sent["float"].is_leaf
    pairs = [
        (sent["float"], data["float"]),
        (sent["others"][0], data["others"][0]),
        (sent["others"][1][0], data["others"][1][0]),
        (sent["others"][1][1], data["others"][1][1]),
    ]
    for there, here in pairs:
        assert there.device == device and there.dtype == here.dtype
        assert torch.equal(there.detach().cpu(), here.detach())


def test_164_one_tensor_comes_back_as_one_tensor():
    x = torch.randn(2, 2)
    assert torch.equal(ltm.send_cpu_data_to_device(x, ltm.lazy_device()).cpu(), x)


def test_164_tensors_on_the_device_and_parameters_stay_as_they_are():
    there = torch.ones(2, device=ltm.lazy_device())
    parameter = torch.nn.Parameter(torch.ones(2))
    sent = ltm.send_cpu_data_to_device([there, parameter], ltm.lazy_device())
    assert sent[0] is there and sent[1] is parameter


def test_164_one_call_is_one_batch_of_outbound_data():
    with metrics.counted() as grown:
        ltm.send_cpu_data_to_device([torch.ones(2, 2), torch.ones(3)], ltm.lazy_device())
    assert grown["OutboundData"] == 1
    assert metrics.metric_data("OutboundData")[2][-1][1] == 7 * 4


def test_164_the_device_has_its_own_copy():
    x = torch.zeros(2)
    there = ltm.send_cpu_data_to_device([x], ltm.lazy_device())[0]
    x.fill_(1)
    assert there.cpu().tolist() == [0, 0]


class Packed(xu.DataWrapper):
    def __init__(self, sequence):
        self.sequence = sequence

    def get_tensors(self):
        return [self.sequence.data]

    def from_tensors(self, tensors):
        return Packed(PackedSequence(tensors[0], self.sequence.batch_sizes))


def test_165_a_packed_sequence_goes_through_its_wrapper():
    padded = torch.randn(4, 3, 2)
    sequence = pack_padded_sequence(padded, [4, 2, 1])
    sent = ltm.send_cpu_data_to_device([Packed(sequence)], ltm.lazy_device())[0].sequence
    assert sent.data.device == ltm.lazy_device() and sent.batch_sizes.device.type == "cpu"
    assert torch.equal(sent.data.cpu(), sequence.data)


def test_167_an_arena_brings_device_tensors_back_in_their_places():
    device = ltm.lazy_device()
    a, b = torch.arange(3, device=device), torch.ones(2, device=device)
    arena = ltm.ToLazyTensorArena(lambda ts: [t.cpu() for t in ts], ltm.is_lazy_tensor)
    back = arena.transform({"x": [a, torch.zeros(1)], "y": (b,)})
    assert [t.tolist() for t in (*back["x"], back["y"][0])] == [[0, 1, 2], [0], [1, 1]]
    assert {t.device.type for t in (*back["x"], back["y"][0])} == {"cpu"}


def test_170_a_rate_of_about_what_was_counted():
    before = time.perf_counter()
    tracker = ltm.RateTracker()
    tracker.add(100)
    within = time.perf_counter()
    time.sleep(0.2)
    shortest = time.perf_counter() - within
    rate = tracker.rate()
    assert 100 / (time.perf_counter() - before) <= rate <= 100 / shortest


def test_a_device_tensor_saved_with_its_view_is_an_error_that_names_both():
    x = torch.zeros(4, device=ltm.lazy_device())
    with pytest.raises(RuntimeError, match=r"Tensor ID \d+ is sharing a view with tensor ID \d+"):
        ltm.check_view_sharing((x, x[0:2]))
    ltm.check_view_sharing((x, x, x.clone()))


def test_two_views_of_one_device_tensor_share_it():
    x = torch.zeros(4, device=ltm.lazy_device())
    with pytest.raises(RuntimeError, match="is sharing a view with"):
        ltm.check_view_sharing([x[:2], x[2:]])
