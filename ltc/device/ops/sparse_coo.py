"""Sparse tensors in coordinates, as far as a gradient of an embedding is one.

torch makes such a tensor of two strided ones, indices and values, which are lazy tensors here.  What
only takes it apart and puts it together is torch's C++ for the CPU, which looks at no element.  What
computes is written down here in calls on the two parts, so that it is recorded; coalescing has as
many results as there are different rows, so it reads what is pending.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ltc.errors import Unsupported
from ltc.support.torch_private import (
    DispatchKey,
    coalesced,
    count_of,
    elements_of,
    kernel_of_key,
    places_of,
)

aten = torch.ops.aten

# Overloads whose C++ kernel for the CPU handles indices and values as a whole.
STRUCTURAL = """
    _coalesced_ _indices _nnz _sparse_coo_tensor_with_dims _sparse_coo_tensor_with_dims_and_tensors
    _to_dense _values clone copy_ copy_sparse_to_sparse_ dense_dim empty.memory_format empty_like
    indices is_coalesced resize_as_sparse_ sparse_dim sparse_resize_ sparse_resize_and_clear_ values
    zero_
""".split()


def _by_cpp(name: str) -> Callable[..., Any]:
    base, _, overload = name.partition(".")
    kernel = kernel_of_key(getattr(getattr(aten, base), overload or "default"))

    def structural(*args: Any, **kwargs: Any):
        return kernel(DispatchKey.SparseCPU, *args, **kwargs)

    return structural


# --- parts ----------------------------------------------------------------------------------------


def _with_values(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The same places with other values."""
    made = _made(x, places_of(x), values)
    return coalesced(made, x.is_coalesced())


