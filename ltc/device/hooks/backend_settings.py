"""torch.backends.ltc: the settings of ltc, under the name where PyTorch has those of a backend.

A setting is the environment variable LTC_<NAME>: `torch.backends.ltc.tier = "native"` is
LTC_TIER=native for this process and those it starts. A wrong value raises at once.

    torch.backends.ltc.tier                    read a setting: "auto"
    torch.backends.ltc.check = True            change it; None puts the default back
    with torch.backends.ltc.flags(tier="native"):
        ...                                    change it for a block
    dir(torch.backends.ltc)                    list the settings; docs/api.md says what they mean
"""

from __future__ import annotations

import sys
import types
from contextlib import AbstractContextManager
from typing import Any

import torch

from ltc import config
from ltc.support.torch_private import DEVICE_TYPE

_VARIABLES = {
    flag.name.removeprefix("LTC_").lower(): flag.name
    for flag in config.FLAGS
    if flag.name.startswith("LTC_")
}


class _Settings(types.ModuleType):
    """The module `torch.backends.ltc`."""

    def is_available(self) -> bool:
        """Return True, as torch.backends.mps.is_available() does on a machine with such a device."""
        return True

    def is_built(self) -> bool:
        """Return True: ltc is Python."""
        return True

    def flags(self, **settings: Any) -> AbstractContextManager[None]:
        """Change settings inside a block, for the whole process.

        Raises:
            AttributeError: If there is no such setting.
            ValueError: If a value is none that the setting can have.

        Example:
            >>> with torch.backends.ltc.flags(tier="native"):
            ...     torch.backends.ltc.tier
            'native'
        """
        wanted = {_variable(name): setting for name, setting in settings.items()}
        config.check(**wanted)
        return config.override(**wanted)

    def __getattr__(self, name: str) -> Any:
        return config.value(_variable(name))

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            config.change(**{_variable(name): value})

    def __dir__(self) -> list[str]:
        return sorted({*_VARIABLES, "flags", "is_available", "is_built"})


def _variable(setting: str) -> str:
    try:
        return _VARIABLES[setting]
    except KeyError:
        raise AttributeError(
            f"torch.backends.{DEVICE_TYPE} has no setting {setting}."
            f"{config.did_you_mean(setting, _VARIABLES)}",
            name=setting,
        ) from None


def install() -> None:
    """Put the module into torch.  Once per process."""
    name = f"torch.backends.{DEVICE_TYPE}"
    sys.modules[name] = settings = _Settings(name, __doc__)
    setattr(torch.backends, DEVICE_TYPE, settings)
