"""Orders of tests, other than that of their files."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from random import Random

import pytest


def in_another_order(items: list[pytest.Item], source: Random) -> list[pytest.Item]:
    """Shuffle files, the classes of a file, and the tests of a class.

    Tests that share a fixture stay together, so it is made as often as in the order of their files.
    """
    return [
        item
        for file in _shuffled_groups(items, lambda item: item.path, source)
        for tests in _shuffled_groups(file, lambda item: getattr(item, "cls", None), source)
        for item in source.sample(tests, len(tests))
    ]


def _shuffled_groups(
    items: list[pytest.Item], key: Callable[[pytest.Item], Hashable], source: Random
) -> list[list[pytest.Item]]:
    groups: dict[Hashable, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return source.sample(list(groups.values()), len(groups))
