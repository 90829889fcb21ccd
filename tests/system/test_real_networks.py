"""Six networks of well-known packages train as rightly as with eager PyTorch, judged by float64.

Many more: `python scripts/compare/real_networks.py --all`.
"""

import math
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

SCRIPTS = Path(__file__).parents[2] / "scripts" / "compare"
sys.path.insert(0, str(SCRIPTS))
import network_check
from network_check import Network

SIX = (
    "timm xcit",
    "torchvision vgg",
    "transformers segformer",
    "transformers llama",
    "transformers qwen3_moe",
    "transformers mamba",
)


@pytest.fixture(scope="module")
def networks() -> dict[str, Network]:
    for package in ("timm", "torchvision", "transformers"):
        if not find_spec(package):
            pytest.skip(f"{package} is not installed: pip install '.[models]'")
    return import_module("network_cases").NETWORKS


@pytest.mark.parametrize("name", SIX)
def test_a_network_is_as_near_to_float64_as_with_eager_pytorch(networks, name):
    checked = network_check.check(networks[name])

    assert [c for c in checked.compared if not c.is_right] == []


def trained(function) -> Network:
    """A network of one parameter, one, whose loss is that function of it."""

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return function(self.w * x)

    def loss_of(model, batch):
        outputs = model(batch["x"])
        return outputs.sum(), outputs

    return Network(Small, lambda: {"x": torch.ones(1)}, loss_of, torch.optim.SGD)


def jump_of(function) -> float:
    """The height of the jump in the gradient of the parameter."""
    found = {c.name: c for c in network_check.check(trained(function)).compared}
    return found["w"].jump


def test_the_border_of_a_relu_is_told_as_a_jump():
    assert jump_of(lambda x: (x - 1 + 1e-8).relu()) == pytest.approx(1)


def test_a_smooth_network_has_no_jump():
    # The gradient w * exp(w * w) of w = 1 has the second derivative 10 e.
    assert jump_of(torch.exp) == pytest.approx(10 * math.e * network_check.MOVE**2, rel=1e-3)
