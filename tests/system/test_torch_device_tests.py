"""Torch's device-generic tests run on ltc: a part of those that its wheel carries, and the report of them.

All of them: `python scripts/compare/torch_device_tests.py`.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "compare"
sys.path.insert(0, str(SCRIPTS))
import torch_device_tests
from torch_device_tests import Case, run_file, told

NEEDS = [one for one in ("expecttest", "hypothesis") if find_spec(one) is None]


@pytest.mark.skipif(bool(NEEDS), reason=f"torch's tests import what is not installed: {NEEDS}")
def test_modules_and_optimizers_of_torchs_tables_pass():
    words = "(nn_Linear or SGD_) and cpu and float32"
    cases = run_file(torch_device_tests.OWN, words)
    assert len(cases) >= 2
    assert not [one for one in cases if one.status == "failed"]


def test_a_file_that_cannot_be_run_is_a_failure_that_says_why(tmp_path):
    (tmp_path / "test_torch.py").write_text("raise RuntimeError('no such thing')")
    cases = run_file(tmp_path / "test_torch.py", "")
    assert [one.status for one in cases] == ["failed"]


def test_failures_are_told_by_their_reasons(capsys, monkeypatch):
    monkeypatch.setitem(torch_device_tests.KNOWN, "sparse", "there is no sparse layout")
    told([Case("a", "passed"), Case("b", "failed", "a sparse x"), Case("c", "failed", "size 3")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 passed, 2 failed, 0 skipped"
    assert any(line.startswith("known") for line in lines)
    assert any(line.startswith("FAILED") and "size N" in line for line in lines)
