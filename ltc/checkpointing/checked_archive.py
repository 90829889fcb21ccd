"""Files of torch.save, read with the checksums that they hold and torch.load does not look at.

Such a file is a zip archive of records: data.pkl describes the tensors, data/0, data/1, ... are their
bytes. All records but those bytes are checked before anything is made of them. The bytes are
checked as torch reads them, so a large file is read once.
"""

from __future__ import annotations

import bisect
import errno
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

import torch

from ltc.checkpointing.safetensors_format import DamagedFile

CHUNK_BYTES = 4 << 20  # read at a time where torch does not read the record itself
_BEGINNING = b"PK\x03\x04"
_NOTE, _NOTE_BYTES = b"PK\x07\x08", (16, 24)  # the "data descriptor" behind a record
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, bytes of the name, bytes of the padding
_IN_UTF_8 = 0x800  # the flag of a record's name
_NO_DIRECTORY = (  # the errors of zipfile where the directory holds anything
    zipfile.BadZipFile, ValueError, OSError, NotImplementedError, OverflowError, MemoryError,
    struct.error,
)  # fmt: skip


def load(
    file_or_path: Any, map_location: Any = None, weights_only: bool = True, mmap: bool = False
) -> Any:
    """Load a file as torch.load does, once every byte that was read agrees with its checksum.

    The arguments are torch.load's. With `mmap` the whole file is read once, to be checked, and its
    tensors are the file, mapped.

    Raises:
        DamagedFile: If a checksum differs, or torch.save did not write the file with checksums.
        The message names the file and the record.
    """
    if not isinstance(file_or_path, (str, os.PathLike)):
        if mmap:
            raise ValueError("mmap=True needs the path of a file, not an open file: pass the path.")
        return _loaded(file_or_path, _name_of(file_or_path), map_location, weights_only)
    path = os.fspath(file_or_path)
    with open(path, "rb") as file:
        if not mmap:
            return _loaded(file, path, map_location, weights_only)
        archive = _Archive(file, path)
        archive.check(archive.records)
    with _no_archive_for_torch(path):
        return torch.load(path, map_location, weights_only=weights_only, mmap=True)


def _loaded(file: Any, path: str, map_location: Any, weights_only: bool) -> Any:
    archive: Any = _Archive(file, path)
    archive.check(record for record in archive.records if not record.is_tensor)
    try:
        with _no_archive_for_torch(path):
            loaded = torch.load(archive, map_location, weights_only=weights_only)
    except Exception:
        archive.finish()  # a damaged record is the better reason
        raise
    archive.finish()
    return loaded


@contextmanager
def _no_archive_for_torch(path: str) -> Iterator[None]:
    """Let DamagedFile name the file where torch's reader refuses its directory."""
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("PytorchStreamReader"):
            raise
        text = str(error).partition(". ")[0]
        raise DamagedFile(f"{path} is damaged, or torch.save did not write it ({text}).") from error


def _name_of(file: Any) -> str:
    name = getattr(file, "name", None)
    return name if isinstance(name, str) else f"a {type(file).__name__}"


@dataclass
class _Record:
    """A file in the archive: its bytes are [start, end) of the archive's file.

    Attributes:
        checksum: CRC-32 of the bytes when they were saved.
        read: Number of bytes that torch has read in order, from `start` on.
        found: CRC-32 of these bytes.
        unsure: True if torch has read bytes out of order.
    """

    name: str
    start: int
    end: int
    checksum: int
    read: int = 0
    found: int = 0
    unsure: bool = False

    @property
    def is_tensor(self) -> bool:
        return self.name.partition("/")[2].startswith("data/")

    def take(self, at: int, content: memoryview) -> None:
        """Account for bytes that torch has read from the position `at` on."""
        if at == self.start:
            self.read = self.found = 0
        if at != self.start + self.read or at + len(content) > self.end:
            self.unsure = True
            return
        self.read += len(content)
        self.found = zlib.crc32(content, self.found)


