"""xser: nested data streamed to one file, tensor by tensor, and back.

The file is a safetensors file, so any reader of that format lists and reads its tensors. What lies
around them is JSON in its metadata (ltc.tree), and every tensor has a checksum (ltc.crc32). Nothing
in it is ever executed.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from tqdm import tqdm

from ltc.device.step import ready_buffer
from ltc.device.tensor import is_lazy, state_of
from ltc.distributed import world
from ltc.utils import old_serialization, safetensors_format
from ltc.utils.nested import check_table, find, from_table, tensors_of, to_table
from ltc.utils.old_serialization import TensorReference
from ltc.utils.safetensors_format import (
    NAME_OF_DTYPE, DamagedFile, bytes_of_type, fill_sums, header_bytes, is_shape, placed,
    read_header, sums_of,
)
from ltc.utils.saving import writing
from ltc.utils.shared_tensors import Entry, Placement, arranged, as_bytes

__all__ = ["DamagedFile", "TensorReference", "load", "names", "save"]

CHUNK_BYTES = 4 << 20  # written at a time; smaller tensors are summed by the thread that writes
MAPPED_BYTES = 1 << 20  # smaller tensors are read: a process may map some 65 thousand areas only

_DTYPES = {str(v).removeprefix("torch."): v for v in vars(torch).values() if type(v) is torch.dtype}
_LAYOUT_KEYS = {"dtype", "shape", "strides", "offset"}


# --- saving -----------------------------------------------------------------------------------

def save(
    data: Any, path: str | os.PathLike, master_only: bool = True, global_master: bool = False,
    progress: bool = False,
) -> None:
    """Write nested data to one file, fetching one tensor at a time.

    data         dicts, lists, tuples, named tuples and sets around tensors, numbers, texts, bytes,
                 None, torch.Size, torch.dtype and torch.device
    master_only  only replica 0 writes (of its host, or of all with `global_master`); no replica
                 waits for another
    progress     show a bar

    The path holds the old file until the new one is whole on disk. Tensors that share memory are
    stored once. Raises TypeError where `data` hold anything else, saying where it sits.
    """
    plan = planned(data)
    if not master_only or world.is_master(local=not global_master):
        write(plan, path, progress)


@dataclass
class Plan:
    """What a save is going to write.

    header   with room for the checksums
    entries  what follows it, in this order; each is fetched when its turn comes
    """

    header: bytearray
    entries: list[Entry]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(bytes_of_type(e.dtype, e.shape) for e in self.entries)


def planned(data: Any) -> Plan:
    """What saving `data` takes; everything its tensors wait for is started, on every replica alike.

    Raises TypeError where `data` hold something that can not be saved, saying where it sits.
    """
    named = tensors_of(data)
    _start([tensor for _, tensor in named])
    entries, placements = arranged(named)
    # The widest elements first: then every tensor starts at a multiple of its element's size.
    entries.sort(key=lambda e: -e.dtype.itemsize)
    _name_apart(entries)
    number = {id(entry): position for position, entry in enumerate(entries)}
    payloads = {
        id(tensor): _payload(tensor, placement, number[id(placement.entry)])
        for (_, tensor), placement in zip(named, placements, strict=True)
    }
    table = to_table(data, lambda tensor: payloads[id(tensor)])
    raw = {e.name: _text(e.dtype) for e in entries if e.dtype not in NAME_OF_DTYPE}
    metadata = {
        "format": "pt",
        "ltc.version": "1",
        "ltc.order": _compact([e.name for e in entries]),
        "ltc.raw": _compact(raw),
        "ltc.tree": _compact(table),
    }
    return Plan(header_bytes(placed(_stored_type(e) for e in entries), metadata), entries)


def _compact(x: Any) -> str:
    return json.dumps(x, separators=(",", ":"))


def _start(tensors: list[torch.Tensor]) -> None:
    """Have everything computed that the tensors wait for, as one program per device."""
    for tensor in tensors:
        if is_lazy(tensor):
            state = state_of(tensor)
            ready_buffer(state if state.base is None else state.base)


def write(plan: Plan, path: str | os.PathLike, progress: bool = False) -> None:
    """Carry a plan out: one tensor at a time, then the checksums, then the new file's name."""
    path = os.fspath(path)
    with writing(path, plan.nbytes) as file:
        file.write(plan.header)
        with _shown(plan.nbytes, progress) as done, ThreadPoolExecutor(max_workers=1) as summing:
            sums = [_stream(entry, file, done, summing) for entry in plan.entries]
        fill_sums(plan.header, sums)
        file.seek(0)
        file.write(plan.header)
    old_serialization.remove_tensors_of(path)


