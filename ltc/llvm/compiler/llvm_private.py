"""A text to machine code while other threads do the same, each in a context of its own.

llvmlite takes one lock for each of its calls, however long, and gives Python's away in all of them.
So its functions are called by their own names: what takes long without either lock, and what is
over at once without letting go of Python's, for which a thread would wait up to 5 ms each time.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from ltc.errors import InvalidGraph, Unsupported
from ltc.support.observation import metrics

# By name, without LLVMPY_ in front: how many arguments it takes.
_LONG = {
    "ParseAssembly": 3,
    "TargetMachineEmitToMemory": 4,
    "DisposeModule": 1,
    "ContextDispose": 1,
}
_SHORT = {
    "ContextCreate": 0, "SetTarget": 2, "SetDataLayout": 2, "VerifyModule": 2, "GetBufferStart": 1,
    "GetBufferSize": 1, "DisposeMemoryBuffer": 1, "DisposeString": 1,
}  # fmt: skip
_AS_OBJECT = 1  # rather than as text


class ObjectCompiler:
    """Compiles one text at a time."""

    def __init__(self, llvm: ModuleType, triple: str, machine: Any):
        """Prepare a compiler.

        Args:
            llvm: llvmlite.binding.
            triple: The kind of system.
            machine: The maker of code, which has no other user.
        """
        self._call, self._machine = functions_of(llvm), machine
        self._triple, self._layout = triple.encode(), str(machine.target_data).encode()

    def object_code(self, text: str) -> bytes:
        """The machine code of a module in LLVM's text form.

        Raises InvalidGraph with LLVM's message where the text is wrong.
        """
        started = time.perf_counter_ns()
        context = self._call["ContextCreate"]()
        try:
            with self._module(context, text) as module:
                code = self._emitted(module)
        except RuntimeError as error:
            raise InvalidGraph(f"LLVM refuses a generated kernel: {error}\n{text}") from None
        finally:
            self._call["ContextDispose"](context)
        metrics.count("llvm.compiled")
        metrics.record("llvm.CompileTime", time.perf_counter_ns() - started, "time")
        return code

    @contextlib.contextmanager
    def _module(self, context: Any, text: str) -> Iterator[Any]:
        module = self._checked("ParseAssembly", context, text.encode())
        try:
            self._call["SetTarget"](module, self._triple)
            self._call["SetDataLayout"](module, self._layout)
            self._checked("VerifyModule", module, fails=bool)
            yield module
        finally:
            self._call["DisposeModule"](module)

    def _emitted(self, module: Any) -> bytes:
        call = self._call
        buffer = self._checked("TargetMachineEmitToMemory", self._machine, module, _AS_OBJECT)
        try:
            return ctypes.string_at(call["GetBufferStart"](buffer), call["GetBufferSize"](buffer))
        finally:
            call["DisposeMemoryBuffer"](buffer)

    def _checked(self, name: str, *arguments: Any, fails: Callable[[Any], bool] = lambda x: not x):
        """Call a function that may leave a message; return its result, or raise RuntimeError if it
        failed.
        """
        message = ctypes.c_char_p()
        try:
            result = self._call[name](*arguments, ctypes.byref(message))
            if fails(result):
                raise RuntimeError((message.value or b"").decode(errors="replace"))
            return result
        finally:
            if message:
                self._call["DisposeString"](message)


@functools.cache
def functions_of(llvm: ModuleType) -> dict[str, Callable]:
    """LLVM's functions by name, with the types that llvmlite knows of them.

    Raises Unsupported where this llvmlite lacks one, or hands it other arguments.
    """
    try:
        known = llvm.ffi.lib
        free, holding = ctypes.CDLL(known._name), ctypes.PyDLL(known._name)
    except AttributeError as error:
        raise Unsupported(f"the library of llvmlite cannot be found: {error}") from error
    found = {}
    for arguments, library in ((_LONG, free), (_SHORT, holding)):
        for name, count in arguments.items():
            found[name] = _typed(known, library, f"LLVMPY_{name}", count)
    return found


def _typed(known: Any, library: ctypes.CDLL, name: str, count: int) -> Callable:
    try:
        typed, function = getattr(known, name), library[name]
    except AttributeError as error:
        raise Unsupported(f"llvmlite has no function {name}: {error}") from error
    if typed.argtypes is not None and len(typed.argtypes) != count:
        raise Unsupported(f"{name} takes {len(typed.argtypes)} arguments where {count} are known")
    function.argtypes, function.restype = typed.argtypes, typed.restype
    return function
