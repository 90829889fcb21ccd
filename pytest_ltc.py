"""A plug-in of pytest: tests say what their steps may cost on an ltc device.

    @pytest.mark.ltc_budget(compiles=1, syncs=0)
    def test_training_stays_on_the_device(): ...

    def test_a_second_step_compiles_nothing(ltc_budget):
        step()
        with ltc_budget(compiles=0):
            step()

It stands outside the package: pytest imports it in every run, and ltc only where a test asks for it.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "ltc_budget(compiles=None, programs=None, syncs=None, fallbacks=None, transfers_mb=None, "
        "warn=False): the test fails where it costs more than that, as in `with ltc.budget(...):`",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    mark = item.get_closest_marker("ltc_budget")
    if mark is None:
        return (yield)
    import ltc

    with ltc.budget(*mark.args, **mark.kwargs):
        return (yield)


@pytest.fixture
def ltc_budget():
    """`ltc.budget`, for a part of a test."""
    import ltc

    return ltc.budget
