"""Every file and folder that CONTRIBUTING.md, the docs and the docstrings name is there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ltc"
# A module's name that is an example of a bad one, files of the user's, one of Python, one that a script
# prints to.
ABSENT = {"going_on.py", "file.py", "script.py", "torch/file.py", "threading.py", "docs/ops.md"}

FOLDERS = ("ltc", "scripts", "tests", "docs", "examples")
FILES = [
    str(path.relative_to(ROOT))
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if "__pycache__" not in path.parts
]
# With each way to name them from a folder further down: "fusion/units.py" is ltc/passes/fusion/units.py.
KNOWN = {"/".join(parts[n:]) for parts in (file.split("/") for file in FILES) for n in range(9)}
KNOWN |= {path.name for path in ROOT.iterdir()}
KNOWN.discard("")

PAGES = ["README.md", *sorted(path.name for path in (ROOT / "docs").glob("*.md"))]
NAMED_FILE = re.compile(r"[\w./-]*\w\.(?:py|md)\b")
QUOTED = re.compile(r"`([\w./-]+/[\w./-]*)`|\]\(([\w./-]+)")
ROW = re.compile(r"^([a-z_]\w*\*?(?:, [a-z_]\w*\*?)*) {2,}\S")


def absent(names: set[str]) -> set[str]:
    """Return the names that no file and no folder has."""
    return {name for name in names - ABSENT if name.strip("/").removeprefix("./") not in KNOWN}


def names_in(text: str) -> set[str]:
    """The files and folders that a text of Markdown names."""
    quoted = {name for found in QUOTED.findall(text) for name in found if name}
    return set(NAMED_FILE.findall(text)) | quoted


def test_what_contributing_names_is_there():
    assert not absent(names_in((ROOT / "CONTRIBUTING.md").read_text()))


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_is_there(page):
    path = ROOT / page if page == "README.md" else ROOT / "docs" / page
    prose = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    assert not absent({name.removeprefix("../") for name in NAMED_FILE.findall(prose)})


def test_no_row_of_contributing_stands_twice():
    lines = (ROOT / "CONTRIBUTING.md").read_text().splitlines()
    first = [line.split("|")[1] for line in lines if line.startswith("| ") and "---" not in line]
    headings = {"command", "layer", "word", "rule", "where is … "}
    several = {one for one in first if first.count(one) > 1 and one.strip() not in headings}
    assert several <= {" 2 "}  # the layer of three that do not import one another


def docstrings_of(path: Path) -> list[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds)]


@pytest.mark.parametrize("folder", ["ltc", "scripts"])
def test_what_docstrings_name_is_there(folder):
    missing = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        named = {name for text in docstrings_of(path) for name in NAMED_FILE.findall(text)}
        if found := absent(named):
            missing[str(path.relative_to(ROOT))] = found
    assert not missing


def modules_in_rows(text: str) -> set[str]:
    """The modules in the first column of a package's table."""
    rows = [found[1] for line in text.splitlines() if (found := ROW.match(line))]
    return {name for row in rows for name in row.split(", ")}


@pytest.mark.parametrize("package", sorted(PACKAGE.rglob("__init__.py")), ids=str)
def test_the_table_of_a_package_names_its_modules(package):
    text = ast.get_docstring(ast.parse(package.read_text())) or ""
    folder = package.parent
    missing = [
        name
        for name in modules_in_rows(text)
        if not [*folder.glob(f"{name}.py"), *folder.glob(f"{name}/__init__.py")]
    ]
    assert not missing, f"{package}: {missing}"


def test_a_module_that_is_not_there_is_found():
    assert modules_in_rows("wire, exchange   messages\n\nThe *frame* is  one.") == {
        "wire",
        "exchange",
    }
    assert absent({"ltc/config.py", "ltc/no_such.py", "fusion/units.py"}) == {"ltc/no_such.py"}
