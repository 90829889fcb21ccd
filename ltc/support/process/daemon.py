"""A thread that works behind its caller, where Python starts one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any


def started_daemon(
    work: Callable[..., Any], name: str, args: Sequence[Any] = ()
) -> threading.Thread | None:
    """The thread, at work; None where Python starts none, and the caller is to go on alone.

    From 3.12 on it starts none in a program that ends, whose functions at its exit may still compute.
    Before that, and otherwise, it is the system that has no thread left.
    """
    thread = threading.Thread(target=work, args=args, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread
