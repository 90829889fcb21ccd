"""The package: built as it is published, and used in an environment that holds nothing else of it."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import ltc
from ltc.native import core_build

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAMED = f"ltc-{ltc.__version__}"
BUILD = "import sys; from setuptools import build_meta as b; print(b.build_{}(*sys.argv[1:]))"


def done(*command, folder: Path, **environment) -> str:
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "LTC_TIER")}
    run = subprocess.run(
        [*map(str, command)], cwd=folder, env={**inherited, **environment}, text=True,
        capture_output=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the source archive, and the wheel that is made of it."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "checkout"
    source.mkdir()
    kept = "git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t"
    done("sh", "-c", f'{kept} "$0"', source, folder=ROOT)
    done(sys.executable, "-c", BUILD.format("sdist"), folder, folder=source)
    with tarfile.open(folder / f"{NAMED}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    done(sys.executable, "-c", BUILD.format("wheel"), folder, folder=folder / NAMED)
    return folder


@pytest.fixture(scope="module")
def environment(built):
    """Run a program where torch and the like are found as here, and ltc in the wheel alone."""
    return installed(built / f"{NAMED}-py3-none-any.whl", built / "environment")


def installed(wheel: Path, place: Path):
    folder = place.parent
    done(sys.executable, "-m", "venv", "--without-pip", place, folder=folder)
    python = place / "bin" / "python"
    (site,) = place.glob("lib/python*/site-packages")
    (site / "others.pth").write_text("\n".join(p for p in sys.path if p.endswith("-packages")))
    done(
        sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps",
        "--no-index", "--disable-pip-version-check", wheel, folder=folder,
    )  # fmt: skip

    def run(program: str, **variables) -> str:
        return done(python, "-W", "ignore", "-c", program, folder=folder, **variables)

    return run


def test_the_archives_hold_the_package_and_its_papers(built):
    archive = zipfile.ZipFile(built / f"{NAMED}-py3-none-any.whl")
    wheel = set(archive.namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "ltc").rglob("*.py")}
    alias = "ltc/compat/lazy_tensor_core/"
    modules = {name.replace(alias, "lazy_tensor_core/") for name in modules}
    assert modules | {"ltc/py.typed", "ltc_autoload.py"} <= wheel
    top = {name.partition("/")[0] for name in wheel if ".dist-info" not in name}
    assert top == {"ltc", "lazy_tensor_core", "ltc_autoload.py"}
    assert not [name for name in wheel if name.startswith("tests")]
    about = archive.read(f"{NAMED}.dist-info/METADATA").decode()
    assert all(f"Classifier: {one}" in about for one in SETTINGS["classifiers"])
    with tarfile.open(built / f"{NAMED}.tar.gz") as archive:
        names = {name.removeprefix(f"{NAMED}/") for name in archive.getnames()}
    papers = {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "docs/api.md"}
    assert papers | {"tests/conftest.py", "scripts/test"} <= names


def test_the_command_is_installed(environment, built):
    command = built / "environment" / "bin" / "ltc"
    assert done(command, "--version", folder=built).strip() == f"ltc {ltc.__version__}"
    assert done(command, "--help", folder=built).startswith("usage: ltc ")


def test_the_readme_runs_where_the_wheel_is_installed(environment):
    readme = (ROOT / "README.md").read_text()
    program = re.search(r"```python\n(.*?)```\n\n```output\n(.*?)```", readme, re.S)
    said = environment(program[1] + "\nimport ltc; print(ltc.__file__, ltc.__version__)")
    measured = re.escape(program[2]).replace(re.escape("..."), r"[\d.]+")
    assert re.match(measured, said)
    assert "environment/lib" in said and said.split()[-1] == ltc.__version__


IN_CORE = """
import torch
from ltc.native import core, core_build
assert (torch.ones(3, device="ltc") + 1).sum().item() == 6
print(core_build.compiler(), core.CORE is not None and core.CORE.ran() > 0, core.WHY_NOT)
"""


def test_a_wheel_may_bring_the_core_along(built, tmp_path):
    source = tmp_path / NAMED
    shutil.copytree(built / NAMED, source)
    (source / "ltc" / "native" / "built").mkdir()
    core = core_build.found()
    if core is None or not core.library:
        pytest.skip("there is no core to bring along")
    core_build.bring_along(source / "ltc" / "native" / "built")
    done(sys.executable, "-c", BUILD.format("wheel"), tmp_path, folder=source)
    run = installed(tmp_path / f"{NAMED}-py3-none-any.whl", tmp_path / "environment")
    empty = tmp_path / "empty"
    empty.mkdir()
    alone = {
        "PATH": str(empty),
        "LTC_CACHE_DIR": str(empty),
        "LTC_NATIVE_DIR": "",
        "LTC_TIER": "op_by_op",
    }
    assert run(IN_CORE, LTC_NATIVE="require", **alone).split() == ["None", "True"]


FOUND = """
import sys, torch
from torch import nn

assert "ltc" not in sys.modules
torch.manual_seed(7)
weight = nn.Linear(2, 2).requires_grad_().weight
weight.sum().backward()
assert "ltc" not in sys.modules  # whoever does not use the device does not import it
model = nn.Linear(2, 2)
before = model.weight
with torch.no_grad():
    drawn = torch.rand(3, device="ltc")
assert model.to("ltc").weight is before and drawn.is_ltc
torch.manual_seed(7)
assert torch.equal(drawn, torch.rand(3, device="ltc"))
print(torch.get_default_device(), drawn.device)
"""


def test_the_device_is_found_without_import(environment):
    assert environment(FOUND).split() == ["cpu", "ltc:0"]


def test_whoever_turns_it_off_has_a_plain_torch_and_may_import_it(environment):
    program = """
import torch
try:
    torch.device("ltc")
except RuntimeError:
    print("unknown")
unnamed = torch.compile(lambda x: x + 1)
named = torch.compile(lambda x: x + 2, backend="ltc")  # by its entry point, which imports ltc
x = torch.ones(2, device="ltc")
print(unnamed(x).tolist(), named(x).tolist(), "ltc" in torch.compiler.list_backends())
"""
    said = environment(program, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert said.splitlines() == ["unknown", "[2.0, 2.0] [3.0, 3.0] True"]


def test_one_number_names_the_version():
    assert SETTINGS["version"] == ltc.__version__
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^## (\S+?),? ", text, re.M)[1] == ltc.__version__
