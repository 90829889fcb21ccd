"""A few sums of 16-bit numbers at random; scripts/compare/random_sums.py has thousands."""

import warnings

import pytest

from ltc.debug import metrics
from tests.drawn import seeds
from tests.random_sums import RandomSums
from tests.recorders import in_a_new_thread, process_of_one_device

DRAWN = 8


@pytest.fixture(autouse=True)
def one_device():
    """As in a process that was told nothing."""
    with process_of_one_device():
        yield


@pytest.mark.noted_at_once("it counts the runs of programs of symbols")
def test_random_sums_are_as_exact_as_their_dtype_on_every_tier():
    found = []
    with warnings.catch_warnings(), metrics.counted() as grown:
        warnings.simplefilter("ignore")  # index_reduce is in beta
        for seed in seeds(DRAWN):
            in_a_new_thread(lambda seed=seed: found.append((seed, RandomSums(seed).failure())))
    assert [seed for seed, failure in found if failure] == [], found
    assert grown["CallByCallRuns"]
    assert grown["UncachedCompile"]
    assert grown["SymbolicSizes"]
