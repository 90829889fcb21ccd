"""What the other tests show of the default backend, the essential ones show of the reference too.

Compared tests run with both wherever they are; the others of these files run again with `eager`.
"""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
ESSENTIAL = (
    "test_tiny.py", "system/test_training.py", "system/test_errors.py", "system/test_memory.py",
    "system/test_threads.py",
)  # fmt: skip
FILES = [str(TESTS / name) for name in ESSENTIAL]


def test_the_essential_tests_pass_with_the_reference_backend():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not compared", *FILES],
        capture_output=True, text=True, cwd=TESTS.parent,
        env={**os.environ, "LTC_BACKEND": "eager"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
