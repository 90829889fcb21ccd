"""Shares of replicas that save one after the other: at every instant a whole checkpoint is there."""

import contextlib
import itertools
import os
import shutil
from pathlib import Path

import pytest

import ltc.utils.serialization as xser
from ltc.utils.checkpoint import CheckpointManager
from tests.saved_part import Part


class Replicas:
    """Managers of some replicas in one process, of which one at a time acts."""

    def __init__(self, folder: Path, monkeypatch, count: int = 2, **options):
        self.folder, self.monkeypatch, self.count = folder, monkeypatch, count
        self.parts = [Part() for _ in range(count)]
        self.managers = [
            CheckpointManager(folder, sharded=True, part=part, **options) for part in self.parts
        ]

    def save(self, ordinal: int, step: int, value: int, metric: float | None = None) -> None:
        self._become(ordinal, self.count)
        self.parts[ordinal].value = value
        self.managers[ordinal].save(step, metric=metric)

    def save_all(self, step: int, value: int, metric: float | None = None) -> None:
        for ordinal in range(self.count):
            self.save(ordinal, step, value, metric)

    def found(self) -> tuple[int, int] | None:
        """The step and the value that an onlooker, which is no replica, restores."""
        self._become(0, 1)
        part = Part()
        restored = CheckpointManager(self.folder, sharded=True, part=part).restore_latest()
        return None if restored is None else (restored.step, part.value)

    def _become(self, ordinal: int, count: int) -> None:
        self.monkeypatch.setenv("XRT_SHARD_ORDINAL", str(ordinal))
        self.monkeypatch.setenv("XRT_SHARD_LOCAL_ORDINAL", str(ordinal))
        self.monkeypatch.setenv("XRT_SHARD_WORLD_SIZE", str(count))


@pytest.fixture
def replicas(tmp_path, monkeypatch):
    def made(**options) -> Replicas:
        return Replicas(tmp_path, monkeypatch, **options)

    return made


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("first", [0, 1])
def test_one_that_is_far_ahead_removes_nothing(first, count, replicas):
    ranks = replicas(count=count, keep_last=1)
    ranks.save_all(1, 10)
    order = [first, *(ordinal for ordinal in range(count) if ordinal != first)]
    for ordinal, step in itertools.product(order, range(2, 6)):
        expected = (1, 10) if ordinal != order[-1] else (max(step - 1, 1), max(step - 1, 1) * 10)
        assert ranks.found() == expected
        ranks.save(ordinal, step, step * 10)
    assert ranks.found() == (5, 50) and len(os.listdir(ranks.folder)) == 1


@pytest.mark.parametrize("same_process", [True, False])
def test_a_step_that_is_saved_anew_is_the_old_one_until_all_have_saved(same_process, replicas):
    ranks = replicas(keep_last=2)
    for step in (4, 5):
        ranks.save_all(step, step)
    if not same_process:
        ranks = replicas(keep_last=2)
    for step in (4, 5):
        ranks.save(0, step, step * 10)
        assert ranks.found() == (5, 5)
    for step, expected in ((4, 5), (5, 50)):
        ranks.save(1, step, step * 10)
        assert ranks.found() == (5, expected)
    assert [len(os.listdir(folder)) for folder in ranks.folder.iterdir()] == [5, 5]


def test_saves_of_one_step_by_replicas_that_drift_apart_are_never_mixed(replicas):
    ranks = replicas(keep_last=1)
    for value in (1, 2, 3):
        ranks.save(0, 7, value)
    for value in (1, 2, 3):
        assert ranks.found() == ((7, value - 1) if value > 1 else None)
        ranks.save(1, 7, value)
    assert ranks.found() == (7, 3) and len(os.listdir(ranks.folder / "step-00000007")) == 5


def test_a_save_that_failed_and_is_tried_again_counts_as_one(replicas, monkeypatch):
    ranks = replicas()
    with monkeypatch.context() as patched, pytest.raises(OSError, match="disk is gone"):
        patched.setattr(
            os, "replace", lambda *names: (_ for _ in ()).throw(OSError("disk is gone"))
        )
        ranks.save(0, 1, 10)
    ranks.save(0, 1, 10)
    ranks.save(1, 1, 10)
    assert ranks.found() == (1, 10)


