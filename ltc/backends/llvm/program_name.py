"""The names of programs on disk: whether there is one is known before anything is imported to read it."""

from __future__ import annotations

import hashlib
import platform

import torch

from ltc import config
from ltc.llvm.compiler import llvm_binding
from ltc.support.disk_cache import disk_cache
from ltc.support.process import processors
from ltc.support.version import source_digest


def program_name(key: str) -> str:
    """Return the name of a program's record.

    Args:
        key: The key of the computation; ltc's, torch's, the machine's and the settings' are added
            here.
    """
    parts = (
        key, source_digest(), torch.__version__, platform.python_version(),
        config.compiled_settings(), llvm_binding.name_of(""), str(processors.count()),
    )  # fmt: skip
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def is_kept(key: str) -> bool:
    """Return True if there is a file for the computation of that key, whole or not."""
    disk = disk_cache()
    return disk is not None and llvm_binding.may_have_compiled() and disk.has(program_name(key))
