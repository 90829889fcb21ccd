"""A device of another kind is refused by name wherever one of ltc's is wanted."""

import pytest
import torch

import ltc
import ltc.core.lazy_model as ltm
import ltc.distributed.parallel_loader as pl

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
    with pytest.raises(RuntimeError, match=f"^{device} is no ltc device.*one as 'ltc', as 'ltc:0'"):
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
        with pytest.raises(RuntimeError, match="format: cpu. An ltc device is wanted: 'ltc'"):
            ltc.device("cpu")
        with pytest.raises(IndexError, match="ltc:9: this process has"):
            ltc.device("ltc:9")
        assert ltc.device() == torch.device("ltc:1")
    finally:
        ltc.device(0)
