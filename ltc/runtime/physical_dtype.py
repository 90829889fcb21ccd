"""The dtypes of tensors in device memory, which LTC_USE_BF16 makes narrower than they appear."""

from __future__ import annotations

import logging
import threading

import torch

from ltc import config

_log = logging.getLogger("ltc")

# name of the variable -> float dtype as reported: as kept
_MODES: dict[str, dict[torch.dtype, torch.dtype]] = {
    "LTC_USE_BF16": {torch.float32: torch.bfloat16, torch.float64: torch.bfloat16},
    "LTC_DOWNCAST_BF16": {torch.float32: torch.bfloat16, torch.float64: torch.float32},
}

_kept_as: dict[torch.dtype, torch.dtype] | None = None
_reading = threading.RLock()


def kept_as() -> dict[torch.dtype, torch.dtype]:
    """The dtypes that are kept as others: fixed at the first use of a device, and logged then."""
    return _read() if _kept_as is None else _kept_as


def physical(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in device memory of a tensor reported as `dtype`."""
    kept = _read() if _kept_as is None else _kept_as
    return kept.get(dtype, dtype) if kept else dtype


def mode() -> str:
    """A word for program keys: "" where everything is kept as it is reported."""
    return ",".join(f"{_name(a)}:{_name(b)}" for a, b in kept_as().items())


def _read() -> dict[torch.dtype, torch.dtype]:
    global _kept_as
    with _reading:
        if _kept_as is None:
            chosen = [name for name in _MODES if config.value(name)]
            if len(chosen) > 1:
                raise ValueError(f"{' and '.join(chosen)} contradict each other: set one of them.")
            found = _MODES[chosen[0]] if chosen else {}
            if found:
                changes = ", ".join(f"{_name(a)} as {_name(b)}" for a, b in found.items())
                _log.warning(
                    "%s=1: ltc devices keep %s, compute in float32, and report the requested dtype; "
                    "ltc.physical_dtype(tensor) returns the kept one",
                    chosen[0],
                    changes,
                )
            _kept_as = found
        return _kept_as


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
