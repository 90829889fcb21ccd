"""Random cases: the same ones in every run, so that a green tree stays green, or fresh ones.

    LTC_TEST_SEED=random   draw cases that no run had before
    LTC_TEST_EXAMPLES=n    draw n times as many

A failure names what repeats it: hypothesis prints the case, the programs of views their seed.
"""

import os
import random

from hypothesis import HealthCheck, settings

FRESH = os.environ.get("LTC_TEST_SEED") == "random"
TIMES = int(os.environ.get("LTC_TEST_EXAMPLES", "1"))


def drawn(count: int = 100) -> settings:
    """The settings of a hypothesis test of that many cases."""
    return settings(
        max_examples=count * TIMES,
        deadline=None,
        derandomize=not FRESH,
        suppress_health_check=[HealthCheck.too_slow],  # of drawing: it would judge the machine
    )


def seed(name: str) -> int:
    """The seed that the environment variable of that name holds, for tests that take a sample."""
    return int(os.environ.get(name, random.SystemRandom().randrange(2**31) if FRESH else 0))


def seeds(count: int) -> list[int]:
    """That many seeds, for tests that draw by themselves."""
    source = random.SystemRandom() if FRESH else random.Random(0)
    return source.sample(range(2**31), count * TIMES)
