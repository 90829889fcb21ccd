"""Advice to XLA that changes no result: accepted, counted, and told once."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import ltc
from ltc import config
from ltc.compat.torch_xla.xla_only import ignored
from ltc.debug.profiler import Trace

_PRECISIONS = ("default", "high", "highest")
_precision = "highest"  # what ltc always does
_eager = contextlib.ExitStack()  # open while each call runs when it is made


@contextlib.contextmanager
def alias_with_buffer_donor_config(should_alias: bool = True) -> Iterator[None]:
    """A block whose buffers may be written over: ltc finds by itself which ones may."""
    ignored("buffer_donation", "it finds by itself which memory a program may write over")
    yield


def create_optimized_replica_groups() -> None:
    """None: all replicas together, which is what hardware without a topology has."""


def start_server(port: int, only_on_master: bool = True) -> None:
    """No server: what it would serve is XLA's own."""
    ignored("profiler_server", "it has no XLA profiler. Use torch.profiler.profile()")


def trace_me(scope: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: each call is a named region of torch's profiler, and of the metrics."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            with Trace(scope):
                return function(*args, **kwargs)

        return traced

    return decorate


def set_mat_mul_precision(precision: str) -> None:
    """Matrix products of float32 are computed in float32, whatever is asked for."""
    global _precision
    if precision not in _PRECISIONS:
        raise ValueError(f"precision {precision!r} is none of {', '.join(_PRECISIONS)}.")
    if precision != "highest":
        ignored("mat_mul_precision", "its products of float32 are always computed in float32")
    _precision = precision


def get_mat_mul_precision() -> str:
    """What was set last; "highest" at first."""
    return _precision


def eager_mode(enable: bool) -> None:
    """Whether each call runs when it is made, in place of a whole step."""
    ltc.sync()
    _eager.close()
    if enable:
        _eager.enter_context(config.override(LTC_TIER="op_by_op"))


def is_eager_mode() -> bool:
    """Whether each call runs when it is made."""
    return bool(config.value("LTC_TIER") == "op_by_op")


@contextlib.contextmanager
def eager_mode_context(enable: bool) -> Iterator[None]:
    """`eager_mode` inside the block."""
    before = is_eager_mode()
    eager_mode(enable)
    try:
        yield
    finally:
        eager_mode(before)
