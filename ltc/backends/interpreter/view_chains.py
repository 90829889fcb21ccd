"""Views of CPU tensors that appear contiguous whatever their strides, and writes through them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

aten = torch.ops.aten


def viewed(x: torch.Tensor, overload: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What a view overload makes of `x`; of a copy of it where its strides do not allow that."""
    made = viewed_in_place(x, overload, args, kwargs)
    return overload(_packed(x), *args, **kwargs) if made is None else made


def write_through(x: torch.Tensor, chain: Sequence[tuple[Any, ...]], new: torch.Tensor) -> None:
    """Replace what a chain of views shows of `x`."""
    shown = x
    for n, (overload, args, kwargs, index) in enumerate(chain):
        made = viewed_in_place(shown, overload, args, kwargs)
        if made is None:
            packed = _packed(shown)
            write_through(packed, chain[n:], new)
            changed = _differ(packed, shown)
            shown[changed] = packed[changed]  # windows may show what was not written to once more
            return
        shown = made if index is None else made[index]
    shown.copy_(new)


def viewed_in_place(
    x: torch.Tensor, overload: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """What the view overload makes of `x` itself; None where its numbers would have to lie there in order."""
    if overload is aten.as_strided.default:
        return _as_strided(x, *args, **kwargs)
    try:
        return overload(x, *args, **kwargs)
    except RuntimeError:  # a `view` of what is not contiguous, or a look at parts of a conjugate
        if x.is_contiguous() and not (x.is_conj() or x.is_neg()):
            raise
        return None


def _as_strided(
    x: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor | None:
    """Its places are counted in `x`, not in the storage that `x` is a part of."""
    if not x.is_contiguous():
        return None
    return x.as_strided(size, stride, x.storage_offset() + (storage_offset or 0))


def _packed(x: torch.Tensor) -> torch.Tensor:
    return x.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _differ(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Where the bits do."""
    return (_bytes(x) != _bytes(y)).any(-1)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return _packed(x).unsqueeze(-1).view(torch.uint8)
