"""The rule by which a loop and its cure are judged, and the page's table of them."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "bench"))
import cures

WORDS = "read it later"


def row(eager=1.0, slow=1.0, cured=1.0, named=(WORDS,), hint=""):
    return cures.Row("a_loop", eager, slow, cured, named, hint)


@pytest.mark.parametrize(
    ("measured", "fault"),
    [
        (row(slow=1.3, cured=1.0, hint=WORDS), ""),
        (row(slow=1.0, cured=1.2), ""),  # not slower than eager: the gain is not judged
        (row(slow=1.9, cured=2.0), ""),  # nor where no hint comes
        (row(slow=2.0, cured=2.1, hint=WORDS), "does not help"),
        (row(slow=2.1, cured=1.0), "no hint came"),
        (row(slow=0.8, cured=0.7, hint=WORDS), "not slower than eager"),
        (row(slow=2.0, cured=1.0, hint="buy a larger machine"), "the hint names"),
        (row(named=("buy a larger machine",)), "the profile names"),
        (row(named=()), ""),
        (row(slow=1.3, cured=1.1, named=(), hint=WORDS), "the profile names"),
    ],
)
def test_a_loop_is_judged_by_what_is_said_of_it(measured, fault):
    found = cures.faults(measured, WORDS)
    assert len(found) == bool(fault) and fault in "".join(found)


def test_the_table_of_the_page_is_the_scripts():
    found = cures._TABLE.search(cures.PAGE.read_text())
    rows = found[0].splitlines()[2:]
    assert [line.split(" | ")[:2] for line in rows] == [
        [f"| {cure.loop_text}", cure.cure_text] for cure in cures.CURES
    ]
