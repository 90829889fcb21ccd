"""The only file that imports llvmlite.binding: text to machine code, looked up by name."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import itertools
import logging
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from types import ModuleType
from typing import Any, NamedTuple

from ltc.errors import BackendMissing, Unsupported
from ltc.llvm.compiler import host_cpu, object_loader, symbols
from ltc.llvm.compiler.host_cpu import HostCpu, allowed, known_host
from ltc.llvm.compiler.llvm_private import ObjectCompiler, functions_of
from ltc.llvm.compiler.public_compiler import PublicCompiler, parsed
from ltc.support.disk_cache import disk_cache
from ltc.support.observation import metrics
from ltc.support.process import purpose
from ltc.support.process.fork_safe_lock import renewed_lock
from ltc.support.version import VERSION

_log = logging.getLogger("ltc")

# Of code generation; no pass runs on the IR, which is written as it should run. The next level, which orders
# instructions once more after registers are given, makes no kernel faster, and takes a tenth longer.
OPTIMIZATION = 1


@functools.cache
def _binding() -> ModuleType:
    """llvmlite.binding, imported when the first kernel is compiled: `import ltc` stays short."""
    try:
        import llvmlite.binding  # noqa: PLC0415
    except ImportError as error:
        raise BackendMissing(
            f"The backend 'llvm' compiles with the package llvmlite, which Python cannot import "
            f"here: {error}. Install it (pip install llvmlite), or set LTC_BACKEND=eager."
        ) from error
    return llvmlite.binding


@functools.cache
def _leave_addresses_as_written() -> None:
    """Have LLVM leave out strength reduction of loops, a fifth of its time, in the whole process.

    It writes the addresses in loops anew. Kernels are as fast without, and have the same bits. Other users of
    LLVM, such as numba, may need it: so a process that runs anything else keeps it.
    """
    _binding().set_option("ltc", "-disable-lsr")


@functools.cache
def _has_private_names() -> bool:
    """Return True if kernels can be compiled side by side; warn once if they cannot."""
    try:
        functions_of(_binding())
    except Unsupported as error:
        _log.warning(
            "kernels are compiled one at a time, which makes first steps slower: ltc does not know "
            "the internals of llvmlite %s (%s). Install one of the versions that ltc requires.",
            _llvmlite_version(),
            error,
        )
        return False
    return True


def _llvmlite_version() -> str:
    try:
        return metadata.version("llvmlite")
    except metadata.PackageNotFoundError:  # it is there without having been installed
        return "of an unknown version"


class _Compiler:
    """The compiler of a process, and its loader where no other is known; made when first wanted."""

    def __init__(self) -> None:
        llvm = _binding()
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        self.triple = llvm.get_process_triple()
        self.cpu, self.features = allowed(*_host(llvm))
        try:
            self.machine = self._machine()
        except RuntimeError as error:
            raise BackendMissing(
                f"LLVM cannot make code for {self.triple}, processor {self.cpu or 'unknown'}: "
                f"{error}. Set LTC_BACKEND=eager."
            ) from error
        self._emitter = self.emitter()
        self.linker = llvm.create_lljit_compiler(self._machine())
        self.numbers = itertools.count()

    def emitter(self) -> ObjectCompiler | PublicCompiler:
        """Return a compiler for one thread, beside others if this llvmlite allows it."""
        kind = ObjectCompiler if _has_private_names() else PublicCompiler
        if purpose.only_compiles and _has_private_names():  # else LLVM may not know the option
            _leave_addresses_as_written()
        return kind(_binding(), self.triple, self._machine())

    def _machine(self):
        llvm = _binding()
        target = llvm.Target.from_triple(self.triple)
        return target.create_target_machine(
            cpu=self.cpu, features=self.features, opt=OPTIMIZATION, reloc="pic",
            codemodel="jitdefault", jit=True,
        )  # fmt: skip

    def object_code(self, text: str) -> bytes:
        return self._emitter.object_code(text)

    def module(self, text: str):
        """The module that a text defines; raises InvalidGraph where it is wrong."""
        return parsed(_binding(), text, self.triple, self.machine)

    def link(self, objects: Sequence[bytes], names: Sequence[str]) -> Library:
        library = _binding().JITLibraryBuilder()
        for code in objects:
            library.add_object_img(code)
        library.add_current_process()
        for name, address in symbols.chosen().items():
            library.import_symbol(name, address)
        for name in names:
            library.export_symbol(name)
        tracker = library.link(self.linker, f"ltc{next(self.numbers)}")
        return Library((tracker, self.linker), {name: tracker[name] for name in names})


class Library(NamedTuple):
    """Code in memory: the addresses are valid as long as what keeps it there is held."""

    kept_by: Any
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


def emitter() -> ObjectCompiler | PublicCompiler:
    """Return the compiler of kernels in the calling thread."""
    return compiler().emitter()


@functools.cache
def host() -> HostCpu:
    """Return LLVM's facts about this machine."""
    return known_host(_asked)


