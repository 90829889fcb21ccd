"""The loop of a classifier's training, a marked step for each batch."""

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

import ltc.core.lazy_model as ltm


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> Iterator[torch.Tensor]:
    """The loss of each step, on its device; the next step begins when it is asked for."""
    for x, wanted in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), wanted)
        loss.backward()
        optimizer.step()
        ltm.mark_step()
        yield loss.detach()
