"""A line of progress, where somebody looks on and has to wait."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm.auto import tqdm

from ltc import config

T = TypeVar("T")
PATIENCE_SECONDS = 2.0  # nothing is shown of what is over sooner


def _is_watched() -> bool:
    """Whether the thread that a user waits for runs on a terminal or in a notebook."""
    if (
        not config.value("LTC_PROGRESS")
        or threading.current_thread() is not threading.main_thread()
    ):
        return False
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def shown_if_slow(items: Iterable[T], total: int, what: str, started: float) -> Iterator[T]:
    """The items, as they come; what has come of `total` is shown once it takes long.

    started  time.monotonic() when the wait began
    """
    if (
        not _is_watched()
    ):  # a tqdm, even a silent one, takes a lock that all forks of a process share
        yield from items
        return
    bar = None
    try:
        for done, item in enumerate(items, 1):
            if bar is not None:
                bar.update()
            elif time.monotonic() - started > PATIENCE_SECONDS:
                bar = tqdm(desc=what, total=total, initial=done, unit=" kernels", leave=False)
            yield item
    finally:
        if bar is not None:
            bar.close()
