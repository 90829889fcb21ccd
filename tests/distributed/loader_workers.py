"""PyTorch's loader starts workers only where processes can share locks, which Python keeps in /dev/shm."""

import multiprocessing

import pytest


def need_semaphores() -> None:
    """Skips the calling test where there are none."""
    try:
        multiprocessing.Lock()
    except OSError as error:
        pytest.skip(f"PyTorch's loader starts no workers here: no semaphores ({error})")