class _Archive:
    """An archive as an open file, which torch reads from.

    Raises:
        DamagedFile: If its directory cannot be that of a file of torch.save.
    """

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._file, self._path = file, path
        self._base = file.tell()  # torch takes an archive in the middle of a file
        self.records = self._found()
        self._starts = [record.start for record in self.records]
        file.seek(self._base)
        if self.records and not any(record.checksum for record in self.records):
            self._refuse(
                "was saved without checksums, after torch.serialization.set_crc32_options(False). "
                "torch.load reads it unchecked"
            )

    # --- the directory --------------------------------------------------------------------------

    def _found(self) -> list[_Record]:
        """The records in the order of their bytes."""
        beginning = self._file.read(len(_BEGINNING))
        if beginning != _BEGINNING:
            self._refuse(
                "does not begin as a zip archive. Either it is damaged, so take another copy, or it "
                "is of torch's older format, which has no checksums: torch.load reads it unchecked"
            )
        try:
            with zipfile.ZipFile(self._file) as archive:
                infos, end = archive.infolist(), archive.start_dir
        except _NO_DIRECTORY as error:
            if isinstance(error, OSError) and error.errno != errno.EINVAL:  # of a place before 0
                raise
            self._refuse(f"has a damaged directory, or is cut short ({error}). Take another copy")
        infos.sort(key=lambda info: info.header_offset)
        if not infos or infos[0].header_offset != self._base:
            self._refuse("has a directory that is not its own. Take another copy")
        records = [self._record(info) for info in infos]
        ends = [info.header_offset for info in infos[1:]] + [end]
        for record, limit in zip(records, ends):
            self._check_end(record, limit)
        return records

    def _record(self, info: zipfile.ZipInfo) -> _Record:
        """A record, by its entry in the directory and the header before its bytes."""
        self._file.seek(info.header_offset)
        header = self._file.read(_LOCAL_HEADER.size)
        if len(header) < _LOCAL_HEADER.size:
            self._refuse_record(info.filename, "begins behind the end")
        signature, name_bytes, padding = _LOCAL_HEADER.unpack(header)
        name = info.orig_filename.encode("utf-8" if info.flag_bits & _IN_UTF_8 else "cp437")
        if signature != _BEGINNING or self._file.read(name_bytes) != name:
            self._refuse_record(info.filename, "is another one where its bytes are")
        if info.compress_type or info.file_size != info.compress_size:
            self._refuse_record(info.filename, "is compressed, as torch.save leaves none")
        start = info.header_offset + _LOCAL_HEADER.size + name_bytes + padding
        return _Record(info.filename, start, start + info.file_size, info.CRC)

    def _check_end(self, record: _Record, limit: int) -> None:
        """Require that nothing but the note of a streamed record is between its end and `limit`."""
        if record.end == limit:
            return
        self._file.seek(record.end)
        note = self._file.read(len(_NOTE)) == _NOTE and limit - record.end in _NOTE_BYTES
        if not note:
            self._refuse_record(record.name, "does not end where the next one begins")

    # --- checks ---------------------------------------------------------------------------------

    def check(self, records: Any) -> None:
        """Read records and compare their bytes with the checksums."""
        for record in records:
            self._file.seek(record.start)
            found, left = 0, record.end - record.start
            while left and (content := self._file.read(min(left, CHUNK_BYTES))):
                found, left = zlib.crc32(content, found), left - len(content)
            self._compare(record, found)
        self._file.seek(self._base)

    def finish(self) -> None:
        """Compare what torch has read; what it has not read in order is read again."""
        doubtful = []
        for record in self.records:
            if record.unsure or 0 < record.read < record.end - record.start:
                doubtful.append(record)
            elif record.read:
                self._compare(record, record.found)
        self.check(doubtful)

    def _compare(self, record: _Record, found: int) -> None:
        if found != record.checksum:
            self._refuse_record(
                record.name,
                f"is damaged: its bytes have the checksum {found:08x}, and {record.checksum:08x} was "
                f"saved",
            )

    def _refuse_record(self, name: str, text: str) -> NoReturn:
        self._refuse(f"has a record {name[:200]!r} that {text}. Take another copy")

    def _refuse(self, text: str) -> NoReturn:
        raise DamagedFile(f"{self._path} {text}.")

    # --- the file that torch reads --------------------------------------------------------------

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def read(self, count: int = -1) -> bytes:
        at = self._file.tell()
        content = self._file.read(count)
        self._account(at, memoryview(content))
        return content

    def readline(self) -> bytes:
        return self._file.readline()  # torch wants it there; archives have no lines

    def readinto(self, buffer: Any) -> int:
        at, into = self._file.tell(), memoryview(buffer).cast("B")
        file: Any = self._file
        count = file.readinto(into)
        self._account(at, into[:count])
        return count

    def _account(self, at: int, content: memoryview) -> None:
        """Tell the record that these bytes belong to; torch reads across the end of none."""
        first = bisect.bisect_right(self._starts, at) - 1
        if first >= 0 and at < self.records[first].end:
            self.records[first].take(at, content)
        for number in range(first + 1, bisect.bisect_left(self._starts, at + len(content))):
            self.records[number].unsure = True