@pytest.mark.parametrize("step, raised", [(3, None), (9, OSError)])
def test_one_that_saves_a_step_below_the_kept_may_find_it_removed(
    step, raised, replicas, monkeypatch
):
    ranks, replace = replicas(keep_last=1), os.replace
    ranks.save_all(8, 80)

    def overtaken(*names) -> None:
        shutil.rmtree(ranks.folder / f"step-{step:08d}", ignore_errors=True)
        replace(*names)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", overtaken)
        with contextlib.nullcontext() if raised is None else pytest.raises(raised, match="step-"):
            ranks.save(0, step, 30)
    ranks.save_all(10, 100)
    assert ranks.found() == (10, 100) and os.listdir(ranks.folder) == ["step-00000010"]


def test_an_onlooker_that_restores_takes_nothing_from_a_save_under_way(replicas):
    ranks = replicas()
    ranks.save_all(1, 10)
    ranks.save(0, 2, 20)
    assert ranks.found() == (1, 10)
    ranks.save(1, 2, 20)
    assert ranks.found() == (2, 20)


def test_an_onlooker_takes_what_became_complete_while_it_looked(replicas, monkeypatch):
    ranks = replicas(keep_last=1)
    ranks.save_all(1, 10)
    load = xser.load

    def overtaken(path, *args, **options):
        if Path(path).name == "step-00000001":
            ranks.save_all(2, 20)
            ranks._become(0, 1)
        return load(path, *args, **options)

    monkeypatch.setattr(xser, "load", overtaken)
    with pytest.warns(UserWarning, match="step 1 is skipped"):
        assert ranks.found() == (2, 20)


def test_what_was_never_complete_goes_although_an_older_one_is_the_best(replicas):
    ranks = replicas(keep_last=1, keep_best=1)
    ranks.save_all(1, 10, metric=0.0)
    ranks.save(0, 2, 20, metric=1.0)
    for step in (3, 4):
        ranks.save_all(step, step * 10, metric=1.0)
    assert sorted(os.listdir(ranks.folder)) == ["step-00000001", "step-00000004"]


@pytest.mark.parametrize("sharded", [True, False])
def test_a_removal_that_is_cut_off_leaves_no_damaged_checkpoint(sharded, replicas, monkeypatch):
    ranks = replicas(count=1, keep_last=1)
    ranks.save_all(1, 10)
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **options: None)
    if sharded:
        ranks.save_all(2, 20)
        assert ranks.managers[0].steps() == [2]
    else:
        part = Part(20)
        CheckpointManager(ranks.folder, part=part).save(1)
        assert ranks.found() == (1, 20)


def test_nothing_is_changed_where_the_random_state_can_not_be_read(replicas):
    ranks = replicas(count=1)
    for step in (1, 2):
        ranks.save_all(step, step * 10)
    (own,) = (ranks.folder / "step-00000002").glob("replica-*")
    own.write_bytes(own.read_bytes()[:-8] + b"damaged!")
    with pytest.warns(UserWarning, match="step 2 is skipped: .*replica-00000-of-00001"):
        assert ranks.found() == (1, 10)
    ranks.parts[0].value = 5
    with pytest.raises(xser.DamagedFile):
        ranks.managers[0].restore(2)
    assert ranks.parts[0].value == 5


def test_a_checkpoint_of_an_older_manifest_loads(replicas):
    """It says nothing of the files with what is each replica's own."""
    ranks = replicas()
    ranks.save_all(1, 10)
    manifest = ranks.folder / "step-00000001" / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text[: text.index(',\n "states"')] + "}")
    assert ranks.found() == (1, 10)
    ranks.save(0, 1, 11)
    assert ranks.found() == (1, 10)
    ranks.save(1, 1, 11)
    assert ranks.found() == (1, 11)
