from collections import deque
from dataclasses import dataclass

import pytest
import torch

from ltc.distributed.parallel_loader import MpDeviceLoader
from ltc.training_loop.transfer import (
    ToLazyTensorArena,
    check_view_sharing,
    send_cpu_data_to_device,
)


def is_tensor(x):
    return isinstance(x, torch.Tensor)


def test_167_all_selected_tensors_are_converted_in_one_call_and_their_order_is_kept():
    calls = []

    def convert(tensors):
        calls.append(len(tensors))
        return [t + 10 for t in tensors]

    a, b, c = (torch.tensor(n) for n in range(3))
    new = ToLazyTensorArena(convert, is_tensor).transform({"x": [a, (b, 5)], "y": {"z": c}, "a": a})
    assert new == {"x": [10, [11, 5]], "y": {"z": 12}, "a": 10}
    assert new["a"] is new["x"][0] and calls == [3]


def test_167_nothing_is_converted_where_nothing_is_selected():
    arena = ToLazyTensorArena(lambda tensors: pytest.fail("called"), is_tensor)
    assert arena.transform({"x": [1, (2,)]}) == {"x": [1, [2]]}


def test_a_conversion_that_loses_tensors_is_an_error():
    with pytest.raises(ValueError, match="got 2 tensors and returned 1"):
        ToLazyTensorArena(lambda ts: ts[:1], is_tensor).transform([torch.ones(1), torch.ones(1)])


def test_a_tensor_saved_with_its_view_is_an_error_that_names_both():
    x = torch.zeros(4)
    message = r"Tensor ID \d+ is sharing a view with tensor ID \d+: float32\[2\] and float32\[4\]"
    with pytest.raises(RuntimeError, match=message):
        check_view_sharing({"x": x, "y": [x[:2]]})


def test_the_same_tensor_twice_and_a_tied_parameter_are_fine():
    x = torch.zeros(4)
    check_view_sharing([x, x, x.detach(), x.clone()])
    layer = torch.nn.Linear(2, 2)
    check_view_sharing({"a": layer.weight, "b": layer.state_dict()})


def test_tensors_without_memory_share_nothing():
    check_view_sharing([torch.empty(0), torch.empty(0, 2), torch.ones(2, device="meta")])
    check_view_sharing(torch.eye(2).to_sparse())


@dataclass(slots=True)
class Batch:
    inputs: torch.Tensor
    targets: torch.Tensor


def test_tensors_in_a_deque_and_in_slots_arrive_on_the_device():
    data = deque([Batch(torch.ones(2), torch.zeros(1))])
    (moved,) = send_cpu_data_to_device(data, "ltc")
    assert moved.inputs.is_ltc and moved.targets.is_ltc and data[0].inputs.is_cpu
    (moved,) = MpDeviceLoader(list(data), "ltc")
    assert moved.inputs.tolist() == [1, 1] and moved.inputs.is_ltc and moved.targets.is_ltc


@pytest.mark.parametrize("send", ["at once", "by a loader"])
def test_sparse_tensors_are_moved_among_others(send):
    sparse = torch.eye(2).to_sparse().requires_grad_()
    data = [torch.ones(2), sparse, torch.zeros(1)]
    if send == "at once":
        moved = send_cpu_data_to_device(data, "ltc")
    else:
        (moved,) = MpDeviceLoader([data], "ltc")
    assert [x.device.type for x in moved] == ["ltc"] * 3
    assert moved[0].tolist() == [1, 1] and moved[2].tolist() == [0]
    assert moved[1].layout is torch.sparse_coo and moved[1].is_leaf and moved[1].requires_grad
    assert torch.equal(moved[1].detach().cpu().to_dense(), torch.eye(2))
