"""Disks that fail at any call of a save or a load: what was there stays, the error says so."""

import builtins
import errno
import io
import os
import shutil
from pathlib import Path

import pytest
import torch

import ltc.core.lazy_model as ltm
import ltc.utils.serialization as xser
from ltc.utils.checkpoint import CheckpointManager


class FaultyDisk:
    """Files below a folder, of which one call fails: the `fails_at`-th of those that are counted.

    error  its errno; 0: a write that takes half of what it is given and then reports ENOSPC
    calls  what was called so far, in order
    """

    def __init__(self, folder: Path, monkeypatch, fails_at: int = -1, error: int = errno.EIO):
        self.folder, self.fails_at, self.error = str(folder), fails_at, error
        self.calls: list[str] = []
        real_open = io.open
        monkeypatch.setattr(builtins, "open", lambda *a, **k: self._opened(real_open, *a, **k))
        for name in ("fsync", "replace", "chmod", "open", "mkdir"):
            monkeypatch.setattr(os, name, self._wrapped(f"os.{name}", getattr(os, name)))

    def call(self, name: str, path: object = "") -> None:
        """Count it, and fail if it is the one."""
        self.calls.append(name)
        if len(self.calls) - 1 == self.fails_at:
            raise OSError(self.error or errno.ENOSPC, os.strerror(self.error or errno.ENOSPC), path)

    def _is_here(self, path: object) -> bool:
        return isinstance(path, (str, os.PathLike)) and str(path).startswith(self.folder)

    def _wrapped(self, name: str, real):
        def called(target, *args, **kwargs):
            if isinstance(target, int) or self._is_here(target):
                self.call(name, target)
            return real(target, *args, **kwargs)

        return called

    def _opened(self, real_open, path, mode="r", *args, **kwargs):
        if not self._is_here(path):
            return real_open(path, mode, *args, **kwargs)
        self.call("open", path)
        file = real_open(path, mode, *args, **kwargs)
        return FaultyFile(file, self) if "b" in mode else file


class FaultyFile:
    """A binary file of a FaultyDisk."""

    def __init__(self, file, disk: FaultyDisk):
        self._file, self._disk = file, disk

    def __getattr__(self, name: str):
        return getattr(self._file, name)

    def __enter__(self):
        self._file.__enter__()
        return self

    def __exit__(self, *error):
        return self._file.__exit__(*error)

    def write(self, content) -> int:
        try:
            self._disk.call("write", self._file.name)
        except OSError:
            if not self._disk.error:
                self._file.write(memoryview(content)[: len(content) // 2])
            raise
        return self._file.write(content)

    def flush(self) -> None:
        self._disk.call("flush", self._file.name)
        self._file.flush()

    def seek(self, *args) -> int:
        self._disk.call("seek", self._file.name)
        return self._file.seek(*args)


def save_xser(folder: Path, version: int) -> None:
    xser.save({"version": version, "x": torch.full((8,), float(version))}, folder / "state")


def load_xser(folder: Path) -> int:
    state = xser.load(folder / "state")
    assert (state["x"] == state["version"]).all()
    return state["version"]


def save_ltm(folder: Path, version: int) -> None:
    ltm.save({"version": version, "x": torch.full((8,), float(version))}, folder / "state")


def load_ltm(folder: Path) -> int:
    state = torch.load(folder / "state")
    assert (state["x"] == state["version"]).all()
    return state["version"]


class Part:
    def __init__(self, version: int = 0):
        self.version = version

    def state_dict(self) -> dict:
        return {"version": self.version, "x": torch.full((8,), float(self.version))}

    def load_state_dict(self, state: dict) -> None:
        self.version = state["version"]
        assert (state["x"] == self.version).all()


def manager_of(folder: Path, part: Part, **options) -> CheckpointManager:
    return CheckpointManager(folder / "checkpoints", keep_last=2, part=part, **options)


def save_manager(folder: Path, version: int) -> None:
    manager_of(folder, Part(version)).save(version)


def load_manager(folder: Path) -> int:
    part = Part()
    restored = manager_of(folder, part).restore_latest()
    assert restored.step == part.version
    return part.version


def save_shares(folder: Path, version: int) -> None:
    manager_of(folder, Part(version), sharded=True).save(version)


WAYS = {
    "xser": (save_xser, load_xser),
    "ltm": (save_ltm, load_ltm),
    "manager": (save_manager, load_manager),
    "sharded": (save_shares, load_manager),
}


def failing_at_each_call(save, error: int, tmp_path: Path):
    """(what failed, the folder, the error that came out of the save or None) for each call of it."""
    fails_at = 0
    while True:
        folder = tmp_path / f"{error}-{fails_at}"
        folder.mkdir()
        save(folder, 1)
        raised = None
        with pytest.MonkeyPatch.context() as patched:
            disk = FaultyDisk(folder, patched, fails_at, error)
            try:
                save(folder, 2)
            except OSError as failed:
                raised = failed
        if len(disk.calls) <= fails_at:
            assert raised is None
            return
        yield disk.calls[fails_at], folder, raised
        shutil.rmtree(folder)
        fails_at += 1


@pytest.mark.parametrize(
    ("way", "error"),
    [
        ("xser", errno.EIO),
        ("xser", 0),
        ("ltm", errno.ENOSPC),
        ("manager", 0),
        ("sharded", errno.EIO),
    ],
)
def test_a_disk_that_fails_at_any_call_of_a_save_leaves_a_whole_file(way, error, tmp_path):
    save, load = WAYS[way]
    failed = set()
    for call, folder, raised in failing_at_each_call(save, error, tmp_path):
        failed.add(call)
        is_new = raised is None or "is saved, but" in str(raised)
        # of several files, one that is in its place is no checkpoint yet
        whole = {1} if not is_new else {1, 2} if raised is not None and way == "sharded" else {2}
        assert load(folder) in whole, f"{call}: {raised}"
        assert raised is None or str(folder) in str(raised), f"{call}: {raised}"
        save(folder, 3)  # the run goes on
        assert load(folder) == 3
        hidden = list(folder.rglob(".*"))
        assert not hidden, f"{call} leaves {hidden}"
    assert {"open", "write", "os.fsync", "os.replace"} <= failed


def test_a_save_behind_the_training_tells_of_its_disk_and_the_next_one_is_written(tmp_path):
    part = Part(1)
    manager = manager_of(tmp_path, part)
    manager.save(1, blocking=False)
    manager.wait()
    with pytest.MonkeyPatch.context() as patched:
        FaultyDisk(tmp_path, patched, 2, errno.ENOSPC)
        manager.save(2, blocking=False)
        with pytest.raises(RuntimeError) as told:
            manager.wait()
    assert isinstance(told.value.__cause__, OSError)
    assert "Could not save" in str(told.value.__cause__)
    assert manager.steps() == [1]
    manager.save(3, blocking=False)
    manager.wait()
    assert manager.steps() == [1, 3]


def test_a_checkpoint_that_cannot_be_read_is_left_out_with_a_warning(tmp_path):
    for version in (1, 2):
        save_manager(tmp_path, version)
    with (
        pytest.MonkeyPatch.context() as patched,
        pytest.warns(UserWarning, match="step 2 is skipped"),
    ):
        FaultyDisk(tmp_path, patched, 0)
        assert load_manager(tmp_path) == 1
