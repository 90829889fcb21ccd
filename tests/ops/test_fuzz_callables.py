"""Some of PyTorch's public callables, called with anything.

All of them: `python scripts/compare/fuzz_callables.py`.  FUZZ_SEED picks other ones and other draws.
"""

import argparse
import sys
from pathlib import Path

from tests.drawn import seed

SCRIPTS = Path(__file__).parents[2] / "scripts" / "compare"
sys.path.insert(0, str(SCRIPTS))
import case_runner
import fuzz_callables

STRIDE = 40
SEED = seed("FUZZ_SEED")


def run(names, draws):
    arguments = argparse.Namespace(device="ltc", draws=draws, seed=SEED, processes=1, timeout=600)
    outcomes = fuzz_callables.run_all(names, arguments, arguments.device)
    return fuzz_callables.judged(outcomes, arguments)


def test_no_call_ends_the_process():
    outcomes = run(fuzz_callables.names()[SEED % STRIDE :: STRIDE], draws=20)
    dead = [outcome for outcome in outcomes if outcome.status == "died"]
    assert not dead, f"FUZZ_SEED={SEED}\n{case_runner.table(dead)}"


def test_many_of_the_draws_are_calls_that_work():
    outcomes = run(["torch.add", "torch.Tensor.mul_", "torch.nn.functional.relu"], draws=100)
    assert all(int(outcome.reason.split()[0]) >= 5 for outcome in outcomes)  # 15 and more, usually


def test_what_is_left_out_exists_and_says_why():
    for name, why in fuzz_callables.LEFT_OUT.items():
        prefix, _, attribute = name.rpartition(".")
        assert hasattr(fuzz_callables.NAMESPACES[prefix], attribute), name
        assert why
