"""`torch_xla.core.functions.nms`: which boxes remain once those that overlap better ones are left out."""

from __future__ import annotations

import torch


def nms(
    boxes: torch.Tensor,
    scores: torch.Tensor,
    score_threshold: torch.Tensor,
    iou_threshold: torch.Tensor,
    output_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices [output_size] of boxes, the remaining ones first, best first; and their
    number.

    The operands are read: a box is dropped depending on all better ones.

    Args:
        boxes: [N, 4], two opposite corners of each.
        scores: [N].
        score_threshold: The number that a score has to exceed.
        iou_threshold: A box that overlaps a better one by more than that, as a share of their
            union, goes.
        output_size: At most N.

    Raises:
        ValueError: For shapes that do not fit.
    """
    count = len(boxes)
    if boxes.shape != (count, 4) or scores.shape != (count,) or not 0 <= output_size <= count:
        raise ValueError(
            f"nms: boxes {list(boxes.shape)}, scores {list(scores.shape)}, output_size {output_size}: "
            f"these are [N, 4], [N] and at most N."
        )
    score, order = scores.cpu().sort(descending=True, stable=True)
    overlaps = _overlaps(boxes.cpu()[order]) > iou_threshold.cpu()
    remains = torch.ones(count, dtype=torch.bool, device="cpu")
    for box in range(count):
        if remains[box]:
            remains[box + 1 :] &= ~overlaps[box, box + 1 :]
    remains &= score > score_threshold.cpu()
    chosen = torch.cat([order[remains], order[~remains]])[:output_size]
    valid = remains.sum().clamp(max=output_size)
    return tuple(x.to(boxes.device, torch.int32) for x in (chosen, valid))  # type: ignore[return-value]


def _overlaps(boxes: torch.Tensor) -> torch.Tensor:
    """[N, N]: the intersection of each two, as a share of their union."""
    low, high = torch.minimum(boxes[:, :2], boxes[:, 2:]), torch.maximum(boxes[:, :2], boxes[:, 2:])
    area = (high - low).prod(1)
    sides = torch.minimum(high[:, None], high) - torch.maximum(low[:, None], low)
    shared = sides.clamp(min=0).prod(2)
    return shared / (area[:, None] + area - shared)
