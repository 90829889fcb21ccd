"""Values that no memory can hold: a compiled program may do without them, a call of PyTorch's cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod

from ltc.aten.call import Call
from ltc.support.process import machine_memory
from ltc.support.sizes.extent import Extent, SizeTrace
from ltc.support.sizes.marks import is_symbolic


def has_too_large_values(calls: Iterable[Call]) -> bool:
    """Whether one is larger than all the memory there is; those of symbolic sizes are not looked at."""
    most = machine_memory.total()
    for call in calls:
        for value in call.results:
            if value is not None and not is_symbolic(value.shape):
                if prod(value.shape) * value.dtype.itemsize > most:
                    return True
    return False


def largest_at(trace: SizeTrace, calls: Iterable[Call]) -> Callable[..., int]:
    """Bytes of the largest value of symbolic size, as a function of the symbols."""
    results = [value for call in calls for value in call.results if value is not None]
    sizes = {
        "*".join([_text(extent) for extent in (*value.shape, value.dtype.itemsize)])
        for value in results
        if is_symbolic(value.shape)
    }
    function: Callable[..., int] = trace.function(f"max(({', '.join(['0', *sorted(sizes), ''])}))")
    return function


def _text(extent: int) -> str:
    return f"({extent.source})" if isinstance(extent, Extent) else str(extent)
