"""xser: nested data streamed to one file, tensor by tensor, and back.

The file is a safetensors file, so any reader of that format lists and reads its tensors. What lies
around them is JSON in its metadata (ltc.tree), and every tensor has a checksum (ltc.crc32). Nothing
in it is ever executed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from tqdm import tqdm

from ltc.checkpointing import checked_archive, manifest
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
from ltc.checkpointing.tree_codec import tensors_of, to_table
from ltc.device.recording.sync import ready_buffer
from ltc.device.recording.tensors import is_lazy, state_of
from ltc.device.storage_sharing import Placement, StoredBytes, arranged, as_bytes
from ltc.distributed import world
from ltc.support.torch_private import DEVICE_TYPE
from ltc.support.tree import for_each_instance_rewrite
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

    The path holds the old file until the new one is whole on disk. Tensors that share memory are
    stored once.

    Args:
        data: Dicts, lists, tuples, named tuples and sets around tensors, numbers, texts, bytes,
            None, torch.Size, torch.dtype and torch.device.
        master_only: Only replica 0 writes (of its host, or of all with `global_master`).
        progress: Show a bar.
        barrier: Return only when every replica has saved; every replica must call it then. Without
            it no replica waits for another.

    Raises:
        TypeError: If `data` hold anything else, saying where it sits.
        ValueError: If something contains itself.
        OSError: If the file cannot be written: then the old one is as it was.

    Example:
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
    """The content that a save is going to write.

    Attributes:
        entries: In the order of their bytes; each is fetched when its turn comes.
        metadata: The texts of the file's header.
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
    """Plan a save of `data`; all that its tensors wait for is started, on every replica alike.

    Raises:
        TypeError: If `data` hold an object that can not be saved; the message says where.
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
    remove_tensors_of(path)


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
    """Return name, dtype and shape as the file lists them.

    Dtypes that the format lacks are bytes, in one dimension more.
    """
    if entry.dtype in NAME_OF_DTYPE:
        return entry.name, entry.dtype, entry.shape
    return entry.name, torch.uint8, (*entry.shape, entry.dtype.itemsize)


def _payload(tensor: torch.Tensor, placement: Placement, number: int) -> list:
    """Return a tensor's node in the tree: the number of its entry, and whatever is not as usual."""
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
    """Load what was saved at `path`, with its tensors on one device (the CPU where None).

    Tensors that shared memory share it again. Large ones on the CPU are the file, mapped: they may
    be written to, the file stays as it is. A plain safetensors file gives {name: tensor}; folders
    that torch_xla or several replicas wrote load too.

    Args:
        map_location: The device of the tensors; those that were on several devices come to this
            one.
        keys: Dotted places, such as "model.fc.weight" or "step": returns {place: value}, and
            nothing else is read.
        progress: Show a bar.

    Raises:
        DamagedFile: If a checksum differs (the message names the tensor), or no save wrote the
            file.
        KeyError: For a place that it has not.
        FileNotFoundError: If there is none.
        TypeError: For a `map_location` that is no device.

    Example:
        >>> import ltc.utils.serialization as xser
        >>> xser.save({"model": {"weight": torch.ones(2)}, "step": 7}, "state.safetensors")
        >>> xser.load("state.safetensors", map_location="ltc", keys=["model.weight"])
        {'model.weight': tensor([1., 1.], device='ltc:0')}
    """
    path, device = os.fspath(path), _one_device(map_location)
    keys = [keys] if isinstance(keys, str) else keys
    if is_old(path):
        return load_legacy(path, device)
    with ExitStack() as files:
        opened = [OpenFile(files.enter_context(open(p, "rb")), p) for p in _files_of(path)]
        with shown(bytes_in(opened), progress) as done:
            return SavedData(opened, path, device, done).read(keys)


def _one_device(map_location: Any) -> torch.device:
    if map_location is None:
        return torch.device("cpu")
    if not isinstance(map_location, (torch.device, str, int)):
        raise TypeError(
            f"map_location is a {type(map_location).__name__}, but a file of xser does not record the "
            f"devices of its tensors: all are loaded to one. Pass that device, such as 'ltc:0'."
        )
    device = torch.device(map_location)
    if device.type != DEVICE_TYPE:
        torch.empty(0, device=device)  # what raises here says nothing of the file
    return device


def names(path: str | os.PathLike) -> list[str]:
    """The names under which a file lists its tensors, or a folder that several replicas wrote.

    None of the tensors is read.

    Raises:
        DamagedFile: If the file is not what a save wrote.
        FileNotFoundError: If there is none.

    Example:
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


# --- Checkpoints of torch_xla's xser: a pickled structure, and a folder of its tensors -----------

_TENSOR_FILE = re.compile(r"tensor_\d+\.pt")
_ZIP = b"PK\x03\x04"
_PICKLE = b"\x80\x02"


class TensorReference:
    """Stands in a checkpoint of torch_xla's xser for the tensor of a number, `tid`.

    Example:
        >>> import ltc.utils.serialization as xser
        >>> xser.TensorReference(3).tid
        3
    """

    def __init__(self, tid: int):
        self.tid = tid


# The modules that wrote such files, each with its own name for the class.
_WRITERS: list[Any] = [
    (TensorReference, f"{module}.serialization.TensorReference")
    for module in ("torch_xla.utils", "lazy_tensor_core.utils", "ltc.utils")
]


def is_old(path: str) -> bool:
    """Return True if `path` is the structure of an old checkpoint."""
    if not os.path.isdir(f"{path}.tensors") or not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        start = file.read(len(_ZIP))
    return start == _ZIP or start.startswith(_PICKLE)


def load_legacy(path: str, device: torch.device) -> Any:
    """The data of an old checkpoint; no class but those of the format is ever made."""
    with torch.serialization.safe_globals(_WRITERS):
        structure = _read(path)
    return for_each_instance_rewrite(
        structure, TensorReference, lambda reference: _tensor(path, reference, device)
    )


def _tensor(path: str, reference: TensorReference, device: torch.device) -> torch.Tensor:
    number = vars(reference).get("tid")
    if type(number) is not int:
        raise DamagedFile(f"{path}: it refers to the tensor {number!r}, which is not a number.")
    file = f"{path}.tensors/tensor_{number}.pt"
    return _read(file).to(device)


def _read(path: str) -> Any:
    """Return the content of a file of the checkpoint; torch's older format has no checksums."""
    with open(path, "rb") as file:
        is_archive = file.read(len(_ZIP)) == _ZIP
    read = checked_archive.load if is_archive else torch.load
    return read(path, map_location="cpu", weights_only=True)


def remove_tensors_of(path: str) -> None:
    """Remove the folder of tensors that an old checkpoint at `path` has left, and nothing else."""
    folder = Path(f"{path}.tensors")
    if folder.is_dir() and all(_TENSOR_FILE.fullmatch(file.name) for file in folder.iterdir()):
        shutil.rmtree(folder)
