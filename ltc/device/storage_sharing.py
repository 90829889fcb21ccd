"""The bytes of each storage that a set of tensors needs, so that shared ones are stored once.

Tensors whose bytes overlap become one entry: the tensor itself where all are alike, the one that
covers the others where there is one, else the stretch of the storage that they span. Tensors of one
storage that touch different bytes share nothing one could observe: each is an entry of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ltc.device.recording.state import State
from ltc.device.recording.tensors import host_tensor, host_value, is_lazy, state_of
from ltc.support.torch_private import storage_identity

_ALIGNMENT_BYTES = 16  # of a stretch: every dtype can be read at its own offsets


@dataclass(frozen=True)
class Layout:
    """The layout of a tensor in a storage; `begin` and `end` are the bytes it touches.

    Attributes:
        offset, strides: In elements.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    begin: int = field(compare=False)
    end: int = field(compare=False)

    @property
    def is_contiguous(self) -> bool:
        return self.strides == contiguous_strides(self.shape)


@dataclass
class StoredBytes:
    """An entry to be stored.

    Attributes:
        name: The name of the first tensor in it.
        tensor: The one it is as a whole, or None where it is a stretch under several.
        fetch: () -> its elements as a contiguous CPU tensor, which may be live memory: do not
            write.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    tensor: torch.Tensor | None
    fetch: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class View:
    """A tensor as part of an entry: elements of its own dtype, counted from the entry's start."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Placement:
    """The entry a tensor is in, and which part of it; None: the entry as it is."""

    entry: StoredBytes
    view: View | None


