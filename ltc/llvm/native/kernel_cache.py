"""Kernels by name: each text is compiled once, and loaded while some program uses it.

A kernel's name is that of its machine code on disk.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from tqdm.auto import tqdm

from ltc import config
from ltc.llvm.compiler import llvm_binding
from ltc.llvm.compiler.llvm_private import ObjectCompiler
from ltc.llvm.compiler.public_compiler import PublicCompiler
from ltc.llvm.native import runner
from ltc.llvm.native.runner import thread_count
from ltc.support.disk_cache import DiskCache, disk_cache
from ltc.support.process.fork_safe_lock import renewed_lock

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
        """Begin to compile the runner of kernels beside them; its maker then finds it on disk."""
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
    return disk.read_as(name, lambda code: llvm_binding.machine_code(code, _symbol(name)))


def _symbol(name: str) -> str:
    """The function's name in the machine code: kernels of one library are told apart."""
    return f"k{name[:32]}"


def _in_memory(names: Iterable[str]) -> dict[str, LoadedKernel]:
    found = {name: _loaded.get(name) for name in names}
    return {name: kernel for name, kernel in found.items() if kernel is not None}


def _link(objects: Mapping[str, llvm_binding.MachineCode]) -> dict[str, LoadedKernel]:
    """Load all as one library: it goes when none of its kernels is needed any more."""
    if not objects:
        return {}
    entries = {name: _symbol(name) for name in objects}
    library = llvm_binding.link(list(objects.values()), list(entries.values()))
    made = {
        name: LoadedKernel(library.addresses[entry], library) for name, entry in entries.items()
    }
    _loaded.update(made)
    return made


# --- A line of progress, where somebody looks on and has to wait ---------------------------------

T = TypeVar("T")
PATIENCE_SECONDS = 2.0  # nothing is shown of what is over sooner


def _is_watched() -> bool:
    """Return True if the thread that a user waits for runs on a terminal or in a notebook."""
    if (
        not config.value("LTC_PROGRESS")
        or threading.current_thread() is not threading.main_thread()
    ):
        return False
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def shown_if_slow(items: Iterable[T], total: int, what: str, started: float) -> Iterator[T]:
    """The items, as they come; what has come of `total` is shown once it takes long.

    Args:
        started: Time.monotonic() when the wait began.
    """
    if (
        not _is_watched()
    ):  # a tqdm, even a silent one, takes a lock that all forks of a process share
        yield from items
        return
    bar = None
    try:
        for done, item in enumerate(items, 1):
            if bar is not None:
                bar.update()
            elif time.monotonic() - started > PATIENCE_SECONDS:
                bar = tqdm(desc=what, total=total, initial=done, unit=" kernels", leave=False)
            yield item
    finally:
        if bar is not None:
            bar.close()


# --- Kernels compiled side by side: by the thread that wants them, and by helpers beside it ------

# LLVM compiles a text in one thread. A network has a hundred texts, and while the first are
# compiled the others are still being written.

MOST_HELPERS = 7  # more would wait for one another: Python has a little to do for each kernel


class Compiling:
    """`with Compiling() as compiling:` texts are given, then taken as machine code.

    No helper is left when the block ends; what none has begun by then is not compiled.

    Attributes:
        begun: Number of texts that were given.
    """

    def __init__(self) -> None:
        self.begun = 0
        self._changed = threading.Condition()  # guards all that follows
        self._waiting: list[tuple[str, str]] = []
        self._running = 0
        self._codes: list[tuple[str, bytes]] = []
        self._error: Exception | None = None
        self._is_closed = False
        self._helpers: list[threading.Thread] = []

    def __enter__(self) -> Compiling:
        return self

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for helper in self._helpers:
            helper.join()

    def begin(self, name: str, text: str) -> None:
        """Have a text compiled, now or by `finished`."""
        self.begun += 1
        with self._changed:
            self._waiting.append((name, text))
            self._changed.notify()
        if len(self._helpers) < min(thread_count() - 1, MOST_HELPERS):
            self._add_helper()

    def finished(self) -> Iterator[tuple[str, bytes]]:
        """(name, machine code) of everything begun, as it comes; this thread compiles as well.

        Raises what went wrong with a text.
        """
        emitter = None
        while True:
            with self._changed:
                codes, self._codes = self._codes, []
                error, job = self._error, self._taken()
            yield from codes
            if error is not None:
                raise error
            if job is not None:
                emitter = emitter or llvm_binding.emitter()
                self._compile(emitter, *job)
            elif not self._is_more_to_come():
                return

    def _is_more_to_come(self) -> bool:
        """Return True if a helper has finished anything else, once one has or all are idle."""
        with self._changed:
            self._changed.wait_for(lambda: self._codes or self._error or not self._running)
            return bool(self._codes or self._error)

    def _add_helper(self) -> None:
        helper = threading.Thread(
            target=self._help, args=(llvm_binding.emitter(),), name="ltc compiling"
        )
        try:
            helper.start()
        except RuntimeError:
            return  # the system has no thread left, or Python is ending: `finished` does it all
        self._helpers.append(helper)

    def _help(self, emitter: ObjectCompiler | PublicCompiler) -> None:
        while (job := self._next()) is not None:
            self._compile(emitter, *job)

    def _next(self) -> tuple[str, str] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            return None if self._is_closed else self._taken()

    def _taken(self) -> tuple[str, str] | None:
        """The longest text that waits, so that none is left to one thread at the end."""
        if not self._waiting:
            return None
        job = max(self._waiting, key=lambda job: len(job[1]))
        self._waiting.remove(job)
        self._running += 1
        return job

    def _compile(self, emitter: ObjectCompiler | PublicCompiler, name: str, text: str) -> None:
        code, error = None, None
        try:
            code = emitter.object_code(text)
        except Exception as raised:
            error = raised
        finally:
            with self._changed:
                self._running -= 1
                self._error = self._error or error
                if code is not None:
                    self._codes.append((name, code))
                self._changed.notify_all()
