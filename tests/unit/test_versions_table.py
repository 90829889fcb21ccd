"""The page's table of versions takes new rows in place of those for the same torch and Python."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "compare"))
import versions


def test_a_row_takes_the_place_of_its_versions_and_others_stay():
    table = versions.TABLE.search(versions.PAGE.read_text())[0]
    *_, last = table.splitlines()
    newer = versions.row(last.split("|")[1].strip(), last.split("|")[2].strip(), "runs", "7 pass")
    other = versions.row("9.9.9", "3.11", "runs", "7 pass")
    merged = versions.merged(table, [other, newer]).splitlines()
    assert merged == [*table.splitlines()[:-1], newer, other]
