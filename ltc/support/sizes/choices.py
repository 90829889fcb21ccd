"""Decisions on sizes without a guard: the greater of two, how many a slice takes, free choices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ltc.support.sizes.extent import Extent, Size, SizeTrace, bounds_of, number_now, source_of


class _Tracing(threading.local):
    trace: SizeTrace | None = None


_tracing = _Tracing()


def current() -> SizeTrace | None:
    """The trace that the calling thread makes a program under."""
    return _tracing.trace


@contextmanager
def tracing(trace: SizeTrace) -> Iterator[None]:
    """Text that is made inside may have marks of this trace."""
    before, _tracing.trace = _tracing.trace, trace
    try:
        yield
    finally:
        _tracing.trace = before


def _trace_of(sizes: Iterable[Size]) -> SizeTrace | None:
    return next((size.trace for size in sizes if isinstance(size, Extent)), None)


def most(*sizes: Size) -> Any:
    """max, as an expression where one of them is: nothing is decided."""
    return _chosen("max", max, 0, sizes)


def least(*sizes: Size) -> Any:
    """min, likewise."""
    return _chosen("min", min, 1, sizes)


def _chosen(name: str, choose: Callable[..., int], side: int, sizes: Sequence[Size]) -> Any:
    sizes = tuple(dict.fromkeys(sizes))
    trace = _trace_of(sizes)
    if trace is None or len(sizes) == 1:
        return choose(sizes)
    value = choose(number_now(size) for size in sizes)
    all_bounds = [bounds_of(size) for size in sizes]
    known = [[b[k] for b in all_bounds if b[k] is not None] for k in (0, 1)]
    bounds: list[int | None] = [None, None]
    for k in (0, 1):
        # the greater of two is at least what one of them is at least; it is at most if both are
        needed = 1 if k == side else len(sizes)
        bounds[k] = choose(known[k]) if len(known[k]) >= needed else None
    for size in sizes:  # one of them may be beyond all others
        rest = [bounds_of(size - other) for other in sizes if other is not size]
        if name == "max" and all(low is not None and low >= 0 for low, _ in rest):
            return size
        if name == "min" and all(high is not None and high <= 0 for _, high in rest):
            return size
    parts = ",".join(sorted(map(source_of, sizes)))
    return trace.atom(f"{name}({parts})", value, (bounds[0], bounds[1]))


@contextmanager
def by_sample(*sizes: Any) -> Iterator[None]:
    """Decisions inside are right at all sizes, whichever way they come out: no guard is noted."""
    trace = _trace_of(sizes) or current()
    if trace is None:
        yield
        return
    before, trace.is_guarding = trace.is_guarding, False
    try:
        yield
    finally:
        trace.is_guarding = before
