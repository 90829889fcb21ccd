"""What belongs to XLA itself: names that can be imported, and say what to do instead when used."""

from __future__ import annotations

import warnings
from typing import Any

from ltc.debug import metrics
from ltc.errors import Unsupported


class XlaOnly(Unsupported):
    """A name of torch_xla that means something in XLA alone; the message says what to do instead."""


class _StandIn(type):
    """A class that can be imported and compared with, and that raises XlaOnly where it is used."""

    alias: str
    reason: str

    def __call__(cls, *args: Any, **kwargs: Any):
        raise XlaOnly(f"{cls.alias}: {cls.reason}")

    def __getattr__(cls, name: str):
        if name.startswith("__"):  # asked by Python, inspect and pickle: no use of it
            raise AttributeError(name)
        raise XlaOnly(f"{cls.alias}.{name}: {cls.reason}")

    def __repr__(cls) -> str:
        return f"<{cls.alias}, which ltc does not have: {cls.reason}>"


def stand_in(alias: str, reason: str) -> type:
    """What stands under the name `alias`: importing it is fine, any use of it raises XlaOnly."""
    return _StandIn(alias.rpartition(".")[2], (), {"alias": alias, "reason": reason})


_warned: set[str] = set()


def ignored(what: str, because: str) -> None:
    """A hint to XLA that changes no result: counted, and told once."""
    metrics.count(f"torch_xla.ignored.{what}")
    if what not in _warned:
        _warned.add(what)
        warnings.warn(f"ltc ignores {what} of torch_xla: {because}", stacklevel=3)
