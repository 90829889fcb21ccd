"""Blocks in which a read of a pending tensor is an error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ContextDecorator

from ltc.errors import SyncForbidden


class _BlocksOfThread(threading.local):
    depth = 0


_thread = _BlocksOfThread()
_called_before: list[Callable[[], object]] = []


def call_before_blocks(function: Callable[[], object]) -> None:
    """Call `function` when a block begins, so that values computed already can be read inside."""
    _called_before.append(function)


class no_sync(ContextDecorator):
    """`with ltc.no_sync():` lets no read cut the step: printing shows pending tensors unread.

    A pending tensor prints as its shape, its dtype and the line that made it, in an f-string too;
    any other read of one (`.item()`, `if x:`, `.cpu()`) raises SyncForbidden at your line. Computed
    values can be read. The block holds for the calling thread. It also decorates functions.

    Example:
        >>> x = torch.ones(3, device="ltc") * 2
        >>> with ltc.no_sync():
        ...     print(x)
        <pending ltc:0 tensor float32[3] made by aten::mul.Tensor at ...>
    """

    def __enter__(self) -> no_sync:
        for function in _called_before:
            function()
        _thread.depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        _thread.depth -= 1


def reads_are_forbidden() -> bool:
    """Return True if the calling thread is in a `no_sync` block."""
    return _thread.depth > 0


def require_reads(name: str) -> None:
    """Raise SyncForbidden in a `no_sync` block: a call of the overload `name` looks at values."""
    if reads_are_forbidden():
        raise SyncForbidden(
            f"{name} reads a pending tensor, which would cut the step: ltc.no_sync() forbids that. "
            f"Read it after ltm.mark_step(), or leave the block first."
        )
