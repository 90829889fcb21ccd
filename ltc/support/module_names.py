"""The place of a module in its model: "encoder.layers.3.attn"."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import nn

_WRAPPERS = ("module", "_orig_mod")  # the only child of DistributedDataParallel; of torch.compile's


class ModuleName:
    """The name of a module: its path below its model; of a model the name of its class.

    It outlives the module, and changes where the module turns out to stand in a larger model.
    """

    __slots__ = ("path",)

    def __init__(self, path: str) -> None:
        self.path = path


_names: weakref.WeakKeyDictionary[nn.Module, ModuleName] = weakref.WeakKeyDictionary()
_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def known_name(module: nn.Module) -> ModuleName | None:
    """None of one that no known model has."""
    return _names.get(module)


def name_in(model: nn.Module, module: nn.Module) -> ModuleName:
    """Return the name of a module of a model, all of which is known from now on."""
    _models.add(model)
    for wrapper in _WRAPPERS:
        children = dict(model.named_children())  # those of a script are no dictionary
        if list(children) == [wrapper]:
            model = children[wrapper]
    for path, one in model.named_modules():
        _note(one, path or type(one).__name__, is_model=not path)
    return _names.get(module) or _note(module, type(module).__name__, is_model=True)


def _note(module: nn.Module, path: str, is_model: bool) -> ModuleName:
    name = _names.get(module)
    if name is None:
        name = _names[module] = ModuleName(path)
    elif not is_model:
        name.path = max(name.path, path, key=lambda found: found.count("."))
    return name


def name_of_held(is_it: Callable[[torch.Tensor], bool]) -> str | None:
    """Return "the parameter 'bias' of Linear" for the first one of a known model that is it; or None."""
    for model in models():
        for name, module in model.named_modules():
            for kind, named in (
                ("parameter", module.named_parameters(recurse=False)),
                ("buffer", module.named_buffers(recurse=False)),
            ):
                for own, tensor in named:
                    if is_it(tensor):
                        path = ".".join(filter(None, (name, own)))
                        return f"the {kind} '{path}' of {type(model).__name__}"
    return None


def classes_of_modules() -> dict[str, str]:
    """Return the name of each known module's class, by the module's path."""
    known = list(_names.items())
    return {name.path: type(module).__name__ for module, name in known}


def models() -> list[nn.Module]:
    """The models that are known, and live."""
    return list(_models)
