"""Ranks of a host that look after each other where no parent does: torchrun sees exit codes alone.

torchrun ends all ranks when one fails, but one that leaves early with code 0 is a success to it,
and the others would wait for that one until their time is over.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator

import torch.distributed as dist

from ltc import config
from ltc.distributed import world
from ltc.distributed.rendezvous import rendezvous
from ltc.distributed.transport import session
from ltc.distributed.transport.bootstrap import processes_per_host, store

POLL_SECONDS = 0.5

_runs = itertools.count()


@contextlib.contextmanager
def peers_watched() -> Iterator[None]:
    """A rank of this host that ends inside its block fails all who wait for it in theirs."""
    here = session.current()
    if here is None or config.value("LTC_RENDEZVOUS"):  # alone, or watched by a parent
        yield
        return
    # A rank that is done says so in the store: it may end while others still read what it sent.
    processes, run = config.value("XRT_SHARD_WORLD_SIZE"), next(_runs)
    done, on_host = store(processes), processes_per_host(processes)
    pids = {
        rank: int(pid)
        for rank, pid in enumerate(rendezvous("ltc.peers", b"%d" % os.getpid()))
        if rank // on_host == world.ordinal() // on_host and rank != world.ordinal()
    }
    over = threading.Event()

    def watch() -> None:
        with contextlib.suppress(dist.DistError):  # the store ends with the launcher, and so do we
            while not over.wait(POLL_SECONDS):
                for rank, pid in pids.items():
                    if not _runs_still(pid) and not done.check([f"done/{run}/{rank}"]):
                        here.abort(f"Rank {rank} (pid {pid}) ended before its function returned.")
                        return

    threading.Thread(target=watch, name="ltc peers", daemon=True).start()
    try:
        yield
        done.set(f"done/{run}/{world.ordinal()}", "")
    finally:
        over.set()


def _runs_still(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
