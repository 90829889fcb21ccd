"""What a process has of its machine: cores, neighbours, and how much of it has gone to disk."""

from __future__ import annotations

import resource
from typing import Any

from ltc import config
from ltc.support.process import processors


def machine_facts(major_faults_before: int = 0) -> dict[str, Any]:
    """cores this process may use, replicas on its host, bytes of it in swap, pages read from disk.

    major_faults_before  of these pages, how many are not to be counted
    """
    return {
        "cores": processors.count(),
        "processes": config.value("LOCAL_WORLD_SIZE") or config.value("XRT_SHARD_WORLD_SIZE"),
        "swapped_bytes": swapped_bytes(),
        "major_faults": major_faults() - major_faults_before,
    }


def major_faults() -> int:
    """Pages of this process that had to be read from a disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def swapped_bytes(status: str = "/proc/self/status") -> int:
    """Of this process's memory, what the system has put on disk."""
    with open(status) as file:
        found = [line.split() for line in file if line.startswith("VmSwap:")]
    return int(found[0][1]) << 10 if found else 0