def _name_apart(entries: list[Entry]) -> None:
    """Make the names of entries different from each other and from what the format reserves."""
    taken = {"__metadata__"}
    for entry in entries:
        plain = (entry.name or "tensor").encode("utf-8", "backslashreplace").decode()
        name, number = plain, 1
        while name in taken:
            number += 1
            name = f"{plain}#{number}"
        taken.add(name)
        entry.name = name


def _stored_type(entry: Entry) -> tuple[str, torch.dtype, tuple[int, ...]]:
    """As what the file lists it: dtypes the format lacks are bytes, in one dimension more."""
    if entry.dtype in NAME_OF_DTYPE:
        return entry.name, entry.dtype, entry.shape
    return entry.name, torch.uint8, (*entry.shape, entry.dtype.itemsize)


def _payload(tensor: torch.Tensor, placement: Placement, number: int) -> list:
    """What the tree says of a tensor: the number of its entry, and what is not as usual."""
    said: dict[str, Any] = {}
    if type(tensor) is torch.nn.Parameter:
        said["parameter"] = True
    if tensor.requires_grad:
        said["requires_grad"] = True
    view = placement.view
    if view is not None:
        said |= {
            "dtype": _text(view.dtype), "shape": view.shape, "strides": view.strides,
            "offset": view.offset,
        }
    return [number, said]


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _stream(
    entry: Entry, file: BinaryIO, done: Callable[[int], Any], summing: ThreadPoolExecutor
) -> int:
    """Write the bytes of an entry; returns their checksum, found in another thread meanwhile."""
    content = memoryview(as_bytes(entry.fetch()).numpy())
    if len(content) < CHUNK_BYTES:
        file.write(content)
        done(len(content))
        return zlib.crc32(content)
    checksum = summing.submit(zlib.crc32, content)
    for start in range(0, len(content), CHUNK_BYTES):
        done(file.write(content[start : start + CHUNK_BYTES]))
    return checksum.result()


@contextmanager
def _shown(total: int, wanted: bool) -> Iterator[Callable[[int], Any]]:
    """A function that takes how many more bytes are done; a bar shows them where it is wanted."""
    if not wanted:  # a tqdm, even a silent one, takes a lock that all forks of a process share
        yield lambda more: None
        return
    with tqdm(total=total, unit="B", unit_scale=True) as bar:
        yield bar.update


# --- loading ----------------------------------------------------------------------------------

def load(
    path: str | os.PathLike, map_location: torch.device | str | None = None,
    keys: Iterable[str] | None = None, progress: bool = False,
) -> Any:
    """What was saved at `path`, with its tensors on one device (the CPU where None).

    keys  dotted places, such as "model.fc.weight" or "step": returns {place: what sits there}, and
          nothing else is read

    Tensors that shared memory share it again. Large ones on the CPU are the file, mapped: they may
    be written to, the file stays as it is. A plain safetensors file gives {name: tensor}; folders
    that torch_xla wrote load too. Raises DamagedFile, naming the tensor, where a checksum differs.
    """
    path = os.fspath(path)
    device = torch.device("cpu" if map_location is None else map_location)
    if old_serialization.is_old(path):
        return old_serialization.load(path, device)
    with open(path, "rb") as file:
        return _Saved(file, path, device, progress).data(keys)


