"""Moves of nested data to and from a lazy device, and the check that no view is saved as a copy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ltc.device.recording import tensors as device_tensor
from ltc.support import tree


class ToLazyTensorArena:
    """Converts all selected tensors of nested data in one call.

    convert_fn  takes the list of tensors and returns as many others, in the same order
    select_fn   says of an object whether it is one of them

    `transform` raises ValueError where `convert_fn` returns another number of them.

    >>> arena = ltm.ToLazyTensorArena(
    ...     convert_fn=lambda tensors: [x.to("ltc") for x in tensors],
    ...     select_fn=lambda x: isinstance(x, torch.Tensor),
    ... )
    >>> arena.transform({"x": torch.ones(2), "n": 3})
    {'x': tensor([1., 1.], device='ltc:0'), 'n': 3}
    """

    def __init__(
        self,
        convert_fn: Callable[[list[torch.Tensor]], list[torch.Tensor]],
        select_fn: Callable[[Any], bool],
    ):
        self._convert_fn, self._select_fn = convert_fn, select_fn

    def transform(self, inputs: Any) -> Any:
        """`inputs` rebuilt around the converted tensors; see tree.for_each_instance_rewrite.

        `convert_fn` is called once, or not at all where nothing is selected.
        """
        tensors: list[torch.Tensor] = []
        tree.for_each_instance(inputs, self._select_fn, tensors.append)
        converted = self._convert_fn(tensors) if tensors else []
        if len(converted) != len(tensors):
            raise ValueError(
                f"convert_fn was given {len(tensors)} tensors and returned {len(converted)}: "
                f"it must return one for each."
            )
        new = {id(t): c for t, c in zip(tensors, converted, strict=True)}
        return tree.for_each_instance_rewrite(inputs, lambda x: id(x) in new, lambda t: new[id(t)])


def send_cpu_data_to_device(data: Any, device: torch.device | str) -> Any:
    """`data` with every CPU tensor in it uploaded, all in one batch.

    `requires_grad` is kept. Tensors elsewhere, and parameters, stay as they are. Containers come
    back as tree.for_each_instance_rewrite makes them: tuples as lists. Raises RuntimeError where
    there is no such device.

    >>> ltm.send_cpu_data_to_device((torch.ones(2), {"label": torch.zeros(1)}), "ltc")
    [tensor([1., 1.], device='ltc:0'), {'label': tensor([0.], device='ltc:0')}]
    """
    upload = functools.partial(device_tensor.upload_many, device=torch.device(device))
    return ToLazyTensorArena(upload, _is_plain_cpu_tensor).transform(data)


def _is_plain_cpu_tensor(x: Any) -> bool:
    return type(x) is torch.Tensor and x.device.type == "cpu"


def check_view_sharing(obj: Any) -> None:
    """Raise RuntimeError where two different tensors of `obj` are views of the same memory.

    Written one by one, they would come back as two that no longer share anything. The same tensor
    twice is fine, and so are two that cover the same elements, such as tied parameters.

    >>> x = torch.ones(4, device="ltc")
    >>> ltm.check_view_sharing([x, x])
    >>> ltm.check_view_sharing([x, x[:2]])
    Traceback (most recent call last):
    RuntimeError: Tensor ID ... is sharing a view with tensor ID ...
    """
    first_of: dict[Any, torch.Tensor] = {}

    def check(tensor: torch.Tensor) -> None:
        shared = _shared_memory(tensor)
        if shared is None:
            return
        first = first_of.setdefault(shared, tensor)
        if not _is_same_view(tensor, first):
            raise RuntimeError(
                f"Tensor ID {_number(tensor)} is sharing a view with tensor ID {_number(first)}: "
                f"{_describe(tensor)} and {_describe(first)}. clone() one of them first."
            )

    tree.for_each_instance(obj, torch.Tensor, check)


def _shared_memory(tensor: torch.Tensor) -> Any:
    """What is equal for two tensors that share memory; None where it is nobody else's."""
    if device_tensor.is_lazy(tensor):
        alias = device_tensor.alias_id(tensor)
        return ("lazy", alias) if alias else None
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return None
    address = tensor.untyped_storage().data_ptr()
    return (tensor.device, address) if address else None


def _is_same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    if device_tensor.is_lazy(a):
        return device_tensor.tensor_id(a) == device_tensor.tensor_id(b)
    return _layout(a) == _layout(b)


def _layout(tensor: torch.Tensor) -> tuple:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _number(tensor: torch.Tensor) -> int:
    return device_tensor.tensor_id(tensor) if device_tensor.is_lazy(tensor) else id(tensor)


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def to_cpu(data: Any) -> Any:
    """`data` with every lazy tensor as a CPU tensor; those that were shared stay shared."""
    return ToLazyTensorArena(_fetch, device_tensor.is_lazy).transform(data)


def _fetch(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    fetched: dict[int, torch.Tensor] = {}
    for t in tensors:
        number = device_tensor.tensor_id(t)
        if number not in fetched:
            fetched[number] = t.detach().cpu().requires_grad_(t.requires_grad)
    return [fetched[device_tensor.tensor_id(t)] for t in tensors]


def materialize(tensors: Any) -> None:
    """Compute the lazy tensors of a sequence and wait for them."""
    for tensor in tensors:
        if device_tensor.is_lazy(tensor):
            device_tensor.host_tensor(tensor)
