"""Torch calls that do what they say, whatever the calling thread has switched on."""

from __future__ import annotations

from typing import Any

import torch

from ltc.support.torch_private import (
    DispatchKey,
    DispatchKeySet,
    dispatch_mode_depth,
    force_dispatch_keys,
    function_mode_depth,
    is_transformed,
    plain_functions,
)

is_inference, is_autocast = torch.is_inference_mode_enabled, torch.is_autocast_enabled


def _key_set(*names: str) -> Any:
    keys = DispatchKeySet(getattr(DispatchKey, names[0]))
    for name in names[1:]:
        keys = keys | DispatchKeySet(getattr(DispatchKey, name))
    return keys


_INCLUDED = _key_set("BackendSelect")
# Python: not to be included is not enough, since detach asks a dispatch mode unless that is excluded.
_EXCLUDED = _key_set(
    "AutogradCPU",
    "AutogradOther",
    "AutogradFunctionality",
    "ADInplaceOrView",
    "AutocastCPU",
    "Python",
)


def has_plain_dispatch() -> bool:
    """Return True if the thread is in no mode that changes calls which bypass torch's dispatcher."""
    return function_mode_depth() == 0 and not is_inference()


def is_plain_now() -> bool:
    """Return True if a kernel of ltc's, called below autograd, needs no PlainDispatch for its
    calls.
    """
    return not (
        function_mode_depth()
        or is_inference()
        or is_autocast("cpu")
        or is_transformed()
        or dispatch_mode_depth()
    )


# The same in generated kernels, of which a call of it would take as long as what it asks.
IS_PLAIN_NOW = (
    "not (function_modes() or is_inference() or is_autocast('cpu') or is_transformed() or modes())"
)
ITS_NAMES = {
    "function_modes": function_mode_depth,
    "is_inference": is_inference,
    "is_autocast": is_autocast,
    "is_transformed": is_transformed,
    "modes": dispatch_mode_depth,
}


class PlainDispatch:
    """Plain CPU kernels inside, whatever modes the calling thread is in.

    Autocast, dispatch and function modes, functorch levels, a default device and inference mode
    would all change what a torch call does; one guard replaces the thread's dispatch state.
    """

    def __enter__(self) -> None:
        self._guards = [
            force_dispatch_keys(_INCLUDED, _EXCLUDED),
            plain_functions(),
        ]
        if torch.is_inference_mode_enabled():
            self._guards.append(torch.inference_mode(False))
        for guard in self._guards:
            guard.__enter__()

    def __exit__(self, *error: Any) -> None:
        for guard in reversed(self._guards):
            guard.__exit__(None, None, None)
