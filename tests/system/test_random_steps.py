"""A few step functions at random are replayed as they would run; scripts/compare has thousands."""

import json
import os
import random
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path

import pytest

from tests.networks import aliased_steps
from tests.networks.step_functions import judged, step_function

COUNT, ALIASED = 12, 6
ROOT = Path(__file__).parents[2]


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


@pytest.mark.parametrize("tier", aliased_steps.TIERS)
def test_arguments_that_share_memory_are_what_they_are(tier):
    first = random.SystemRandom().randrange(10**12)
    counts: Counter[str] = Counter()
    for seed in range(first, first + ALIASED):
        fault, grown = aliased_steps.judged(seed, tier)
        assert not fault, f"seed {seed}: {fault}\n{aliased_steps.aliased_step(seed).text}"
        counts.update(grown)
    assert counts["ReplayedCalls"]
    assert counts["UncachedCompile"] + counts["UncompiledPrograms"] + counts["CachedCompile"]


def run(script, *options):
    command = [sys.executable, str(ROOT / "scripts" / "compare" / script), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_a_run_goes_on_where_it_was_stopped(tmp_path):
    done = tmp_path / "done.json"
    options = ("--aliases", "--seed", "1", "--tier", "native", "--done", str(done), "--count")
    first = run("random_steps.py", *options, "1")
    assert json.loads(done.read_text())["next"] == 2
    again = run("random_steps.py", *options, "2")
    assert "from seed 1, from 2 on, to 3" in again.stdout, first.stderr + again.stderr
    kept = json.loads(done.read_text())
    assert (kept["first"], kept["next"]) == (1, 3)
    assert again.returncode == (0 if kept["counts"]["calls replayed"] else 1)


def test_a_run_in_which_nothing_is_replayed_fails():
    done = run("random_steps.py", "--aliases", "--seed", "1", "--count", "0")
    assert done.returncode == 1
    assert "no call was replayed" in done.stdout


def test_a_fault_in_what_is_compared_is_found():
    """One of them; all: python scripts/compare/seeded_faults.py --steps 200."""
    done = run("seeded_faults.py", "--steps", "50", "--fault", "a base stands for its views")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "after" in done.stdout
