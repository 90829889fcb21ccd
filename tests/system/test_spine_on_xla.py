"""The tests of what every program needs pass on XLA too, on the device that JAX finds.

Compared tests of these files compare with the CPU, in every state that a program comes to there.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="JAX is not installed: pip install 'ltc[test]' has it")
TESTS = Path(__file__).parent.parent
SPINE = (
    "test_tiny.py", "system/test_training.py", "system/test_errors.py", "system/test_threads.py",
    "system/test_assignment.py", "system/test_last_views.py", "system/test_moving.py",
    "system/test_printing.py", "system/test_autocast_types.py", "system/test_saving.py",
)  # fmt: skip
# Eight encoder layers with recomputation, in float64, which XLA compiles for a minute; hundreds of
# programs of one call, each compiled; and what a killed process leaves on the disk, whatever its device.
ELSEWHERE = (
    "not checkpointed_transformer and not another_is_just_recording and not crash_loop "
    "and not killed_save"
)


@pytest.mark.parametrize("name", SPINE)
def test_the_tests_of_a_file_pass_on_xla(name):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-k", ELSEWHERE, str(TESTS / name)],
        capture_output=True, text=True, cwd=TESTS.parent,
        env={**os.environ, "LTC_BACKEND": "xla"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
