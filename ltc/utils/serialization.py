"""xser: nested data streamed to one file, tensor by tensor, and back.

The file is a safetensors file, so any reader of that format lists and reads its tensors. What lies
around them is JSON in its metadata (ltc.tree), and every tensor has a checksum (ltc.crc32). Nothing
in it is ever executed.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from tqdm import tqdm

from ltc.checkpointing import manifest, xser_legacy
from ltc.checkpointing.reader import Done, OpenFile, SavedData, bytes_in
from ltc.checkpointing.safetensors_format import (
    NAME_OF_DTYPE,
    DamagedFile,
    fill_sums,
    header_bytes,
    placed,
    read_header,
)
from ltc.checkpointing.saving import writing
from ltc.checkpointing.storage_sharing import Placement, StoredBytes, arranged, as_bytes
from ltc.checkpointing.tree_codec import tensors_of, to_table
from ltc.checkpointing.xser_legacy import TensorReference
from ltc.device.recording.sync import ready_buffer
from ltc.device.recording.tensors import is_lazy, state_of
from ltc.distributed import world
from ltc.support.torch_private import DEVICE_TYPE
from ltc.tracebacks import make_entrances

__all__ = ["DamagedFile", "TensorReference", "load", "names", "save"]

CHUNK_BYTES = 4 << 20  # written at a time; smaller tensors are summed by the thread that writes


# --- saving -----------------------------------------------------------------------------------


def save(
    data: Any,
    path: str | os.PathLike,
    master_only: bool = True,
    global_master: bool = False,
    progress: bool = False,
    barrier: bool = False,
) -> None:
    """Write nested data to one file, fetching one tensor at a time.

    data         dicts, lists, tuples, named tuples and sets around tensors, numbers, texts, bytes,
                 None, torch.Size, torch.dtype and torch.device
    master_only  only replica 0 writes (of its host, or of all with `global_master`)
    progress     show a bar
    barrier      return only when every replica has saved; every replica must call it then.
                 Without it no replica waits for another.

    The path holds the old file until the new one is whole on disk. Tensors that share memory are
    stored once. Raises TypeError where `data` hold anything else, saying where it sits; ValueError
    where something contains itself; OSError where the file cannot be written: then the old one is
    as it was.

    >>> import ltc.utils.serialization as xser
    >>> xser.save({"weight": torch.ones(2, device="ltc"), "step": 7}, "state.safetensors")
    >>> xser.load("state.safetensors")
    {'weight': tensor([1., 1.]), 'step': 7}
    """
    plan = planned(data)
    if not master_only or world.is_master(local=not global_master):
        write(plan, path, progress)
    if barrier:
        world.meet("ltc.utils.serialization.save")


@dataclass(frozen=True)
class SavePlan:
    """What a save is going to write.

    entries   in the order of their bytes; each is fetched when its turn comes
    metadata  what surrounds them
    """

    entries: list[StoredBytes]
    metadata: dict[str, str]

    def part(self, number: int, count: int) -> SavePlan:
        """The share of one replica out of `count`: nearly as many bytes as every other's."""
        loads, share = [0] * count, []
        for entry in sorted(self.entries, key=lambda e: -e.nbytes):
            lightest = loads.index(min(loads))
            loads[lightest] += entry.nbytes
            if lightest == number:
                share.append(entry)
        share.sort(key=lambda e: -e.dtype.itemsize)
        return SavePlan(share, {**self.metadata, "ltc.part": f"{number} of {count}"})


def planned(data: Any) -> SavePlan:
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
    return SavePlan(entries, metadata)


def _compact(x: Any) -> str:
    return json.dumps(x, separators=(",", ":"))


def _start(tensors: list[torch.Tensor]) -> None:
    """Have everything computed that the tensors wait for, as one program per device."""
    for tensor in tensors:
        if is_lazy(tensor):
            state = state_of(tensor)
            ready_buffer(state if state.base is None else state.base)


def write(plan: SavePlan, path: str | os.PathLike, progress: bool = False) -> None:
    """Carry a plan out: one tensor at a time, then the checksums, then the new file's name."""
    path, total = os.fspath(path), sum(e.nbytes for e in plan.entries)
    header = header_bytes(placed(_stored_type(e) for e in plan.entries), plan.metadata)
    with writing(path, len(header) + total) as file:
        file.write(header)
        with shown(total, progress) as done, ThreadPoolExecutor(max_workers=1) as summing:
            sums = [_stream(entry, file, done, summing) for entry in plan.entries]
        fill_sums(header, sums)
        file.seek(0)
        file.write(header)
    xser_legacy.remove_tensors_of(path)


