"""The way to JAX: what is missing is told in a sentence, and nothing is imported before."""

from __future__ import annotations

import re
import warnings
from importlib import metadata
from typing import Any

from ltc.backends.interface import BackendImplInterface
from ltc.errors import BackendMissing
from ltc.support.lazy_module import LazyModule

_backend = LazyModule("ltc.backends.xla.xla_backend")

OLDEST, FIRST_UNTRIED = (0, 10), (0, 12)
INSTALL = "pip install 'ltc[xla]' for the CPU; docs/accelerators.md has the lines for others"


def xla_backend() -> BackendImplInterface:
    """The backend of the devices that JAX finds.

    Raises:
        BackendMissing: There is no JAX, an older one, or no device that it can use.
    """
    found = _version()
    if found < OLDEST:
        raise BackendMissing(
            f"LTC_BACKEND=xla needs JAX {_text(OLDEST)} or newer, and this is {_text(found)}: "
            f"{INSTALL}."
        )
    if found >= FIRST_UNTRIED:
        warnings.warn(
            f"ltc was not tried with JAX {_text(found)}. If something fails, install an earlier one: "
            f"pip install 'jax<{_text(FIRST_UNTRIED)}'.",
            stacklevel=2,
        )
    try:
        made: BackendImplInterface = _backend.XlaBackend()
    except RuntimeError as error:  # of JAX: no device, or one whose memory another process holds
        raise BackendMissing(
            f"JAX finds no device for LTC_BACKEND=xla: {error}. Set JAX_PLATFORMS=cpu to run on the "
            f"CPU; for another device install its plug-in, see that no other process holds its "
            f"memory (XLA_PYTHON_CLIENT_PREALLOCATE=false takes only what is needed), and see "
            f"docs/accelerators.md."
        ) from error
    return made


def _version() -> tuple[int, ...]:
    try:
        text = metadata.version("jax")
    except metadata.PackageNotFoundError:
        raise BackendMissing(
            f"LTC_BACKEND=xla needs JAX, which is not installed: {INSTALL}."
        ) from None
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def _text(version: Any) -> str:
    return ".".join(map(str, version))
