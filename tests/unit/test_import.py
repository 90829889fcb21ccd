"""What `import ltc` leaves behind."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("before", ["enable", "disable"])
def test_importing_leaves_the_garbage_collector_as_it_was(before):
    program = (
        f"import gc; gc.{before}(); was = gc.isenabled(); import ltc; "
        f"assert gc.isenabled() is was"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)
