"""On systems that ltc has no way for, `import ltc` says so in one sentence."""

import sys

import pytest

from ltc.support.known_system import require_known_system


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_it_runs_where_files_are_locked_and_memory_shared_as_here(monkeypatch, platform):
    monkeypatch.setattr(sys, "platform", platform)
    require_known_system()


def test_on_windows_the_sentence_names_what_to_use(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ImportError, match="not on win32.*use it in WSL 2"):
        require_known_system()


def test_on_processors_of_the_other_byte_order_it_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(ImportError, match="big-endian"):
        require_known_system()
