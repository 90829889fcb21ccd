"""Kernels by name: each text is compiled once, and loaded while some program uses it.

A kernel's name is that of its machine code on disk.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Mapping

from ltc.llvm.compiler import llvm_binding
from ltc.llvm.native import runner
from ltc.llvm.native.parallel_compile import Compiling
from ltc.support.disk_cache import DiskCache, disk_cache
from ltc.support.process.fork_safe_lock import renewed_lock
from ltc.support.progress import shown_if_slow

_FUNCTION = "@kernel"  # what the text of every kernel calls itself


class LoadedKernel:
    """A kernel in memory, as long as this object is held."""

    __slots__ = ("entry", "_library", "__weakref__")

    def __init__(self, entry: int, library: llvm_binding.Library):
        self.entry, self._library = entry, library


_loaded: weakref.WeakValueDictionary[str, LoadedKernel] = weakref.WeakValueDictionary()
_lock = renewed_lock(globals(), "_lock")


def kernel_name(text: str) -> str:
    """Names the machine code that this machine makes of a text."""
    return llvm_binding.name_of(text)


class Loading:
    """`with Loading() as loading:` the kernels of a program are loaded.

    They are compiled where no program of this process and no earlier process had them.  One thread
    loads at a time, so that another one finds what both need.
    """

    def __init__(self) -> None:
        self._compiling, self._started = Compiling(), time.monotonic()
        self._disk = disk_cache()
        self._found: dict[str, LoadedKernel] = {}
        self._objects: dict[str, llvm_binding.MachineCode] = {}
        self._begun: set[str] = set()

    def __enter__(self) -> Loading:
        self._held = _lock
        self._held.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._compiling.__exit__(*error)
        finally:
            self._held.release()

    def begin(self, text: str) -> None:
        """This kernel will be loaded: it may be compiled while the others are still unknown."""
        self._begin(kernel_name(text), text)

    def begin_runner(self) -> None:
        """What runs kernels is compiled beside them; whoever makes it finds it on disk."""
        if self._disk is None or runner.has_runner():
            return
        text = llvm_binding.marked(*runner.runner_source())
        name = llvm_binding.name_of(text)
        if self._disk.read(name) is None:
            self._compiling.begin(name, text)

    def load(self, texts: Mapping[str, str]) -> dict[str, LoadedKernel]:
        """The kernels by `kernel_name`, as their texts are given."""
        for name, text in texts.items():
            self._begin(name, text)
        self._finish()
        found = {name: kernel for name, kernel in self._found.items() if name in texts}
        return found | _link({name: self._objects[name] for name in texts if name not in found})

    def _finish(self) -> None:
        codes, total = self._compiling.finished(), self._compiling.begun
        for name, code in shown_if_slow(codes, total, "ltc compiles a program", self._started):
            self._objects[name] = llvm_binding.machine_code(code)
            if self._disk:
                self._disk.write(name, code)

    def _begin(self, name: str, text: str) -> None:
        if name in self._begun:
            return
        self._begun.add(name)
        if (kernel := _loaded.get(name)) is not None:
            self._found[name] = kernel
        elif self._disk and (found := _read(self._disk, name)) is not None:
            self._objects[name] = found
        else:
            self._compile(name, text)

    def _compile(self, name: str, text: str) -> None:
        self._compiling.begin(name, text.replace(_FUNCTION, f"@{_symbol(name)}"))


def load(texts: Mapping[str, str]) -> dict[str, LoadedKernel]:
    """The kernels by `kernel_name`, as their texts are given."""
    with Loading() as loading:
        return loading.load(texts)


def load_from_disk(names: Iterable[str]) -> dict[str, LoadedKernel] | None:
    """The kernels of these names, or None where some would have to be compiled."""
    disk = disk_cache()
    with _lock:
        found = _in_memory(names)
        objects: dict[str, llvm_binding.MachineCode] = {}
        for name in names:
            if name not in found:
                read = _read(disk, name) if disk else None
                if read is None:
                    return None
                objects[name] = read
        return found | _link(objects)


def _read(disk: DiskCache, name: str) -> llvm_binding.MachineCode | None:
    """A kernel's machine code; what defines no such kernel is removed as damaged."""
    return disk.read_as(name, lambda code: llvm_binding.machine_code(code, _entry(name)))


def _symbol(name: str) -> str:
    """The function's name in the machine code: kernels of one library are told apart."""
    return f"k{name[:32]}"


def _entry(name: str) -> str:
    return f"{_symbol(name)}.entry"


def _in_memory(names: Iterable[str]) -> dict[str, LoadedKernel]:
    found = {name: _loaded.get(name) for name in names}
    return {name: kernel for name, kernel in found.items() if kernel is not None}


def _link(objects: Mapping[str, llvm_binding.MachineCode]) -> dict[str, LoadedKernel]:
    """Load all as one library: it goes when none of its kernels is needed any more."""
    if not objects:
        return {}
    entries = {name: _entry(name) for name in objects}
    library = llvm_binding.link(list(objects.values()), list(entries.values()))
    made = {
        name: LoadedKernel(library.addresses[entry], library) for name, entry in entries.items()
    }
    _loaded.update(made)
    return made
