"""`import torch_xla`, and every module below it, made of the rows of alias_table."""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from ltc.compat.torch_xla.alias_table import MODULES, AliasModule
from ltc.compat.torch_xla.xla_only import stand_in

PACKAGE = "torch_xla"
_SCRIPT = "ltc.compat.torch_xla.script_"  # then the script's path, as hexadecimal digits


class _NamesModule(ModuleType):
    """A module of torch_xla: each name is looked up in ltc when it is first asked for."""

    def __init__(self, row: AliasModule) -> None:
        super().__init__(row.name, f"{row.name}, as ltc has it.")
        self._row = row
        self.__all__ = sorted({*row.found, *row.refused})

    def __getattr__(self, name: str) -> Any:
        value = _value_of(self._row, name)
        setattr(self, name, value)
        return value

    def __reduce__(self) -> tuple:
        """A function that uses it, sent to another process by value, takes the stand-in along."""
        return module_named, (self.__name__,)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.__all__]


def _value_of(row: AliasModule, name: str) -> Any:
    full = f"{row.name}.{name}"
    if name in row.found:
        module, _, wanted = row.found[name].partition(":")
        return getattr(importlib.import_module(module), wanted)
    if name in row.refused:
        return stand_in(full, row.refused[name])
    if full in MODULES:
        return importlib.import_module(full)
    if row.otherwise and not name.startswith("__"):
        return stand_in(full, row.otherwise)
    raise AttributeError(
        f"module {row.name!r} has no attribute {name!r} in ltc: docs/torch_xla.md lists what there is."
    )


class _TableFinder(MetaPathFinder, Loader):
    """Finds torch_xla's modules in the table, and a script under the name that main_spec gives it."""

    def find_spec(self, fullname: str, path=None, target=None) -> ModuleSpec | None:
        if fullname in MODULES:
            return ModuleSpec(fullname, self, is_package=True)
        if fullname.startswith(_SCRIPT):
            return main_spec(bytes.fromhex(fullname.removeprefix(_SCRIPT)).decode())
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _NamesModule(MODULES[spec.name])

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is run: the names are looked up when they are asked for."""


def module_named(name: str) -> ModuleType:
    """A module of torch_xla, in a process that may not have had it before."""
    return importlib.import_module(name)


def main_spec(path: str) -> ModuleSpec:
    """The spec under which a script runs as the main program.

    A process that multiprocessing starts imports its parent's main program again, by the name in
    its spec. This one lies below ltc.compat.torch_xla, so that process has torch_xla before the
    script asks for it.
    """
    absolute = str(Path(path).resolve())
    name = _SCRIPT + absolute.encode().hex()
    spec = ModuleSpec(name, SourceFileLoader(name, absolute), origin=absolute)
    spec.has_location = True
    return spec


def install() -> None:
    """Make torch_xla importable. Once per process; ImportError where a real one is installed."""
    real = PathFinder.find_spec(PACKAGE)
    own = str(Path(__file__).parent)
    if real is not None and own not in map(_resolved, real.submodule_search_locations or []):
        raise ImportError(
            f"torch_xla itself is installed, at {real.origin}, and `import ltc.compat.torch_xla` "
            f"would hide it. Uninstall it, or use an environment without it; for both in one, write "
            f"`import ltc.core.lazy_model` in place of `import torch_xla.core.xla_model`."
        )
    if PACKAGE in sys.modules:
        raise ImportError(
            "A module named torch_xla is loaded already. Import ltc.compat.torch_xla before it."
        )
    sys.meta_path.insert(0, _TableFinder())


def _resolved(folder: str) -> str:
    return str(Path(folder).resolve())
