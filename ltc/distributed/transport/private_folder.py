"""A folder for the files and sockets of one launch, which goes when its processes have gone."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

IN_MEMORY = "/dev/shm"  # Linux's file system without a disk
_JANITOR = 'read -r _; rm -rf -- "$0"'  # read ends when every holder of the pipe's other end has


@contextlib.contextmanager
def private_folder() -> Iterator[str]:
    """The path of a new folder that only this user can enter, in memory where there is a place.

    It is removed at the end of the block; where this process is killed, a process that waits for
    just that removes it.
    """
    parent = IN_MEMORY if os.access(IN_MEMORY, os.W_OK | os.X_OK) else None
    path, owner = tempfile.mkdtemp(prefix="ltc-", dir=parent), os.getpid()  # with mode 0700
    janitor = subprocess.Popen(
        ["/bin/sh", "-c", _JANITOR, path],
        stdin=subprocess.PIPE,
        start_new_session=True,  # no signal meant for this process's group reaches it
    )
    try:
        yield path
    finally:
        if os.getpid() == owner:  # a forked child that ends leaves it to its parent
            shutil.rmtree(path, ignore_errors=True)
            assert janitor.stdin is not None
            janitor.stdin.close()
            if not os.path.exists(path):  # where somebody still writes there it stays, for later
                janitor.kill()  # processes forked meanwhile hold the pipe open while they live
                janitor.wait()
