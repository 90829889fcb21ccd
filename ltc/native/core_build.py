"""The core is built: by the machine's C++ compiler, against the torch that is installed.

What is built is kept in the cache on disk, under all that it depends on.  It is kept once a process of
its own has used it and come to the right numbers; a build that failed is kept as well, by what it said,
so that only `python -m ltc build` tries it again until something has changed.  A wheel that `scripts/wheels`
has made brings cores along, each for one build of torch.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ltc import config
from ltc.support.disk_cache import DiskCache, cache_of, disk_cache

SOURCES = Path(__file__).parent / "csrc"
BROUGHT = Path(__file__).parent / "built"  # where a wheel has the cores that it brings along
TRIED = "LTC_NATIVE_TRIED"  # names a library that a process is to try
MOST_BEGUN = (
    3  # builds behind programs of which none came to its end; then no program begins another one
)
_FLAGS = (
    "-std=c++20", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared",
    "-fvisibility=hidden", "-x", "c++",
)  # fmt: skip
_COMPILERS = ("g++", "clang++", "c++")
_LIBRARIES = ("-ltorch_cpu", "-lc10")
_MOST_SAID = 2000  # characters that a compiler's complaint is cut to
_LOCK = "native-core.lock"
_LIBRARY, _FAILURE, _BEGUN = b"L", b"F", b"B"  # the first byte of what is kept


class CannotBuild(Exception):
    """The core cannot be built here; the text says why."""


@dataclass(frozen=True)
class Built:
    """The outcome of a build, as the cache has it.

    library  the shared library; empty where there is none
    failure  why there is none; empty where there is one
    """

    library: bytes = b""
    failure: str = ""


def found() -> Built | None:
    """Return what was built for this torch and compiler, else what the package has brought along.

    None if there is neither.
    """
    kind, content = _record(kept_in())
    if kind == _LIBRARY:
        return Built(content)
    if (brought := _brought()) is not None:
        return Built(brought.read_bytes())
    if kind == _FAILURE:
        return Built(failure=content.decode())
    if kind == _BEGUN and int(content) >= MOST_BEGUN:
        return Built(failure=f"{MOST_BEGUN} builds were ended before they had come to an end")
    return None


def why_none() -> str:
    """Return why nothing is built, where `found` returns None."""
    if kept_in() is None:
        return "LTC_CACHE is 0, and LTC_NATIVE_DIR names no folder"
    return no_compiler() or (
        "it is not built yet: a program that runs for some seconds has it built for the next one, and "
        "python -m ltc build builds it at once"
    )


def no_compiler() -> str:
    """Return that there is no compiler; "" if there is one."""
    if compiler() is not None:
        return ""
    chosen = config.value("CXX")
    names = (
        f"CXX names {chosen}, which is not there" if chosen else f"none of {', '.join(_COMPILERS)}"
    )
    return f"no C++ compiler was found: {names}"


def build() -> Built:
    """Build the core unless it is there and can be used, try it in a process of its own, and keep the outcome.

    It waits for another process that does so.

    Raises:
        CannotBuild: there is no compiler, or no cache to keep it in.
    """
    disk = kept_in()
    if disk is None:
        raise CannotBuild("nothing is kept on disk: LTC_CACHE is 0")
    with _told(disk):
        lock = disk.lock(_LOCK, wait=True)
    if lock is None:
        raise CannotBuild(f"nothing can be kept in {disk.folder}")
    try:
        built, brought = found(), _brought()
        if brought is not None and _record(disk)[0] != _LIBRARY and _tried(brought):
            return _build(disk)
        return built if built is not None and built.library else _build(disk)
    finally:
        os.close(lock)


def bring_along(folder: Path) -> None:
    """Put the core of this torch, built if need be, where a package with that folder brings it along."""
    (folder / _name(without_compiler=True)).write_bytes(build().library)


def build_behind(start: Callable[[int, dict[str, str]], object]) -> None:
    """Have another process build it, unless one does, or has.

    Args:
        start: Starts a process that calls `build_as_asked`, and is given the lock's descriptor and
            these variables: it may be in another folder.
    """
    disk, found_compiler = kept_in(), compiler()
    if disk is None or found_compiler is None:
        return
    lock = disk.lock(_LOCK, wait=False)
    if lock is None:
        return
    try:
        if found() is None:
            start(lock, {"LTC_NATIVE_DIR": str(disk.folder.absolute()), "CXX": found_compiler})
    finally:
        os.close(lock)  # that process has a copy


def build_as_asked() -> None:
    """Build the core in a process that `build_behind` has started."""
    disk = kept_in()
    if disk is not None:
        _build(disk)


def _build(disk: DiskCache) -> Built:
    if no_compiler():
        raise CannotBuild(no_compiler())
    _note_begun(disk)
    with tempfile.TemporaryDirectory(prefix="ltc-native-") as folder:
        library = Path(folder) / "core.so"
        failure = compiled(library) or _tried(library)
        built = Built(failure=failure) if failure else Built(library.read_bytes())
    with _told(disk):
        _keep(disk, built)
    return built


def _note_begun(disk: DiskCache) -> None:
    """Note that a build has begun: a disk that has no room for that has none for a library."""
    kind, content = _record(disk)
    begun = int(content) + 1 if kind == _BEGUN else 1
    with _told(disk):
        is_kept = disk.write(_name(), _BEGUN + b"%d" % begun)
    if not is_kept:
        raise CannotBuild(f"nothing can be kept in {disk.folder}")


def kept_in() -> DiskCache | None:
    """Return where the core is kept: LTC_NATIVE_DIR, else where programs are; None if nowhere."""
    folder = config.value("LTC_NATIVE_DIR")
    return cache_of(Path(folder).expanduser()) if folder else disk_cache()


def compiler() -> str | None:
    """Return the path of the C++ compiler: the one that CXX names, else the first that there is."""
    chosen = config.value("CXX")
    names = (chosen,) if chosen else _COMPILERS
    found = next((path for name in names if (path := shutil.which(name))), None)
    return found and os.path.abspath(found)


@contextmanager
def _told(disk: DiskCache) -> Iterator[None]:
    """Raise CannotBuild for what the cache warns of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "ltc's cache")
        try:
            yield
        except UserWarning as told:
            raise CannotBuild(f"the native core cannot be kept: {told}") from None


