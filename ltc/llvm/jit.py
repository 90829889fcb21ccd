"""The only file that imports llvmlite.binding: text to machine code, looked up by name."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import hashlib
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ltc.debug import metrics
from ltc.errors import BackendMissing, InvalidGraph
from ltc.utils.disk_cache import disk_cache
from ltc.utils.version import VERSION
from ltc.utils.renewed_lock import renewed_lock

OPTIMIZATION = 2  # of code generation; no pass runs on the IR, which is written as it should run


@functools.cache
def _binding() -> ModuleType:
    """llvmlite.binding, imported when the first kernel is compiled: `import ltc` stays short."""
    try:
        import llvmlite.binding
    except ImportError as error:
        raise BackendMissing(
            f"The backend 'llvm' compiles with the package llvmlite, which Python can not import "
            f"here: {error}. Install it (pip install llvmlite), or set LTC_BACKEND=eager."
        ) from error
    return llvmlite.binding


class _Compiler:
    """What one process compiles with; made when first wanted."""

    def __init__(self) -> None:
        llvm = _binding()
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        self.triple = llvm.get_process_triple()
        self.cpu, self.features = _host(llvm)
        try:
            self.machine = self._machine()
        except RuntimeError as error:
            raise BackendMissing(
                f"LLVM can not make code for {self.triple}, processor {self.cpu or 'unknown'}: "
                f"{error}. Set LTC_BACKEND=eager."
            ) from error
        self.linker = llvm.create_lljit_compiler(self._machine())
        self.symbols = _library_symbols()
        self.loaded: list[Library] = []  # for the life of the process
        self.numbers = itertools.count()

    def _machine(self):
        llvm = _binding()
        target = llvm.Target.from_triple(self.triple)
        return target.create_target_machine(
            cpu=self.cpu, features=self.features, opt=OPTIMIZATION, reloc="pic",
            codemodel="jitdefault", jit=True,
        )  # fmt: skip

    def name_of(self, text: str) -> str:
        """Of the object code: equal where nothing differs that it depends on."""
        version = ".".join(map(str, _binding().llvm_version_info))
        settings = (VERSION, version, self.triple, self.cpu, self.features, str(OPTIMIZATION))
        return hashlib.sha256("\0".join([*settings, text]).encode()).hexdigest()

    def object_code(self, text: str) -> bytes:
        started = time.perf_counter_ns()
        code = self.machine.emit_object(self.module(text))
        metrics.count("llvm.compiled")
        metrics.record("llvm.CompileTime", time.perf_counter_ns() - started, "time")
        return code

    def module(self, text: str):
        """The module that a text defines; raises InvalidGraph where it is wrong."""
        try:
            module = _binding().parse_assembly(text)
            module.triple = self.triple
            module.data_layout = str(self.machine.target_data)
            module.verify()
        except RuntimeError as error:
            raise InvalidGraph(f"LLVM refuses a generated kernel: {error}\n{text}") from None
        return module

    def link(self, objects: Sequence[bytes], names: Sequence[str]) -> Library:
        library = _binding().JITLibraryBuilder()
        for code in objects:
            library.add_object_img(code)
        library.add_current_process()
        for name, address in self.symbols.items():
            library.import_symbol(name, address)
        for name in names:
            library.export_symbol(name)
        tracker = library.link(self.linker, f"ltc{next(self.numbers)}")
        return Library(tracker, {name: tracker[name] for name in names})


class Library(NamedTuple):
    """Code in memory: the addresses are valid as long as the tracker is held."""

    tracker: Any
    addresses: dict[str, int]


def _host(llvm: ModuleType) -> tuple[str, str]:
    """The name of this processor and its features; of one that LLVM does not know, none."""
    try:
        return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    except RuntimeError:
        return "", ""


_lock = renewed_lock(globals(), "_lock")

_compilers: list[_Compiler] = []


def compiler() -> _Compiler:
    with _lock:
        if not _compilers:
            _compilers.append(_Compiler())
        return _compilers[0]


def object_code(name: str, text: str) -> bytes:
    """The machine code of a module in LLVM's text form; kept on disk under `name`.

    Raises InvalidGraph with LLVM's message where the text is wrong.
    """
    disk = disk_cache()
    code = disk.read(name) if disk else None
    if code is None:
        with _lock:
            code = compiler().object_code(text)
        if disk:
            disk.write(name, code)
    return code


def link(objects: Sequence[bytes], names: Sequence[str]) -> Library:
    """Load machine code; the functions to be called are named."""
    with _lock:
        return compiler().link(objects, names)


def compile_kernels(text: str, *names: str) -> dict[str, int]:
    """The addresses of functions that a module defines: valid as long as the process lives.

    Raises InvalidGraph with LLVM's message where the text is wrong.
    """
    # A program keeps the same text on disk with its function renamed: another text, another name.
    text = f"; {' '.join(names)}\n{text}"
    library = link([object_code(compiler().name_of(text), text)], names)
    compiler().loaded.append(library)
    return library.addresses


def assembly(text: str) -> str:
    """The instructions that a module in LLVM's text form becomes."""
    with _lock:
        return compiler().machine.emit_assembly(compiler().module(text))


def has_feature(name: str) -> bool:
    """Whether kernels may use instructions of that set, as LLVM calls it: avx512f."""
    return f"+{name}" in compiler().features.split(",")


def has_symbol(name: str) -> bool:
    return name in compiler().symbols


# Rare functions of the C library, called lane by lane, by their double names.
MATH_NAMES = (
    "exp", "exp2", "expm1", "log", "log1p", "log2", "log10", "sin", "cos", "tan", "asin", "acos",
    "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "lgamma", "pow",
    "atan2", "hypot", "fmod", "nextafter", "nextafterf",
)  # fmt: skip
THREAD_NAMES = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
SHIM_NAMES = (
    "torch_call_dispatcher", "aoti_torch_create_tensor_from_blob", "aoti_torch_copy_",
    "aoti_torch_delete_tensor_object", "torch_new_string_handle",
)  # fmt: skip


def _library_symbols() -> dict[str, int]:
    found: dict[str, int] = {}
    mathematics = ctypes.util.find_library("m")
    if mathematics:
        found.update(_addresses(ctypes.CDLL(mathematics), MATH_NAMES))
    # The pool that torch itself uses: a second one would fight with it for the cores.
    for path in sorted(Path(torch.__file__).parent.glob("lib/libgomp*")):
        found.update(_addresses(ctypes.CDLL(str(path)), THREAD_NAMES))
    for path in sorted(Path(torch.__file__).parent.glob("lib/libtorch_cpu.*")):
        found.update(_addresses(ctypes.CDLL(str(path)), SHIM_NAMES))
    return found


def _addresses(library: ctypes.CDLL, names: tuple[str, ...]) -> dict[str, int]:
    return {
        name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        for name in names
        if hasattr(library, name)
    }
