"""Convolutions and the gradients of their inputs, of one to three dimensions, on [N, C, *spatial].

Where the kernel is one point they are matrix products; elsewhere the sums over channels and taps
that nchw_accumulate.py gathers columns for, or, where a group has few result channels, those of
nchw_direct.py.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch

from ltc.llvm.conv.axes import Axes, forward_axes, gradient_phases
from ltc.llvm.conv.geometry import Geometry, KernelSequence
from ltc.llvm.conv.nchw_accumulate import Sums
from ltc.llvm.conv.nchw_direct import DirectSums
from ltc.llvm.emit.builder import Builder, function_text
from ltc.llvm.emit.index import Index
from ltc.llvm.emit.isa import Isa
from ltc.llvm.emit.vectors import Epilogue, GeneratedKernel, Vectors, tasks_for
from ltc.llvm.gemm.blocking import Matrix, stored_plain
from ltc.llvm.gemm.kernel import matmul

FEW_CHANNELS = 4  # a group with fewer result channels would gather more than it multiplies


def convolution(
    name: str, dtype: torch.dtype, geometry: Geometry, isa: Isa,
    epilogue: Epilogue | None = None, operands: int = 0,
) -> KernelSequence:  # fmt: skip
    """[N, O, *windows] of operand [N, C, *spatial] and weight [O, C / groups, *kernel].

    dtype     of all three: float32, float64, or float16 and bfloat16, which sum in float32
    epilogue  maps a vector of sums to the vector stored: its row is image * O + channel, its
              column the position in the flat *windows
    operands  pointers that the epilogue reads, %p3 and on
    arguments "weight", "operand", "result", then "operand0" and on
    tasks     each computes whole rows of the result; no result depends on their number

    Raises Unsupported where a kernel is so large that its columns fit in no stack.
    """
    n, channels, *_ = geometry.operand
    if geometry.is_pointwise:
        return _pointwise(name, dtype, geometry, isa, epilogue, operands)
    axes = forward_axes(*geometry.window)
    rows = geometry.weight[0] // geometry.groups
    sums = _sums_for(rows)
    body = sums(dtype, n, geometry.groups, rows, channels // geometry.groups, axes, isa, epilogue)
    return KernelSequence((body.kernel(name, "operand", "weight", operands),), {})


def convolution_input_gradient(
    name: str, dtype: torch.dtype, geometry: Geometry, isa: Isa
) -> KernelSequence:
    """The gradient [N, C, *spatial] of a convolution's operand, from that of its result.

    arguments  "weight" as the convolution's, "gradient" [N, O, *windows], "result"; between them
               "transposed", the weights in the order in which they are read here
    """
    (n, channels, *_), groups = geometry.operand, geometry.groups
    rows, depth = channels // groups, geometry.weight[0] // groups
    if geometry.is_pointwise:
        return _pointwise_gradient(name, dtype, geometry, isa)
    phases = gradient_phases(*geometry.window)
    kernels, start = [], 0
    for axes in phases:
        body = _sums_for(rows)(dtype, n, groups, rows, depth, axes, isa, None, start)
        kernels.append(_transposed_weights(name, dtype, geometry, axes, start, isa))
        kernels.append(body.kernel(name, "gradient", "transposed", 0))
        start += groups * rows * depth * body.taps
    size = max(1, start) * dtype.itemsize
    return KernelSequence(tuple(kernels), {"transposed": size})


def _sums_for(rows: int) -> type[Sums]:
    """What computes the sums of a group with so many result channels."""
    return DirectSums if rows < FEW_CHANNELS else Sums


def _pointwise(name, dtype, geometry, isa, epilogue, operands) -> KernelSequence:
    (n, channels, *spatial), outputs = geometry.operand, geometry.weight[0]
    positions = prod(spatial)
    kernel = matmul(
        name, dtype, (n,), (outputs, positions, channels),
        Matrix(channels, 1, (0,)), stored_plain(channels, positions, (n,)),
        stored_plain(outputs, positions, (n,)), isa, epilogue, operands,
    )  # fmt: skip
    return KernelSequence((_renamed(kernel, "weight", "operand"),), {})


def _pointwise_gradient(name, dtype, geometry, isa) -> KernelSequence:
    (n, channels, *spatial), outputs = geometry.operand, geometry.weight[0]
    positions = prod(spatial)
    kernel = matmul(
        name, dtype, (n,), (channels, positions, outputs),
        Matrix(1, channels, (0,)), stored_plain(outputs, positions, (n,)),
        stored_plain(channels, positions, (n,)), isa,
    )  # fmt: skip
    return KernelSequence((_renamed(kernel, "weight", "gradient"),), {})


def _renamed(kernel: GeneratedKernel, left: str, right: str) -> GeneratedKernel:
    arguments = (left, right, *kernel.arguments[2:])
    return replace(kernel, arguments=arguments)


def _transposed_weights(name, dtype, geometry: Geometry, axes: Axes, start: int, isa):
    """transposed[group, channel, output, taps of this phase] from weight[group, output, channel, *]."""
    b = Builder(1)
    v = Vectors(b, isa, dtype)
    groups, outputs = geometry.groups, geometry.weight[0] // geometry.groups
    channels, kernel = geometry.weight[1], geometry.weight[2:]
    kernel = (*[1] * (3 - len(kernel)), *kernel)
    taps = prod(axis.taps for axis in axes)
    size = prod(kernel)
    low, high = b.share(groups * channels)

    def weights(number: Index, o: Index) -> None:
        group, channel = divmod(number, channels)
        first = group * outputs + o
        source = v.at("%p0", (first * channels + channel) * size)
        target = v.at("%p1", start + (number * outputs + o) * taps)
        each_tap(b, axes, lambda tap, k: copy(v.at(source, kernel_element(tap)), v.at(target, k)))

    def kernel_element(tap: tuple[Index, Index, Index]) -> Index:
        at: Index = 0
        for index, axis, extent in zip(tap, axes, kernel):
            at = at * extent + (index * axis.kernel[1] + axis.kernel[0])
        return at

    def copy(source: str, target: str) -> None:
        bits = f"i{8 * dtype.itemsize}"
        b.emit(f"store {bits} {b.effect(f'load {bits}, ptr {source}')}, ptr {target}")

    if taps:
        b.nest([(low, high, 1), outputs], [], lambda number, o, _: weights(number, o))
    tasks = tasks_for(20 * groups * channels * outputs * taps, groups * channels, 1)
    return GeneratedKernel(name, function_text(name, 2, b), ("weight", "transposed"), tasks, 0)


def each_tap(b: Builder, axes: Axes, body) -> None:
    """Loops body((d, h, w), flat number) over the taps."""
    depth, height, width = (axis.taps for axis in axes)
    b.nest(
        (depth, height, width), [],
        lambda d, h, w, _: body((d, h, w), (d * height + h) * width + w),
    )  # fmt: skip
