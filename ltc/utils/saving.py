"""Files that any PyTorch can read: lazy tensors become CPU tensors first."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ltc.utils.atomic import replacing
from ltc.utils.transfer import to_cpu


def save_for_cpu(data: Any, file_or_path, write: bool) -> None:
    """torch.save of `data` on the CPU where `write`; elsewhere the tensors are only computed."""
    on_cpu = to_cpu(data)
    if not write:
        return
    if not isinstance(file_or_path, (str, os.PathLike)):
        torch.save(on_cpu, file_or_path)
        return
    with replacing(Path(file_or_path)) as file:
        torch.save(on_cpu, file)
