"""Processes of this machine: their names for others to know them by, and whether they run."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from pathlib import Path


@functools.cache
def this_machine() -> int:
    """A number for this machine since it was started, and for the processes that see each other."""
    parts = [os.uname().nodename]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        parts.append(os.readlink("/proc/self/ns/pid"))
    digest = hashlib.blake2b(" ".join(parts).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def own_name() -> str:
    """Return what `neighbour` knows this process by."""
    return f"{this_machine()} {os.getpid()}"


def neighbour(name: str | bytes) -> int:
    """Return the id of the process of that name; 0 if it is another machine's, or no name."""
    try:
        machine, process = map(int, name.split())
    except ValueError:
        return 0
    return process if machine == this_machine() else 0


def is_running(process: int) -> bool:
    """Return True if this process of this machine has not ended."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not _is_zombie(process)


def _is_zombie(process: int) -> bool:
    """Return True if the process has ended and only its parent has not looked yet."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False
