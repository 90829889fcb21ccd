"""Files that xser wrote, and other safetensors files, read tensor by tensor and checked."""

from __future__ import annotations

import contextlib
import json
import mmap
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from ltc.checkpointing.safetensors_format import (
    DamagedFile,
    Header,
    TensorEntry,
    bytes_of_type,
    is_list_of_places,
    is_shape,
    read_header,
    sums_of,
)
from ltc.checkpointing.tree_codec import DTYPES, check_table, find, from_table
from ltc.device.recording.tensors import upload_many
from ltc.support.process import machine_memory
from ltc.support.torch_private import DEVICE_TYPE

MAPPED_BYTES = 1 << 20  # smaller tensors are read: a process may map some 65 thousand areas only
SUMMED_BEHIND_BYTES = 4 << 20  # larger ones are summed in a thread while the device copies them

_LAYOUT_KEYS = {"dtype", "shape", "strides", "offset"}

Done = Callable[[int], Any]


class OpenFile:
    """An open file of tensors."""

    def __init__(self, file: BinaryIO, path: str):
        self.file, self.path = file, path
        self.header = read_header(file, path)
        self.sums = sums_of(self.header, path)


def bytes_in(files: list[OpenFile]) -> int:
    """Bytes of all tensors of the files."""
    return sum(entry.end - entry.begin for file in files for entry in file.header.entries)


class SavedData:
    """The content of open files; a tensor is read when it is asked for, once.

    Args:
        path: The name of the files in messages.
        done: Called with the number of further bytes read.
    """

    def __init__(self, files: list[OpenFile], path: str, device: torch.device, done: Done):
        self._path, self._device, self._done = path, device, done
        self._place = {
            e.name: (file, number) for file in files for number, e in enumerate(file.header.entries)
        }
        self._content = _content([file.header for file in files], path)
        self._read: dict[str, torch.Tensor] = {}

    def read(self, keys: Iterable[str] | None) -> Any:
        """Everything, or {key: what sits there}."""
        with ThreadPoolExecutor(max_workers=1) as self._summing:
            return self._flat(keys) if self._content is None else self._nested(keys)

    def _entry(self, name: str) -> TensorEntry:
        file, number = self._place[name]
        return file.header.entries[number]

    def _flat(self, keys: Iterable[str] | None) -> dict[str, torch.Tensor]:
        """Tensors by name, of a file that says no more."""
        wanted = self._place if keys is None else list(keys)
        self._require(key for key in wanted if key not in self._place)
        return {name: self._tensor(name) for name in wanted}

    def _nested(self, keys: Iterable[str] | None) -> Any:
        content = self._content
        assert content is not None  # the caller has looked
        table = content.table
        if keys is None:
            return self._made(table, [len(table) - 1])[len(table) - 1]
        places, missing = {}, []
        for key in keys:
            try:
                places[key] = find(table, key)
            except KeyError:
                missing.append(key)
        self._require(missing)
        made = self._made(table, places.values())
        return {key: made[position] for key, position in places.items()}

    def _require(self, missing: Iterable[str]) -> None:
        missing = list(missing)
        if missing:
            raise KeyError(
                f"{self._path} has nothing at {', '.join(map(repr, missing[:5]))}. Its tensors are "
                f"{', '.join(map(repr, list(self._place)[:20]))}."
            )

    def _made(self, table: list, roots: Iterable[int]) -> dict[int, Any]:
        try:
            return from_table(table, roots, self._described)
        except ValueError as error:
            raise DamagedFile(f"{self._path}: its tree is invalid: {error}.") from error

    def _described(self, number: Any, said: Any) -> torch.Tensor:
        """The tensor that a node of the tree describes."""
        assert self._content is not None
        order = self._content.order
        if type(number) is not int or not 0 <= number < len(order) or not isinstance(said, dict):
            raise ValueError(f"there is no tensor {number!r}")
        tensor = self._tensor(order[number]).detach()
        if _LAYOUT_KEYS & said.keys():
            tensor = _view(tensor, said)
        wants_gradient = bool(said.get("requires_grad"))
        if wants_gradient and not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(f"a tensor of {tensor.dtype} has no gradient")
        if said.get("parameter"):
            return torch.nn.Parameter(tensor, requires_grad=wants_gradient)
        return tensor.requires_grad_(wants_gradient)

    def _tensor(self, name: str) -> torch.Tensor:
        """A tensor of the file on the device, its bytes checked."""
        if name not in self._read:
            file, entry = self._place[name][0], self._entry(name)
            start = file.header.data_start + entry.begin
            content = _bytes_at(file.file, file.path, start, entry.end - entry.begin)
            array: Any = content.numpy()
            if len(content) < SUMMED_BEHIND_BYTES:
                self._check(zlib.crc32(array), name)
            else:  # summed while the device copies it
                checksum = self._summing.submit(zlib.crc32, array)
            self._read[name] = _moved(self._typed(content, entry), self._device)
            if len(content) >= SUMMED_BEHIND_BYTES:
                self._check(checksum.result(), name)
            self._done(len(content))
        return self._read[name]

    def _typed(self, content: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
        """The bytes of an entry as what they stand for."""
        if entry.dtype is torch.bool and bool((content > 1).any()):
            raise DamagedFile(
                f"{self._path}: tensor {entry.name!r} has booleans other than 0 and 1."
            )
        real = self._content.raw.get(entry.name) if self._content is not None else None
        dtype = entry.dtype if real is None else real
        if content.data_ptr() % dtype.itemsize:
            content = content.clone()  # another writer's file need not be aligned
        shape = entry.shape if real is None else entry.shape[:-1]
        return content.view(dtype).reshape(shape)

    def _check(self, found: int, name: str) -> None:
        file, number = self._place[name]
        if file.sums is not None and found != file.sums[number]:
            raise DamagedFile(
                f"{file.path}: tensor {name!r} is damaged: its bytes have the checksum {found:08x}, "
                f"and {file.sums[number]:08x} was saved. Take another copy."
            )


@dataclass(frozen=True)
class _Content:
    """The metadata beside the tensors.

    Attributes:
        order: Names of the entries, as the tree numbers them.
        raw: Real dtypes of entries that are stored as bytes.
    """

    table: list
    order: list[str]
    raw: dict[str, torch.dtype]


def _content(headers: list[Header], path: str) -> _Content | None:
    """The checked metadata of files that `save` wrote; None where another program wrote them."""
    if not any(key.startswith("ltc.") for header in headers for key in header.metadata):
        return None
    try:
        for header in headers:
            _check_metadata(header.metadata, headers[0].metadata)
        table, order, raw = (
            json.loads(headers[0].metadata[f"ltc.{name}"]) for name in ("tree", "order", "raw")
        )
        check_table(table)
        entries = [entry for header in headers for entry in header.entries]
        return _Content(table, _checked_order(order, entries), _checked_raw(raw, entries))
    except KeyError as error:
        raise DamagedFile(f"{path}: the metadata lack {error}.") from None
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path}: the metadata are invalid: {error}.") from None


