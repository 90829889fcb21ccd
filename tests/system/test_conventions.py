"""What PyTorch code expects of a device: its events, settings, memory tables, names and modules."""

import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import ltc.core.lazy_model as ltm
from ltc import config


def test_an_event_of_torch_keeps_time_and_can_be_waited_for():
    begin, end = (torch.Event("ltc", enable_timing=True) for _ in range(2))
    begin.record()
    total = torch.ones(3, device="ltc") + 1
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) > 0 and end.query()
    assert total.tolist() == [2, 2, 2]


def test_a_stream_of_torch_records_events_that_can_be_waited_for():
    stream = torch.Stream("ltc")
    event = stream.record_event()
    event.synchronize()
    stream.wait_event(event)
    stream.synchronize()
    assert stream.device == torch.device("ltc:0")


@pytest.mark.parametrize("make", [torch.Event, torch.Stream, torch.Generator])
def test_a_class_of_torch_makes_its_own_object_for_other_devices(make):
    of_ltc = make("ltc")
    assert isinstance(of_ltc, make) and issubclass(type(of_ltc), make)
    assert of_ltc.device.type == "ltc"
    if make is not torch.Stream:  # the CPU has none
        assert isinstance(make("cpu"), make) and type(make("cpu")) is not type(of_ltc)
    assert pickle.loads(pickle.dumps(make)) is make


def test_methods_of_these_classes_take_the_objects_of_every_device():
    torch.Event.synchronize(torch.Event("ltc"))
    torch.Stream.synchronize(torch.Stream("ltc"))
    for device in ("cpu", "ltc"):
        copied = torch.Generator.clone_state(torch.Generator(device).manual_seed(3))
        assert (copied.device.type, copied.initial_seed()) == (device, 3)


@pytest.mark.parametrize("make", [torch.Event, torch.Stream, torch.Generator])
def test_a_device_that_does_not_exist_has_no_such_object(make):
    with pytest.raises(RuntimeError, match="ltc:7 does not exist"):
        make("ltc:7")


def test_the_accelerator_tells_its_dtypes():
    capability = torch.accelerator.get_device_capability()
    assert {torch.float32, torch.bfloat16, torch.bool} < capability["supported_dtypes"]
    for dtype in capability["supported_dtypes"]:
        assert torch.empty(2, dtype=dtype, device="ltc").dtype is dtype


# --- torch.ltc -----------------------------------------------------------------------------------


def test_the_module_is_known_by_its_own_name():
    assert repr(torch.ltc).startswith("<module 'torch.ltc' from")
    with pytest.raises(AttributeError, match="module 'torch.ltc' has no attribute 'nothing'"):
        torch.ltc.nothing
    assert "memory_summary" in torch.ltc.__doc__
    assert [name for name in torch.ltc.__all__ if not getattr(torch.ltc, name).__doc__] == []


def test_the_module_lists_its_public_names_alone():
    shown = {name for name in dir(torch.ltc) if not name.startswith("_")}
    assert shown == set(torch.ltc.__all__)


def test_a_device_has_the_name_of_its_processor():
    assert torch.ltc.get_device_name() == torch.ltc.get_device_properties().name
    assert "LLVM" not in torch.ltc.get_device_name()


def test_the_memory_snapshot_adds_up_to_what_is_allocated():
    model = torch.nn.Linear(3, 4).to("ltc")
    loss = model(torch.ones(2, 3, device="ltc")).relu().sum()  # autograd keeps some more
    ltm.mark_step(wait=True)
    segments = torch.ltc.memory_snapshot()
    assert sum(one["total_size"] for one in segments) == torch.ltc.memory_allocated()
    assert all(one["total_size"] == sum(b["size"] for b in one["blocks"]) for one in segments)
    weights = [one for one in segments if one["name"] == "weight"]  # also of models of other tests
    facts = [(one["shape"], one["dtype"], one["total_size"]) for one in weights]
    assert ((4, 3), torch.float32, 48) in facts
    assert loss.requires_grad


