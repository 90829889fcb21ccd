"""Programs of many kinds of calls, drawn at random, give what the CPU gives."""

import warnings

import pytest
import torch

import ltc.core.lazy_model as ltm
from tests.drawn import seeds
from tests.random_programs import Program, drawn_program

PROGRAMS = 60
LENGTHS = (6, 10, 14, 20)
ROUNDING = 1e-9  # of float64, after some twenty calls that each round
BEYOND_NEARBY = 1e3  # how much more than inputs that are 1e-13 away roundings may change


def difference(program: Program, gradients: bool) -> str:
    """What is not as on the CPU; empty where all is."""
    exact, nearby = program.run("cpu", gradients), program.nearby().run("cpu", gradients)
    ours = [x.cpu() for x in program.run("ltc", gradients, ltm.mark_step)]
    if [(x.shape, x.dtype) for x in ours] != [(x.shape, x.dtype) for x in exact]:
        return "other types"
    for k, (mine, theirs, other) in enumerate(zip(ours, exact, nearby)):
        if not theirs.numel() or not torch.isfinite(theirs).all():
            continue
        allowed = ROUNDING * max(1.0, float(theirs.abs().max()))
        allowed += BEYOND_NEARBY * float((theirs - other).abs().nan_to_num(torch.inf).max())
        if not (mine - theirs).abs().max() <= allowed:
            return f"number {k} of results and gradients is off by {(mine - theirs).abs().max()}"
    return ""


@pytest.mark.parametrize("seed", seeds(PROGRAMS))
def test_a_random_program_equals_the_cpu(seed):
    program = drawn_program(seed, LENGTHS[seed % len(LENGTHS)])
    gradients = bool(seed // len(LENGTHS) % 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = difference(program, gradients)
        if not found:
            return
        for result in program.results:  # the smallest program that shows it
            part = program.only(result)
            if why := difference(part, gradients):
                pytest.fail(f"seed {seed}, gradients {gradients}: {why}\n{part}")
    pytest.fail(f"seed {seed}, gradients {gradients}: {found}\n{program}")


def test_what_lies_in_a_place_is_read_before_another_store_takes_it():
    """The cosine is kept for two passes over a row, the operand of both stores is not."""
    x = torch.randn(17, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def step(device):
        given = x.to(device).requires_grad_()
        positive = given * (given > 0)
        rows = positive.movedim(1, 0)[torch.tensor([0, 0, 0, 1, 1, 1]).to(device)]
        whole, centered = rows.floor(), rows - rows.mean([1], keepdim=True)
        total = positive.sin().sum() + whole.sin().sum() + centered.sin().sum()
        gradient = torch.autograd.grad(total, given)[0]
        return positive.detach(), whole.detach(), centered.detach(), gradient

    for mine, theirs in zip(step("ltc"), step("cpu")):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-12, atol=1e-12)
