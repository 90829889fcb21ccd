"""What LLVM says of this machine, kept on disk: a process whose kernels are compiled asks no LLVM.

Importing LLVM takes 40 to 90 ms, and makes eight thousand objects that Python's collector counts.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path

from ltc import config
from ltc.support.disk_cache import disk_cache
from ltc.support.version import VERSION

_PROCESSORS = Path("/proc/cpuinfo")
_FIRST_BYTES = 8192  # of them: more than the lines of one processor
# Of what that file says, what LLVM tells processors apart by; the rest differs from hour to hour.
_TELLING = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")


@dataclasses.dataclass(frozen=True)
class HostCpu:
    """
    triple    the kind of system
    cpu       the processor's name, "" where LLVM does not know it
    features  its instructions: +avx2,-avx512f
    llvm      the version of LLVM
    """

    triple: str
    cpu: str
    features: str
    llvm: str


def known_host(ask: Callable[[], HostCpu]) -> HostCpu:
    """What is on disk of this machine and this LLVM, else what `ask` gives."""
    name, disk = _name(), disk_cache()
    if name is None or disk is None:
        return ask()
    host = disk.read_as(name, lambda data: HostCpu(*map(str, json.loads(data))))
    if host is not None:
        return host
    host = ask()
    disk.write(name, json.dumps(dataclasses.astuple(host)).encode())
    return host


def is_known() -> bool:
    """Whether `known_host` has no need to ask, or always has."""
    name, disk = _name(), disk_cache()
    return name is None or (disk is not None and disk.read(name) is not None)


def _name() -> str | None:
    """Differs whenever LLVM may answer differently; None where that can not be told cheaply."""
    if platform.machine() != "x86_64":
        return None  # a processor whose cores differ: LLVM looks at all of them
    try:
        seen = [VERSION, config.value("LTC_ISA"), *_processor(), *_llvm_library()]
    except (OSError, ImportError):
        return None
    return hashlib.sha256("\0".join(["host", *seen]).encode()).hexdigest()


@functools.cache
def _processor() -> list[str]:
    with open(_PROCESSORS, encoding="utf-8") as file:
        first, _, _ = file.read(_FIRST_BYTES).partition("\n\n")
    lines = [line.partition(":") for line in first.splitlines()]
    return [value for key, _, value in lines if key.strip() in _TELLING]


@functools.cache
def _llvm_library() -> list[str]:
    """Which files llvmlite consists of, without importing it."""
    package = importlib.util.find_spec("llvmlite")
    if package is None or package.origin is None:
        raise ImportError("llvmlite")
    seen = []
    with os.scandir(Path(package.origin).parent / "binding") as entries:
        for entry in entries:
            if "llvmlite" in entry.name:
                status = entry.stat()
                seen.append(f"{entry.path} {status.st_size} {status.st_mtime_ns}")
    return sorted(seen)
