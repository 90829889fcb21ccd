"""`tensor.data = other` where one of them is lazy and the other is not: a model moved by hand.

torch keeps the tensor and gives it the other's storage, which it allows between its own kinds of
devices only.  Here the two trade places, as they do in `module.to(device)`: the Python object, by
which optimizers and modules know a parameter, stays.
"""

from __future__ import annotations

import torch

from ltc.device.tensor import is_lazy
from ltc.device.torch_api import TensorBase


def install() -> None:
    """Let `.data` be assigned across devices.  Once per process."""
    inherited = TensorBase.data

    def assign(self: torch.Tensor, value: torch.Tensor) -> None:
        if not isinstance(value, torch.Tensor) or is_lazy(self) == is_lazy(value):
            inherited.__set__(self, value)
        else:
            _trade_places(self, value)

    torch.Tensor.data = property(inherited.__get__, assign, doc=inherited.__doc__)


def _trade_places(tensor: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        moved, gradient = value.detach(), tensor.grad
        if isinstance(tensor, torch.nn.Parameter):
            moved = torch.nn.Parameter(moved, tensor.requires_grad)
        else:
            moved.requires_grad_(tensor.requires_grad)
        if gradient is not None:
            moved.grad = gradient.to(value.device)
    torch.utils.swap_tensors(tensor, moved)
