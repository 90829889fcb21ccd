"""Some of the features of torch that scripts/compare/features.py tries, one of each kind."""

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts" / "compare"
sys.path.insert(0, str(SCRIPTS))
import features
from feature_cases import FEATURES

pytestmark = pytest.mark.also_native

SOME = {
    "torch.func": ["functional call with gradients of each sample"],
    "autograd": ["own function under vmap", "saved tensors hooks", "is grads batched"],
    "optimizers": ["LBFGS with a line search", "state of an optimizer moves"],
    "schedules": ["averaged model"],
    "modules": ["spectral norm", "hooks of modules", "meta modules become empty"],
    "copies and files": ["save and load", "distributed checkpoint"],
    "fft": ["stft and back"],
    "linalg": ["lstsq"],
    "distributions": ["mixture"],
    "random numbers": ["fork rng"],
    "precision": ["scaled losses"],
    "tools": ["torch dispatch modes", "custom operators", "masked tensors"],
    "other layouts": ["nested"],
}
NAMES = [(group, name) for group, names in SOME.items() for name in names]


@pytest.mark.parametrize("group, name", NAMES, ids=[name for _, name in NAMES])
def test_a_feature_of_torch_is_as_on_the_cpu(group, name):
    verdict, reason, details = features.judged(name, FEATURES[group][name])

    assert verdict == "equal", reason + details


def test_what_is_not_there_is_in_the_docs():
    docs = "".join(p.read_text() for p in (SCRIPTS.parents[1] / "docs").glob("*.md"))

    assert sum(map(len, FEATURES.values())) >= 165
    assert "sparse layouts and quantized tensors" in docs and "sharing a view" in docs
