"""Tests where the memory that processes share is small, or not there: containers have 64 MB of it.

    sudo python scripts/stress/small_shared_memory.py [TEST ...] [--sizes none 16 64]

Each size is mounted over /dev/shm in a mount namespace of its own, which needs root or the right to
make user namespaces. Without tests named, those of two processes and more run: tests/distributed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

_CHECKOUT = Path(__file__).parents[2]
_MOUNTED = 'mount -t tmpfs -o "$0" tmpfs /dev/shm && exec "$@"'


def options_of(size: str) -> str:
    """Return the mount options of the file system: of so many megabytes, or one that takes nothing."""
    return "ro" if size == "none" else f"size={size}m"


def passes(size: str, tests: list[str]) -> bool:
    namespaces = ["--mount"] if os.geteuid() == 0 else ["--mount", "--map-root-user"]
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", *tests]
    command = ["unshare", *namespaces, "sh", "-c", _MOUNTED, options_of(size), *pytest]
    started = time.monotonic()
    status = subprocess.run(command, cwd=_CHECKOUT).returncode
    verdict = "pass" if status == 0 else f"FAIL with status {status}"
    print(f"/dev/shm {size}: {verdict}, {time.monotonic() - started:.0f} s", flush=True)
    return status == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["none", "16", "64"], help="in MB, or none")
    parser.add_argument(
        "tests", nargs="*", default=["tests/distributed"], help="arguments of pytest"
    )
    options = parser.parse_args()
    return not all([passes(size, options.tests) for size in options.sizes])


if __name__ == "__main__":
    sys.exit(main())
