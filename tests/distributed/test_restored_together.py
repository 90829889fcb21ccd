"""Replicas of which one is far ahead of the others save shares, and go back to the same step."""

import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import ltc.core.lazy_model as ltm
from ltc.distributed.transport import session
from ltc.utils.checkpoint import CheckpointManager
from tests.saved_part import Part

sys.path.insert(0, str(Path(__file__).parent))

from replicas import in_processes, in_threads, values

pytestmark = pytest.mark.devices(4)


def saved(manager: CheckpointManager, part: Part, steps: range, blocking: bool = True) -> None:
    for step in steps:
        part.value = float(step)
        manager.save(step, blocking=blocking)


def restored(manager: CheckpointManager, part: Part) -> tuple:
    """The step that was gone back to, and the value of the part."""
    found = manager.restore_latest()
    return (None if found is None else found.step), part.value


class Ahead:
    """Some replicas come first: the others begin when these wait for them, or have gone on."""

    def __init__(self, first: int):
        self.first, self.gone_on = first, threading.Event()

    def run(self, ordinal: int, function: Callable[[], tuple]) -> tuple:
        if ordinal == self.first:
            try:
                return function()
            finally:
                self.gone_on.set()
        while not self.gone_on.is_set() and not self._is_waiting():
            time.sleep(0.01)
        return function()

    def _is_waiting(self) -> bool:
        _, inside, _, line = session.current().host.board.entry(self.first)
        return bool(inside) and line.startswith("rendezvous")


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("replicas, first", [(2, 0), (2, 1), (3, 1)])
def test_one_that_is_ahead_waits_for_what_the_others_save(replicas, first, blocking, tmp_path):
    ahead = Ahead(first)

    def train(ordinal: int, device: str) -> tuple:
        part = Part()
        manager = CheckpointManager(tmp_path, keep_last=2, sharded=True, part=part)
        ltm.rendezvous("all have begun")

        def save_and_go_back() -> tuple:
            saved(manager, part, range(1, 6), blocking)
            part.value = 0.0
            return restored(manager, part)

        return (*ahead.run(ordinal, save_and_go_back), manager.steps())

    assert values(in_threads(train, replicas)) == [(5, 5.0, [4, 5])] * replicas
    assert len(list(tmp_path.iterdir())) == 2


def test_where_one_replica_writes_all_nobody_waits_for_another(tmp_path):
    def train(ordinal: int, device: str) -> tuple:
        part = Part()
        manager = CheckpointManager(tmp_path, part=part)
        if ordinal == 0:
            saved(manager, part, range(1, 3))
            return restored(manager, part)
        return (None, part.value)

    assert values(in_threads(train, 2)) == [(2, 2.0), (None, 0.0)]


def test_a_save_that_not_all_have_made_is_left_out_by_all(tmp_path):
    def train(ordinal: int, device: str) -> tuple:
        part = Part()
        manager = CheckpointManager(tmp_path, sharded=True, part=part)
        saved(manager, part, range(1, 3 + ordinal))
        return restored(manager, part)

    assert values(in_threads(train, 2)) == [(2, 2.0)] * 2


def test_a_checkpoint_that_one_can_not_read_is_left_out_by_all(tmp_path):
    def train(ordinal: int, device: str) -> tuple:
        part = Part()
        manager = CheckpointManager(tmp_path, sharded=True, part=part)
        saved(manager, part, range(1, 3))
        ltm.rendezvous("all have saved")
        if ordinal == 1:  # nobody else reads its random state
            (own,) = (tmp_path / "step-00000002").glob("replica-00001-*")
            own.write_bytes(own.read_bytes()[:-8] + b"damaged!")
        return restored(manager, part)

    with pytest.warns(UserWarning, match="step 2 is skipped: replica 1: .*replica-00001-of-00002"):
        assert values(in_threads(train, 2)) == [(1, 1.0)] * 2


@pytest.mark.parametrize("dead", [0, 1])
def test_a_share_of_a_save_that_was_cut_off_is_no_part_of_a_later_one(dead, tmp_path):
    """One died in step 2 after it had saved, the other before; in their next life both save anew."""

    def manager_of(value: float) -> tuple[CheckpointManager, Part]:
        part = Part(value)
        return CheckpointManager(tmp_path, sharded=True, part=part), part

    def train(ordinal: int, device: str) -> list:
        if ordinal == dead:
            manager_of(5.0)[0].save(2)
        ltm.rendezvous("it is dead")
        manager, part = manager_of(0.0)
        found = [restored(manager, part)]
        part.value = 7.0
        if ordinal != dead:
            manager.save(2)
        ltm.rendezvous("one has saved")
        found.append(manager.steps())
        if ordinal == dead:
            manager.save(2)
        return [*found, restored(manager, part)]

    assert values(in_threads(train, 2)) == [[(None, 0.0), [], (2, 7.0)]] * 2
    assert len(list((tmp_path / "step-00000002").iterdir())) == 5  # nothing of the dead one's


def test_a_world_of_another_size_leaves_nothing_in_the_checkpoints_of_the_next(tmp_path):
    def save_some(count: int, ordinal: int, device: str) -> tuple:
        part = Part()
        manager = CheckpointManager(tmp_path, sharded=True, part=part)
        found = restored(manager, part)
        saved(manager, part, range(1, 3 if ordinal < count else 2))
        return found

    assert values(in_threads(functools.partial(save_some, 2), 3)) == [(None, 0.0)] * 3
    assert values(in_threads(functools.partial(save_some, 2), 2)) == [(1, 1.0)] * 2
    for step in (1, 2):
        files = (tmp_path / f"step-0000000{step}").glob("*.safetensors")
        assert ["-of-00002" in file.name for file in files] == [True] * 4


def saved_by(ordinal: int, folder: str, value: float, ordinals: tuple[int, ...] = (0, 1)) -> list:
    """The steps that there are once some replicas of a run, none of which restores, have saved."""
    if ordinal in ordinals:
        CheckpointManager(folder, sharded=True, part=Part(value)).save(2)
    ltm.rendezvous("all have saved")
    return CheckpointManager(folder, sharded=True, part=Part()).steps()


def saved_by_the_first(ordinal: int) -> list:
    return saved_by(ordinal, os.environ["FOLDER"], 5.0, ordinals=(0,))


def saved_by_the_second(ordinal: int) -> list:
    return saved_by(ordinal, os.environ["FOLDER"], 7.0, ordinals=(1,))


def saved_by_both(ordinal: int) -> list:
    return saved_by(ordinal, os.environ["FOLDER"], 8.0)


@pytest.mark.parametrize("of_processes", [False, True], ids=["threads", "processes"])
def test_shares_of_two_runs_are_no_checkpoint_where_nobody_restores(of_processes, tmp_path):
    """One replica of the first run saved, the other of the second; the third saves as a whole."""

    def run(function: Callable, value: float, ordinals: tuple[int, ...]) -> list:
        if of_processes:
            return values(in_processes(__file__, function.__name__, FOLDER=str(tmp_path)))
        return values(in_threads(lambda i, device: saved_by(i, str(tmp_path), value, ordinals), 2))

    assert run(saved_by_the_first, 5.0, (0,)) == [[], []]
    assert run(saved_by_the_second, 7.0, (1,)) == [[], []]
    assert run(saved_by_both, 8.0, (0, 1)) == [[2], [2]]
    part = Part()
    CheckpointManager(tmp_path, part=part).restore(2)
    assert part.value == 8.0 and len(list((tmp_path / "step-00000002").iterdir())) == 5
