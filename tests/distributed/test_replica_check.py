"""ltm.check_replicas: one bit that differs is found, and named, on every replica."""

import pickle
import threading

import pytest
import torch
from torch import nn

import ltc.core.lazy_model as ltm
import ltc.distributed.lazy_multiprocessing as lmp
from tests.distributed.replicas import in_threads, values

pytestmark = pytest.mark.devices(4)

drawing = threading.Lock()  # threads share a generator


def model_on(device) -> nn.Module:
    with drawing:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    return model.to(device)


def flip_a_bit(tensor: torch.Tensor) -> None:
    """Of the last place of the last number."""
    changed = tensor.detach().cpu().clone()
    changed.view(torch.int32)[-1] ^= 1
    with torch.no_grad():
        tensor.copy_(changed)


def checked(ordinal: int, device, wrong: dict[int, str]) -> tuple | None:
    """What the error says where the replicas in `wrong` have a flipped bit in that parameter."""
    model = model_on(device)
    model[1].running_mean += ordinal  # a buffer: each replica has its own batches
    if ordinal in wrong:
        flip_a_bit(model.get_parameter(wrong[ordinal]))
    try:
        ltm.check_replicas(model)
    except ltm.ReplicasDiffer as error:
        return error.names, error.ordinals, str(error)
    finally:
        ltm.mark_step()
    return None


@pytest.mark.parametrize("wrong", [{}, {0: "0.bias"}, {2: "2.bias"}, {1: "2.bias", 3: "2.bias"}])
def test_threads(wrong):
    found = values(in_threads(lambda ordinal, device: checked(ordinal, device, wrong), 4))
    assert len(set(map(str, found))) == 1  # the same on every replica
    if not wrong:
        assert found[0] is None
        return
    names, ordinals, text = found[0]
    assert names == [next(iter(wrong.values()))] and repr(names[0]) in text
    # two of four that were changed alike are no minority
    assert ordinals == (list(wrong) if len(wrong) == 1 else [0, 1, 2, 3])


def in_a_process(rank: int) -> tuple | None:
    return checked(rank, ltm.lazy_device(), {1: "2.bias"})


def test_processes():
    first, second = lmp.spawn(in_a_process, nprocs=2)
    assert first == second and first[:2] == (["2.bias"], [0, 1])
    assert "differ from each other in '2.bias'" in first[2]


def test_one_replica_is_like_itself():
    ltm.check_replicas(model_on("ltc"))


DTYPES = (torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_of_every_kind(dtype, shape):
    def compare(ordinal: int, device) -> bool:
        one = torch.zeros(shape, dtype=dtype, device=device)
        host = torch.ones(2, 2, dtype=dtype)
        ltm.check_replicas({"one": one, "host": host.t(), "element": host[:1, 0].conj()})
        with pytest.raises(ltm.ReplicasDiffer, match="'other'"):
            ltm.check_replicas({"one": one, "other": torch.full((), ordinal, device=device)})
        with pytest.raises(ltm.ReplicasDiffer, match="'one'"):  # another shape
            ltm.check_replicas({"one": one.unsqueeze(0) if ordinal else one})
        return True

    assert values(in_threads(compare, 2)) == [True, True]


def test_the_error_travels():
    error = ltm.ReplicasDiffer("text", ["a"], [1])
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.names, again.ordinals) == ("text", ["a"], [1])
