"""Checkpoints of torch_xla's xser: a pickled structure, and a folder of its tensors."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from ltc.checkpointing import checked_archive
from ltc.checkpointing.safetensors_format import DamagedFile
from ltc.support.tree import for_each_instance_rewrite

_TENSOR_FILE = re.compile(r"tensor_\d+\.pt")
_ZIP = b"PK\x03\x04"
_PICKLE = b"\x80\x02"


class TensorReference:
    """Stands in a checkpoint of torch_xla's xser for the tensor of a number, `tid`.

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
    """Whether `path` is the structure of an old checkpoint."""
    if not os.path.isdir(f"{path}.tensors") or not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        start = file.read(len(_ZIP))
    return start == _ZIP or start.startswith(_PICKLE)


def load(path: str, device: torch.device) -> Any:
    """The data of an old checkpoint; no class but those of the format is ever made."""
    with torch.serialization.safe_globals(_WRITERS):
        structure = _read(path)
    return for_each_instance_rewrite(
        structure, TensorReference, lambda reference: _tensor(path, reference, device)
    )


def _tensor(path: str, reference: TensorReference, device: torch.device) -> torch.Tensor:
    number = vars(reference).get("tid")
    if type(number) is not int:
        raise DamagedFile(f"{path}: it refers to the tensor {number!r}, which is no number.")
    file = f"{path}.tensors/tensor_{number}.pt"
    return _read(file).to(device)


def _read(path: str) -> Any:
    """What a file of the checkpoint holds; one of torch's older format has no checksums."""
    with open(path, "rb") as file:
        is_archive = file.read(len(_ZIP)) == _ZIP
    read = checked_archive.load if is_archive else torch.load
    return read(path, map_location="cpu", weights_only=True)


def remove_tensors_of(path: str) -> None:
    """Remove the folder of tensors that an old checkpoint at `path` has left, and nothing else."""
    folder = Path(f"{path}.tensors")
    if folder.is_dir() and all(_TENSOR_FILE.fullmatch(file.name) for file in folder.iterdir()):
        shutil.rmtree(folder)
