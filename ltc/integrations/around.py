"""A function of another package, with something of ours around it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def around(owner: Any, name: str, ours: Callable[..., Any]) -> None:
    """From now on `owner.name(...)` is `ours(original, ...)`.

    Example:
        >>> import types
        >>> other = types.SimpleNamespace(price=lambda: 3)
        >>> around(other, "price", lambda original: original() + 1)
        >>> other.price()
        4
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs)

    setattr(owner, name, wrapped)