def _name_apart(entries: list[StoredBytes]) -> None:
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


def _stored_type(entry: StoredBytes) -> tuple[str, torch.dtype, tuple[int, ...]]:
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
            "dtype": _text(view.dtype),
            "shape": view.shape,
            "strides": view.strides,
            "offset": view.offset,
        }
    return [number, said]


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _stream(entry: StoredBytes, file: BinaryIO, done: Done, summing: ThreadPoolExecutor) -> int:
    """Write the bytes of an entry; returns their checksum, found in another thread meanwhile."""
    array: Any = as_bytes(entry.fetch()).numpy()
    content = memoryview(array)
    if len(content) < CHUNK_BYTES:
        file.write(content)
        done(len(content))
        return zlib.crc32(content)
    checksum = summing.submit(zlib.crc32, content)
    for start in range(0, len(content), CHUNK_BYTES):
        done(file.write(content[start : start + CHUNK_BYTES]))
    return checksum.result()


# --- loading ----------------------------------------------------------------------------------


def load(
    path: str | os.PathLike,
    map_location: torch.device | str | None = None,
    keys: Iterable[str] | str | None = None,
    progress: bool = False,
) -> Any:
    """What was saved at `path`, with its tensors on one device (the CPU where None).

    map_location  the device of the tensors; those that were on several devices come to this one
    keys          dotted places, such as "model.fc.weight" or "step": returns {place: what sits
                  there}, and nothing else is read
    progress      show a bar

    Tensors that shared memory share it again. Large ones on the CPU are the file, mapped: they may
    be written to, the file stays as it is. A plain safetensors file gives {name: tensor}; folders
    that torch_xla or several replicas wrote load too. Raises DamagedFile, naming the tensor, where a
    checksum differs, or the file is not what a save wrote; KeyError for a place that it has not;
    FileNotFoundError where there is none; TypeError for a `map_location` that is no device.

    >>> import ltc.utils.serialization as xser
    >>> xser.save({"model": {"weight": torch.ones(2)}, "step": 7}, "state.safetensors")
    >>> xser.load("state.safetensors", map_location="ltc", keys=["model.weight"])
    {'model.weight': tensor([1., 1.], device='ltc:0')}
    """
    path, device = os.fspath(path), _one_device(map_location)
    keys = [keys] if isinstance(keys, str) else keys
    if xser_legacy.is_old(path):
        return xser_legacy.load(path, device)
    with ExitStack() as files:
        opened = [OpenFile(files.enter_context(open(p, "rb")), p) for p in _files_of(path)]
        with shown(bytes_in(opened), progress) as done:
            return SavedData(opened, path, device, done).read(keys)


def _one_device(map_location: Any) -> torch.device:
    if map_location is None:
        return torch.device("cpu")
    if not isinstance(map_location, (torch.device, str, int)):
        raise TypeError(
            f"map_location is a {type(map_location).__name__}, but a file of xser does not know from "
            f"which devices its tensors came: all come to one. Pass that device, such as 'ltc:0'."
        )
    device = torch.device(map_location)
    if device.type != DEVICE_TYPE:
        torch.empty(0, device=device)  # what raises here says nothing of the file
    return device


def names(path: str | os.PathLike) -> list[str]:
    """The names under which a file lists its tensors, or a folder that several replicas wrote.

    None of the tensors is read. Raises DamagedFile where the file is not what a save wrote,
    FileNotFoundError where there is none.

    >>> import ltc.utils.serialization as xser
    >>> xser.save({"model": {"weight": torch.ones(2)}, "step": 7}, "state.safetensors")
    >>> xser.names("state.safetensors")
    ['model.weight']
    """
    path, found = os.fspath(path), []
    for one in _files_of(path):
        with open(one, "rb") as file:
            found += [entry.name for entry in read_header(file, one).entries]
    return found


def _files_of(path: str) -> list[str]:
    return manifest.parts_of(path) if os.path.isdir(path) else [path]


@contextmanager
def shown(total: int, wanted: bool) -> Iterator[Done]:
    """A function that takes how many more bytes are done; a bar shows them where it is wanted."""
    if not wanted:  # a tqdm, even a silent one, takes a lock that all forks of a process share
        yield lambda more: None
        return
    with tqdm(total=total, unit="B", unit_scale=True) as bar:
        yield bar.update


make_entrances(globals(), __all__)
