"""A few step functions at random are replayed as they would run; scripts/compare has thousands."""

import random
import warnings

from tests.networks.step_functions import judged, step_function

COUNT = 12


def test_random_step_functions_are_replayed_as_they_would_run():
    first = random.SystemRandom().randrange(10**12)
    replayed = 0
    with warnings.catch_warnings(record=True) as refused:
        warnings.simplefilter("always")
        for seed in range(first, first + COUNT):
            fault, grown = judged(seed)
            assert not fault, f"seed {seed}: {fault}\n{step_function(seed).text}"
            replayed += grown.get("ReplayedCalls", 0)
    assert replayed, [str(one.message) for one in refused]


def test_a_seed_gives_the_same_function():
    assert step_function(5) == step_function(5)
    assert any(step_function(seed).is_impure for seed in range(20))
