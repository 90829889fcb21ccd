"""Workers and threads of loaders: those that PyTorch can start here, and those that ltc leaves running."""

import multiprocessing
import threading

import pytest

HANG_SECONDS = 600  # of a machine that is busy with other things


def need_semaphores() -> None:
    """Skips the calling test where there are none, so that PyTorch's loader starts no workers.

    Processes share locks by semaphores, which Python keeps in /dev/shm.
    """
    try:
        multiprocessing.Lock()
    except OSError as error:
        pytest.skip(f"PyTorch's loader starts no workers here: no semaphores ({error})")


def loader_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("ltc loader")]


def wait_until_no_loader_thread_runs():
    """Threads end after the loop they served, not with it; a hang fails by the suite's limit."""
    for thread in loader_threads():
        thread.join(HANG_SECONDS)
    assert not loader_threads()
