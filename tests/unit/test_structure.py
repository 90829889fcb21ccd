"""The numbers that scripts/code/structure.py bounds."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _script():
    spec = spec_from_file_location("structure", ROOT / "scripts" / "code" / "structure.py")
    module = sys.modules["structure"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


structure = _script()


@pytest.fixture(scope="module")
def all_modules():
    return structure.modules()


@pytest.mark.parametrize("measure", structure.MEASURES, ids=lambda measure: measure.name)
def test_is_within_its_bound(measure, all_modules):
    assert measure.value(all_modules) <= measure.bound, list(measure.places(all_modules))


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write modules into a package named ltc, and return them parsed."""
    monkeypatch.setattr(structure, "ROOT", tmp_path)
    monkeypatch.setattr(structure, "PACKAGE", tmp_path / "ltc")

    def written(**texts):
        (tmp_path / "ltc").mkdir(exist_ok=True)
        for name, text in {"__init__": "", **texts}.items():
            (tmp_path / "ltc" / f"{name}.py").write_text(text)
        return structure.modules()

    return written


def test_the_longest_chain_counts_modules_that_wait_for_one_another(package):
    parsed = package(
        a="from ltc import b\nfrom ltc.d import x",
        b="import ltc.c",
        c="from ltc.d import x",
        d="x = 1",
    )
    assert list(structure.longest_chain(parsed)) == ["ltc.a", "ltc.b", "ltc.c", "ltc.d"]


@pytest.mark.parametrize(
    "text",
    [
        "b = LazyModule('ltc.b')",
        "__getattr__ = lazy_names(globals(), {'x': 'ltc.b'})",
        "if TYPE_CHECKING:\n    from ltc.b import x",
    ],
)
def test_the_chain_does_not_wait_for_what_is_imported_later(package, text):
    parsed = package(a=text, b="x = 1")
    assert len(list(structure.longest_chain(parsed))) == 1


def test_a_cycle_is_found(package):
    (found,) = structure.import_cycles(package(a="from ltc import b", b="from ltc.a import x"))
    assert "ltc.a" in found and "ltc.b" in found


def test_a_module_has_one_importer_however_it_imports(package):
    parsed = package(
        a="b = LazyModule('ltc.b')\nfrom ltc.c import x, y",
        b="from ltc.c import x",
        c="x = y = 1",
    )
    found = list(structure.imported_once(parsed))
    assert found == ["ltc/b.py:1: 0 lines, imported by ltc.a"]


def test_relative_imports_are_imports(package):
    parsed = package(a="from . import b\nfrom .c import x", b="", c="x = 1")
    names = {module.name for module in parsed}
    (first,) = [module for module in parsed if module.name == "ltc.a"]
    assert {one.target for one in structure.imports(first, names)} == {"ltc.b", "ltc.c"}
