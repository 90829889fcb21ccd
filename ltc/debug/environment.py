"""The machine and the libraries that ltc uses, as text: `python -m ltc info`, and fault reports."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch

from ltc import config
from ltc.device.recording.recorder import devices
from ltc.native.core import CORE, WHY_NOT
from ltc.runtime.transfers import backend, capabilities
from ltc.support.disk_cache import disk_cache
from ltc.support.folder_safety import danger
from ltc.support.process import processors
from ltc.support.version import VERSION

_MEGABYTE = 1 << 20


def describe() -> str:
    """Return a line for each fact; the last one says if a program runs.

    Example:
        >>> from ltc.debug import environment
        >>> environment.describe().splitlines()[0].split()[:2]
        ['ltc', '0.1.0']
    """
    width = 12
    return "\n".join(f"{name:{width}} {text}" for name, text in _facts())


def _facts() -> Iterator[tuple[str, str]]:
    yield "ltc", f"{VERSION}, in {Path(config.__file__).parent}"
    yield "torch", torch.__version__
    yield "Python", f"{platform.python_version()}, {platform.platform()}"
    for package in ("llvmlite", "numpy"):
        yield package, _version(package)
    yield "devices", ", ".join(map(str, devices()))
    yield "backend", _backend()
    yield "processor", _processor()
    yield (
        "processors",
        f"{processors.count()} of {os.cpu_count()}; {torch.get_num_threads()} threads",
    )
    yield "cache", describe_cache()
    yield "native core", "used" if CORE is not None else f"none: {WHY_NOT.splitlines()[0]}"
    for flag, variable, text in config.found_in_environment():
        yield "variable", f"{flag}={text}" + ("" if flag == variable else f", by {variable}")
    for name, nearest in config.unknown_variables():
        yield (
            "unknown",
            f"{name}, which ltc does not read" + (f"; did you mean {nearest}?" if nearest else ""),
        )
    yield "a program", _trial()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _backend() -> str:
    asked = config.value("LTC_BACKEND")
    try:
        made = backend().name
    except Exception as error:  # the report shows the reason
        return f"{asked}: {error}"
    return asked if made == asked else f"{made}, in place of {asked}"


def _processor() -> str:
    try:
        describe = capabilities().describe
        return platform.machine() if describe is None else describe()
    except Exception as error:  # the report shows the reason
        return f"{type(error).__name__}: {error}"


def describe_cache() -> str:
    """Describe where compiled programs are kept on disk, and how much; or why they are not.

    Example:
        >>> from ltc.debug import environment
        >>> print(environment.describe_cache())  # doctest: +SKIP
        /home/you/.cache/ltc: 85 files, 4.1 of at most 1024 MB
    """
    cache = disk_cache()
    if cache is None:
        return "none: LTC_CACHE=0"
    try:
        reason = danger(cache.folder)
    except OSError:
        return f"{cache.folder}, which does not exist yet"
    if reason is not None:
        return f"not used: {reason}"
    files, nbytes = cache.count()
    most = config.value("LTC_CACHE_MB")
    return f"{cache.folder}: {files} files, {nbytes / _MEGABYTE:.1f} of at most {most} MB"


def _trial() -> str:
    """Run one program from its first call to its value, and return a verdict."""
    try:
        x = torch.arange(6.0, device="ltc").reshape(2, 3)
        value = (x @ x.t() + 1).sum().item()
    except Exception as error:  # whatever it is, it is the answer
        return f"fails with {type(error).__name__}: {error}"
    return "runs" if value == 87.0 else f"gives {value} in place of 87.0"
