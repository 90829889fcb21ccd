"""Types of results that a process has found out, for those after it.

Asking torch for the types of a call takes up to some milliseconds, and a first step has a hundred
kinds of calls.  The answers lie in the cache on disk, one file for each overload.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from ltc.support.bounded_table import BoundedTable
from ltc.support.disk_cache import disk_cache
from ltc.support.version import source_digest

_Found = dict  # text of a call's kind -> ((shape, dtype) or None, …)
MOST = 512  # kinds of calls of one overload: older ones make room
# Where torch's kernels warn of some calls.  The formulas answer nearly all others of these, so that
# to be asked anew in each process costs little, and each warns its user.
_WARN = frozenset(
    f"aten::{name}"
    for name in (
        "copy_", "_to_copy",  # of complex numbers to real ones
        "std.correction", "std_mean.correction", "var.correction", "var_mean.correction",
        "index_reduce", "index_reduce_", "index_reduce.out",
        "scatter.reduce", "scatter_.reduce", "scatter.reduce_out",
    )
)  # fmt: skip
_PLAIN = frozenset({bool, int, float, complex, str, type(None)})
_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format, torch.device)

_read: dict[str, BoundedTable[str, tuple]] = {}
_unwritten: dict[str, _Found] = {}


def look_up(overload: Any, key: tuple) -> tuple | None:
    """What `note` was told, in this process or in an earlier one."""
    text = _text_of(overload, key)
    return None if text is None else _known(overload.name()).get(text)


def note(overload: Any, key: tuple, types: tuple) -> None:
    """Remember the types of a call.

    key  all that they depend on
    """
    text = _text_of(overload, key)
    if text is not None:
        _known(overload.name()).keep(text, types)
        _unwritten.setdefault(overload.name(), {})[text] = types


def keep() -> None:
    """Write down what is new.  What two processes write at once, one of them may find out again."""
    while _unwritten:
        name, found = _unwritten.popitem()
        disk = disk_cache()
        if disk is not None:
            kept = list((_on_disk(name) | found).items())[-MOST:]
            record = {text: [_record(one) for one in types] for text, types in kept}
            disk.write(_file_name(name), json.dumps(record, separators=(",", ":")).encode())


def _known(name: str) -> BoundedTable[str, tuple]:
    found = _read.get(name)
    if found is None:
        found = _read[name] = BoundedTable("ResultTypesOfDisk", 2 * MOST)
        found.update(_on_disk(name))
    return found


def _on_disk(name: str) -> _Found:
    disk = disk_cache()
    return (disk.read_as(_file_name(name), _parsed) if disk else None) or {}


def _parsed(data: bytes) -> _Found:
    return {text: tuple(map(_type, types)) for text, types in json.loads(data).items()}


def _file_name(overload: str) -> str:
    parts = "types", overload, source_digest(), torch.__version__
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _record(one: tuple | None) -> list | None:
    return None if one is None else [list(one[0]), str(one[1]).removeprefix("torch.")]


def _type(record: list | None) -> tuple | None:
    return None if record is None else (tuple(record[0]), getattr(torch, record[1]))


def _text_of(overload: Any, key: tuple) -> str | None:
    """The key in words that mean the same in every process; None where there are no such words.

    What an operation of the user gives may be another thing tomorrow.
    """
    if overload.namespace != "aten" or overload.name() in _WARN:
        return None
    words = []
    for part in key:
        kind = part.__class__
        if kind in _PLAIN:
            words.append(repr(part))
        elif kind is type:
            words.append(part.__name__)
        elif isinstance(part, tuple):
            words.append(str(tuple(part)))
        elif isinstance(part, _OF_TORCH):
            words.append(str(part))
        elif part is not overload:
            return None
    return " ".join(words)
