"""Whether a function that `spawn` was given runs in this process: inside it there is no other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_inside = False  # of the process, not the thread: a thread that the function starts is inside too


@contextlib.contextmanager
def function_of_spawn() -> Iterator[None]:
    """Around the user's function, in a rank."""
    with _set(True):
        yield


@contextlib.contextmanager
def whole_script() -> Iterator[None]:
    """Around a script that runs in a rank as under torchrun: its own `spawn` is the outermost."""
    with _set(False):
        yield


@contextlib.contextmanager
def _set(inside: bool) -> Iterator[None]:
    global _inside
    before, _inside = _inside, inside
    try:
        yield
    finally:
        _inside = before


def refuse_inside() -> None:
    """Raise RuntimeError where a function of `spawn` runs in this process."""
    if _inside:
        raise RuntimeError(
            "spawn() was called by a function that spawn() runs. Its ranks are the replicas that "
            "there are, and a rank has none of its own; the others would be waited for until they "
            "call it too. Call the inner function itself, in every rank, or spawn it after the "
            "outer spawn() has returned."
        )
