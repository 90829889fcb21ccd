"""A sample of the fault matrix of scripts/stress/faults.py, which runs all of it, any number of times.

How soon a death is known is measured there: here the machine may be doing anything else.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.loader_workers import need_semaphores

SCRIPT = Path(__file__).parents[2] / "scripts" / "stress" / "faults.py"


@pytest.mark.parametrize(
    "only", ["loader", "left early, 0", "rank SIGKILL spawn", "rank os._exit torchrun"]
)
def test_no_fault_of_the_matrix_hangs_or_is_lost(only):
    if only == "loader":
        need_semaphores()
    command = [sys.executable, str(SCRIPT), "--only", only, "--seconds", "600", "--limit", "900"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
