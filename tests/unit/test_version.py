"""The name for the files that the package consists of: every way in which it may lie there."""

import os
import zipfile
from pathlib import Path

import pytest

from ltc.support import version


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """One of two modules, in place of ltc."""
    folder = tmp_path / "files" / "ltc"
    (folder / "support").mkdir(parents=True)
    (folder / "support" / "version.py").write_text("x = 1")
    (folder / "device.py").write_text("y = 2")
    monkeypatch.setattr(version, "__file__", str(folder / "support" / "version.py"))
    return folder


digest = version.source_digest.__wrapped__


def test_it_differs_where_a_module_is_new_or_changed(package):
    found = [digest()]
    (package / "other.py").write_text("")
    found.append(digest())
    (package / "support" / "version.py").write_text("x = 12")
    found.append(digest())
    assert len({*found, digest()}) == 3


def test_what_is_no_module_changes_nothing(package):
    before = digest()
    (package / "data.json").write_text("{}")
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "device.py").write_text("")
    assert digest() == before


def test_links_to_nowhere_and_in_a_circle(package):
    os.symlink("me@host.17", package / ".#device.py")  # as an editor locks a file
    before = digest()
    os.symlink("..", package / "support" / "all")
    os.symlink("nowhere", package / "support" / "none")
    assert digest() == before


def test_of_a_package_in_an_archive_it_is_that_of_the_archive(tmp_path, monkeypatch):
    found = set()
    archive = tmp_path / "ltc.zip"
    monkeypatch.setattr(version, "__file__", str(archive / "ltc" / "support" / "version.py"))
    for text in ("x = 1", "x = 12"):
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr("ltc/support/version.py", text)
        found.add(digest())
    assert len(found) == 2
