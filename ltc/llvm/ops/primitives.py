"""The primitives that are neither loops nor products, and the kernels of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ltc.ir import ops
from ltc.ir.loop_nest import Product
from ltc.ir.node import Node
from ltc.ir.one_shot import is_one_shot
from ltc.ir.ops import Op
from ltc.llvm.emit.kernel_code import KernelCode
from ltc.llvm.ops.arg_reduce import arg_reduce_codes, can_arg_reduce
from ltc.llvm.ops.one_shot_sync import publish_codes, wait_codes
from ltc.llvm.ops.scan import can_scan, scan_codes
from ltc.llvm.ops.scatter import can_scatter, scatter_codes
from ltc.llvm.ops.torch_c_abi import call_codes, can_call


@dataclass(frozen=True)
class Row:
    """One primitive.

    supports  whether there are kernels for a node
    codes     the kernels of a product without epilogue whose operands are contiguous
    """

    supports: Callable[[Node], bool]
    codes: Callable[[Product], list[KernelCode]]


PRIMITIVES: dict[Op, Row] = {
    ops.PUT: Row(can_scatter, scatter_codes),
    ops.SCATTER: Row(can_scatter, scatter_codes),
    ops.CUMSUM: Row(can_scan, scan_codes),
    ops.CUMPROD: Row(can_scan, scan_codes),
    ops.ARGMAX: Row(can_arg_reduce, arg_reduce_codes),
    ops.ARGMIN: Row(can_arg_reduce, arg_reduce_codes),
    ops.EXTERN: Row(can_call, call_codes),
    ops.COLLECTIVE_START: Row(is_one_shot, publish_codes),
    ops.COLLECTIVE_WAIT: Row(is_one_shot, wait_codes),
}
