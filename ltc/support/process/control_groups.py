"""Linux's control groups: what limits the processors and the memory of a container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

GROUP, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def own_groups(controller: str) -> Iterator[Path]:
    """The folders of the groups that this process is in, each with those that it lies in.

    Args:
        controller: "cpu", "memory": version 1 has groups of its own for each.

    Raises:
        OSError: If there are none: no Linux, or no /proc.
    """
    for line in GROUP.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = GROUPS / controller if controllers else GROUPS
        inner = root / path.lstrip("/")
        yield from (one for one in (inner, *inner.parents) if one.is_relative_to(root))
