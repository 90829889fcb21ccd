"""The safetensors file: a length, a JSON header that lists the tensors, then their bytes, no gaps.

What stands in a file is doubted: a header is used only when all of it fits the file it is in.
Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from ltc.errors import DamagedFile

MAX_HEADER_BYTES = 100_000_000  # other readers refuse more
MAX_DIMS = 64  # what torch can iterate over
ALIGNMENT_BYTES = 64  # of the first tensor: vector loads from a mapped file
LENGTH_BYTES = 8

NAME_OF_DTYPE = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.bool: "BOOL",
}
DTYPE_OF_NAME = {name: dtype for dtype, name in NAME_OF_DTYPE.items()}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file; its bytes are [begin, end) behind the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """The header of a file.

    Attributes:
        entries: In the order of their bytes.
        data_start: Position in the file of the first tensor's first byte.
    """

    entries: tuple[TensorEntry, ...]
    metadata: dict[str, str]
    data_start: int


def bytes_of_type(dtype: torch.dtype, shape: Iterable[int]) -> int:
    """Bytes of a contiguous tensor."""
    return math.prod(shape) * dtype.itemsize


# --- writing ----------------------------------------------------------------------------------

# The sums come first in the metadata, so their places follow from the number of tensors alone.
_OPENING = b'{"__metadata__":{"ltc.header":"'
_BETWEEN = b'","ltc.crc32":"'
_SUM_DIGITS = 8


def placed(types: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> tuple[TensorEntry, ...]:
    """Entries for tensors of (name, dtype, shape), one behind the other."""
    entries, begin = [], 0
    for name, dtype, shape in types:
        end = begin + bytes_of_type(dtype, shape)
        entries.append(TensorEntry(name, dtype, shape, begin, end))
        begin = end
    return tuple(entries)


def header_bytes(entries: tuple[TensorEntry, ...], metadata: Mapping[str, str]) -> bytearray:
    """The header with its length, and zeros where `fill_sums` will put the checksums."""
    sums = {"ltc.header": "0" * _SUM_DIGITS, "ltc.crc32": "0" * _SUM_DIGITS * len(entries)}
    content: dict[str, Any] = {"__metadata__": {**sums, **metadata}}
    for e in entries:
        content[e.name] = {
            "dtype": NAME_OF_DTYPE[e.dtype],
            "shape": e.shape,
            "data_offsets": (e.begin, e.end),
        }
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(
            f"The structure around {len(entries)} tensors takes {len(text)} bytes as JSON, and a "
            f"safetensors header holds {MAX_HEADER_BYTES}. Put large lists of numbers into tensors."
        )
    return bytearray(len(text).to_bytes(LENGTH_BYTES, "little") + text)


def fill_sums(header: bytearray, sums: Iterable[int]) -> None:
    """Write the tensors' checksums and the header's own into what `header_bytes` made."""
    start = LENGTH_BYTES + len(_OPENING)
    tensors = start + _SUM_DIGITS + len(_BETWEEN)
    digits = b"".join(b"%08x" % s for s in sums)
    header[tensors : tensors + len(digits)] = digits
    header[start : start + _SUM_DIGITS] = b"%08x" % zlib.crc32(header)


def _sum_of_header(header: bytes) -> int:
    """The checksum of a header whose own sum counts as zeros."""
    start = LENGTH_BYTES + len(_OPENING)
    blank = bytearray(header)
    blank[start : start + _SUM_DIGITS] = b"0" * _SUM_DIGITS
    return zlib.crc32(blank)


# --- reading ----------------------------------------------------------------------------------


def read_header(file: BinaryIO, path: str) -> Header:
    """The header of an open file; raises DamagedFile where anything in it can not be true."""
    size = os.fstat(file.fileno()).st_size
    text = _header_text(file, path, size)
    content = _parsed(text, path)
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise DamagedFile(f"{path}: the metadata is not a mapping of names to strings.")
    data_start = LENGTH_BYTES + len(text)
    entries = _checked_entries(content, path, size - data_start)
    if "ltc.header" in metadata:
        found = _sum_of_header(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        if metadata["ltc.header"] != f"{found:08x}":
            raise DamagedFile(
                f"{path}: the header has the checksum {found:08x}, but records "
                f"{metadata['ltc.header'][:16]!r}. Take another copy of the file."
            )
    return Header(entries, metadata, data_start)


def _header_text(file: BinaryIO, path: str, size: int) -> bytes:
    file.seek(0)
    start = file.read(LENGTH_BYTES)
    if len(start) < LENGTH_BYTES:
        raise DamagedFile(f"{path}: {size} bytes are too few for a safetensors file.")
    length = int.from_bytes(start, "little")
    if length > min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
        raise DamagedFile(
            f"{path}: the header should have {length} bytes, in a file of {size}. The file is cut "
            f"short, or not a safetensors file."
        )
    text = file.read(length)
    if len(text) < length:
        raise DamagedFile(f"{path}: the file became shorter while it was read.")
    return text


def _parsed(text: bytes, path: str) -> dict[str, Any]:
    try:
        content = json.loads(text.decode(), object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path}: the header is not JSON of this format: {error}.") from None
    if not isinstance(content, dict):
        raise DamagedFile(f"{path}: the header is a {type(content).__name__}, not a mapping.")
    return content


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a name occurs twice in one mapping")
    return made


def _checked_entries(
    content: dict[str, Any], path: str, data_bytes: int
) -> tuple[TensorEntry, ...]:
    entries = sorted(
        (_checked_entry(name, said, path) for name, said in content.items()),
        key=lambda e: (e.begin, e.end),
    )
    position = 0
    for e in entries:
        if e.begin != position:
            raise DamagedFile(
                f"{path}: tensor {e.name!r} starts at byte {e.begin}, and the tensor before it ends "
                f"at {position}."
            )
        position = e.end
    if position != data_bytes:
        raise DamagedFile(
            f"{path}: its tensors take {position} bytes, and {data_bytes} stand behind the header. "
            f"The file is cut short or was appended to."
        )
    return tuple(entries)


def _checked_entry(name: str, said: Any, path: str) -> TensorEntry:
    def fault(text: str) -> DamagedFile:
        return DamagedFile(f"{path}: tensor {name!r} {text}.")

    if not isinstance(said, dict) or said.keys() != {"dtype", "shape", "data_offsets"}:
        raise fault("is not described by dtype, shape and data_offsets")
    dtype = DTYPE_OF_NAME.get(said["dtype"]) if isinstance(said["dtype"], str) else None
    if dtype is None:
        raise fault(f"has the unknown dtype {said['dtype']!r}")
    shape, offsets = said["shape"], said["data_offsets"]
    if not is_shape(shape):
        raise fault(f"has the invalid shape {shape!r}")
    if not is_list_of_places(offsets) or len(offsets) != 2:
        raise fault(f"has the data_offsets {offsets!r}, which are not [begin, end]")
    begin, end = offsets
    if end - begin != bytes_of_type(dtype, shape):
        raise fault(f"has {end - begin} bytes, and its type needs {bytes_of_type(dtype, shape)}")
    return TensorEntry(name, dtype, tuple(shape), begin, end)


def is_list_of_places(x: Any) -> bool:
    """Return True if `x` is a list of numbers that may count bytes or elements."""
    return isinstance(x, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in x)


def is_shape(x: Any) -> bool:
    """Return True if `x` is a list of extents that a tensor may have."""
    if not is_list_of_places(x) or len(x) > MAX_DIMS:
        return False
    return math.prod(max(extent, 1) for extent in x) < 1 << 59  # bytes then fit in 63 bits


def sums_of(header: Header, path: str) -> list[int] | None:
    """The checksum of every tensor, in the order of the entries; None where the file has none."""
    digits = header.metadata.get("ltc.crc32")
    if digits is None:
        return None
    if len(digits) != _SUM_DIGITS * len(header.entries):
        raise DamagedFile(
            f"{path}: it has {len(header.entries)} tensors, but not as many checksums."
        )
    try:
        return [int(digits[i : i + _SUM_DIGITS], 16) for i in range(0, len(digits), _SUM_DIGITS)]
    except ValueError:
        raise DamagedFile(f"{path}: the checksums are not hexadecimal numbers.") from None
