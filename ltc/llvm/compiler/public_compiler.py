"""A text to machine code by llvmlite's public functions alone, one thread after the other."""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

from ltc.errors import InvalidGraph
from ltc.support.observation import metrics


class PublicCompiler:
    """Compiles as `ObjectCompiler` of llvm_private.py does, whose place it takes."""

    def __init__(self, llvm: ModuleType, triple: str, machine: Any):
        """Prepare a compiler.

        Args:
            llvm: llvmlite.binding.
            triple: The kind of system.
            machine: The maker of code, which has no other user.
        """
        self._llvm, self._triple, self._machine = llvm, triple, machine

    def object_code(self, text: str) -> bytes:
        """The machine code of a module in LLVM's text form; raises InvalidGraph as `parsed`."""
        started = time.perf_counter_ns()
        code = self._machine.emit_object(parsed(self._llvm, text, self._triple, self._machine))
        metrics.count("llvm.compiled")
        metrics.count("llvm.compiled_in_turn")
        metrics.record("llvm.CompileTime", time.perf_counter_ns() - started, "time")
        return code


def parsed(llvm: ModuleType, text: str, triple: str, machine: Any) -> Any:
    """The module that a text defines; raises InvalidGraph with LLVM's message where it is wrong."""
    try:
        # A context of its own: beside another thread's module in the same one it would break.
        module = llvm.parse_assembly(text, llvm.create_context())
        module.triple = triple
        module.data_layout = str(machine.target_data)
        module.verify()
    except RuntimeError as error:
        raise InvalidGraph(f"LLVM refuses a generated kernel: {error}\n{text}") from None
    return module
