"""A checkpoint that several replicas write: a file each, and a manifest when all are there.

No replica waits for another. Whoever finishes last finds every file in place and writes the
manifest, which names the files and the checksums of their headers, so that files of different
saves are never taken for one checkpoint.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from ltc.checkpointing.safetensors_format import DamagedFile, read_header
from ltc.checkpointing.saving import writing

NAME = "manifest.json"


def part_path(folder: str | os.PathLike, ordinal: int, count: int) -> Path:
    """The file of one replica out of `count`."""
    return Path(folder) / f"part-{ordinal:05d}-of-{count:05d}.safetensors"


def state_path(folder: str | os.PathLike, ordinal: int, count: int) -> Path:
    """The file with what is one replica's own."""
    return Path(folder) / f"replica-{ordinal:05d}-of-{count:05d}.safetensors"


def is_complete(folder: str | os.PathLike) -> bool:
    """Whether every replica has written its files."""
    return (Path(folder) / NAME).is_file()


def complete(folder: str | os.PathLike, count: int) -> bool:
    """Write the manifest if all files of `count` replicas are there; returns whether they are."""
    parts = [part_path(folder, ordinal, count) for ordinal in range(count)]
    states = [state_path(folder, ordinal, count) for ordinal in range(count)]
    if not all(file.is_file() for file in (*parts, *states)):
        return False
    said = {"version": 1, "parts": {part.name: _sum_of(part) for part in parts}}
    with writing(Path(folder) / NAME) as file:
        file.write(json.dumps(said, indent=1).encode())
    return True


def parts_of(folder: str) -> list[str]:
    """The files of a checkpoint; raises DamagedFile where they are not those of its manifest."""
    path = Path(folder) / NAME
    try:
        said = json.loads(path.read_text())
        parts = dict(said["parts"])
    except FileNotFoundError:
        raise DamagedFile(f"{folder}: there is no {NAME}: not every replica has saved.") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedFile(f"{path}: it is not a manifest: {error!r:.200}.") from None
    for name, checksum in parts.items():
        if os.path.basename(name) != name or not name.startswith("part-"):
            raise DamagedFile(f"{path}: {name[:200]!r} is no file of a checkpoint.")
        if not (Path(folder) / name).is_file():
            raise DamagedFile(f"{path}: the file {name} is missing.")
        if _sum_of(Path(folder) / name) != checksum:
            raise DamagedFile(f"{path}: the file {name} is of another save.")
    return [str(Path(folder) / name) for name in parts]


def count_of(folder: str) -> int:
    """How many replicas saved it."""
    return len(parts_of(folder))


def _sum_of(path: Path) -> str | None:
    with open(path, "rb") as file:
        return read_header(file, str(path)).metadata.get("ltc.header")
