"""The launch of several ranks that other tests look at: what a check that fails means to the next."""

import pytest

from tests.distributed.ranks import findings

CHECKS = """
import torch
import torch.distributed as dist
import ltc

def check_that_fails_on_all_ranks(rank, world):
    raise RuntimeError("as on the others")

def check_that_passes(rank, world):
    x = torch.ones(2, device="ltc:0")
    dist.all_reduce(x)
    return x.tolist()

def check_that_fails_on_one_rank(rank, world):
    assert rank == 1, "the first one fails"

def check_that_nobody_comes_to(rank, world):
    pass
"""


def test_checks_go_on_after_one_that_fails_on_all_ranks_alike(tmp_path):
    (tmp_path / "checks.py").write_text(CHECKS)
    found = findings(str(tmp_path / "checks.py"), tmp_path, world=2)
    with pytest.raises(AssertionError, match="as on the others"):
        found.of("check_that_fails_on_all_ranks")
    assert found.of("check_that_passes") == [[2.0, 2.0]] * 2
    with pytest.raises(AssertionError, match="the first one fails"):
        found.of("check_that_fails_on_one_rank")
    with pytest.raises(AssertionError, match="did not come to"):
        found.of("check_that_nobody_comes_to")
