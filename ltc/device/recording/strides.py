"""The strides a view would have on the CPU, which decide whether a call makes a view or a copy.

A lazy tensor appears contiguous, and its values are handed on in the order of its indices. But
`x.t().contiguous()` and `x.t().reshape(-1)` are copies, as a write to them or to x shows. A tensor
that is no view counts as contiguous, whatever strides the CPU would have given it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ltc.device.recording.state import State
from ltc.device.torch_device import contiguous_strides
from ltc.support.bounded_table import BoundedTable
from ltc.support.torch_private import plain_functions

Strides = tuple[int, ...] | None  # None: those of a contiguous tensor


class _CpuLayout(NamedTuple):
    """The layout of a view on the CPU.

    Attributes:
        strides: The strides of the view.
        overlaps: True if the CPU refuses to write to it: it shows an element several times.
        repeats: True if it may do so, windows that overlap included.
    """

    strides: Strides
    overlaps: bool
    repeats: bool


# With the chain, so that its parts keep their ids.
_known: BoundedTable[tuple, tuple[tuple, _CpuLayout]] = BoundedTable("Strides", 1024)


def strides_of(state: State) -> Strides:
    """Return the strides of a view; None if the tensor is contiguous on the CPU or not a view."""
    return None if state.base is None else _layout_of(state, state.base).strides


def overlaps(view: State) -> bool:
    """Return True if the CPU refuses to write to a view: it shows an element several times."""
    return _layout_of(view, view.base).overlaps


REFUSAL = (
    "unsupported operation: more than one element of the written-to tensor refers to a single memory "
    "location. Please clone() the tensor before performing the operation."
)


def repeats(view: State) -> bool:
    """Return True if a view may show an element of its base several times."""
    return view.base is not None and _layout_of(view, view.base).repeats


def _layout_of(view: State, base: Any) -> _CpuLayout:
    return layout_by(view.chain, *base.type)


def layout_by(chain: tuple, shape: tuple[int, ...], dtype: torch.dtype) -> _CpuLayout:
    """Return the layout of what a chain of views shows of a contiguous tensor."""
    key = (shape, dtype, *map(id, chain))
    known = _known.get(key)
    if known is None:
        known = _known.keep(key, (chain, _layout_by(chain, shape, dtype)))
    return known[1]


def _layout_by(chain: tuple, shape: tuple[int, ...], dtype: torch.dtype) -> _CpuLayout:
    hidden = False
    with plain_functions(), torch.no_grad():
        view: Any = without_values(shape, None, dtype)
        for overload, args, kwargs, index in chain:
            try:
                made = overload(view, *args, **kwargs)
            except RuntimeError:  # a `view` of what is not contiguous, which the CPU refuses
                hidden = hidden or _shows_twice(view)
                made = overload(without_values(tuple(view.shape), None, dtype), *args, **kwargs)
            view = made if index is None else made[index]
    strides = None if view.is_contiguous() else tuple(view.stride())
    return _CpuLayout(strides, hidden or _shows_twice(view), hidden or _may_show_twice(view))


def _shows_twice(view: torch.Tensor) -> bool:
    """Torch's own rule; it does not look for other overlaps, of windows say."""
    moves = zip(view.shape, view.stride())
    return not view.is_contiguous() and any(n > 1 and step == 0 for n, step in moves)


def _may_show_twice(view: torch.Tensor) -> bool:
    """Return True if a step along some dimension does not pass all that lies along shorter ones."""
    reached = 0
    for step, extent in sorted((s, n) for n, s in zip(view.shape, view.stride()) if n > 1):
        if step <= reached:
            return True
        reached += (extent - 1) * step
    return False


def without_values(shape: tuple[int, ...], strides: Strides, dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the meta device."""
    whole = torch.empty(0, dtype=dtype, device="meta")
    return whole.as_strided(shape, strides or contiguous_strides(shape))
