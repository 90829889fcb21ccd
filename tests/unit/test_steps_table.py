"""The page's table of training steps is what ratios.json says, and a ratio that was lost is told."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "bench"))
import table


def test_the_page_has_the_ratios_that_are_kept():
    assert table.TABLE.search(table.PAGE.read_text())[0] == table.written(table.kept())


def test_each_row_has_a_cell_for_each_machine():
    columns = table.kept() | {"another": table.Column("today", "abc", 96.4, 18.6, {"mlp": 1.234})}
    head, *rows = table.written(columns).splitlines()
    assert {row.count("|") for row in rows} == {head.count("|")}
    (mlp,) = [row for row in rows if "`mlp`" in row]
    assert mlp.endswith("| 1.23 |") and rows[-2].endswith("| 96, 19 |")


def test_processors_of_one_family_with_other_vectors_are_of_another_kind(monkeypatch):
    told = "vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nflags\t\t: fpu avx2{}"
    kinds = []
    for flags in ("", " avx512f"):
        monkeypatch.setattr(table, "_processors", lambda flags=flags: told.format(flags))
        kinds.append(table.this_machine(2))
    assert kinds == ["AMD family 25 with AVX2, 2 threads", "AMD family 25 with AVX-512, 2 threads"]


def test_a_ratio_a_tenth_below_the_one_that_is_kept_is_told():
    column = table.Column("then", "abc", None, None, {"mlp": 2.0, "gpt": 1.2, "vit": 1.0})
    assert column.lost({"mlp": 1.79, "gpt": 1.09}) == ["mlp: 1.79, 2 before (then)"]
