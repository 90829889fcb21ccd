"""A block or a test that costs more than it may fails, and says why."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import ltc
import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics
from ltc.errors import BudgetExceeded
from tests.explained import in_a_thread

ROOT = Path(__file__).parents[2]


def step(n):
    loss = (torch.ones(n, 3, device="ltc") * 2).sum()
    ltm.mark_step(wait=True)
    return loss


@pytest.mark.native("a program is asked for when its path comes back")
def test_a_block_that_costs_nothing_new_passes():
    step(61)
    with ltc.budget(compiles=0, programs=0, syncs=0, fallbacks=0, transfers_mb=0):
        step(61)


@pytest.mark.native("it counts the programs that are compiled")
def test_a_new_program_exceeds_a_budget_of_none_and_is_explained():
    step(62)
    with pytest.raises(BudgetExceeded) as caught, ltc.budget(compiles=0):
        step(63)
    text = str(caught.value)
    assert text.startswith("The budget of this block is compiles=0; it cost compiles=1.")
    assert "with size [62, 3], got [63, 3]" in text
    assert "test_budgets.py" in text
    assert [one.reason for one in caught.value.explanations] == ["shape"]


def test_a_program_that_is_not_compiled_is_new_all_the_same():
    with config.override(LTC_TIER="auto", LTC_NUM_DEVICES=1, LTC_CACHE=0):
        with ltc.budget(compiles=0):
            in_a_thread(step, 64)

        def twice():  # what comes back gets a program
            step(65)
            step(65)

        with pytest.raises(BudgetExceeded, match="programs=1"), ltc.budget(programs=0):
            in_a_thread(twice)


@pytest.mark.native("it counts programs, and calls that run when made are none")
def test_reads_and_eager_calls_are_counted_each_time():
    x = torch.ones(3, device="ltc")

    def read(times):
        for _ in range(times):
            (x + 1).sum().item()

    with ltc.budget(syncs=2):
        read(2)
    with pytest.raises(BudgetExceeded, match="syncs=3"), ltc.budget(syncs=2, fallbacks=0):
        read(3)
    with pytest.raises(BudgetExceeded, match="aten::nonzero"), ltc.budget(fallbacks=0):
        x.nonzero()


def test_transfers_are_counted_both_ways():
    x = torch.ones(1 << 18)  # a megabyte
    with ltc.budget(transfers_mb=2):
        x.to("ltc").cpu()
    with pytest.raises(BudgetExceeded, match="transfers_mb=3"), ltc.budget(transfers_mb=2):
        x.to("ltc").cpu()
        x.to("ltc")


def test_counters_that_are_cleared_inside_count_from_there():
    with pytest.raises(BudgetExceeded), ltc.budget(transfers_mb=0):
        metrics.clear_all()
        torch.ones(3).to("ltc")


@pytest.mark.native("it counts programs, and calls that run when made are none")
def test_a_budget_may_warn_at_the_users_line():
    with pytest.warns(UserWarning, match="fallbacks=1") as caught:
        with ltc.budget(fallbacks=0, warn=True):
            torch.ones(3, device="ltc").nonzero()
    assert caught[0].filename == __file__


def test_an_error_of_the_block_is_left_alone():
    with pytest.raises(KeyError), ltc.budget(fallbacks=0):
        torch.ones(3, device="ltc").nonzero()
        raise KeyError


@pytest.mark.native("it counts programs, and calls that run when made are none")
def test_a_function_may_have_a_budget_and_call_itself():
    @ltc.budget(fallbacks=1)
    def nested(depth):
        if depth:
            nested(depth - 1)
        torch.ones(3, device="ltc").nonzero()

    nested(0)
    with pytest.raises(BudgetExceeded, match="fallbacks=2"):
        nested(1)


def test_nothing_listens_when_the_block_is_over():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ltc.budget(fallbacks=0):
            pass
        torch.ones(3, device="ltc").nonzero()


TESTS = """
import pytest, torch

def read():
    return torch.ones(3, device="ltc").sum().item()

@pytest.mark.ltc_budget(syncs=1)
def test_within():
    read()

@pytest.mark.ltc_budget(syncs=0)
def test_beyond():
    read()

def test_a_part(ltc_budget):
    read()
    with ltc_budget(syncs=0):
        read()

def test_no_budget():
    read()
"""


@pytest.mark.native("it counts programs, and calls that run when made are none")
def test_the_plug_in_gives_a_mark_and_a_fixture(tmp_path, installed):
    (tmp_path / "test_it.py").write_text(TESTS)
    options = ["-q", "--strict-markers", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": installed},
    )
    assert "2 failed, 2 passed" in done.stdout
    assert "FAILED test_it.py::test_beyond - ltc.errors.BudgetExceeded" in done.stdout
    assert "FAILED test_it.py::test_a_part - ltc.errors.BudgetExceeded" in done.stdout
    assert "the step was cut by a read" in done.stdout


def test_pytest_without_such_tests_does_not_import_ltc(tmp_path, installed):
    (tmp_path / "test_it.py").write_text(
        "import sys\ndef test():\n    assert 'ltc' not in sys.modules"
    )
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": installed},
    )
    assert "1 passed" in done.stdout, done.stdout