def _record(disk: DiskCache | None) -> tuple[bytes, bytes]:
    """Return what is kept: its kind, and the rest; twice b"" for nothing."""
    record = b"" if disk is None else disk.read(_name()) or b""
    return record[:1], record[1:]


def _keep(disk: DiskCache, built: Built) -> None:
    if built.failure:
        disk.write(_name(), _FAILURE + built.failure.encode())
        return
    for name in {_name(), _name(without_compiler=True)}:
        disk.write(name, _LIBRARY + built.library)


def compiled(library: Path, flags: Sequence[str] = ()) -> str:
    """Compile the sources as one file; return what the compiler complained of, or "".

    Args:
        flags: More of the compiler's.
    """
    root = Path(torch.__file__).parent
    unit = "".join(f'#include "{file}"\n' for file in sorted(SOURCES.glob("*.cpp")))
    command = [
        str(compiler()), *_FLAGS, *flags, "-", "-o", str(library), f"-I{SOURCES}", f"-I{root / 'include'}",
        f"-I{root / 'include/torch/csrc/api/include'}", "-x", "none", f"-L{root / 'lib'}", *_LIBRARIES,
        f"-Wl,-rpath,{root / 'lib'}",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, input=unit, capture_output=True, text=True)
    except OSError as error:
        return f"{command[0]} cannot be run: {error}"
    if not done.returncode:
        return ""
    line = done.stderr.rfind("\n", 0, max(0, done.stderr.find("error:"))) + 1  # of the first error
    return f"{command[0]} failed:\n{done.stderr[line:][:_MOST_SAID]}"


def _brought() -> Path | None:
    """Return the core for this torch that came with the package; None if none did."""
    file = BROUGHT / _name(without_compiler=True) if BROUGHT.is_dir() else None
    return file if file is not None and file.exists() else None


def _tried(library: Path) -> str:
    """Use the library in a process of its own; return what went wrong, or ""."""
    environment = config.environment_without_settings()
    environment |= {TRIED: str(library), "LTC_TIER": "op_by_op", "OMP_NUM_THREADS": "1"}
    folders = [str(Path(__file__).parents[2]), *sys.path]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    done = subprocess.run(
        [sys.executable, "-m", "ltc.debug.native_self_test"],
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode == 0:
        return ""
    said = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
    ended = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
    return f"the self-test ended with {ended}: {said[0][:_MOST_SAID]}"


def _name(without_compiler: bool = False) -> str:
    """The name in the cache: it says all that the library depends on.

    Args:
        without_compiler: True for the name under which a machine looks that has no compiler: an image
            may have been made on one that has.
    """
    return _digest("" if without_compiler else _compiler_text())


@functools.cache
def _digest(compiler_text: str) -> str:
    parts = [
        torch.__version__,
        str(torch.version.git_version),
        *_FLAGS,
        *_LIBRARIES,
        compiler_text,
    ]
    parts += [f"{file.name}\n{file.read_text()}" for file in sorted(SOURCES.iterdir())]
    return hashlib.sha256(json.dumps(["native core", *parts]).encode()).hexdigest()


def _compiler_text() -> str:
    """The compiler's path, size and time of change: to ask for its version takes a process."""
    path = compiler()
    if path is None:
        return ""
    status = os.stat(path)
    return f"{path} {status.st_size} {status.st_mtime_ns}"
