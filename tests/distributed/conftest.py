"""What the tests of several ranks share: how many there are, and one launch for a file's checks."""

import pytest

from tests.distributed.ranks import findings, names_of


def pytest_generate_tests(metafunc):
    """A test that takes `claim` runs once for each check of its file."""
    if "claim" in metafunc.fixturenames:
        metafunc.parametrize("claim", names_of(vars(metafunc.module)))


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """How the checks of the file went, all in one launch."""
    world = getattr(request.module, "RANKS", None)
    devices = getattr(request.module, "DEVICES", 1)
    folder = tmp_path_factory.mktemp("ranks")
    return findings(request.module.__file__, folder, world, devices=devices)
