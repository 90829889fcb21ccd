"""Convolutions on channels last whose windows are single positions: matrix products of all positions."""

from __future__ import annotations

from ltc.llvm.conv.geometry import Geometry
from ltc.llvm.gemm.blocking import Matrix, Shape, stored_plain, stored_transposed


def forward_shape(geometry: Geometry) -> Shape:
    """[positions, O] of the operand [positions, C] and the weight [O, C]."""
    rows, outputs, channels = _extents(geometry)
    right = stored_transposed(channels, outputs)
    return _shape(rows, outputs, channels, stored_plain(rows, channels), right)


def input_gradient_shape(geometry: Geometry) -> Shape:
    """[positions, C] of the gradient [positions, O] and the weight [O, C]."""
    rows, outputs, channels = _extents(geometry)
    right = stored_plain(outputs, channels)
    return _shape(rows, channels, outputs, stored_plain(rows, outputs), right)


def weight_gradient_shape(geometry: Geometry) -> Shape:
    """[O, C] of the gradient [positions, O] and the operand [positions, C]."""
    rows, outputs, channels = _extents(geometry)
    left = stored_transposed(outputs, rows)
    return _shape(outputs, channels, rows, left, stored_plain(rows, channels))


def _shape(m: int, n: int, k: int, left: Matrix, right: Matrix) -> Shape:
    return Shape((), m, n, k, left, right, stored_plain(m, n))


def _extents(geometry: Geometry) -> tuple[int, int, int]:
    """The numbers of positions of all images, of outputs and of channels."""
    rows = geometry.operand[0]
    for extent in geometry.operand[2:]:
        rows *= extent
    return rows, geometry.weight[0], geometry.operand[1]