def _made(x: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return aten._sparse_coo_tensor_with_dims_and_tensors.default(
        x.sparse_dim(), x.dense_dim(), x.shape, indices, values,
        dtype=values.dtype, layout=torch.sparse_coo, device=values.device,
    )  # fmt: skip


def _row_numbers(x: torch.Tensor) -> torch.Tensor:
    """[nnz]: each place as one number, in the order of the dimensions."""
    numbers, *others = places_of(x).unbind(0)
    for size, index in zip(x.shape[1:], others):
        numbers = numbers * size + index
    return numbers


def coalesce(x: torch.Tensor) -> torch.Tensor:
    """aten::_coalesce: each place once, in ascending order; values of the same place are added."""
    if x.is_coalesced():
        return x
    if count_of(x) < 2 or x.sparse_dim() == 0:
        return coalesced(x.clone(), count_of(x) < 2)
    places, to = torch.unique(_row_numbers(x), return_inverse=True)
    values = elements_of(x)
    total = values.new_zeros((len(places), *values.shape[1:])).index_add_(0, to, values)
    indices: list[torch.Tensor] = []
    for size in reversed(x.shape[1 : x.sparse_dim()]):
        indices.insert(0, places % size)
        places = torch.div(places, size, rounding_mode="floor")
    return coalesced(_made(x, torch.stack([places, *indices]), total))


def sparse_mask(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """aten::sparse_mask: the elements of a strided tensor at the mask's places."""
    _check_shapes("sparse_mask", x, mask)
    if x.is_sparse:
        raise Unsupported(_refusal("aten::sparse_mask of a sparse tensor"))
    return _with_values(mask, x[tuple(places_of(mask).unbind(0))])


# --- arithmetic -----------------------------------------------------------------------------------


def _check_shapes(name: str, x: torch.Tensor, other: torch.Tensor) -> None:
    if x.shape != other.shape:
        raise RuntimeError(
            f"{name}: expected 'self' and 'other' to have same size, but got "
            f"{list(x.shape)} and {list(other.shape)}"
        )


def add(x: torch.Tensor, other: torch.Tensor, *, alpha: Any = 1) -> torch.Tensor:
    """aten::add.Tensor where at least one is sparse: strided + sparse is strided."""
    if x.is_sparse and other.is_sparse:
        return _sum_of_sparse(x, other, alpha)
    dtype = torch.result_type(x, other)
    return add_(x.clone() if x.dtype == dtype else x.to(dtype), other, alpha=alpha)


def add_(x: torch.Tensor, other: torch.Tensor, *, alpha: Any = 1) -> torch.Tensor:
    """aten::add_.Tensor."""
    if x.is_sparse and other.is_sparse:
        return _written(_sum_of_sparse(x, other, alpha), x)
    if x.is_sparse:
        raise RuntimeError("add(sparse, dense) is not supported. Use add(dense, sparse) instead.")
    _check_shapes("add", x, other)
    _check_cast(torch.result_type(x, other), x.dtype)
    values = elements_of(other).to(x.dtype)
    if other.sparse_dim() == 1:
        return x.index_add_(0, places_of(other)[0], values, alpha=alpha)
    if other.sparse_dim() == 0:
        return x.add_(values.sum(0), alpha=alpha)
    return x.index_put_(tuple(places_of(other).unbind(0)), values * alpha, accumulate=True)


def _sum_of_sparse(x: torch.Tensor, other: torch.Tensor, alpha: Any) -> torch.Tensor:
    """Places of both, one behind the other; as on the CPU merged where both are coalesced."""
    _check_shapes("add", x, other)
    if (x.sparse_dim(), x.dense_dim()) != (other.sparse_dim(), other.dense_dim()):
        raise RuntimeError(
            f"add: expected 'self' and 'other' to have same number of sparse dimensions, but got "
            f"{x.sparse_dim()} and {other.sparse_dim()}"
        )
    values = torch.cat([elements_of(x), elements_of(other) * alpha])
    total = _made(x, torch.cat([places_of(x), places_of(other)], 1), values)
    merge = x.is_coalesced() and other.is_coalesced()
    return coalesce(total) if merge or count_of(total) > total.numel() else total


def _check_cast(made: torch.dtype, kept: torch.dtype) -> None:
    if not torch.can_cast(made, kept):
        raise RuntimeError(f"result type {made} can't be cast to the desired output type {kept}")


def sub(x: torch.Tensor, other: torch.Tensor, *, alpha: Any = 1) -> torch.Tensor:
    """aten::sub.Tensor."""
    return add(x, other, alpha=-alpha)


def sub_(x: torch.Tensor, other: torch.Tensor, *, alpha: Any = 1) -> torch.Tensor:
    """aten::sub_.Tensor."""
    return add_(x, other, alpha=-alpha)


def _of_values(name: str, overload: Any) -> Callable[..., torch.Tensor]:
    """A call that changes values one by one and leaves zeros zeros: by a number, or by nothing."""

    def changed(*operands: Any, **kwargs: Any):
        sparse = [x for x in operands if isinstance(x, torch.Tensor) and x.is_sparse]
        others = [x for x in operands if isinstance(x, torch.Tensor) and not x.is_sparse]
        if len(sparse) != 1 or any(x.dim() for x in others):
            raise Unsupported(_refusal(name))
        if name == "aten::div" and operands[0] is not sparse[0]:
            raise Unsupported(_refusal("aten::div by a sparse tensor"))
        values = [elements_of(x) if x is sparse[0] else x for x in operands]
        return _with_values(sparse[0], overload(*values, **kwargs))

    return changed


def _in_place(changed: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def write(x: torch.Tensor, *rest: Any, **kwargs: Any):
        return _written(changed(x, *rest, **kwargs), x)

    return write


def _into(changed: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def write(*operands: Any, out: torch.Tensor, **kwargs: Any):
        return _written(changed(*operands, **kwargs), out)

    return write


def _written(made: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    _check_cast(made.dtype, kept.dtype)
    return kept.copy_(made)


# --- all of it ------------------------------------------------------------------------------------


def _refusal(name: str) -> str:
    return (
        f"{name}: an ltc device holds sparse tensors as gradients alone, which are added, scaled, "
        f"coalesced, masked and moved. Call .to_dense() or .cpu() first."
    )


def refuse(overload: Any, *args: Any, **kwargs: Any):
    """Refuse every other overload of a sparse tensor."""
    raise Unsupported(_refusal(str(overload).replace(".", "::", 1).removesuffix(".default")))


def _kernels() -> dict[str, Callable[..., Any]]:
    kernels: dict[str, Callable[..., Any]] = {name: _by_cpp(name) for name in STRUCTURAL}
    kernels |= {"_coalesce": coalesce, "sparse_mask": sparse_mask}
    kernels |= {"add.Tensor": add, "add_.Tensor": add_, "add.out": _into(add)}
    kernels |= {"sub.Tensor": sub, "sub_.Tensor": sub_, "sub.out": _into(sub)}
    for base, overload in (("mul", ".Tensor"), ("div", ".Tensor"), ("neg", ""), ("abs", "")):
        plain = getattr(getattr(aten, base), overload[1:] or "default")
        changed = _of_values(f"aten::{base}", plain)
        kernels |= {f"{base}{overload}": changed, f"{base}_{overload}": _in_place(changed)}
        kernels[f"{base}.out"] = _into(changed)
    return kernels


KERNELS = _kernels()


def bag_gradient(dense: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """aten::_embedding_bag_backward: where it is to be sparse, torch's formula for the CPU, in calls.

    Args:
        dense: The kernel for all others.
    """
    by_torch = kernel_of_key(aten._embedding_bag_backward.default)

    def gradient(*args: Any, **kwargs: Any):
        is_sparse = args[9] if len(args) > 9 else kwargs["sparse"]
        if not is_sparse:
            return dense(*args, **kwargs)
        return by_torch(DispatchKey.CPU, *args, **kwargs)

    return gradient
