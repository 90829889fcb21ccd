"""What PyTorch's CPU kernels refuse by its values raises here too, on every tier, with the line."""

import os
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import ltc
import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics
from tests import toy_vendor, value_checks
from tests.recorders import forget_paths
from tests.value_checks import CHECKS, difference, drawn, failure_of, outcome

ROOT = Path(__file__).parents[2]
AUTO = {"LTC_TIER": "auto", "LTC_NUM_DEVICES": 1, "LTC_CACHE": 0}
NO_JAX = pytest.mark.skipif(find_spec("jax") is None, reason="JAX is not installed")
EVERY_BACKEND = pytest.mark.parametrize(
    "backend", ["eager", "toy", pytest.param("xla", marks=NO_JAX)]
)
TIMES = 10  # in a process: interpreted, compiled, and for long


@pytest.fixture(autouse=True)
def no_path_is_known():
    forget_paths()


def assert_as_on_the_cpu(name: str, values: torch.Tensor) -> None:
    check = CHECKS[name]
    expected = outcome(check, values, lambda x: x)
    found = outcome(check, values, lambda x: x.to("ltc"))
    wrong = difference(check, expected, found)
    assert wrong is None, f"of {values.tolist()}: {wrong}"


def with_one_wrong(name: str, wrong) -> torch.Tensor:
    check = CHECKS[name]
    right = [check.right[0], check.right[-1]]
    return check.values([*right, wrong, check.right[0]])


@pytest.mark.parametrize("tier", ["auto", "op_by_op"])
@pytest.mark.parametrize("name", CHECKS)
def test_a_wrong_value_raises_the_cpus_error_each_time(name, tier):
    values = with_one_wrong(name, CHECKS[name].wrong[0])
    with config.override(**AUTO | {"LTC_TIER": tier}):
        for _ in range(TIMES):
            assert_as_on_the_cpu(name, values)


def test_calls_that_run_when_they_are_made_look_each_time():
    values = with_one_wrong("bce gradient", 2.0)[:3]
    with config.override(**AUTO), metrics.counted() as grown:
        for _ in range(TIMES):
            assert_as_on_the_cpu("bce gradient", values)
        assert grown["ImmediateSteps"]


@pytest.mark.parametrize("name", CHECKS)
def test_a_compiled_program_refuses_each_wrong_value_and_takes_those_at_the_limit(name):
    check = CHECKS[name]
    for wrong in check.wrong:
        assert_as_on_the_cpu(name, with_one_wrong(name, wrong))
    for right in check.right:
        assert_as_on_the_cpu(name, with_one_wrong(name, right))
    assert_as_on_the_cpu(name, check.values([]))


@EVERY_BACKEND
@pytest.mark.parametrize("name", CHECKS)
def test_every_backend_refuses_it(name, backend):
    assert toy_vendor.ToyBackend.name == "toy"
    with config.override(LTC_BACKEND=backend):
        assert_as_on_the_cpu(name, with_one_wrong(name, CHECKS[name].wrong[0]))
        assert_as_on_the_cpu(name, with_one_wrong(name, CHECKS[name].right[-1]))


# Of several calls each: a single one gets no program.
OF_ANY_SIZE = ("bce behind a layer", "bernoulli", "normal", "embedding by frequency")


@pytest.mark.parametrize("name", OF_ANY_SIZE)
def test_sizes_that_change_are_looked_at_too(name):
    check, choose, sizes = CHECKS[name], random.Random(0), iter(range(3, 300))
    with config.override(**AUTO, LTC_CHECK=0), metrics.counted() as grown:
        while not grown["SymbolicSizes"]:  # until one program runs at sizes that are new to it
            assert_as_on_the_cpu(name, check.values([check.right[0]] * next(sizes)))
        for _ in range(20):
            assert_as_on_the_cpu(name, drawn(check, choose, next(sizes)))


@pytest.mark.parametrize("seed", range(20))
def test_random_values_are_taken_or_refused_as_on_the_cpu(seed):
    assert failure_of(seed) is None


def test_a_replayed_step_looks_at_each_batch():
    weight = torch.ones(2, device="ltc", requires_grad=True)

    @ltc.compile
    def step(x, target):
        loss = F.binary_cross_entropy(x * weight, target)
        loss.backward()
        gradient, weight.grad = weight.grad, None
        return loss, gradient

    target = torch.tensor([0.0, 1.0]).to("ltc")
    for k in range(6):
        loss, _ = step(torch.tensor([0.5, k / 6]).to("ltc"), target)
        assert loss.isfinite()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="input should be between 0 and 1"):
            step(torch.tensor([0.5, 1.5]).to("ltc"), target)[0].cpu()
    assert step(torch.tensor([0.5, 1.0]).to("ltc"), target)[0].isfinite()


@pytest.mark.native("the error is that of a step that was recorded")
def test_a_step_that_fails_trains_nothing():
    model = torch.nn.Linear(2, 1).to("ltc")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = [p.detach().cpu() for p in model.parameters()]
    x, target = torch.full((4, 2), 50.0).to("ltc"), torch.ones(4, 1).to("ltc")
    torch.nn.BCELoss()(model(x) + 2, target).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        ltm.mark_step(wait=True)
    for p, old in zip(model.parameters(), before):
        assert torch.equal(p.detach().cpu(), old)


@pytest.mark.native("the error is that of a step that was recorded")
def test_of_two_calls_that_refuse_their_values_the_first_is_named():
    p = torch.tensor([0.5, 7.0, -7.0]).to("ltc")
    with pytest.raises(RuntimeError, match="all elements of target") as raised:
        first = F.binary_cross_entropy(p.sigmoid(), p)
        (first + F.binary_cross_entropy(p, p.sigmoid())).cpu()
    line = raised.traceback[0].lineno  # counted from 0
    assert f"test_value_checks.py:{line} " in " ".join(raised.value.__notes__)


def test_a_check_costs_no_kernel_of_its_own():
    def program():
        p = torch.rand(64, 32).to("ltc")
        return F.binary_cross_entropy(p, p)

    with metrics.counted() as grown:
        assert program().isfinite()
    assert not [name for name in grown if name.startswith("extern.python")]


_SAVED = """
import torch, ltc
from torch.nn import functional as F
x = torch.tensor([0.5, 1.5], device="ltc")
try:
    F.binary_cross_entropy(x, x - 0.5).cpu()
except RuntimeError as error:
    print(error, *error.__notes__)
"""


def test_a_program_from_the_disk_cache_refuses_it_too(tmp_path):
    script = tmp_path / "saved.py"
    script.write_text(_SAVED)
    environment = {"LTC_CACHE_DIR": str(tmp_path / "cache"), "LTC_TIER": "native"}
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, str(script)],
            env={**os.environ, **environment, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert "all elements of input should be between 0 and 1" in done.stdout
        assert "saved.py:" in done.stdout


def test_the_docs_list_every_check():
    assert f"\n{value_checks.table()}\n" in (ROOT / "docs" / "api.md").read_text()
