"""ltc with several versions of torch and Python: an environment for each, and the quick tests in it.

    python scripts/compare/versions.py                              every minor from 2.10 on, this Python
    python scripts/compare/versions.py --torch 2.12 2.15.0 --python 3.11 3.14
    python scripts/compare/versions.py --write                      the rows go into docs/reliability.md

Prints a table. Each environment is removed after its tests; torch takes 2 GB of it. Where
torch's build is one for CUDA, NVIDIA's libraries are not installed: stand-ins say that there is no
device. A Python that this machine lacks comes from Debian's packages. A `--wheels` folder is looked into
before anything is downloaded. Ends with 1 where one fails.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

import debian_python
from cuda_stand_ins import put_stand_ins

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGE = ROOT / "docs" / "reliability.md"
TABLE = re.compile(r"^\| torch \| Python \|.*?\n(?=\n)", re.M | re.S)
OLDEST = (2, 10)
QUICK = """
    tests/test_tiny.py tests/unit/test_import.py tests/unit/test_private_names.py tests/unit/test_device_guard.py
    tests/unit/test_reference_counts.py tests/system/test_liveness.py tests/system/test_autograd.py
    tests/system/test_views.py tests/system/test_sparse_gradients.py tests/system/test_torch_compile.py
    tests/system/test_autocast_types.py
""".split()
# What torch itself needs of Python's packages, and the tests.
OTHERS = "filelock fsspec jinja2 networkx setuptools sympy typing-extensions pytest hypothesis expecttest".split()
OTHERS += "safetensors cloudpickle pytest-xdist".split()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    this = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument("--torch", nargs="+", help="minors or versions; default: all")
    parser.add_argument("--python", nargs="+", default=[this], help="versions of Python")
    parser.add_argument("--wheels", type=Path, help="a folder with wheels of torch")
    parser.add_argument("--native", action="store_true", help="build the core, and run with it")
    parser.add_argument(
        "--write", action="store_true", help="put the rows into the table of the page"
    )
    parser.add_argument("--tests", nargs="+", default=QUICK, help="arguments of pytest")
    asked = parser.parse_args()
    rows = []
    for python in asked.python:
        for version in chosen(asked.torch):
            rows.append(tried(python, version, asked))
            print(rows[-1], flush=True)
    print("\n| torch | Python | README's example | quick tests | date |\n|---|---|---|---|---|")
    print("\n".join(rows))
    if asked.write:
        PAGE.write_text(TABLE.sub(lambda found: merged(found[0], rows), PAGE.read_text(), count=1))
    return int(any("fail" in row or "no " in row for row in rows))


def merged(table: str, rows: list[str]) -> str:
    """Return a table with new rows in place of those for the same torch and Python."""
    head, line, *kept = table.splitlines()
    found = {tuple(one.split("|")[1:3]): one for one in [*kept, *rows]}
    return "\n".join([head, line, *sorted(found.values())]) + "\n"


def chosen(asked: list[str] | None) -> list[str]:
    """The newest version of each minor that the registry has, or of those that are asked for."""
    said = output(sys.executable, "-m", "pip", "index", "versions", "torch")
    found = re.search(r"Available versions: (.*)", said)
    known = re.findall(r"[\d.]+", found[1]) if found else []
    newest: dict[str, str] = {}
    for version in known:
        newest.setdefault(".".join(version.split(".")[:2]), version)
    if asked:
        return [newest.get(name, name) for name in asked]
    minors = [m for m in newest if tuple(map(int, m.split("."))) >= OLDEST]
    return [newest[minor] for minor in reversed(minors)]


def output(*command: object, **options: object) -> str:
    run = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)  # type: ignore[call-overload]
    if run.returncode:
        raise RuntimeError(
            f"{' '.join(map(str, command))}\n{run.stdout[-3000:]}{run.stderr[-3000:]}"
        )
    return run.stdout


def tried(python: str, version: str, asked: argparse.Namespace) -> str:
    """A row of the table: what ran in an environment of its own."""
    with tempfile.TemporaryDirectory(prefix="ltc-versions-") as name:
        folder = Path(name)
        settings = variables(folder)
        try:
            interpreter = shutil.which(f"python{python}") or debian_python.made(python, folder)
            made = environment(str(interpreter), version, folder, asked.wheels)
            if asked.native:
                output(made, "-m", "ltc", "build", env=settings)
                settings["LTC_NATIVE"] = "require"
        except (RuntimeError, subprocess.CalledProcessError) as error:
            print(error, file=sys.stderr)
            return row(version, python, "no environment", "")
        return row(
            version, python, example(made, settings), quick_tests(made, asked.tests, settings)
        )


def row(version: str, python: str, example: str, tests: str) -> str:
    return f"| {version} | {python} | {example} | {tests} | {datetime.date.today()} |"


def environment(interpreter: str, version: str, folder: Path, wheels: Path | None) -> Path:
    """A Python with that torch and what ltc and its tests need; ltc is taken from the checkout."""
    output(interpreter, "-m", "venv", folder / "venv")
    python = folder / "venv" / "bin" / "python"
    pip = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-cache-dir",
        "--disable-pip-version-check",
    ]
    free = {**os.environ, "PIP_CONSTRAINT": os.devnull}  # a machine's own limits on versions
    near = ["--no-index", "--find-links", wheels] if has_torch(wheels, version, python) else []
    output(*pip, *near, "--no-deps", f"torch=={version}", env=free)
    output(*pip, *OTHERS, *[one for one in PROJECT["dependencies"] if not one.startswith("torch")])
    (library,) = (folder / "venv").glob("lib/python*/site-packages/torch/lib")
    put_stand_ins(library)
    return python


def has_torch(wheels: Path | None, version: str, python: Path) -> bool:
    """True if the folder has a wheel of that torch for that Python."""
    tag = output(python, "-c", "import sys; print('cp%d%d' % sys.version_info[:2])").strip()
    return wheels is not None and any(wheels.glob(f"torch-{version}*-{tag}-*.whl"))


def variables(folder: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LTC_", "PYTHON"))}
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "ltc" / "compat")))
    return {**kept, "PYTHONPATH": paths, "LTC_CACHE_DIR": str(folder / "cache"), "LTC_NATIVE": "0"}


def example(python: Path, settings: dict[str, str]) -> str:
    text = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert text is not None
    try:
        output(python, "-c", text[1], env=settings, cwd=python.parents[2])
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return "fails"
    return "runs"


def quick_tests(python: Path, tests: list[str], settings: dict[str, str]) -> str:
    started = time.monotonic()
    run = subprocess.run(
        [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT, env=settings, capture_output=True, text=True,
    )  # fmt: skip
    print(run.stdout[-6000:], file=sys.stderr)
    passed = re.search(r"(\d+) passed", run.stdout)
    failed = re.search(r"(\d+) (?:failed|error)", run.stdout)
    minutes = (time.monotonic() - started) / 60
    print(f"{minutes:.1f} minutes", file=sys.stderr)
    return f"{passed[1] if passed else 0} pass" + (f", {failed[1]} fail" if failed else "")


if __name__ == "__main__":
    sys.exit(main())
