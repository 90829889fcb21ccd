"""Every Python block of the README and of the docs runs, page by page, as a reader would run it."""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^(?P<indent>[ ]*)```(?P<language>[^\n]*)\n(?P<body>.*?)^(?P=indent)```", re.M | re.S)
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
PAGES = [page for page in PAGES if page.exists()]


def python_blocks(page: Path) -> list[tuple[int, str]]:
    """(line of its first statement, code) of each block marked as Python.

    A block marked "python norun" shows what can not run here, such as a vendor's own device.
    """
    text = page.read_text()
    return [
        (text.count("\n", 0, match.start("body")) + 1, match["body"])
        for match in BLOCK.finditer(text)
        if match["language"].strip() == "python"
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_blocks_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    """Blocks of one page share their names, and what they save lands in an empty folder."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    for line, code in python_blocks(page):
        # Blank lines in front make a traceback point into the page itself.
        program = compile("\n" * (line - 1) + code, str(page), "exec")
        with contextlib.redirect_stdout(io.StringIO()):
            exec(program, names)


def test_the_readme_is_one_screen_and_has_an_example():
    readme = ROOT / "README.md"
    assert len(readme.read_text().splitlines()) <= 60
    assert python_blocks(readme), "README.md shows no example"


def test_the_commands_of_the_readme_exist():
    readme = (ROOT / "README.md").read_text()
    for script in ("scripts/mnist", "scripts/test"):
        assert script in readme
        assert (ROOT / script).stat().st_mode & 0o111, f"{script} is not executable"
