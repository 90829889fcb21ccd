"""A device of another kind is refused by name wherever one of ltc's is wanted."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

import ltc
import ltc.core.lazy_model as ltm
import ltc.distributed.parallel_loader as pl

pytestmark = pytest.mark.devices(4)

CALLS = {
    "send_cpu_data_to_device": lambda device: ltm.send_cpu_data_to_device(torch.ones(2), device),
    "mark_step": ltm.mark_step,
    "get_rng_state": ltm.get_rng_state,
    "set_rng_state": lambda device: ltm.set_rng_state(1, device),
    "get_memory_info": ltm.get_memory_info,
    "lazy_device": ltm.lazy_device,
    "wait_device_ops": lambda device: ltm.wait_device_ops([device]),
    "ParallelLoader": lambda device: pl.ParallelLoader([torch.ones(2)], [device]),
    "MpDeviceLoader": lambda device: iter(pl.MpDeviceLoader([torch.ones(2)], device)),
    "torch.ltc.synchronize": torch.ltc.synchronize,
    "torch.ltc.get_rng_state": torch.ltc.get_rng_state,
}


@pytest.mark.parametrize("device", ["cpu", "cuda:0", torch.device("meta")])
@pytest.mark.parametrize("name", CALLS)
def test_a_device_of_another_kind_is_refused(name, device):
    with pytest.raises(RuntimeError, match=f"^{device} is not an ltc device: pass 'ltc', 'ltc:0'"):
        CALLS[name](device)


def test_waiting_for_none_waits_for_all():
    x = torch.ones(2, device="ltc:1") * 2
    ltm.mark_step("ltc:1")
    ltm.wait_device_ops(None)
    assert x.tolist() == [2, 2]


def test_a_device_becomes_current_by_its_name_too():
    try:
        assert ltc.device("ltc:1") == ltc.device(torch.device("ltc:1")) == torch.device("ltc:1")
        assert ltc.device() == torch.device("ltc:1")
        with pytest.raises(RuntimeError, match="format: cpu. Pass an ltc device: 'ltc'"):
            ltc.device("cpu")
        with pytest.raises(IndexError, match="ltc:9: this process has"):
            ltc.device("ltc:9")
        assert ltc.device() == torch.device("ltc:1")
    finally:
        ltc.device(0)


def test_torch_accelerator_and_torch_ltc_have_one_current_device():
    accelerator = torch.accelerator
    with accelerator.device_index(2):
        assert torch.ones(1, device="ltc").device == torch.device("ltc:2")
        assert torch.ltc.current_device() == accelerator.current_device_index() == 2
    assert torch.ltc.current_device() == 0
    with torch.ltc.device(1):
        assert accelerator.current_device_index() == 1
        accelerator.set_device_index("ltc:3")
        assert torch.ltc.current_device() == 3
        with pytest.raises(RuntimeError, match="ltc:9 does not exist"):
            accelerator.set_device_index(9)
        torch.ltc.set_device(-1)  # as with torch.cuda: nothing
        with accelerator.device_index(None), torch.ltc.device(-1):
            assert accelerator.current_device_index() == 3
    assert accelerator.current_device_index() == 0


def test_a_stream_is_that_of_its_device():
    assert torch.ltc.Stream(2).device == torch.device("ltc:2")
    assert torch.ltc.current_stream(1).device == torch.device("ltc:1")
    assert torch.accelerator.current_stream(3).device == torch.device("ltc:3")
    x = torch.arange(3, device="ltc:1")[torch.tensor([7], device="ltc:1")]
    with pytest.raises(IndexError):
        torch.accelerator.current_stream(1).synchronize()
    del x


MADE_ON_THE_CURRENT_DEVICE = {
    "to": lambda x: x.to("ltc"),
    "to device": lambda x: x.to(torch.device("ltc"), torch.float64, copy=True),
    "to by keyword": lambda x: x.to(device="ltc", non_blocking=True),
    "from another": lambda x: x.to("ltc:2").to("ltc"),
    "sparse": lambda x: x.to_sparse().to("ltc"),
    "gradient": lambda x: x.requires_grad_().to("ltc"),
    "module": lambda x: nn.BatchNorm1d(2).to("ltc").running_mean,
    "packed": lambda x: nn.utils.rnn.pack_sequence([x]).to("ltc").data,
    "tensor": lambda x: torch.tensor([1.0], device="ltc"),
    "as_tensor": lambda x: torch.as_tensor([1.0], device="ltc"),
    "asarray": lambda x: torch.asarray(x, device=torch.device("ltc")),
    "new_tensor": lambda x: x.new_tensor([1], device="ltc"),
    "sparse_coo_tensor": lambda x: torch.sparse_coo_tensor([[0]], [1.0], (2,), device="ltc"),
    "ones": lambda x: torch.ones(2, device="ltc"),
}


@pytest.mark.parametrize("way", MADE_ON_THE_CURRENT_DEVICE)
def test_a_bare_ltc_is_the_current_device(way):
    make = MADE_ON_THE_CURRENT_DEVICE[way]
    with torch.ltc.device(1):
        assert make(torch.ones(2, 2)).device == torch.device("ltc:1")
        assert torch.ones(2).to("ltc:0").device == torch.device("ltc:0")
    assert make(torch.ones(2, 2)).device == torch.device("ltc:0")


def test_a_bare_ltc_as_default_device_is_the_current_device():
    def made():
        return {
            function([1]).device.index
            for function in (torch.tensor, torch.as_tensor, torch.asarray, torch.ones)
        }

    with torch.ltc.device(1):
        with torch.device("ltc"):
            assert made() == {1}
        with torch.device("ltc:2"):
            assert made() == {2}
    with torch.device("ltc"):
        assert made() == {0}


def test_a_bare_ltc_in_another_thread_is_its_own_current_device():
    found = []

    def move():
        torch.ltc.set_device(1)
        found.append(torch.ones(2).to("ltc").device.index)

    thread = threading.Thread(target=move)
    thread.start()
    thread.join()
    assert found == [1] and torch.ones(2).to("ltc").device.index == 0


MADE_LIKE_A_TENSOR = {
    "new_tensor": lambda x: x.new_tensor([1, 2]),
    "new_tensor of an array": lambda x: x.new_tensor(torch.ones(2).numpy()),
    "new of numbers": lambda x: x.new([1.0, 2.0]),
    "new of a size": lambda x: x.new(2, 3),
    "new of a Size": lambda x: x.new(torch.Size([2])),
    "new of a named size": lambda x: x.new(size=(2,)),
    "new of nothing": lambda x: x.new(),
    "new of a tensor": lambda x: x.new(x),
    "new_zeros": lambda x: x.new_zeros(2),
}


@pytest.mark.parametrize("way", MADE_LIKE_A_TENSOR)
@pytest.mark.parametrize("device", ["ltc:0", "ltc:1"])
def test_what_is_made_like_a_tensor_is_on_its_device(way, device):
    make = MADE_LIKE_A_TENSOR[way]
    expected = make(torch.ones(2, dtype=torch.float64))
    made = make(torch.ones(2, dtype=torch.float64, device=device))
    assert made.device == torch.device(device)
    assert (made.shape, made.dtype) == (expected.shape, expected.dtype)


def test_what_is_made_like_a_tensor_may_be_elsewhere():
    x = torch.ones(2, device="ltc:1")
    assert x.new_tensor([1.0], device="cpu").device.type == "cpu"
    assert x.new_tensor([1.0], device="ltc:2").device.index == 2
    assert torch.ones(2).new_tensor([1.0]).device.type == torch.ones(2).new(3).device.type == "cpu"


COPIES = {
    "pickle": lambda generator: pickle.loads(pickle.dumps(generator)),
    "deepcopy": copy.deepcopy,
    "clone_state": torch.Generator.clone_state,
}


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_a_generator_is_on_its_device(way):
    generator = torch.Generator("ltc:1").manual_seed(3)
    torch.rand(2, device="ltc:1", generator=generator)
    copied = COPIES[way](generator)
    assert copied.device == torch.device("ltc:1")
    drawn = [torch.rand(4, device="ltc:1", generator=one) for one in (generator, copied)]
    assert torch.equal(*drawn)


@pytest.mark.parametrize("device", ["ltc:0", "ltc:2"])
def test_an_index_on_the_cpu_chooses_from_a_tensor_of_any_device(device):
    x = torch.arange(12.0, device=device).view(4, 3)
    chosen, column = torch.tensor([2, 0]), torch.tensor([1])
    for _ in range(5):
        assert x[chosen].tolist() == [[6, 7, 8], [0, 1, 2]]
        assert x[:, column].tolist() == [[1], [4], [7], [10]]
        assert x[chosen, column].tolist() == [7, 1]
        x[chosen] = x[chosen].clone()
        assert x[chosen].device == torch.device(device)
        ltm.mark_step()
