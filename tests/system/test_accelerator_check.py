"""scripts/accelerator_check, in a time that is too short for all its parts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="JAX is not installed")
ROOT = Path(__file__).parents[2]


def test_the_check_keeps_its_time_and_tells_what_it_has_left_out(tmp_path):
    out = tmp_path / "found.json"
    command = [sys.executable, ROOT / "scripts" / "accelerator_check", "--seconds", "40"]
    done = subprocess.run(
        [*command, "--out", out], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert "versions" in found["machine"] or "failed" in found["machine"]
    assert all("failed" in part or part.get("ok", True) for part in found.values())
    assert found["times resnet18 fused"] == {"failed": "no time left"}
    assert "wrong: nothing" in done.stdout


@pytest.mark.parametrize("part", [("values", "tiny"), ("times", "tiny", "ltc")])
def test_a_part_tells_its_figures(part):
    script = ROOT / "scripts" / "bench" / "accelerator_parts.py"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, *part], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "LTC_BACKEND": "xla", "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    if part[0] == "values":
        assert told["ok"]
        assert not told["cut_out"]
    else:
        assert told["pipelined_ms"] > 0
        assert told["host_ms"] > 0
        assert told["first_s"] > 0
