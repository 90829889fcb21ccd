"""The README and the docs are true: their Python runs, and prints what they say it prints.

A page is run in a process of its own, block after block, as a reader would type it.  Blocks are
marked by language:

    python         runs; the names of earlier blocks of the page are there
    output         what the block before it prints; "..." stands for any text, as in doctest
    console        lines after "$ " are run from the checkout's root; the others are their output
    python norun   shows what can not run here
"""

import doctest
import importlib
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ltc import config
from ltc.device import policy

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(
    r"^(?P<indent>[ ]*)```(?P<language>[^\n]*)\n(?P<body>.*?)^(?P=indent)```", re.M | re.S
)
LINK = re.compile(r"\]\((?!https?:)(?P<target>[^)#\s]*)(#(?P<heading>[^)\s]*))?\)")
FILE = re.compile(r"`((?:ltc|scripts|tests)/[\w/]+(?:\.\w+)?/?)`")
FUNCTION = re.compile(
    r"`(?:\w+\.)?(\w+)`(?: \([^)]*\))?\s+in\s+`((?:ltc|scripts|tests)/[\w/]+\.py)`"
)
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
PAGES = [page for page in PAGES if page.exists()]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

# Runs [[line, code], ...] from stdin; writes what each printed, as JSON.
RUNNER = """
import contextlib, io, json, sys
names, printed = {"__name__": "page"}, []
for line, code in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        # Blank lines in front make a traceback point into the page itself.
        exec(compile("\\n" * (line - 1) + code, sys.argv[1], "exec"), names)
    printed.append(said.getvalue())
json.dump(printed, sys.stdout)
"""


def blocks(page: Path, *languages: str) -> list[tuple[int, str, str]]:
    """(line of its first statement, language, text) of each block in one of the languages."""
    text = page.read_text()
    return [
        (text.count("\n", 0, match.start("body")) + 1, match["language"].strip(), match["body"])
        for match in BLOCK.finditer(text)
        if match["language"].strip() in languages
    ]


def printed_by(page: Path, code: list[tuple[int, str]], folder: Path) -> list[str]:
    """What each block prints; what they save lands in `folder`."""
    # A reader's process has the defaults, not what the tests are run with; but for the native core,
    # which a reader may have or not.
    environment = {n: v for n, v in os.environ.items() if not n.startswith(("LTC_", "XRT_"))}
    environment |= {n: v for n, v in os.environ.items() if n in ("LTC_NATIVE", "LTC_NATIVE_DIR")}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, str(page.relative_to(ROOT))],
        input=json.dumps(code),
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def difference(expected: str, printed: str) -> str:
    """How `printed` differs from what the page shows; "" where it does not."""
    checker, options = doctest.OutputChecker(), doctest.ELLIPSIS | doctest.REPORT_NDIFF
    if checker.check_output(expected, printed, options):
        return ""
    return checker.output_difference(doctest.Example("", expected), printed, options)


@every_page
def test_the_blocks_of_a_page_run_and_print_what_it_says(page, tmp_path):
    found = blocks(page, "python", "output")
    code = [(line, text) for line, kind, text in found if kind == "python"]
    printed = iter(printed_by(page, code, tmp_path))
    wrong, latest = [], None
    for line, kind, text in found:
        if kind == "python":
            latest = next(printed)
        elif said := difference(text, latest):
            wrong.append(f"{page.relative_to(ROOT)}:{line}\n{said}")
    assert not wrong, "\n".join(wrong)


@every_page
def test_the_commands_of_a_page_print_what_it_says(page):
    wrong = []
    for line, _, text in blocks(page, "console"):
        for command, expected in re.findall(r"^\$ ([^\n]*)\n((?:(?!\$ ).*\n)*)", text, re.M):
            words = shlex.split(command)
            words[0] = sys.executable if words[0] == "python" else words[0]
            done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
            if said := difference(expected, done.stdout):
                wrong.append(f"{page.relative_to(ROOT)}:{line}: {command}\n{said}{done.stderr}")
    assert not wrong, "\n".join(wrong)


@every_page
def test_the_links_of_a_page_lead_somewhere(page):
    missing = []
    for link in LINK.finditer(page.read_text()):
        target = page.parent / link["target"] if link["target"] else page
        if not target.exists() or (link["heading"] and link["heading"] not in headings(target)):
            missing.append(link[0])
    assert missing == []


@every_page
def test_the_files_and_functions_that_a_page_names_exist(page):
    text = page.read_text()
    files = set(FILE.findall(text))
    missing = {name for name in files if not (ROOT / name).exists()}
    for function, name in FUNCTION.findall(text):
        defined = rf"^\s*(def|class) {function}\b|^{function}\b"
        if name not in missing and not re.search(defined, (ROOT / name).read_text(), re.M):
            missing.add(f"{function} in {name}")
    assert missing == set()


