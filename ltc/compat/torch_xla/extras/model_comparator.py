"""`torch_xla.debug.model_comparator`: what two runs of a model saved under the same names, compared."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import torch

from ltc.core import lazy_model as ltm
from ltc.tracebacks import is_users

_folder: str | None = None
_saved: Counter[str] = Counter()
_step: int | None = None


def configure(save_dir: str | None) -> None:
    """Save into that folder from now on; nothing is saved where it is None."""
    global _folder, _step
    _folder, _step = save_dir, None
    _saved.clear()


def save(name: str | None, tensor: torch.Tensor, step: int | None = None) -> torch.Tensor:
    """The tensor, whose value the first replica has saved: a read.

    Args:
        name: None for the caller's file and line; each has a number behind it.
        step: A folder of its own for what is saved in that step.
    """
    global _step
    folder = _folder or os.environ.get("MODELCMP_SAVEDIR")
    if folder is None:
        return tensor
    value = tensor.detach().cpu()
    if ltm.is_master_ordinal(False):
        if step is not None and step != _step:
            _step = step
            _saved.clear()
        target = Path(folder) if step is None else Path(folder) / f"step-{step}"
        target.mkdir(parents=True, exist_ok=True)
        name = _line_of_the_caller() if name is None else name
        torch.save(value, target / f"{name}.{_saved[name]}")
        _saved[name] += 1
    return tensor


def _line_of_the_caller() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}.l{frame.f_lineno}"


def compare(
    save_dir1: str, save_dir2: str, rtol: float = 1e-5, atol: float = 1e-8, max_diffs: int = 25
) -> str:
    """Return the differences between two folders, as text; "" if there are none."""
    first, second = (_files(Path(folder)) for folder in (save_dir1, save_dir2))
    report = [f"Mismatch: {name} not in {save_dir2}\n" for name in sorted(first - second)]
    report += [f"Mismatch: {name} not in {save_dir1}\n" for name in sorted(second - first)]
    for name in sorted(first & second):
        one, other = (str(Path(folder) / name) for folder in (save_dir1, save_dir2))
        report.append(tensor_file_compare(one, other, rtol, atol, max_diffs))
    return "".join(report)


def _files(folder: Path) -> set[str]:
    """The names of what was saved below the folder."""
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.suffix[1:].isdecimal()
    }


def _read(path: str) -> torch.Tensor:
    tensor: torch.Tensor = torch.load(path, weights_only=True)
    return tensor


def tensor_file_compare(
    path1: str, path2: str, rtol: float = 1e-5, atol: float = 1e-8, max_diffs: int = 25
) -> str:
    """Return the differences between two files, under the name of the first."""
    found = compare_tensors(_read(path1), _read(path2), rtol, atol, max_diffs)
    lines = "".join(f"  {line}\n" for line in found.splitlines())
    return f"Changes in saved tensor {Path(path1).name!r}:\n{lines}" if found else ""


def compare_tensors(
    tensor1: torch.Tensor,
    tensor2: torch.Tensor,
    rtol: float = 1e-5,
    atol: float = 1e-8,
    max_diffs: int = 25,
) -> str:
    """The largest differences of elements beyond max(rtol * larger, atol); "" where there are none."""
    if tensor1.shape != tensor2.shape:
        return f"Tensors have different shape: {list(tensor1.shape)} vs. {list(tensor2.shape)}\n"
    first, second = tensor1.detach().cpu().double(), tensor2.detach().cpu().double()
    error = (first - second).abs()
    allowed = (torch.maximum(first.abs(), second.abs()) * rtol).clamp(min=atol)
    differ = ~(error <= allowed) & ~(first.isnan() & second.isnan()) & (first != second)
    places = differ.nonzero()
    largest = error[differ].argsort(descending=True)[:max_diffs].tolist()
    report = ""
    for place in (tuple(places[i].tolist()) for i in largest):
        one, other = first[place].item(), second[place].item()
        report += f"{list(place)}: {one} vs. {other}\terror={error[place].item()}\n"
    if len(places) > max_diffs:
        report += f"... aborting after {max_diffs} differences\n"
    return report
