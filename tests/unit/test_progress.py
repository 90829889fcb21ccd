"""A line of progress is shown where somebody waits for long, and nowhere else."""

import contextlib
import io
import threading
import time

import pytest
import torch

from ltc import config
from ltc.llvm.native import kernel_cache
from ltc.llvm.native.kernel_cache import shown_if_slow


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr(kernel_cache.tqdm, "monitor_interval", 0)
    return Terminal()


def taken(shown: io.StringIO, waited: float) -> list[int]:
    with contextlib.redirect_stderr(shown):
        return list(shown_if_slow(range(5), 5, "compiling", time.monotonic() - waited))


def test_what_takes_long_is_shown_on_a_terminal(terminal):
    assert taken(terminal, waited=60) == [0, 1, 2, 3, 4]
    assert "compiling" in terminal.getvalue()
    assert "/5" in terminal.getvalue()


def test_what_is_over_soon_is_not(terminal):
    assert taken(terminal, waited=0) == [0, 1, 2, 3, 4]
    assert terminal.getvalue() == ""


def test_a_file_shows_nothing():
    shown = io.StringIO()
    assert taken(shown, waited=60) == [0, 1, 2, 3, 4]
    assert shown.getvalue() == ""


def test_what_runs_behind_shows_nothing(terminal):
    found = []
    thread = threading.Thread(target=lambda: found.extend(taken(terminal, waited=60)))
    thread.start()
    thread.join()
    assert (found, terminal.getvalue()) == ([0, 1, 2, 3, 4], "")


def test_it_can_be_switched_off(terminal):
    with config.override(LTC_PROGRESS=0):
        assert taken(terminal, waited=60) == [0, 1, 2, 3, 4]
    assert terminal.getvalue() == ""


def test_compiling_is_shown(terminal, monkeypatch):
    monkeypatch.setattr(kernel_cache, "PATIENCE_SECONDS", -1.0)
    settings = config.override(LTC_TIER="native", LTC_CACHE=0)
    with settings, contextlib.redirect_stderr(terminal):
        (torch.ones(3, 17).to("ltc") * 3).cosh().sum(0).cpu()
    assert "ltc compiles a program" in terminal.getvalue()
