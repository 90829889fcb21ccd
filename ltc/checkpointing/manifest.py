"""A checkpoint that several replicas write: files of each, and a manifest when all are there.

No replica waits for another. The last replica to finish finds every file of its save in place and
writes the manifest. The manifest names the files and the checksums of their headers, so that files of
different saves are never taken for one checkpoint. Another save of the same step writes beside them.
Its manifest replaces the old one at once, and then the old files are removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ltc.checkpointing.safetensors_format import DamagedFile, read_header
from ltc.checkpointing.saving import writing
from ltc.support.atomic_file import UNFINISHED

NAME = "manifest.json"
_FILE = re.compile(
    r"\.?(?:part|replica)-\d{5,}-of-(?P<count>\d{5,})"
    r"(?:\.(?P<life>[0-9a-f]{12}))?(?:\.(?P<number>\d{1,9}))?\.safetensors"
    rf"(?:\.[0-9a-f]{{32}}(?:{re.escape(UNFINISHED)})?)?"  # what a killed save left
)


@dataclass(frozen=True)
class SharedSave:
    """One save of a step by all replicas, as the names of its files tell it from every other.

    Attributes:
        count: The replicas.
        life: Twelve hexadecimal digits that they share with no other run, and agree on anew where
            they go back together; "" for one replica, and where processes have nowhere to meet.
        number: Number of earlier saves of the step in that life.
    """

    count: int
    life: str = ""
    number: int = 0

    def part_path(self, folder: str | os.PathLike, ordinal: int) -> Path:
        """The file with the tensors that one replica writes."""
        return self._path(folder, "part", ordinal)

    def state_path(self, folder: str | os.PathLike, ordinal: int) -> Path:
        """Return the file with one replica's own state."""
        return self._path(folder, "replica", ordinal)

    def _path(self, folder: str | os.PathLike, kind: str, ordinal: int) -> Path:
        life = f".{self.life}" if self.life else ""
        number = f".{self.number}" if self.number else ""
        name = f"{kind}-{ordinal:05d}-of-{self.count:05d}{life}{number}.safetensors"
        return Path(folder) / name


def is_complete(folder: str | os.PathLike) -> bool:
    """Return True if every replica has written its files."""
    return (Path(folder) / NAME).is_file()


def complete(folder: str | os.PathLike, save: SharedSave) -> bool:
    """Write the manifest if all files of a save are there; returns whether they are.

    Then those of the saves before it are removed.
    """
    parts = [save.part_path(folder, ordinal) for ordinal in range(save.count)]
    states = [save.state_path(folder, ordinal) for ordinal in range(save.count)]
    if not all(file.is_file() for file in (*parts, *states)):
        return False
    said = {
        "version": 1,
        "parts": {file.name: _sum_of(file) for file in parts},
        "states": {file.name: _sum_of(file) for file in states},
    }
    with writing(Path(folder) / NAME) as file:
        file.write(json.dumps(said, indent=1).encode())
    _remove_superseded(Path(folder), save)
    return True


def remove(folder: Path) -> None:
    """Remove a checkpoint; wherever that stops, what is left is none."""
    with contextlib.suppress(OSError):
        (folder / NAME).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def number_of(folder: str | os.PathLike, count: int, life: str) -> int:
    """The number of the save that the manifest is of; -1 where that is none of a life."""
    with contextlib.suppress(DamagedFile, OSError):
        for save in map(_save_of, _said(Path(folder) / NAME)["parts"]):
            if save is not None and (save.count, save.life) == (count, life):
                return save.number
    return -1


def parts_of(folder: str) -> list[str]:
    """The files of a checkpoint; raises DamagedFile where they are not those of its manifest."""
    return [
        _checked(folder, *part, "part-") for part in _said(Path(folder) / NAME)["parts"].items()
    ]


def own_state_of(folder: str, ordinal: int) -> str | None:
    """Return the file with one replica's own state; None for a replica that did not save.

    Raises:
        DamagedFile: For the same reasons as `parts_of`.
    """
    own = f"replica-{ordinal:05d}-of-"
    for name, checksum in _said(Path(folder) / NAME)["states"].items():
        if name.startswith(own):
            return _checked(folder, name, checksum, own)
    return None


def _checked(folder: str, name: str, checksum: Any, prefix: str) -> str:
    path, file = Path(folder) / NAME, Path(folder) / name
    if os.path.basename(name) != name or not name.startswith(prefix):
        raise DamagedFile(f"{path}: {name[:200]!r} is not the name of a checkpoint's file.")
    if not file.is_file():
        raise DamagedFile(f"{path}: the file {name} is missing.")
    if checksum not in (_sum_of(file), _NOT_SAID):
        raise DamagedFile(f"{path}: the file {name} belongs to another save.")
    return str(file)


_NOT_SAID = object()  # a checksum that an older manifest does not tell


def _said(path: Path) -> dict[str, dict[str, Any]]:
    try:
        said = json.loads(path.read_text())
        parts = {str(name): checksum for name, checksum in dict(said["parts"]).items()}
        of_older = {name.replace("part-", "replica-", 1): _NOT_SAID for name in parts}
        states = dict(said.get("states", of_older))
        return {"parts": parts, "states": {str(name): sum for name, sum in states.items()}}
    except FileNotFoundError:
        raise DamagedFile(
            f"{path.parent}: there is no {NAME}: not every replica has saved."
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFile(f"{path}: it is not a manifest: {error!r:.200}.") from None


def _remove_superseded(folder: Path, save: SharedSave) -> None:
    """Remove what is of another save than one that is complete, but for what has begun after it."""
    with contextlib.suppress(OSError):  # tidying up is no part of the save
        for path in folder.iterdir():
            other = _save_of(path.name)
            if other is None or other == save:
                continue
            if (other.count, other.life) != (save.count, save.life) or other.number < save.number:
                path.unlink(missing_ok=True)


def _save_of(name: str) -> SharedSave | None:
    """The save that a file is of, by its name; None where it is no replica's."""
    match = _FILE.fullmatch(name)
    if match is None:
        return None
    return SharedSave(int(match["count"]), match["life"] or "", int(match["number"] or 0))


def _sum_of(path: Path) -> str | None:
    with open(path, "rb") as file:
        return read_header(file, str(path)).metadata.get("ltc.header")
