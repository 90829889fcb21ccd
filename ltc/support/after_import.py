"""Something to be done once another module is there, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def after_import(name: str, act: Callable[[], None]) -> None:
    """Call `act` when the module of that name has been imported: now, where it is already.

    Example:
        >>> told = []
        >>> after_import("sys", lambda: told.append("it is there"))
        >>> told
        ['it is there']
    """
    if name in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _ImportWatch(name, act))


class _ImportWatch(MetaPathFinder):
    """Finds one module, once, as the other finders would, and acts after it has run."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self._name, self._act = name, act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _LoaderThatActs(spec.loader, self._act)
        return spec


class _LoaderThatActs(Loader):
    def __init__(self, loader: Loader, act: Callable[[], None]) -> None:
        self._loader, self._act = loader, act

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._act()
