"""A function of ours in the place of one of torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def stand_in(holder: Any, name: str, function: Callable[..., Any]) -> None:
    """Put a function in the place of `holder.name`, of a module or a class, for good.

    It gets the name of the replaced function, by which pickle writes it: a model that holds
    `torch.flatten` is saved as before, and loads without ltc.

    Example:
        >>> import pickle, types, sys
        >>> other = sys.modules["other"] = types.ModuleType("other")
        >>> stand_in(other, "price", lambda: 3)
        >>> other.price, pickle.loads(pickle.dumps(other.price)) is other.price
        (<function price at 0x...>, True)
    """
    if isinstance(holder, type):
        function.__module__ = holder.__module__
        function.__qualname__ = f"{holder.__qualname__}.{name}"
    else:
        function.__module__ = holder.__name__
        function.__qualname__ = name
    function.__name__ = name
    setattr(holder, name, function)
