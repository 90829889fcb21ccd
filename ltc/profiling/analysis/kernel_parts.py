"""The parts of a kernel: one operation may run as several native functions, one after the other."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

KernelRecord = dict[str, Any]
_PART = re.compile(r"^part \d+ of ")
_SUMMED = ("seconds", "read_bytes", "written_bytes", "multiply_adds", "operations")


def whole_name(name: str) -> str:
    """Return the name of the kernel that a part belongs to."""
    return _PART.sub("", name)


def groups_of_parts(kernels: Iterable[KernelRecord]) -> list[list[KernelRecord]]:
    """Return the parts of each kernel, in order; of most kernels there is one."""
    groups: list[list[KernelRecord]] = []
    for kernel in kernels:
        last = groups[-1] if groups else []
        names = {one["name"] for one in last}
        is_of_it = whole_name(kernel["name"]) in {whole_name(name) for name in names}
        if is_of_it and kernel["name"] not in names:
            last.append(kernel)
        else:
            groups.append([kernel])
    return groups


def joined_parts(parts: list[KernelRecord]) -> KernelRecord:
    """Return the record of a whole kernel; it is launched as often as each part."""
    if len(parts) == 1:
        return parts[0]
    main = max(parts, key=lambda part: part.get("multiply_adds") or 0)
    summed = {key: sum(part.get(key) or 0 for part in parts) for key in _SUMMED}
    launches = max(part["launches"] for part in parts)
    return {**main, **summed, "name": whole_name(main["name"]), "launches": launches}