def may_have_compiled() -> bool:
    """Return True if some process may have compiled on this machine, by a quick look.

    Where none has, there is no need to import LLVM before something is compiled.
    """
    return bool(_compilers or host.cache_info().currsize) or host_cpu.is_known()


def _asked() -> HostCpu:
    made = compiler()
    version = ".".join(map(str, _binding().llvm_version_info))
    return HostCpu(made.triple, made.cpu, made.features, version)


def name_of(text: str) -> str:
    """Return a name for the object code: equal if nothing that it depends on differs."""
    settings = (VERSION, *dataclasses.astuple(host()), str(OPTIMIZATION))
    return hashlib.sha256("\0".join([*settings, text]).encode()).hexdigest()


class MachineCode(NamedTuple):
    """An object file, and what ltc's own loader has read of it; None where LLVM is to load it."""

    code: bytes
    parsed: object_loader.Object | None


def machine_code(code: bytes, *names: str) -> MachineCode:
    """An object file that defines these functions; raises ValueError, or what reading it meets."""
    try:
        parsed = object_loader.Object(code)
    except object_loader.UnknownObject:
        _require_object(code)
        return MachineCode(code, None)
    except Unsupported:  # LLVM knows all kinds
        return MachineCode(code, None)
    if not parsed.names().issuperset(names):
        raise ValueError(f"Machine code without {' or '.join(names)}.")
    return MachineCode(code, parsed)


def _require_object(code: bytes) -> None:
    """Raises ValueError where LLVM makes no such files here."""
    if sys.platform == "linux" and platform.machine() == "x86_64":
        raise ValueError("No object file of this kind of processor.")
    try:
        _binding().ObjectFileRef.from_data(code)
    except RuntimeError as error:
        raise ValueError(f"No object file: {error}") from None


def object_code(name: str, text: str, names: Sequence[str]) -> MachineCode:
    """The machine code of a module in LLVM's text form; kept on disk under `name`.

    Raises InvalidGraph with LLVM's message where the text is wrong.

    Args:
        names: The names of its functions.
    """
    disk = disk_cache()
    found = disk.read_as(name, lambda code: machine_code(code, *names)) if disk else None
    if found is not None:
        return found
    with _lock:
        code = compiler().object_code(text)
    if disk is not None:
        disk.write(name, code)
    return machine_code(code, *names)


def link(objects: Sequence[MachineCode], names: Sequence[str]) -> Library:
    """Load machine code; the functions to be called are named.

    Raises:
        CodeRefused: If the system lets no memory become code.
    """
    parsed = [found for _, found in objects if found is not None]
    if len(parsed) == len(objects):
        with contextlib.suppress(Unsupported):  # what it calls is in no library
            return Library(*object_loader.load(parsed, names, symbols.address_of))
    metrics.count("llvm.linked")
    with _lock:
        return compiler().link([code for code, _ in objects], names)


# Held by no module alone, and never freed: threads may run in that code until the process is gone.
_kept: list[Library] = []
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept))


def marked(text: str, names: Sequence[str]) -> str:
    """The text that `compile_kernels` keeps.

    A program keeps the same text on disk with its function renamed: another text, another name.
    """
    return f"; {' '.join(names)}\n{text}"


def compile_kernels(text: str, *names: str) -> dict[str, int]:
    """Return the addresses of functions that a module defines: valid as long as the process lives.

    Their machine code is on disk from then on.

    Raises:
        InvalidGraph: The text is wrong; the error has LLVM's message.
    """
    text = marked(text, names)
    library = link([object_code(name_of(text), text, names)], names)
    _kept.append(library)
    return library.addresses


def assembly(text: str) -> str:
    """The instructions that a module in LLVM's text form becomes."""
    with _lock:
        return compiler().machine.emit_assembly(compiler().module(text))


def has_feature(name: str) -> bool:
    """Return True if kernels may use instructions of that set, as LLVM calls it: avx512f."""
    return f"+{name}" in host().features.split(",")
