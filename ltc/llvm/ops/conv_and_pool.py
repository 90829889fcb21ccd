"""The generated kernels of convolutions and poolings, and of their gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch

from ltc import config
from ltc.errors import Unsupported
from ltc.ir import ops
from ltc.ir.node import Node, is_channels_last
from ltc.llvm.conv.geometry import Geometry, KernelSequence
from ltc.llvm.conv.nchw import convolution, convolution_input_gradient  # fmt: skip
from ltc.llvm.conv.nchw_weight_grad import convolution_weight_gradient
from ltc.llvm.conv.nhwc import channels_last_convolution, channels_last_input_gradient
from ltc.llvm.conv.nhwc_depthwise import (
    depthwise_convolution,
    depthwise_input_gradient,
    depthwise_weight_gradient,
    is_depthwise,
)  # fmt: skip
from ltc.llvm.conv.nhwc_weight_grad import channels_last_weight_gradient
from ltc.llvm.conv.winograd import (
    is_convolution_faster,
    is_input_gradient_faster,
    winograd_convolution,
    winograd_input_gradient,
)
from ltc.llvm.conv.winograd_weight_grad import (
    is_weight_gradient_faster,
    winograd_weight_gradient,
)
from ltc.llvm.emit.isa import SSE2, Isa
from ltc.llvm.emit.vectors import Epilogue, GeneratedKernel
from ltc.llvm.ops.product_choice import called_pointwise
from ltc.llvm.pooling.nchw import (
    Pool,
    average_pool,
    average_pool_gradient,
    max_pool,
    max_pool_gradient,
)  # fmt: skip
from ltc.llvm.pooling.nhwc import (
    ChannelsLastPool,
    channels_last_average_pool,
    channels_last_average_pool_gradient,
    channels_last_max_pool,
    channels_last_max_pool_gradient,
)  # fmt: skip

NAME = "kernel"  # of every function: equal texts are equal kernels
FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


@dataclass(frozen=True)
class NodeKernels:
    """The kernels of one node, one after the other, over contiguous buffers.

    Attributes:
        pointers: For each kernel, what its pointers are: the above, "result0" and "result1", the
            names in `scratch`, "operand0" and on for those of the epilogue, and "fault": one i64
            that is 0 before the launch, and 1 after it where an index was outside its dimension.
        reads: The nodes whose buffers the kernels read, called "read0", "read1", ... in `pointers`.
        scratch: Bytes of memory that the kernels share, by name.
    """

    kernels: tuple[GeneratedKernel, ...]
    reads: tuple[Node, ...]
    pointers: tuple[tuple[str, ...], ...]
    scratch: dict[str, int]


def kernels_of(
    node: Node, isa: Isa, epilogue: Epilogue | None = None, operands: int = 0, may_measure: bool = False
) -> NodeKernels | None:  # fmt: skip
    """Return the kernels of a node, or None if it has none.

    Args:
        epilogue, operands: The arguments of a convolution; other ops take none.
        may_measure: True if PyTorch's kernel is called where it was measured to be faster.
    """
    maker = _MAKERS.get(node.op)
    if maker is None or not all(t.dtype in dtypes(isa) for t in _floating_types(node)):
        return None
    if may_measure and node.op in _CONVOLUTIONS and is_channels_last(node):
        geometry, reads = _CONVOLUTIONS[node.op](node)
        call = called_pointwise(node.op, node.dtype, geometry, isa, epilogue, operands)
        if call is not None:
            return _named(call, reads, ("result",))
    try:
        return maker(node, isa) if epilogue is None else maker(node, isa, epilogue, operands)
    except Unsupported:  # the reference computes it
        return None


def dtypes(isa: Isa) -> frozenset[torch.dtype]:
    """Return the dtypes of floats that kernels are made for."""
    # A half becomes a float through a library function that baseline machines call.
    return FLOATS - {torch.float16} if isa is SSE2 else FLOATS


def _floating_types(node: Node):
    """The types that must be one of FLOATS: all but the indices of a pooling."""
    if node.op is ops.MAX_POOL:
        return (node.inputs[0].type,)
    if node.op is ops.MAX_POOL_GRADIENT:
        return (node.type,)
    return (node.type, *(n.type for n in node.inputs))


def _named(
    sequence: KernelSequence | GeneratedKernel, reads: dict[str, Node], results: tuple[str, ...]
) -> NodeKernels:
    """`reads` and `results` say what the kernels call their operands and results."""
    if isinstance(sequence, GeneratedKernel):
        sequence = KernelSequence((sequence,), {})
    names = {name: f"read{i}" for i, name in enumerate(reads)}
    names.update({name: f"result{i}" for i, name in enumerate(results)})
    pointers = tuple(
        tuple(names.get(argument, argument) for argument in kernel.arguments)
        for kernel in sequence.kernels
    )
    return NodeKernels(sequence.kernels, tuple(reads.values()), pointers, sequence.scratch)


# --- windows ------------------------------------------------------------------------------------


def _geometry(node: Node, operand, weight, result) -> Geometry:
    names = ("stride", "padding", "dilation", "groups")
    if is_channels_last(node):
        operand, result = ((s[0], s[-1], *s[1:-1]) for s in (operand, result))
    return Geometry(operand, weight, result, *(node.attr(name) for name in names))


def _sequence(make, node: Node, geometry: Geometry, isa: Isa, epilogue, operands: int):
    if epilogue is None:
        return _plain_sequence(make, node.dtype, geometry, isa)
    return make(NAME, node.dtype, geometry, isa, epilogue, operands)


@functools.lru_cache(maxsize=256)
def _plain_sequence(make, dtype: torch.dtype, geometry: Geometry, isa: Isa) -> KernelSequence:
    """A network has many convolutions of one kind, each of which is asked for more than once."""
    return make(NAME, dtype, geometry, isa)


def _may_transform() -> bool:
    return bool(config.value("LTC_WINOGRAD"))


def _convolution(node: Node, isa: Isa, epilogue: Epilogue | None = None, operands: int = 0):
    geometry, reads = _forward(node)
    make = convolution
    if is_channels_last(node):
        make = channels_last_convolution
        if is_depthwise(geometry):
            make = depthwise_convolution
        elif _may_transform() and is_convolution_faster(node.dtype, geometry, isa):
            make = winograd_convolution
    return _named(_sequence(make, node, geometry, isa, epilogue, operands), reads, ("result",))


def _input_gradient(node: Node, isa: Isa, epilogue: Epilogue | None = None, operands: int = 0):
    geometry, reads = _of_input(node)
    if is_channels_last(node):
        make = channels_last_input_gradient
        if is_depthwise(geometry):
            make = depthwise_input_gradient
        elif _may_transform() and is_input_gradient_faster(node.dtype, geometry, isa):
            make = winograd_input_gradient
        sequence = _sequence(make, node, geometry, isa, epilogue, operands)
    else:
        sequence = _plain_sequence(convolution_input_gradient, node.dtype, geometry, isa)
    return _named(sequence, reads, ("result",))


def _weight_gradient(node: Node, isa: Isa, epilogue: Epilogue | None = None, operands: int = 0):
    geometry, reads = _of_weight(node)
    if is_channels_last(node):
        make = channels_last_weight_gradient
        if is_depthwise(geometry):
            make = depthwise_weight_gradient
        elif _may_transform() and is_weight_gradient_faster(node.dtype, geometry, isa):
            make = winograd_weight_gradient
        sequence = _sequence(make, node, geometry, isa, epilogue, operands)
    else:
        sequence = _plain_sequence(convolution_weight_gradient, node.dtype, geometry, isa)
    return _named(sequence, reads, ("result",))


# A convolution's geometry, and what its kernels call its operands.
_Convolution = tuple[Geometry, dict[str, Node]]


def _forward(node: Node) -> _Convolution:
    x, weight = node.inputs
    geometry = _geometry(node, x.shape, weight.shape, node.shape)
    return geometry, {"operand": x, "weight": weight}


def _of_input(node: Node) -> _Convolution:
    gradient, weight = node.inputs
    geometry = _geometry(node, node.shape, weight.shape, gradient.shape)
    return geometry, {"gradient": gradient, "weight": weight}


def _of_weight(node: Node) -> _Convolution:
    gradient, x = node.inputs
    geometry = _geometry(node, x.shape, node.shape, gradient.shape)
    return geometry, {"gradient": gradient, "operand": x}


_CONVOLUTIONS: dict[ops.Op, Callable[[Node], _Convolution]] = {
    ops.CONVOLUTION: _forward,
    ops.CONVOLUTION_INPUT_GRADIENT: _of_input,
    ops.CONVOLUTION_WEIGHT_GRADIENT: _of_weight,
}

_Extents = tuple[int, ...]  # of each spatial dimension


def _window(node: Node) -> tuple[_Extents, _Extents, _Extents, _Extents]:
    names = ("kernel", "stride", "padding", "dilation")
    kernel, stride, padding, dilation = (tuple(node.attr(name)) for name in names)
    return kernel, stride, padding, dilation


def _pool(node: Node, operand: tuple[int, ...], result: tuple[int, ...]) -> Pool:
    rank = len(node.attr("kernel"))
    return Pool(operand[-rank:], result[-rank:], *_window(node), planes=prod(operand[:-rank]))


def _channels_last_pool(
    node: Node, operand: tuple[int, ...], result: tuple[int, ...]
) -> ChannelsLastPool:
    images, *spatial, channels = operand
    window = _window(node)
    return ChannelsLastPool(tuple(spatial), result[1:-1], *window, images=images, channels=channels)


def _max_pool(node: Node, isa: Isa):
    (x,) = node.inputs
    if is_channels_last(node):
        pool = _channels_last_pool(node, x.shape, node.attr("shape"))
        kernel = channels_last_max_pool(NAME, x.dtype, pool, isa)
        return _named(kernel, {"operand": x}, ("result", "indices"))
    kernel = max_pool(NAME, x.dtype, _pool(node, x.shape, node.attr("shape")), isa)
    return _named(kernel, {"operand": x}, ("result", "indices"))


def _max_pool_gradient(node: Node, isa: Isa, epilogue: Epilogue | None = None, operands: int = 0):
    gradient, indices = node.inputs
    if is_channels_last(node):
        pool = _channels_last_pool(indices.inputs[0], node.shape, gradient.shape)
        kernel = channels_last_max_pool_gradient(NAME, node.dtype, pool, isa, epilogue, operands)
        return _named(kernel, {"gradient": gradient, "indices": indices}, ("result",))
    planes = node.shape[0] * node.shape[1]
    kernel = max_pool_gradient(NAME, node.dtype, planes, node.shape[2:], gradient.shape[2:], isa)
    return _named(kernel, {"gradient": gradient, "indices": indices}, ("result",))


def _average_pool(node: Node, isa: Isa):
    (x,) = node.inputs
    counted = (node.attr("count_padding"), node.attr("divisor"))
    if is_channels_last(node):
        pool = _channels_last_pool(node, x.shape, node.shape)
        kernel = channels_last_average_pool(NAME, node.dtype, pool, isa, *counted)
        return _named(kernel, {"operand": x}, ("result",))
    kernel = average_pool(NAME, node.dtype, _pool(node, x.shape, node.shape), isa, *counted)
    return _named(kernel, {"operand": x}, ("result",))


def _average_pool_gradient(node: Node, isa: Isa):
    (gradient,) = node.inputs
    counted = (node.attr("count_padding"), node.attr("divisor"))
    if is_channels_last(node):
        pool = _channels_last_pool(node, node.shape, gradient.shape)
        kernel = channels_last_average_pool_gradient(NAME, node.dtype, pool, isa, *counted)
        return _named(kernel, {"gradient": gradient}, ("result",))
    planes = _pool(node, node.shape, gradient.shape)
    kernel = average_pool_gradient(NAME, node.dtype, planes, isa, *counted)
    return _named(kernel, {"gradient": gradient}, ("result",))


_MAKERS: dict[ops.Op, Callable[..., NodeKernels]] = {
    ops.CONVOLUTION: _convolution,
    ops.CONVOLUTION_INPUT_GRADIENT: _input_gradient,
    ops.CONVOLUTION_WEIGHT_GRADIENT: _weight_gradient,
    ops.MAX_POOL: _max_pool,
    ops.MAX_POOL_GRADIENT: _max_pool_gradient,
    ops.AVERAGE_POOL: _average_pool,
    ops.AVERAGE_POOL_GRADIENT: _average_pool_gradient,
}
