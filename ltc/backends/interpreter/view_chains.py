"""Views of CPU tensors that appear contiguous whatever their strides, and writes through them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten


def viewed(x: torch.Tensor, overload: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the views of `x` by an overload; of a copy of it if its strides do not allow that."""
    made = viewed_in_place(x, overload, args, kwargs)
    return overload(_packed(x), *args, **kwargs) if made is None else made


def shown(x: Any, chain: Sequence[tuple[Any, ...]], view: Callable[..., Any] = viewed) -> Any:
    """Return what a chain of views shows of `x`.

    Args:
        view: Makes one view, of a tensor, an overload, its arguments and keywords.
    """
    for overload, args, kwargs, index in chain:
        made = view(x, overload, args, kwargs)
        x = made if index is None else made[index]
    return x


def write_through(x: torch.Tensor, chain: Sequence[tuple[Any, ...]], new: torch.Tensor) -> None:
    """Replace what a chain of views shows of `x`."""
    part = x
    for n, (overload, args, kwargs, index) in enumerate(chain):
        made = viewed_in_place(part, overload, args, kwargs)
        if made is None:
            packed = _packed(part)
            write_through(packed, chain[n:], new)
            changed = _differ(packed, part)
            part[changed] = packed[changed]  # windows may show what was not written to once more
            return
        part = made if index is None else made[index]
    part.copy_(new)


def viewed_in_place(
    x: torch.Tensor, overload: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Return the views of `x` itself; None if its numbers would have to lie in order for that."""
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
    """Return the view; its places are counted in `x`, not in the storage that `x` is a part of."""
    if not x.is_contiguous():
        return None
    return x.as_strided(size, stride, x.storage_offset() + (storage_offset or 0))


def _packed(x: torch.Tensor) -> torch.Tensor:
    return x.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _differ(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return where the bits differ."""
    return (_bytes(x) != _bytes(y)).any(-1)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return _packed(x).unsqueeze(-1).view(torch.uint8)
