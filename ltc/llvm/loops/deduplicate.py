"""Kernels that differ in nothing but their buffers are written once."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from ltc.ir.loop_nest import Kernel
from ltc.ir.loop_nest_key import form_of
from ltc.ir.node import Node
from ltc.llvm.emit.kernel_code import KernelCode
from ltc.llvm.loops.bounds_checks import faults_of
from ltc.llvm.loops.emitter import kernel_code


class EqualKernels:
    """The kernels of one program: an optimizer has one for each parameter, few of them different."""

    def __init__(self) -> None:
        self._codes: dict[Hashable, KernelCode] = {}

    def code(self, kernel: Kernel, streamed: frozenset[Node] = frozenset()) -> KernelCode:
        """As `kernel_code`; the text is that of an equal kernel where there was one."""
        form = form_of(kernel), tuple([node in streamed for node in kernel.writes()])
        code = self._codes.get(form)
        if code is None:
            code = self._codes[form] = kernel_code(kernel, streamed)
        return replace(code, nodes=(*kernel.reads(), *kernel.writes(), *faults_of(kernel)))