def _check_metadata(metadata: dict[str, str], first: dict[str, str]) -> None:
    """Raise where one of the files has no checksums, or is not of the same save as the first."""
    metadata["ltc.header"], metadata["ltc.crc32"]  # without them nothing would be checked
    if metadata["ltc.version"] != "1":
        raise ValueError(f"version {metadata['ltc.version'][:40]!r}, but this ltc reads version 1")
    if metadata["ltc.order"] != first["ltc.order"]:
        raise ValueError("its parts hold different tensors")


def _checked_order(order: Any, entries: list[TensorEntry]) -> list[str]:
    if not isinstance(order, list) or not all(isinstance(name, str) for name in order):
        raise ValueError("the order of the tensors is not a list of names")
    if sorted(order) != sorted(entry.name for entry in entries):
        raise ValueError("the order names other tensors than the file has")
    return order


def _checked_raw(raw: Any, entries: list[TensorEntry]) -> dict[str, torch.dtype]:
    entry_of = {e.name: e for e in entries}
    checked: dict[str, torch.dtype] = {}
    given: Any = raw.items() if isinstance(raw, dict) else [(None, None)]
    for name, text in given:
        entry = entry_of.get(name)
        dtype = DTYPES.get(text) if isinstance(text, str) else None
        if entry is None or dtype is None:
            raise ValueError(
                f"{name!r} has the unknown dtype {text!r}, or is no tensor of the file"
            )
        if entry.dtype is not torch.uint8 or entry.shape[-1:] != (dtype.itemsize,):
            raise ValueError(f"{name!r} is not stored as the bytes of {text}")
        checked[name] = dtype
    return checked


def _view(entry: torch.Tensor, said: dict[str, Any]) -> torch.Tensor:
    """The part of an entry that a node describes; raises ValueError where it would lie outside."""
    dtype = DTYPES.get(str(said.get("dtype")))
    layout: Any = [said.get(key) for key in ("shape", "strides", "offset")]
    shape, strides, offset = layout
    if dtype is None or not is_shape(shape) or not is_list_of_places([offset, *strides]):
        raise ValueError(f"a view has the invalid layout {str(said)[:200]}")
    if len(strides) != len(shape):
        raise ValueError(f"a view of {len(shape)} dimensions has {len(strides)} strides")
    last = offset + sum((max(n, 1) - 1) * step for n, step in zip(shape, strides))
    held = entry.numel() * entry.dtype.itemsize
    if 0 not in shape and (last + 1) * dtype.itemsize > held:
        raise ValueError(f"a view reaches element {last} of a tensor of {held} bytes")
    nbytes = bytes_of_type(dtype, shape)
    if nbytes > max(held, machine_memory.total()):  # it repeats elements, as `expand` does
        raise ValueError(
            f"a view expands {held} bytes to {nbytes}, more than the {machine_memory.total()} bytes "
            f"that this process can have"
        )
    if entry.dtype is not dtype:
        flat = entry.reshape(-1)
        flat = flat[: held // dtype.itemsize * dtype.itemsize // entry.dtype.itemsize]
        entry = flat.view(dtype)
    return entry.as_strided(shape, strides, offset)


def _moved(plain: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor on another device; its memory is free as soon as it is there."""
    return upload_many([plain], device)[0] if device.type == DEVICE_TYPE else plain.to(device)


def _bytes_at(file: BinaryIO, path: str, start: int, length: int) -> torch.Tensor:
    """Bytes of a file: large stretches as a private map, which takes memory only where written."""
    if length >= MAPPED_BYTES:
        skipped = start % mmap.ALLOCATIONGRANULARITY
        try:
            area = mmap.mmap(
                file.fileno(),
                skipped + length,
                flags=mmap.MAP_PRIVATE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
                offset=start - skipped,
            )
        except ValueError:
            raise DamagedFile(f"{path}: the file became shorter while it was read.") from None
        with contextlib.suppress(OSError):  # advice only
            area.madvise(mmap.MADV_SEQUENTIAL)
        return torch.frombuffer(area, dtype=torch.uint8, count=length, offset=skipped)
    content = torch.empty(length, dtype=torch.uint8, device="cpu")
    file.seek(start)
    raw: Any = file  # opened without a buffer or with one, it reads into memory
    if raw.readinto(content.numpy()) < length:
        raise DamagedFile(f"{path}: the file became shorter while it was read.")
    return content
