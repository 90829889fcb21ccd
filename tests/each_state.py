"""The states that a test's calls may be in, and a test that runs in each of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.runtime.background import compile_behind
from tests.recorders import forget_paths

# LTC_TIER, and how often a test runs there in one process: noted at first, then followed.
STATES = {"left alone": ("op_by_op", 1), "noted": ("auto", 1), "followed": ("auto", 4)}
IMMEDIATE = ("left alone", "noted")


@contextmanager
def tier_of(state: str) -> Iterator[None]:
    """No path is known, and nothing is pending behind it."""
    tier, _ = STATES[state]
    with config.override(LTC_TIER=tier):
        forget_paths()
        yield
        ltm.mark_step()


def runs_in(state: str) -> Iterator[int]:
    """The numbers of the runs; programs that were asked for are there before each."""
    _, times = STATES[state]
    for number in range(times):
        compile_behind.wait()
        yield number
        ltm.mark_step()


def in_each_state(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test where calls are left alone, where they are noted, and until they are followed."""

    @functools.wraps(test)
    def run(*arguments: Any, state: str, **named: Any) -> None:
        with tier_of(state):
            for _ in runs_in(state):
                test(*arguments, **named)

    asked = inspect.signature(test)
    state = inspect.Parameter("state", inspect.Parameter.KEYWORD_ONLY)
    run.__signature__ = asked.replace(parameters=[*asked.parameters.values(), state])  # type: ignore[attr-defined]
    marked: Callable[..., None] = pytest.mark.parametrize("state", STATES)(run)
    return marked