def test_a_memory_snapshot_passes_over_a_module_that_has_not_begun():
    unmade = torch.nn.Module.__new__(torch.nn.Linear)
    kept = torch.ones(3, 4, device="ltc")
    assert any(one["shape"] == (3, 4) for one in torch.ltc.memory_snapshot())
    assert "_modules" not in vars(unmade) and kept.shape == (3, 4)


def test_the_memory_summary_has_the_figures_of_the_stats():
    kept = torch.ones(1 << 20, device="ltc")
    stats, summary = torch.ltc.memory_stats(), torch.ltc.memory_summary()
    assert f"{stats['allocated_bytes.all.current'] / 2**20:.2f} MiB" in summary
    assert f"{stats['allocated_bytes.all.peak'] / 2**20:.2f} MiB" in summary
    assert "buffers" in summary and "buffers" not in torch.ltc.memory_summary(abbreviated=True)
    assert kept.nbytes == 4 << 20


def test_a_storage_moves_to_the_device():
    storage = torch.arange(3, dtype=torch.float32).untyped_storage()
    moved = storage.ltc()
    assert moved.is_ltc and not storage.is_ltc
    assert torch.empty(0, device="ltc").set_(moved).tolist() == [0, 1, 2]


# --- torch.backends.ltc --------------------------------------------------------------------------


def test_settings_are_read_and_changed_in_torch_backends():
    settings = torch.backends.ltc
    with config.override(LTC_SYNC_WAIT=None):
        assert settings.sync_wait is False
        settings.sync_wait = True
        assert config.value("LTC_SYNC_WAIT") is True
        with settings.flags(sync_wait=False, fallback="warn"):
            assert (settings.sync_wait, settings.fallback) == (False, "warn")
        assert settings.sync_wait is True
        settings.sync_wait = None
        assert settings.sync_wait is False
    assert {"tier", "debug", "flags"} < set(dir(settings)) and settings.is_available()


def test_a_setting_that_cannot_be_is_refused_when_it_is_made():
    before = config.value("LTC_TIER")
    with pytest.raises(ValueError, match="LTC_TIER=fast: expected one of auto, native, op_by_op"):
        torch.backends.ltc.tier = "fast"
    with pytest.raises(ValueError, match="expected 1, 0, true or false"):
        torch.backends.ltc.flags(check="perhaps")
    with pytest.raises(AttributeError, match="no setting teir. Did you mean tier?"):
        torch.backends.ltc.teir
    with pytest.raises(AttributeError, match="no setting teir. Did you mean tier?"):
        torch.backends.ltc.teir = "native"
    assert config.value("LTC_TIER") == before


# --- others --------------------------------------------------------------------------------------


def test_process_groups_of_the_device_are_of_its_own_backend():
    assert dist.get_default_backend_for_device("ltc") == "ltc"
    assert dist.get_default_backend_for_device(torch.device("ltc", 0)) == "ltc"


def test_a_wrong_variable_is_told_at_the_first_use_whatever_reads_it():
    with config.override(LTC_MAX_IN_FLIGHT="many"):
        code = "import torch, ltc; torch.ones(1, device='ltc')"
        done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "LTC_MAX_IN_FLIGHT=many: expected an integer of at least 1. It sets: steps" in last


BEFORE_THE_IMPORT = """
import sys, torch
{use}
assert "ltc" in sys.modules
"""
USES = {
    "a generator": "assert torch.Generator('ltc').manual_seed(3).device.type == 'ltc'",
    "its keyword": "assert torch.Generator(device=torch.device('ltc', 0)).device.type == 'ltc'",
    "a setting": "assert torch.backends.ltc.tier == 'auto'",
    "a new setting": "torch.backends.ltc.tier = 'native'; assert torch.backends.ltc.tier == 'native'",
    "a storage": "assert torch.ones(2).untyped_storage().ltc().is_ltc",
    "an event": "torch.Event(torch.ltc.current_stream().device).synchronize()",
}


@pytest.mark.parametrize("what", USES)
def test_the_first_use_may_come_before_the_import(installed, what):
    code = BEFORE_THE_IMPORT.format(use=USES[what])
    with config.override(LTC_TIER=None):
        environment = {**config.os.environ, "PYTHONPATH": installed}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, text=True, capture_output=True
        )
    assert done.returncode == 0, done.stderr
