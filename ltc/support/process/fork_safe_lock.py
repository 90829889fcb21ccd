"""A module's lock that a child of fork can take, even if it was held in the parent."""

from __future__ import annotations

import os
import threading
from typing import Any


def renewed_lock(module: dict[str, Any], name: str) -> Any:
    """A reentrant lock for `module[name]`, which a child of fork finds replaced by a new one.

    Reentrant, because a finaliser that wants it may run while its own thread holds it.  Replaced,
    because the child would otherwise wait for a thread that only its parent has.
    """

    def renew() -> None:
        module[name] = threading.RLock()

    os.register_at_fork(after_in_child=renew)
    return threading.RLock()
