"""Python's last collections are left out where the failure of another rank ends a program."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from ltc.errors import PeerFailure, RankFailed
from ltc.support.process.last_collections import leave_out_after

leave_out_after(PeerFailure, RankFailed)

class Circle:
    def __init__(self):
        self.own = self

    def __del__(self):
        print("collected")

circle = Circle()
exec(sys.argv[1])
"""


@pytest.mark.parametrize(
    ("end", "is_collected"),
    [
        ("raise PeerFailure('one is gone')", False),
        ("raise RankFailed(1, 2, 'it ended', '', {})", False),
        ("raise ValueError('of its own')", True),
        ("sys.exit(3)", True),
        ("try: raise PeerFailure('one is gone')\nexcept PeerFailure: sys.exit(3)", True),
        ("sys.ps1 = '> '; raise PeerFailure('as a user types')", True),
        ("pass", True),
    ],
)
def test_objects_in_circles_stay_where_a_failure_of_another_rank_ends_the_program(
    end, is_collected
):
    done = subprocess.run([sys.executable, "-c", SCRIPT, end], capture_output=True, text=True)
    assert ("collected" in done.stdout) == is_collected, done.stderr


def test_a_process_that_can_meet_others_does_so():
    script = (
        "import atexit, gc, sys, ltc.distributed.transport.session\n"
        "from ltc.errors import PeerFailure\n"
        "sys.last_value = PeerFailure('one is gone')\n"
        "atexit._run_exitfuncs()\n"
        "sys.exit(not gc.get_freeze_count())"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
