"""Where a module stands in its model: "encoder.layers.3.attn"."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

_WRAPPERS = ("module", "_orig_mod")  # the only child of DistributedDataParallel; of torch.compile's
_paths: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def name_of(module: Any) -> str:
    """The path below its model; of a model itself the name of its class.

    module  a weak reference to one; "" where it is gone. A string stays as it is.
    """
    if isinstance(module, str):
        return module
    living = module()
    if living is None:
        return ""
    if living not in _paths:
        _look_at_all()
    return _paths.get(living) or type(living).__name__


def forget() -> None:
    """Modules may have been put elsewhere."""
    _paths.clear()


def _look_at_all() -> None:
    for model in models():
        for wrapper in _WRAPPERS:
            inner = model._modules.get(wrapper)
            if inner is not None and len(model._modules) == 1:
                model = inner
        for path, module in model.named_modules():
            _paths.setdefault(module, path)


def models() -> Iterator[nn.Module]:
    """Every module of this process that stands in no other."""
    # isinstance would ask proxies of other libraries; one that is being made has no children yet
    found = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
    found = [one for one in found if "_modules" in one.__dict__]
    inner = {id(child) for module in found for child in module.children()}
    yield from (module for module in found if id(module) not in inner)
