"""What the end of a recording takes for dead has no tensor: no reference count hides a living one."""

import gc

import pytest
import torch

import ltc.core.lazy_model as ltm
from ltc.device.recording import exit_liveness
from tests.drawn import seeds
from tests.random_programs import drawn_program

PROGRAMS = 10


def states_with_tensors() -> set[int]:
    """The identities of the states that a storage leads to, found without counting."""
    storages = [found for found in gc.get_objects() if type(found) is torch.UntypedStorage]
    states = [vars(one)["lazy"] for one in storages if "lazy" in vars(one)]
    with_bases = {id(state) for state in states}
    return with_bases | {id(state.base) for state in states if state.base is not None}


@pytest.fixture
def looks(monkeypatch) -> list[tuple[int, int, int]]:
    """(living, dead, living taken for dead) of each end that looks at its states."""
    found = []
    real = exit_liveness._looked_at

    def looked_at(recorder):
        states = recorder.live + recorder.bound
        living = states_with_tensors()
        numbers = [id(state) for state in states if exit_liveness._is_of(state, recorder)]
        del states
        ended, alive = real(recorder)
        lost = (living & set(numbers)) - {id(state) for state in alive}
        found.append((len(alive), len(numbers) - len(alive), len(lost)))
        return ended, alive

    monkeypatch.setattr(exit_liveness, "_looked_at", looked_at)
    return found


@pytest.mark.native("the ends of followed recordings are looked at")
@pytest.mark.parametrize("seed", seeds(PROGRAMS))
def test_no_living_tensor_is_taken_for_dead(seed, looks):
    program = drawn_program(seed)
    program.run("ltc", bool(seed % 2), ltm.mark_step)
    ltm.mark_step()
    assert looks and sum(lost for *_, lost in looks) == 0


@pytest.mark.native("the ends of followed recordings are looked at")
def test_tensors_that_are_gone_are_not_kept(looks):
    """The ends above would pass as well where everything was taken for alive."""
    x = torch.ones(3, device="ltc")
    y = (x + 1).exp().sin()  # of four results two are alive
    ltm.mark_step()
    (one,) = looks
    assert one == (2, 2, 0)
    del y


@pytest.mark.native("the ends of followed recordings are looked at")
def test_a_tensor_that_only_an_argument_holds_is_alive(looks):
    def ends_with(tensor):
        ltm.mark_step()
        return tensor.sum().item()

    for _ in range(50):  # in the end the interpreter passes arguments in its quickest way
        assert ends_with(torch.ones(3, device="ltc") + 1) == 6
    assert sum(lost for *_, lost in looks) == 0
