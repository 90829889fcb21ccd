"""What torch.jit.trace and torch.onnx.export have to see of what is on an ltc device.

torch leaves aten::convolution out of a trace: on every other device it calls aten::_convolution,
which is traced.  So, for as long as anything is traced, it does here as well.

ONNX's older exporter looks into the memory of parameters and constants, and takes two of one shape
at one address for one.  A lazy tensor has no memory to look at, so it is given their copies on the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.backends import cudnn

from ltc.device.recording.tensors import is_lazy
from ltc.support.stand_in import stand_in
from ltc.support.torch_private import ONNX_PASSES, TRACED_GRAPH, library_for_a_while


def install() -> None:
    """Let convolutions be traced, and lazy parameters exported.  Once per process."""
    for name in ("trace", "trace_module"):
        stand_in(torch.jit, name, _with_convolutions(getattr(torch.jit, name)))
    TRACED_GRAPH.replace(_with_convolutions(TRACED_GRAPH.current))
    for graph_pass in ONNX_PASSES:
        graph_pass.replace(_of_cpu_tensors(graph_pass.current))


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


def _of_cpu_tensors(graph_pass: Callable[..., Any]):
    @functools.wraps(graph_pass)
    def wrapped(graph: Any, parameters: dict[str, Any], *args: Any):
        for node in graph.findAllNodes("onnx::Constant"):
            if node.hasAttribute("value") and is_lazy(value := node.t("value")):
                node.t_("value", value.cpu())
        return graph_pass(graph, _on_cpu(parameters), *args)

    return wrapped


def _on_cpu(parameters: dict[str, Any]):
    """The same names and values; a lazy tensor of two names has one copy."""
    tensors = {id(value): value for value in parameters.values() if is_lazy(value)}
    copies = {key: tensor.detach().cpu() for key, tensor in tensors.items()}
    return {name: copies.get(id(value), value) for name, value in parameters.items()}
