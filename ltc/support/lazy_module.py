"""Modules that are imported at their first use: `import ltc` is quick, and programs pay for what they use.

tests/unit/test_layers.py reads each name given here as an import, so the layers hold for it too.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType, ModuleType
from typing import Any

import torch

from ltc.support.torch_private import no_dispatch_modes, plain_functions


class LazyModule:
    """Stand for a module; the first use of one of its names imports it.

    Example:
        >>> decimal = LazyModule("decimal")
        >>> decimal.Decimal(1) / 4
        Decimal('0.25')
    """

    def __init__(self, name: str) -> None:
        """
        Args:
            name: the full name of the module.
        """
        self._name = name

    @property
    def is_imported(self) -> bool:
        """True if the module has been imported, up to its last line."""
        spec = getattr(sys.modules.get(self._name), "__spec__", None)
        return spec is not None and not getattr(spec, "_initializing", False)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(loaded(self._name), attribute)


def loaded(name: str) -> ModuleType:
    """Import a module as at the top of a program, wherever its first use happens to be.

    Args:
        name: the full name of the module.

    Returns:
        The module, which other threads may be importing at the same time.
    """
    if name in sys.modules:
        return import_module(name)  # it waits for a thread that is in the midst of it
    with torch.inference_mode(False), plain_functions(), no_dispatch_modes(), uncollected():
        return import_module(name)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Switch Python's collector off for an import, which makes no garbage.

    One look at all of torch's objects takes 0.1 s.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def lazy_names(
    namespace: dict[str, Any], places: Mapping[str, str] = MappingProxyType({})
) -> Callable[[str], Any]:
    """Make the `__getattr__` of a package whose names and modules are imported at their first use.

    Args:
        namespace: the package's globals.
        places: the module of each public name that is defined elsewhere.

    Returns:
        A function for the package's `__getattr__`. It raises AttributeError for other names.
    """
    package = namespace["__name__"]

    def found(name: str) -> Any:
        if name in places:
            namespace[name] = getattr(loaded(places[name]), name)
        elif name.startswith("__") or find_spec(f"{package}.{name}") is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        else:
            loaded(f"{package}.{name}")  # which makes it a name of the package
        return namespace[name]

    return found