def test_the_page_of_the_states_has_the_policys_constants():
    constants = {name: value for name, value in vars(policy).items() if name.isupper()}
    table = re.findall(r"\| `(\w+)` = (\d+) \|", (ROOT / "docs/states_of_a_step.md").read_text())
    assert {name: int(value) for name, value in table} == constants


def headings(page: Path) -> set[str]:
    """The page's headings, as a link names them."""
    titles = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_readme_is_one_screen_and_has_an_example():
    readme = ROOT / "README.md"
    assert len(readme.read_text().splitlines()) <= 60
    assert blocks(readme, "python"), "README.md shows no example"


def test_the_commands_of_the_readme_exist():
    readme = (ROOT / "README.md").read_text()
    for script in ("scripts/mnist", "scripts/test"):
        assert script in readme
        assert (ROOT / script).stat().st_mode & 0o111, f"{script} is not executable"


# --- the API page -------------------------------------------------------------------------------

DOCUMENTED = (
    "ltc", "ltc.core.lazy_model", "ltc.device.hooks.module", "ltc.debug.metrics",
    "ltc.debug.metrics_saver", "ltc.debug.profiler", "ltc.debug.graphs", "ltc.utils.utils",
    "ltc.utils.closures",
    "ltc.utils.keyd_queue", "ltc.utils.cached_dataset", "ltc.utils.checkpoint_tagger", "ltc.amp",
    "ltc.amp.syncfree", "ltc.errors",
)  # fmt: skip


def public_names(module) -> list[str]:
    """What the module offers: its __all__, or the functions and classes that it defines."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == module.__name__
    ]


@pytest.mark.parametrize("module", DOCUMENTED)
def test_the_api_page_has_every_public_name(module):
    words = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", api_page()))))
    assert [n for n in public_names(importlib.import_module(module)) if n not in words] == []


def test_the_api_page_has_every_variable():
    rows = api_page().splitlines()
    missing = [row for row in map(variable_row, config.FLAGS) if row not in rows]
    assert not missing, "docs/api.md lacks, or has otherwise:\n" + "\n".join(missing)


def test_the_api_page_has_no_variable_that_is_gone():
    listed = re.findall(r"^\| `([A-Z0-9_]+)` \|", api_page(), re.M)
    assert listed == [flag.name for flag in config.FLAGS]


def test_the_api_page_has_every_counter_and_metric():
    recorded = re.compile(r'(?:metrics\.(?:count|record|timed)|counting)\(\s*f?"([\w:.]+)(?="|\{)')
    sources = [path.read_text() for path in (ROOT / "ltc").rglob("*.py")]
    names = {name for source in sources for name in recorded.findall(source)}
    assert "MarkStep" in names
    assert [name for name in sorted(names) if f"`{name}" not in api_page()] == []


def test_the_api_page_has_no_counter_or_metric_that_is_gone():
    sources = "".join(path.read_text() for path in (ROOT / "ltc").rglob("*.py"))
    section = api_page().partition("ltc counts the following")[2].partition("### ltc.debug")[0]
    first = re.findall(r"^\| (.*?) \|", section, re.M)
    names = re.findall(r"`([A-Za-z][\w.]*)", " ".join(first))
    assert "MarkStep" in names
    assert [name for name in names if not _is_in_code(name, sources)] == []


def _is_in_code(name: str, sources: str) -> bool:
    """Whether the name is written there, or begins as one that is put together."""
    return any(f'"{name[:end]}' in sources for end in {len(name), _end_of_prefix(name)})


def _end_of_prefix(name: str) -> int:
    prefixes = ("TierUp", "Forgotten.", "aten", "CutOut", "RuleFault", "rule.", "pass.", "trace.")
    return next((len(prefix) for prefix in prefixes if name.startswith(prefix)), len(name))


@every_page
def test_a_page_names_no_variable_that_does_not_exist(page):
    known = {name for flag in config.FLAGS for name in (flag.name, flag.older)}
    for path in (ROOT / "tests").rglob("*.py"):  # what the tests alone look at
        known.update(re.findall(r'"(LTC_TEST_\w+)"', path.read_text()))
    assert set(re.findall(r"\bLTC_[A-Z0-9_]+[A-Z0-9]", page.read_text())) - known == set()


def api_page() -> str:
    return (ROOT / "docs" / "api.md").read_text()


def variable_row(flag: config.Flag) -> str:
    """The flag's row in the page's table."""
    return f"| `{flag.name}` | {default_text(flag)} | {flag.meaning} |"


def default_text(flag: config.Flag) -> str:
    if flag.read is config.boolean:
        return str(int(flag.default))
    if isinstance(flag.default, tuple):
        return ":".join(map(str, flag.default))
    if flag.name == "LTC_MAX_PENDING_BYTES":
        return "half"  # of the memory of the machine the page is read on
    return str(flag.default)
