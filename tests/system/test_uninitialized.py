"""torch.nn.Lazy…: modules that learn their shapes from their first input, on the lazy device."""

import copy
import io
import os
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

pytestmark = pytest.mark.devices(2)

MODULES = {
    "linear": (lambda **kw: nn.LazyLinear(3, **kw), (4, 5)),
    "conv1d": (lambda **kw: nn.LazyConv1d(3, 2, **kw), (2, 3, 8)),
    "conv2d": (lambda **kw: nn.LazyConv2d(3, 2, **kw), (2, 3, 8, 8)),
    "conv3d": (lambda **kw: nn.LazyConv3d(3, 2, **kw), (2, 3, 4, 4, 4)),
    "transposed conv": (lambda **kw: nn.LazyConvTranspose2d(3, 2, **kw), (2, 3, 8, 8)),
    "batch norm 1d": (lambda **kw: nn.LazyBatchNorm1d(**kw), (4, 5)),
    "batch norm 2d": (lambda **kw: nn.LazyBatchNorm2d(**kw), (2, 3, 4, 4)),
    "batch norm 3d": (lambda **kw: nn.LazyBatchNorm3d(**kw), (2, 3, 4, 4, 4)),
}
WAYS = {
    "made there": lambda make: make(device="ltc"),
    "moved": lambda make: make().to("ltc"),
    "moved there and back": lambda make: make().to("ltc").cpu().to("ltc:1").to("ltc:0"),
    "pickled": lambda make: pickle.loads(pickle.dumps(make().to("ltc"))).to("ltc"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODULES)
def test_it_trains_like_an_ordinary_one(name, way, equal):
    make, shape = MODULES[name]
    x = torch.randn(shape)
    lazy, plain = WAYS[way](make), make()
    plain(x)
    lazy.load_state_dict(plain.state_dict())
    assert not any(type(p) is UninitializedParameter for p in lazy.parameters())
    optimizers = [torch.optim.SGD(module.parameters(), 0.1) for module in (lazy, plain)]
    for module, optimizer, device in zip((lazy, plain), optimizers, ("ltc", "cpu")):
        for _ in range(2):
            optimizer.zero_grad()
            module(x.to(device)).square().mean().backward()
            optimizer.step()
    equal(lazy.state_dict(), dict(plain.state_dict()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", MODULES)
def test_its_first_input_gives_it_shapes_on_the_device_and_of_the_dtype(name, dtype):
    make, shape = MODULES[name]
    for module in (make(device="ltc").to(dtype), make().to("ltc", dtype)):
        assert module(torch.randn(shape).to("ltc", dtype)).dtype is dtype
        assert all(p.is_ltc and p.dtype is dtype and p.numel() for p in module.parameters())
        assert "Lazy" not in type(module).__name__


def test_a_copy_learns_its_own_shapes():
    first = nn.LazyLinear(3, device="ltc")
    second = copy.deepcopy(first)
    for module, width in ((first, 5), (second, 7)):
        assert module(torch.ones(2, width, device="ltc")).shape == (2, 3)


def test_a_state_without_shapes_is_saved_and_loaded():
    file, source = io.BytesIO(), nn.LazyLinear(3).to("ltc")
    torch.save(source.state_dict(), file)
    file.seek(0)
    for state in (source.state_dict(), torch.load(file, weights_only=False)):
        for device in ("ltc", "cpu"):
            module = nn.LazyLinear(3, device=device)
            module.load_state_dict(state)
            assert type(module.weight) is UninitializedParameter
            assert module(torch.ones(2, 5, device=device)).shape == (2, 3)


@pytest.mark.parametrize("device", ["ltc", "cpu"])
def test_before_its_first_input_a_parameter_says_what_is_missing(device):
    weight = nn.LazyLinear(3, device=device).weight
    with pytest.raises(ValueError, match="Attempted to use an uninitialized parameter"):
        weight + 1
    with pytest.raises(RuntimeError, match="Can't access the shape of an uninitialized parameter"):
        weight.shape


MOVED = """
import torch, ltc
import ltc.core.lazy_model as ltm
torch.ltc.set_device(1)
model = torch.nn.LazyLinear(3).to("ltc")
print(model(torch.ones(2, 4, device="ltc")).device, model.weight.device)
"""


def test_it_moves_where_another_device_is_current():
    environment = {**os.environ, "LTC_NUM_DEVICES": "2"}
    done = subprocess.run(
        [sys.executable, "-c", MOVED], capture_output=True, text=True, env=environment
    )
    assert done.stdout == "ltc:1 ltc:1\n", done.stderr
