"""What torch.jit.trace has to see of calls that an ltc device takes whole.

torch leaves aten::convolution out of a trace: on every other device it calls aten::_convolution,
which is traced.  So, for as long as anything is traced, it does here as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.backends import cudnn

from ltc.support.stand_in import stand_in
from ltc.support.torch_private import library_for_a_while


def install() -> None:
    """Let convolutions be traced.  Once per process."""
    for name in ("trace", "trace_module"):
        stand_in(torch.jit, name, _with_convolutions(getattr(torch.jit, name)))


def _with_convolutions(trace: Callable[..., Any]):
    @functools.wraps(trace)
    def wrapped(*args: Any, **kwargs: Any):
        with library_for_a_while("aten", "IMPL") as library:
            library.impl("convolution", _convolution, "AutogradPrivateUse1", allow_override=True)
            return trace(*args, **kwargs)

    return wrapped


def _convolution(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> torch.Tensor:
    return torch.ops.aten._convolution.default(
        x,
        weight,
        bias,
        stride,
        padding,
        dilation,
        transposed,
        output_padding,
        groups,
        cudnn.benchmark,
        cudnn.deterministic,
        cudnn.enabled,
        cudnn.allow_tf32,
    )
