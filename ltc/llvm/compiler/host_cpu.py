"""LLVM's facts about this machine, kept on disk: a process whose kernels are compiled needs no
LLVM.

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
from ltc.errors import Unsupported
from ltc.support.disk_cache import disk_cache
from ltc.support.version import VERSION

_PROCESSORS = Path("/proc/cpuinfo")
_FIRST_BYTES = 8192  # of them: more than the lines of one processor
# Of what that file says, what LLVM tells processors apart by; the rest differs from hour to hour.
_TELLING = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")


@dataclasses.dataclass(frozen=True)
class HostCpu:
    """The kind of system, and LLVM's facts about its processor.

    Attributes:
        triple: The kind of system.
        cpu: The processor's name, "" where LLVM does not know it.
        features: Its instructions: +avx2,-avx512f.
        llvm: The version of LLVM.
    """

    triple: str
    cpu: str
    features: str
    llvm: str


def known_host(ask: Callable[[], HostCpu]) -> HostCpu:
    """Return the facts on disk of this machine and this LLVM, else the result of `ask`."""
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
    """Return True if `known_host` has no need to ask, or always has."""
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
    """Return the files of llvmlite, without importing it."""
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


# --- LTC_ISA: fewer instructions than this processor has, as a smaller one would be given --------

# Kernels for other processors are tested so, and machines that share a cache of kernels can agree
# on what all of them have. The levels are those of the System V ABI, AMD64 supplement, 3.1.1.

_V2 = (
    "cmov", "cx8", "fxsr", "mmx", "sse", "sse2", "cx16", "crc32", "popcnt", "sahf", "sse3", "ssse3",
    "sse4.1", "sse4.2",
)  # fmt: skip
_V3 = (*_V2, "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave")
_LEVELS = {"sse4": ("x86-64-v2", _V2), "avx2": ("x86-64-v3", _V3)}  # LLVM's names


def allowed(cpu: str, features: str) -> tuple[str, str]:
    """(processor, features) that LLVM is told of, where it says these of the machine.

    Raises Unsupported where the machine lacks what LTC_ISA asks for.
    """
    wanted = config.value("LTC_ISA")
    if wanted == "native":
        return cpu, features
    level, names = _LEVELS[wanted]
    there = features.split(",")
    if platform.machine() != "x86_64" or not all(f"+{name}" in there for name in names):
        raise Unsupported(
            f"LTC_ISA={wanted} needs instructions that this processor lacks ({level}). Unset it: "
            f"ltc then uses this processor's."
        )
    return level, ",".join(f"+{name}" for name in names)