def names(path: str | os.PathLike) -> list[str]:
    """The names under which a file lists its tensors; none of them is read."""
    path = os.fspath(path)
    with open(path, "rb") as file:
        return [entry.name for entry in read_header(file, path).entries]


class _Saved:
    """An open file, whose tensors are read when they are asked for, each once."""

    def __init__(self, file: BinaryIO, path: str, device: torch.device, progress: bool):
        self._file, self._path, self._device, self._progress = file, path, device, progress
        self._header = read_header(file, path)
        self._sums = sums_of(self._header, path)
        self._content = _content(self._header, path)
        self._number = {e.name: position for position, e in enumerate(self._header.entries)}
        self._read: dict[str, torch.Tensor] = {}

    def data(self, keys: Iterable[str] | None) -> Any:
        total = sum(e.end - e.begin for e in self._header.entries)
        with (
            _shown(total, self._progress) as self._done,
            ThreadPoolExecutor(max_workers=1) as self._summing,
        ):
            return self._flat(keys) if self._content is None else self._nested(keys)

    def _flat(self, keys: Iterable[str] | None) -> dict[str, torch.Tensor]:
        """Tensors by name, of a file that says no more."""
        wanted = self._number if keys is None else list(keys)
        self._require(key for key in wanted if key not in self._number)
        return {name: self._tensor(name) for name in wanted}

    def _nested(self, keys: Iterable[str] | None) -> Any:
        table = self._content.table
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
                f"{', '.join(map(repr, list(self._number)[:20]))}."
            )

    def _made(self, table: list, roots: Iterable[int]) -> dict[int, Any]:
        try:
            return from_table(table, roots, self._described)
        except ValueError as error:
            raise DamagedFile(f"{self._path}: its tree can not be: {error}.") from error

    def _described(self, number: Any, said: Any) -> torch.Tensor:
        """The tensor that a node of the tree describes."""
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
            number = self._number[name]
            entry = self._header.entries[number]
            start = self._header.data_start + entry.begin
            content = _bytes_at(self._file, self._path, start, entry.end - entry.begin)
            if len(content) < CHUNK_BYTES:
                self._check(zlib.crc32(content.numpy()), number)
            else:  # summed while the device copies it
                checksum = self._summing.submit(zlib.crc32, content.numpy())
            self._read[name] = self._typed(content, entry).to(self._device)
            if len(content) >= CHUNK_BYTES:
                self._check(checksum.result(), number)
            self._done(len(content))
        return self._read[name]

    def _typed(self, content: torch.Tensor, entry: safetensors_format.Entry) -> torch.Tensor:
        """The bytes of an entry as what they stand for."""
        if entry.dtype is torch.bool and bool((content > 1).any()):
            raise DamagedFile(f"{self._path}: tensor {entry.name!r} has booleans that are not 0 or 1.")
        real = self._content.raw.get(entry.name) if self._content is not None else None
        dtype = entry.dtype if real is None else real
        if content.data_ptr() % dtype.itemsize:
            content = content.clone()  # another writer's file need not be aligned
        shape = entry.shape if real is None else entry.shape[:-1]
        return content.view(dtype).reshape(shape)

    def _check(self, found: int, number: int) -> None:
        if self._sums is not None and found != self._sums[number]:
            raise DamagedFile(
                f"{self._path}: tensor {self._header.entries[number].name!r} is damaged: its bytes "
                f"have the checksum {found:08x}, and {self._sums[number]:08x} was saved. Take "
                f"another copy."
            )


@dataclass(frozen=True)
class _Content:
    """What the metadata say beside the tensors.

    order  names of the entries, as the tree numbers them
    raw    real dtypes of entries that are stored as bytes
    """

    table: list
    order: list[str]
    raw: dict[str, torch.dtype]


