"""What other packages need to know of the device is told to them when they are imported."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

# the module of another package, and the plug-in that it is handed to
PLUG_INS = {
    "accelerate.accelerator": "ltc.integrations.accelerate_hooks",
    "accelerate.commands.launch": "ltc.integrations.accelerate_launch",
    "safetensors": "ltc.integrations.safetensors_files",
    "torch.nn.attention.flex_attention": "ltc.integrations.flex_attention",
    "transformers.training_args": "ltc.integrations.transformers_arguments",
    "transformers.trainer": "ltc.integrations.transformers_trainer",
}
STAND_INS = str(Path(__file__).parents[1] / "compat")


class _ThenPlugIn(importlib.abc.Loader):
    """Runs a module as its own loader does, then its plug-in's `install(module)`."""

    def __init__(self, loader: importlib.abc.Loader):
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            spec.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        _plug_in(module)


class _Follower(importlib.abc.MetaPathFinder):
    """Finds the modules of the table where Python would, and has their plug-ins follow."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in PLUG_INS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenPlugIn(spec.loader)
        return spec


def _plug_in(module: ModuleType) -> None:
    importlib.import_module(PLUG_INS[module.__name__]).install(module)


def install() -> None:
    """Follow the imports to come; what has been imported already is told at once."""
    if STAND_INS in sys.path:  # as in this project's own tests: no torch_xla is installed there
        os.environ.setdefault("USE_TORCH_XLA", "0")
    sys.meta_path.insert(0, _Follower())
    for name in PLUG_INS:
        if name in sys.modules:
            _plug_in(sys.modules[name])
