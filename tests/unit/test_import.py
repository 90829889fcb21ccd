"""What `import ltc` leaves behind."""

import os
import subprocess
import sys

import pytest
import torch

import ltc
from ltc.device import torch_device


@pytest.mark.parametrize("before", ["enable", "disable"])
def test_importing_leaves_the_garbage_collector_as_it_was(before):
    program = (
        f"import gc; gc.{before}(); was = gc.isenabled(); import ltc; assert gc.isenabled() is was"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


def test_what_users_call_is_there_without_an_import_of_its_own():
    """`import ltc; ltc.amp.autocast()`, as with `torch.amp`."""
    program = "import ltc; ltc.amp.autocast, ltc.core.lazy_model.mark_step, ltc.debug.metrics"
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


PARTS = (  # that many programs never use
    "llvmlite",
    "torch._dynamo",
    "ltc.amp",
    "ltc.backends.llvm",
    "ltc.checkpointing.saving",
    "ltc.compat",
    "ltc.core",
    "ltc.distributed.lazy_multiprocessing",
    "ltc.llvm",
    "ltc.profiling.profile",
    "ltc.profiling.report",
    "ltc.replay",
)


def test_parts_that_are_not_used_are_not_imported():
    program = f"import sys, ltc; print([one for one in {PARTS} if one in sys.modules])"
    plain = {k: v for k, v in os.environ.items() if k not in ("LTC_DEBUG", "LTC_PROFILE")}
    said = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], check=True, capture_output=True, env=plain
    )
    assert said.stdout.decode().strip() == "[]"


RUNS_AT_ONCE = """
import sys, torch, ltc
x = torch.ones(3).to("ltc")
assert (x * 2).sum().item() == 6
print([one for one in ("ltc.backends.llvm.compiling", "ltc.llvm.loops", "llvmlite") if one in sys.modules])
"""


def test_calls_that_run_when_they_are_made_import_nothing_that_compiles():
    """It takes 0.1 s: half of a small program's first step."""
    said = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUNS_AT_ONCE],
        check=True,
        capture_output=True,
        env=os.environ | {"LTC_TIER": "auto"},
    )
    assert said.stdout.decode().strip() == "[]"


@pytest.mark.parametrize("name", ltc.__all__)
def test_public_names_are_there_and_are_kept(name):
    assert getattr(ltc, name) is getattr(ltc, name)
    assert name in dir(ltc)


def test_a_name_that_ltc_lacks_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'ltc' has no attribute 'profiel'"):
        _ = ltc.profiel
    assert not hasattr(ltc, "torch_xla")


@pytest.mark.parametrize(
    "shape", [(2, 3), [2, 3], torch.Size([2, 3])], ids=lambda s: type(s).__name__
)
def test_the_maker_of_a_tensor_is_given_plain_tuples(monkeypatch, shape):
    """From torch 2.15 on it takes nothing else, and every tensor of ltc:1 comes from it."""
    make = torch_device.reinterpret_tensor

    def strict(seed, sizes, strides, offset):
        assert type(sizes) is type(strides) is tuple
        return make(seed, sizes, strides, offset)

    monkeypatch.setattr(torch_device, "reinterpret_tensor", strict)
    tensor = torch_device.empty_tensor(shape, torch.float32, 1)
    assert tuple(tensor.shape) == (2, 3) and tensor.stride() == (3, 1)
