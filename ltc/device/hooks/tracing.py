"""What torch.jit.trace has to see of calls that an ltc device takes whole.

torch leaves aten::convolution out of a trace: on every other device it calls aten::_convolution,
which is traced.  So, for as long as anything is traced, it does here as well.
"""

from __future__ import annotations

import functools

import torch
from torch.backends import cudnn

from ltc.support.torch_private import library_for_a_while


def install() -> None:
    """Let convolutions be traced.  Once per process."""
    for name in ("trace", "trace_module"):
        setattr(torch.jit, name, _with_convolutions(getattr(torch.jit, name)))


def _with_convolutions(trace):
    @functools.wraps(trace)
    def wrapped(*args, **kwargs):
        with library_for_a_while("aten", "IMPL") as library:
            library.impl("convolution", _convolution, "AutogradPrivateUse1", allow_override=True)
            return trace(*args, **kwargs)

    return wrapped


def _convolution(
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups
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
