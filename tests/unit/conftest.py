"""Tests of single parts: each runs with LTC_TIER=native."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """Mark the tests of this folder: pytest hands over those of others as well."""
    native = pytest.mark.native("one part is tested alone, without what decides when it is used")
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(native)
