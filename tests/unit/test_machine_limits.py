"""The machine's limits are kept with their time, and measured again when that is long ago."""

import time

import pytest

from ltc import config
from ltc.llvm.native import machine_limits, runner
from ltc.llvm.native.machine_limits import MAX_AGE_SECONDS, MachineLimits, limits


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """The number of measurements; the others' share of the processors is what the test sets."""
    seen = {"copies": 0, "others": 0.0}

    def copy_rate() -> float:
        seen["copies"] += 1
        return 1e10

    monkeypatch.setattr(machine_limits, "_copy_rate", copy_rate)
    monkeypatch.setattr(machine_limits, "_fma_rate", lambda threads: 1e11)
    monkeypatch.setattr(machine_limits._Processors, "others_share", lambda self: seen["others"])
    monkeypatch.setattr(machine_limits, "_known", {})
    with config.override(LTC_CACHE_DIR=str(tmp_path), LTC_CACHE="1"):
        yield seen


def forget():
    machine_limits._known.clear()


def test_limits_are_kept_with_the_time_of_their_measurement(measured):
    begun = time.time()
    found = limits()
    forget()
    assert limits() == found and measured["copies"] == 1
    assert begun <= found.measured_at <= time.time()


def test_old_limits_are_measured_again(measured, monkeypatch):
    limits()
    forget()
    later = time.time() + MAX_AGE_SECONDS + 1
    monkeypatch.setattr(machine_limits.time, "time", lambda: later)
    assert limits().measured_at == later and measured["copies"] == 2


def test_limits_measured_beside_others_are_not_kept_and_say_so(measured):
    measured["others"] = 0.5
    assert not limits().is_quiet
    forget()
    measured["others"] = 0.0
    assert limits().is_quiet and measured["copies"] == 2


def test_others_share_is_what_this_process_has_not_used(monkeypatch):
    ticks = iter([(100, 1000), (700, 2000)])
    monkeypatch.setattr(machine_limits, "_ticks", lambda: next(ticks))
    monkeypatch.setattr(machine_limits.time, "process_time", lambda: 0.0)
    assert machine_limits._Processors().others_share() == 0.6


def test_a_measurement_of_the_future_is_old():
    threads = runner.thread_count()
    assert MachineLimits(1.0, 1.0, threads, time.time() + 60, 0.0).is_old
