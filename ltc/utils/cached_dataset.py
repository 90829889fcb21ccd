"""A data set whose samples, once computed, are read from disk.

The folder holds METADATA, a JSON object with `length`, `max_files_per_folder` and `compress`, and
the samples as torch.save writes them, in numbered folders: `<i // max_files_per_folder>/<i>.pt`,
or `.pt.gz` where compressed. A sample's file is written whole or not at all.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from ltc.checkpointing import checked_archive
from ltc.checkpointing.safetensors_format import DamagedFile
from ltc.support.atomic_file import replacing


class CachedDataset(Dataset):
    """`data_set`, with every sample computed once and then kept below `path`.

    Samples are pickled: open only folders that you trust.

    Args:
        data_set: Has `__len__` and `__getitem__`; None where the cache is complete.
        path: A folder; one that holds a cache already is used, and its own settings count.
    """

    def __init__(
        self,
        data_set: Any | None,
        path: str | Path,
        max_files_per_folder: int = 1000,
        compress: bool = True,
    ):
        self._data_set = data_set
        self._path = Path(path)
        described = self._path / "METADATA"
        if not described.exists():
            if data_set is None:
                raise RuntimeError(
                    f"{self._path} holds no METADATA, and there is no data set to fill it from. "
                    f"Pass the data set once, and call warmup()."
                )
            self._path.mkdir(parents=True, exist_ok=True)
            self._write_metadata(described, len(data_set), max_files_per_folder, compress)
        self._metadata = json.loads(described.read_text())
        if data_set is not None and len(data_set) != len(self):
            raise RuntimeError(
                f"{self._path} caches {len(self)} samples, but the data set has {len(data_set)}. "
                f"Use another folder for another data set."
            )

    @staticmethod
    def _write_metadata(path: Path, length: int, max_files_per_folder: int, compress: bool) -> None:
        metadata = {
            "length": length,
            "max_files_per_folder": max_files_per_folder,
            "compress": compress,
        }
        with replacing(path) as file:
            file.write(json.dumps(metadata).encode())

    def __len__(self) -> int:
        return self._metadata["length"]

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(
                f"Sample {index} is out of range: the data set has {len(self)} samples."
            )
        index %= len(self)
        path = self._path_of(index)
        if not path.exists():
            return self._compute(index, path)
        file = io.BytesIO(self._decompressed(path)) if self._metadata["compress"] else path
        return checked_archive.load(file, weights_only=False)

    @staticmethod
    def _decompressed(path: Path) -> bytes:
        try:
            return gzip.decompress(path.read_bytes())
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DamagedFile(
                f"{path} is damaged: {error}. Remove it: the sample is then computed again."
            ) from error

    def warmup(self) -> None:
        """Compute and write every sample that is not on disk yet."""
        for index in range(len(self)):
            path = self._path_of(index)
            if not path.exists():
                self._compute(index, path)

    def _path_of(self, index: int) -> Path:
        folder = str(index // self._metadata["max_files_per_folder"])
        return self._path / folder / f"{index}.pt{'.gz' if self._metadata['compress'] else ''}"

    def _compute(self, index: int, path: Path) -> Any:
        if self._data_set is None:
            raise RuntimeError(
                f"Sample {index} is not in {self._path}, and there is no data set to compute it. "
                f"Pass the data set, or fill the folder with warmup() first."
            )
        sample = self._data_set[index]
        buffer = io.BytesIO()
        torch.save(sample, buffer)
        data = buffer.getvalue()
        if self._metadata["compress"]:
            data = gzip.compress(data, mtime=0)
        path.parent.mkdir(exist_ok=True)
        with replacing(path) as file:
            file.write(data)
        return sample
