"""Parts of XLA itself: names that say what to do instead, and advice that changes nothing."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from ltc.errors import Unsupported
from ltc.support.observation import metrics
from ltc.tracebacks import is_users


class XlaOnly(Unsupported):
    """A name of torch_xla that means something in XLA alone; the message says what to do instead."""


class _StandIn(type):
    """A class that can be imported and compared with, and that raises XlaOnly where it is used."""

    alias: str
    reason: str

    def __call__(cls, *args: Any, **kwargs: Any):
        raise XlaOnly(f"{cls.alias}: {cls.reason}")

    def __getattr__(cls, name: str):
        if name.startswith("__"):  # asked by Python, inspect and pickle: no use of it
            raise AttributeError(name)
        raise XlaOnly(f"{cls.alias}.{name}: {cls.reason}")

    def __repr__(cls) -> str:
        return f"<{cls.alias}, which ltc does not have: {cls.reason}>"


def stand_in(alias: str, reason: str) -> type:
    """Return a stand-in under the name `alias`: importing it is fine, any use of it raises XlaOnly."""
    return _StandIn(alias.rpartition(".")[2], (), {"alias": alias, "reason": reason})


_warned: set[str] = set()


def ignored(what: str, because: str) -> None:
    """Count a hint to XLA that changes no result, and warn of it once."""
    metrics.count(f"torch_xla.ignored.{what}")
    if what not in _warned:
        _warned.add(what)
        text = f"ltc ignores {what} of torch_xla: {because}"
        warnings.warn(text, stacklevel=_level_of_the_user())


def _level_of_the_user() -> int:
    """Return how far above the caller the user's line is."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level


# --- advice -------------------------------------------------------------------------------------


def set_custom_compile_options(options: dict) -> None:
    """Accepted, and counted: they are options of XLA's compiler."""
    if options:
        ignored("compile_options", "they are options of XLA's compiler, and change no result")


@contextlib.contextmanager
def alias_with_buffer_donor_config(should_alias: bool = True) -> Iterator[None]:
    """A block whose buffers may be written over: ltc determines itself which ones may."""
    ignored("buffer_donation", "it determines itself which memory a program may write over")
    yield


def create_optimized_replica_groups() -> None:
    """None: all replicas together, which is what hardware without a topology has."""


_PRECISIONS = ("default", "high", "highest")
_precision = "highest"  # what ltc always does


def set_mat_mul_precision(precision: str) -> None:
    """Matrix products of float32 are computed in float32, whatever is asked for."""
    global _precision
    if precision not in _PRECISIONS:
        raise ValueError(f"precision {precision!r} is not one of {', '.join(_PRECISIONS)}.")
    if precision != "highest":
        ignored("mat_mul_precision", "its products of float32 are always computed in float32")
    _precision = precision


def get_mat_mul_precision() -> str:
    """Return the value set last; "highest" at first."""
    return _precision


def set_full_mat_mul_precision(use_full_mat_mul_precision: bool = True) -> None:
    """Set the precision, as older releases do in place of set_mat_mul_precision."""
    set_mat_mul_precision("highest" if use_full_mat_mul_precision else "default")
