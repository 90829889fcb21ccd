"""Every rule computes operands of odd shapes as the CPU does, or leaves them to PyTorch's kernel."""

import functools
import random

import pytest
import torch
import torch.nn.functional as F

import ltc
import ltc.core.lazy_model as ltm
from ltc import config
from ltc.aten import registry
from ltc.aten.nn import normalization
from ltc.debug import metrics
from ltc.errors import InvalidGraph
from ltc.ir import build
from tests.drawn import seeds
from tests.odd_shapes import calls, failures
from tests.recorders import process_of_one_device

RULES = 12
WEIGHTS = {
    "(C, 1, 1, 1)": (3, 1, 1, 1), "(C, 1)": (3, 1), "(1, C)": (1, 3), "(1, C, 1, 1)": (1, 3, 1, 1),
    "(C, 1, 1)": (3, 1, 1), "(C,)": (3,),
}  # fmt: skip


@functools.cache
def known_calls():
    return calls()


@pytest.mark.parametrize("seed", seeds(1))
def test_rules_take_operands_of_odd_shapes(seed):
    """A few rules; all of them: python scripts/compare/odd_shapes.py."""
    known = known_calls()
    assert len(known) > 300
    names = random.Random(seed).sample(sorted(known), RULES)
    with config.override(LTC_BACKEND="eager", LTC_TIER="native"):
        found = {name: failures(known[name]) for name in names}
    assert not [text for _, texts in found.values() for text in texts]
    assert sum(tried for tried, _ in found.values()) > RULES


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluating"])
@pytest.mark.parametrize("given", ["weight", "bias"])
@pytest.mark.parametrize("shape", WEIGHTS)
def test_a_batch_norm_takes_its_weights_in_any_shape(shape, given, training):
    """Interpreted first, then compiled."""
    x, mean, var = torch.randn(4, 3, 2, 2), torch.randn(3), torch.rand(3) + 1
    weights = {"weight": torch.tensor([1.0, 2.0, 3.0]), "bias": torch.tensor([4.0, 5.0, 6.0])}
    expected = F.batch_norm(x, mean.clone(), var.clone(), **weights, training=training)
    weights[given] = weights[given].reshape(WEIGHTS[shape])
    on_ltc = {name: one.to("ltc") for name, one in weights.items()}
    for tier in ("auto", "native"):
        with process_of_one_device(LTC_TIER=tier, LTC_CACHE=0):
            for _ in range(4):
                found = F.batch_norm(
                    x.to("ltc"), mean.to("ltc"), var.to("ltc"), **on_ltc, training=training
                )
                ltm.mark_step()
                torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("shape", [(3, 1), (1, 3), (3, 1, 1, 1)])
def test_statistics_of_other_shapes_are_refused_as_on_the_cpu(shape):
    texts = []
    for device in ("cpu", "ltc"):
        x, mean = torch.randn(4, 3, 2).to(device), torch.zeros(shape).to(device)
        with pytest.raises(RuntimeError) as caught:
            F.batch_norm(x, mean, torch.ones(3).to(device), training=True).cpu()
        texts.append(str(caught.value).splitlines()[0])
    assert texts[0] == texts[1]


@pytest.mark.compared
def test_no_dimensions_are_all_of_them(device):
    x = torch.tensor([[1.0, torch.nan], [2.0, 3.0]]).to(device)
    return torch.nansum(x, dim=[]), torch.nansum(x[:1, :1], []), torch.sum(x, dim=[])


@pytest.mark.compared
def test_a_product_of_no_rows_is_as_large_as_what_is_added(device):
    """The CPU's kernel expands nothing then."""
    x = torch.ones(1).to(device)
    return torch.addmv(x, torch.ones(0, 10).to(device), torch.ones(10).to(device))


@pytest.fixture
def broken_rule(monkeypatch):
    """A formula that takes every operand for a matrix."""

    def transposed(x):
        rows, columns = x.shape
        return build.reshape(x, (columns, rows))

    monkeypatch.setitem(registry.RULES, "aten::sin", registry.Rule(transposed, {}, False))
    registry.rule_of.cache_clear()
    yield
    registry.rule_of.cache_clear()


@pytest.mark.native("a formula is asked where a program is made")
@pytest.mark.parametrize("shape", [(719,), (2, 719)], ids=["an error", "another shape"])
def test_where_a_formula_fails_torchs_kernel_runs_and_a_counter_says_so(broken_rule, shape):
    """No other test has made a program of this shape, whose formula would not be asked again."""
    x = torch.rand(shape)
    with config.override(LTC_CHECK=0), metrics.counted() as grown:
        found = x.to("ltc").sin()
        ltm.mark_step()
        torch.testing.assert_close(found.cpu(), x.sin())
    assert grown["RuleFault::aten::sin"] == 1
    (told,) = [one for one in ltc.explain() if one.kind == "faults"][-1:]
    assert "the rule of aten::sin" in told.what
    assert "test_odd_shapes.py" in told.what
    with config.override(LTC_CHECK=1):
        found = (x + 1).to("ltc").sin()
        with pytest.raises((InvalidGraph, ValueError)):
            ltm.mark_step(wait=True)


def test_statistics_are_one_number_for_each_channel():
    vector, matrix = (build.full(shape, 0.0, torch.float32) for shape in ((3,), (3, 1)))
    assert normalization._is_per_channel(3, vector, None)
    assert not normalization._is_per_channel(3, vector, matrix)
    assert not normalization._is_per_channel(4, vector)


@pytest.mark.compared
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize(
    "shape", [(1,), (5, 10), (10,)], ids=str
)  # of (5, 1) the CPU's sum is wrong
def test_addbmm_in_place_takes_the_shape_of_its_result(device, shape):
    x, a, b = torch.randn(shape), torch.randn(3, 5, 4), torch.randn(3, 4, 10)
    x, a, b = (one.to(device) for one in (x, a, b))
    result = x.addbmm_(a, b, beta=0.5)
    assert result is x and x.shape == (5, 10)
    return x, x * 2
