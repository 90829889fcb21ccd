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
    assert found["times resnet18_bf16 torch"] == {"failed": "no time left"}
    assert "wrong: nothing" in done.stdout


def lines_of(script: str, *arguments: str) -> list[dict]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", ROOT / "scripts" / "bench" / script, *arguments], input="",
        capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "LTC_BACKEND": "xla", "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_part_tells_whether_values_are_right():
    (told,) = lines_of("accelerator_parts.py", "values", "tiny")
    assert told["ok"]
    assert not told["cut_out"]


@pytest.mark.parametrize("script", ["accelerator_parts.py", "accelerator_times.py"])
def test_a_part_tells_the_times_of_each_way_once_it_may_go_on(script):
    of_ltc = script == "accelerator_parts.py"
    command = ["times", "tiny_adam"] if of_ltc else ["tiny_adam", "fused", "eager"]
    ways = {"replayed", "recorded"} if of_ltc else {"fused", "eager"}
    told = lines_of(script, *command)
    assert {"ready": True} in told
    assert told[-1] == {"over": True}
    assert {one["way"] for one in told if "loss" in one} == ways
    timed = [one for one in told if "pipelined_ms" in one]
    assert {one["way"] for one in timed} == ways
    assert all(one["pipelined_ms"] > 0 and one["host_ms"] > 0 for one in timed)
