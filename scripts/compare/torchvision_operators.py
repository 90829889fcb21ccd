"""torchvision, also where its compiled operators can not be loaded.

The torchvision of PyPI is built for CUDA, and its library does not load into a torch built for the
CPU alone; importing the package then fails at the operators that it describes. Here these are
declared before it is imported, and non-maximum suppression, the one that training a detector
calls, has a CPU kernel. Pooling regions has a form in Python in torchvision itself.

Import this module before torchvision, timm or transformers.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch

library = torch.library.Library("torchvision", "FRAGMENT")


def loads() -> bool:
    """Return True if torchvision's own library can be loaded into this torch."""
    package = Path(importlib.util.find_spec("torchvision").origin).parent
    try:
        torch.ops.load_library(package / "_C.so")
    except OSError:
        return False
    return True


def boxes_kept(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
    """Indices of the boxes that no better one overlaps by more than the threshold, best first."""
    order = scores.argsort(descending=True, stable=True)
    kept = []
    while len(order):
        best, order = order[0], order[1:]
        kept.append(best)
        order = order[overlaps(boxes[best], boxes[order]) <= threshold]
    return torch.stack(kept) if kept else order


def overlaps(box: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    """Intersection over union of one box with each of the others, corners as x, y, x, y."""
    low, high = torch.maximum(box[:2], boxes[:, :2]), torch.minimum(box[2:], boxes[:, 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    return shared / ((box[2:] - box[:2]).prod() + (boxes[:, 2:] - boxes[:, :2]).prod(-1) - shared)


LOADED = loads()
if not LOADED:
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.impl("nms", boxes_kept, "CPU")

import torchvision.ops.boxes  # noqa: E402

if not LOADED:
    torchvision.ops.boxes._assert_has_ops = lambda: None
    # `torchvision.ops.roi_align` is the function. Its form in Python is for the devices it knows.
    sys.modules["torchvision.ops.roi_align"].is_compile_supported = lambda device: True