def contiguous_strides(shape: Iterable[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, in elements."""
    strides, step = [], 1
    for extent in reversed(tuple(shape)):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def arranged(
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> tuple[list[StoredBytes], list[Placement]]:
    """The entries that hold named tensors, and the placement of each tensor, in the given order.

    Nothing is computed or copied yet.
    """
    tensors = list(tensors)
    storages: dict[Hashable, list[tuple[int, Layout]]] = {}
    for number, (_, tensor) in enumerate(tensors):
        storage, layout = _where(tensor)
        storages.setdefault(storage, []).append((number, layout))
    placements: dict[int, Placement] = {}
    for members in storages.values():
        for cluster in _clusters(members):
            placements.update(_placements(cluster, tensors))
    in_order = [placements[number] for number in range(len(tensors))]
    return list({id(p.entry): p.entry for p in in_order}.values()), in_order


# --- where a tensor lies ------------------------------------------------------------------------


def _where(tensor: torch.Tensor) -> tuple[Hashable, Layout]:
    """(what identifies its storage, its layout there)."""
    if is_lazy(tensor):
        return _where_lazy(tensor)
    layout = _layout(tensor)
    key = (str(tensor.device), storage_identity(tensor.untyped_storage()))
    if tensor.is_conj() or tensor.is_neg():  # its bytes are not its elements
        return (*key, tensor.is_conj(), tensor.is_neg(), layout), layout
    return key, layout


def _where_lazy(tensor: torch.Tensor) -> tuple[Hashable, Layout]:
    state = state_of(tensor)
    if state.base is not None:
        layout = _layout_in_base(state)
        if layout is not None:
            return state.base, layout
    return state, _layout(tensor)


def _layout_in_base(view: State) -> Layout | None:
    """Return the layout of a lazy view in its base; None if no strides can express it."""
    root: Any = view.base
    base: Any = root.buffer if root.buffer is not None else root.value
    whole = torch.empty(base.shape, dtype=base.dtype, device="meta")
    plain = whole
    for overload, args, kwargs, index in view.chain:
        if not plain.is_contiguous():  # on the device it would look contiguous to what follows
            return None
        result = overload(plain, *args, **kwargs)
        plain = result if index is None else result[index]
    same = storage_identity(plain.untyped_storage()) == storage_identity(whole.untyped_storage())
    return _layout(plain) if same and not plain.is_conj() and not plain.is_neg() else None


def _layout(tensor: torch.Tensor) -> Layout:
    dtype, shape, strides = tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())
    offset = int(tensor.storage_offset())
    last = offset + sum((extent - 1) * step for extent, step in zip(shape, strides))
    end = last + 1 if tensor.numel() else offset
    if _looks_contiguous(shape, strides):
        strides = contiguous_strides(shape)
    return Layout(dtype, shape, strides, offset, offset * dtype.itemsize, end * dtype.itemsize)


def _looks_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return True if the strides differ from contiguous ones only where they are never stepped
    along.
    """
    wanted = contiguous_strides(shape)
    return 0 in shape or all(
        extent == 1 or step == other for extent, step, other in zip(shape, strides, wanted)
    )


# --- what overlaps ------------------------------------------------------------------------------

Members = list[tuple[int, Layout]]


def _clusters(members: Members) -> list[Members]:
    """Members of one storage, those that overlap together; empty ones only with their like."""
    clusters: list[Members] = []
    empty: dict[Layout, Members] = {}
    end = -1
    for number, layout in sorted(members, key=lambda m: (m[1].begin, -m[1].end, m[0])):
        if layout.begin == layout.end:
            empty.setdefault(layout, []).append((number, layout))
        elif layout.begin < end:
            clusters[-1].append((number, layout))
            end = max(end, layout.end)
        else:
            clusters.append([(number, layout)])
            end = layout.end
    return [*clusters, *empty.values()]


def _placements(cluster: Members, tensors: list) -> dict[int, Placement]:
    first = min(number for number, _ in cluster)
    name = tensors[first][0]
    if len({layout for _, layout in cluster}) == 1:
        placement = Placement(_whole(tensors[first][1], name), None)
        return dict.fromkeys((number for number, _ in cluster), placement)
    begin, end = cluster[0][1].begin, max(layout.end for _, layout in cluster)
    for number, layout in cluster:
        if layout.is_contiguous and (layout.begin, layout.end) == (begin, end):
            entry = _whole(tensors[number][1], tensors[number][0])
            return {n: _part(entry, begin, other, layout) for n, other in cluster}
    begin -= begin % _ALIGNMENT_BYTES
    entry = _stretch(tensors[first][1], begin, end, name)
    return {number: _part(entry, begin, layout, None) for number, layout in cluster}


def _part(entry: StoredBytes, begin: int, layout: Layout, whole: Layout | None) -> Placement:
    if layout == whole:
        return Placement(entry, None)
    offset = layout.offset - begin // layout.dtype.itemsize
    return Placement(entry, View(layout.dtype, layout.shape, layout.strides, offset))


def _whole(tensor: torch.Tensor, name: str) -> StoredBytes:
    return StoredBytes(name, tensor.dtype, tuple(tensor.shape), tensor, lambda: _on_host(tensor))


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    if is_lazy(plain):
        return host_tensor(plain)
    return plain.cpu().resolve_conj().resolve_neg().contiguous()


def _stretch(tensor: torch.Tensor, begin: int, end: int, name: str) -> StoredBytes:
    """The bytes [begin, end) of the storage of a tensor."""
    return StoredBytes(
        name, torch.uint8, (end - begin,), None, lambda: _bytes_under(tensor)[begin:end]
    )


def _bytes_under(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the storage that a tensor is in."""
    if is_lazy(tensor):
        state = state_of(tensor)
        return as_bytes(host_value(state if state.base is None else state.base))
    storage = tensor.detach().untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage.cpu())


def as_bytes(plain: torch.Tensor) -> torch.Tensor:
    """The bytes of a CPU tensor's elements, in their order."""
    packed = plain.resolve_conj().resolve_neg().contiguous()
    # One element counts as contiguous whatever its strides, and `view` looks at them all the same.
    return packed.as_strided((packed.numel(),), (1,)).view(torch.uint8)
