"""Modules that are imported at their first use."""

import gc
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from ltc.support.lazy_module import LazyModule, lazy_names, loaded, uncollected

ROOT = Path(__file__).parents[2]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of its own, whose module `part` tells under which modes it was imported."""
    folder = tmp_path / "lazy_example"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "part.py").write_text(
        "import gc, time, torch\n"
        "time.sleep(0.05)\n"
        "made = torch.ones(1)\n"
        "collects = gc.isenabled()\n"
        "late = 'the last line'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "lazy_example"
    for name in [one for one in sys.modules if one.startswith("lazy_example")]:
        del sys.modules[name]


def test_the_first_use_of_a_name_imports_the_module(package):
    part = LazyModule(f"{package}.part")
    assert f"{package}.part" not in sys.modules and not part.is_imported
    assert part.late == "the last line" and part.is_imported
    assert sys.modules[f"{package}.part"].late is part.late


def test_a_name_that_the_module_lacks_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = LazyModule(f"{package}.part").nothing_of_the_kind


def test_a_module_that_is_missing_is_an_import_error():
    with pytest.raises(ModuleNotFoundError, match="no_such_package_of_anyone"):
        _ = LazyModule("no_such_package_of_anyone").name


def test_the_modes_of_the_user_do_not_reach_the_import(package):
    with torch.inference_mode(), torch.device("meta"):
        made = LazyModule(f"{package}.part").made
        assert torch.is_inference_mode_enabled() and torch.ones(1).device.type == "meta"
    assert made.device.type == "cpu" and not made.is_inference()


@pytest.mark.parametrize("collects", [True, False])
def test_python_collects_after_an_import_as_before(package, collects):
    was = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        assert LazyModule(f"{package}.part").collects is False
        assert gc.isenabled() is collects
    finally:
        (gc.enable if was else gc.disable)()


def test_an_error_inside_switches_the_collector_on_again():
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), uncollected():
        _ = 1 / 0
    assert gc.isenabled()


def test_threads_that_use_a_module_at_once_find_it_complete(package):
    part, start, found = LazyModule(f"{package}.part"), threading.Barrier(8), []

    def use():
        start.wait()
        found.append(part.late)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert found == ["the last line"] * 8


def test_a_package_gives_names_and_modules_at_their_first_use(package):
    namespace = loaded(package).__dict__
    namespace["__getattr__"] = lazy_names(namespace, {"late": f"{package}.part"})
    assert loaded(package).late == "the last line"
    assert "late" in namespace  # found without __getattr__ from now on
    assert loaded(package).part is sys.modules[f"{package}.part"]


@pytest.mark.parametrize("name", ["nothing_of_the_kind", "__wrapped__"])
def test_a_package_refuses_other_names(package, name):
    namespace = loaded(package).__dict__
    with pytest.raises(AttributeError, match=rf"module 'lazy_example' has no attribute '{name}'"):
        lazy_names(namespace)(name)


@pytest.mark.parametrize("package", ["core", "debug", "distributed", "utils"])
def test_modules_that_users_import_need_no_import_of_their_own(package):
    """In a process of its own: here other tests have imported most of them."""
    text = (
        "import pkgutil, ltc\n"
        f"package = ltc.{package}\n"
        "for _, name, _ in pkgutil.iter_modules(package.__path__):\n"
        "    assert getattr(package, name).__name__ == f'{package.__name__}.{name}', name\n"
    )
    ended = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
