"""A sample of PyTorch's operator table on `ltc`.

The whole table is `python scripts/compare/opinfo.py`.  What is known to differ stands in
opinfo_remaining.txt beside this file, each case with its reason; a case that is not in it must be
equal.  OPINFO_SEED picks another sample.
"""

import sys
from pathlib import Path

import pytest
import torch

from tests.drawn import seed

SCRIPTS = Path(__file__).parents[2] / "scripts" / "compare"
sys.path.insert(0, str(SCRIPTS))
import case_runner
import opinfo

REMAINING = Path(__file__).parent / "opinfo_remaining.txt"
STRIDE = 16
SEED = seed("OPINFO_SEED")


def remaining() -> set[str]:
    """Names of the cases that are known to differ: the second column of the table."""
    rows = [line.split() for line in REMAINING.read_text().splitlines()]
    return {row[1] for row in rows if len(row) > 1 and row[1].count("|") == 2}


def test_a_sample_of_the_operator_table_equals_the_cpu():
    names = opinfo.case_names()[SEED % STRIDE :: STRIDE]
    outcomes = case_runner.run(SCRIPTS / "opinfo.py", names, timeout_seconds=600, progress=False)
    known = remaining()
    wrong = [o for o in outcomes if o.status not in ("equal", "refused") and o.name not in known]
    assert not wrong, f"OPINFO_SEED={SEED}\n{case_runner.table(wrong)}"
    repaired = [o.name for o in outcomes if o.status == "equal" and o.name in known]
    assert not repaired, f"equal by now; take them out of {REMAINING.name}: {repaired}"


def test_what_remains_keeps_the_share_that_is_promised():
    cases = opinfo.case_names()
    assert remaining() <= set(cases)
    assert len(remaining()) <= 0.015 * len(cases)


@pytest.mark.parametrize("rounds_worse, near", [("cpu", True), ("ltc", False)])
def test_a_result_is_judged_by_float64_where_the_cpus_is_another(rounds_worse, near):
    def tripled(x):
        coarse = x.device.type == rounds_worse and x.dtype == torch.float32
        return x * 3 + coarse * 1e-3

    x = torch.randn(5)
    found = tripled(x.to("ltc"))
    assert opinfo.as_near_to_float64(tripled, (x, (), {}), tripled(x), found) == near


def test_a_case_that_took_too_long_is_tried_again_behind_the_others(tmp_path):
    script = tmp_path / "cases.py"
    script.write_text(
        f"import os, sys, time; sys.path.insert(0, {str(SCRIPTS)!r})\n"
        "from case_runner import Outcome, serve\n"
        "def run_case(name):\n"
        f"    seen = os.path.exists({str(tmp_path / 'seen')!r})\n"
        f"    open({str(tmp_path / 'seen')!r}, 'w').close()\n"
        "    if name == 'slow' and not seen: time.sleep(600)\n"
        "    return Outcome(name, 'equal')\n"
        "serve(run_case)\n"
    )
    told = []
    outcomes = case_runner.run(
        script, ["slow", "last"], timeout_seconds=2, progress=False, tell=told.append
    )
    assert [outcome.status for outcome in outcomes] == ["equal", "equal"]
    assert [outcome.name for outcome in told] == ["last", "slow"]


@pytest.mark.parametrize("body, status", [("os.abort()", "died"), ("time.sleep(600)", "timeout")])
def test_a_case_that_ends_or_blocks_its_worker_costs_only_itself(tmp_path, body, status):
    script = tmp_path / "cases.py"
    script.write_text(
        f"import os, sys, time; sys.path.insert(0, {str(SCRIPTS)!r})\n"
        "from case_runner import Outcome, serve\n"
        f"def run_case(name):\n    if name == 'bad': {body}\n    return Outcome(name, 'equal')\n"
        "serve(run_case)\n"
    )
    names = ["first", "bad", "last"]
    outcomes = case_runner.run(script, names, timeout_seconds=2, progress=False)
    assert [outcome.status for outcome in outcomes] == ["equal", status, "equal"]