def _content(header: safetensors_format.Header, path: str) -> _Content | None:
    """The checked metadata of a file that `save` wrote; None where another program wrote it."""
    metadata = header.metadata
    if not any(key.startswith("ltc.") for key in metadata):
        return None
    if metadata.get("ltc.version") != "1":
        raise DamagedFile(
            f"{path}: it is of version {str(metadata.get('ltc.version'))[:40]}, this ltc reads 1."
        )
    try:
        metadata["ltc.header"], metadata["ltc.crc32"]  # without them nothing would be checked
        table, order, raw = (
            json.loads(metadata[f"ltc.{name}"]) for name in ("tree", "order", "raw")
        )
        check_table(table)
        return _Content(table, _checked_order(order, header), _checked_raw(raw, header))
    except KeyError as error:
        raise DamagedFile(f"{path}: the metadata lack {error}.") from None
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path}: the metadata can not be: {error}.") from None


def _checked_order(order: Any, header: safetensors_format.Header) -> list[str]:
    listed = [e.name for e in header.entries]
    if not isinstance(order, list) or not all(isinstance(name, str) for name in order):
        raise ValueError("the order of the tensors is not a list of names")
    if sorted(order) != sorted(listed):
        raise ValueError("the order names other tensors than the file has")
    return order


def _checked_raw(raw: Any, header: safetensors_format.Header) -> dict[str, torch.dtype]:
    entry_of = {e.name: e for e in header.entries}
    checked = {}
    for name, text in raw.items() if isinstance(raw, dict) else [(None, None)]:
        entry = entry_of.get(name)
        dtype = _DTYPES.get(text) if isinstance(text, str) else None
        if entry is None or dtype is None:
            raise ValueError(f"{name!r} is said to be of dtype {text!r}")
        if entry.dtype is not torch.uint8 or entry.shape[-1:] != (dtype.itemsize,):
            raise ValueError(f"{name!r} is not stored as the bytes of {text}")
        checked[name] = dtype
    return checked


def _view(entry: torch.Tensor, said: dict[str, Any]) -> torch.Tensor:
    """The part of an entry that a node describes; raises ValueError where it would lie outside."""
    dtype = _DTYPES.get(said.get("dtype"))
    shape, strides, offset = (said.get(key) for key in ("shape", "strides", "offset"))
    if dtype is None or not is_shape(shape) or not is_shape(strides) or not is_shape([offset]):
        raise ValueError(f"a view has the layout {str(said)[:200]}")
    if len(strides) != len(shape):
        raise ValueError(f"a view of {len(shape)} dimensions has {len(strides)} strides")
    last = offset + sum((max(n, 1) - 1) * step for n, step in zip(shape, strides))
    held = entry.numel() * entry.dtype.itemsize
    if 0 not in shape and (last + 1) * dtype.itemsize > held:
        raise ValueError(f"a view reaches element {last} of a tensor of {held} bytes")
    if entry.dtype is not dtype:
        flat = entry.reshape(-1)
        flat = flat[: held // dtype.itemsize * dtype.itemsize // entry.dtype.itemsize]
        entry = flat.view(dtype)
    return entry.as_strided(shape, strides, offset)


def _bytes_at(file: BinaryIO, path: str, start: int, length: int) -> torch.Tensor:
    """Bytes of a file: large stretches as a private map, which takes memory only where written."""
    if length >= MAPPED_BYTES:
        skipped = start % mmap.ALLOCATIONGRANULARITY
        area = mmap.mmap(
            file.fileno(), skipped + length, flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE, offset=start - skipped,
        )
        area.madvise(mmap.MADV_SEQUENTIAL)
        return torch.frombuffer(area, dtype=torch.uint8, count=length, offset=skipped)
    content = torch.empty(length, dtype=torch.uint8)
    file.seek(start)
    if file.readinto(content.numpy()) < length:
        raise DamagedFile(f"{path}: the file became shorter while it was read.")
    return content
