"""Moves of nested data to and from a lazy device, and the check that no view is saved as a copy."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch

from ltc.device.recording import tensors as device_tensor
from ltc.device.recording.sync import ready_buffer
from ltc.errors import Unsupported
from ltc.support import tree
from ltc.training_loop.nested_copy import copied


class ToLazyTensorArena:
    """Convert all selected tensors of nested data in one call.

    `transform` raises ValueError where `convert_fn` returns another number of them.

    Args:
        convert_fn: Takes the list of tensors and returns as many others, in the same order.
        select_fn: Returns True for an object that is one of these tensors.

    Example:
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
                f"convert_fn got {len(tensors)} tensors and returned {len(converted)}: "
                f"it must return one for each."
            )
        new = {id(t): c for t, c in zip(tensors, converted, strict=True)}
        return tree.for_each_instance_rewrite(inputs, lambda x: id(x) in new, lambda t: new[id(t)])


def send_cpu_data_to_device(data: Any, device: torch.device | str) -> Any:
    """`data` with every CPU tensor in it uploaded, all in one batch.

    `requires_grad` is kept. Tensors elsewhere, and parameters, stay as they are. Containers and
    objects keep their kind (see nested_copy.py), but plain tuples come back as lists.

    Args:
        data: A tensor, or containers and objects that hold some.
        device: A lazy device.

    Returns:
        The same structure, with tensors on the device.

    Raises:
        RuntimeError: If there is no such device.
        Unsupported: For a tensor that no device can hold.
        TypeError: For what holds tensors that cannot be exchanged.

    Example:
        >>> ltm.send_cpu_data_to_device((torch.ones(2), {"label": torch.zeros(1)}), "ltc")
        [tensor([1., 1.], device='ltc:0'), {'label': tensor([0.], device='ltc:0')}]
    """
    place = device_tensor.device_of(torch.device(device)).torch_device
    move = functools.partial(_moved_together, device=place)
    return copied(data, _is_left_on_the_cpu, move, with_arrays=False)


def batch_on_device(batch: Any, device: torch.device) -> Any:
    """Copy a loader's batch so that its tensors are on the device, whatever the source does next.

    Every tensor is moved, parameters and those of other devices too, and so are objects that have a
    method `to`. NumPy arrays and other plain memory are copied and stay on the host. A tensor that
    is on the device and requires grad stays the same object. Raises like `send_cpu_data_to_device`.
    """
    move = functools.partial(_moved_together, device=device)
    return copied(batch, _is_moved_with_a_batch, move, with_arrays=True)


def _is_left_on_the_cpu(x: Any) -> bool:
    if isinstance(x, torch.Tensor):
        return x.device.type == "cpu" and not isinstance(x, torch.nn.Parameter)
    return _moves_itself(x)


def _is_moved_with_a_batch(x: Any) -> bool:
    kinds = (torch.Tensor, torch.nn.Module, torch.UntypedStorage, torch.TypedStorage)
    return isinstance(x, kinds) or _moves_itself(x)


def _moves_itself(x: Any) -> bool:
    """Return True for an object that has a method `to` and holds tensors; no module does here."""
    if not callable(getattr(type(x), "to", None)) or isinstance(x, (type, torch.nn.Module)):
        return False
    if isinstance(x, (torch.Tensor, tree.DataWrapper)):
        return False
    tensors: list[torch.Tensor] = []
    tree.for_each_instance(x, torch.Tensor, tensors.append)
    return bool(tensors)


def _moved_together(values: list[Any], device: torch.device) -> list[Any]:
    """Each on the device: plain CPU tensors in one transfer, the others one by one."""
    plain = [value for value in values if _is_uploaded(value)]
    uploaded = iter(device_tensor.upload_many(plain, device))
    return [next(uploaded) if _is_uploaded(v) else _moved(v, device) for v in values]


def _is_uploaded(x: Any) -> bool:
    """Return True for a tensor that an upload copies as it is: a plain one, without a graph."""
    if type(x) is not torch.Tensor or x.device.type != "cpu" or not x.is_leaf:
        return False
    return x.layout is torch.strided and not (x.is_quantized or x.is_nested)


def _moved(value: Any, device: torch.device) -> Any:
    if not isinstance(value, torch.Tensor):
        return _moved_by_itself(value, device)
    if device_tensor.is_lazy(value) and value.is_leaf:
        if value.requires_grad and value.device == device:
            return value  # a leaf is known by its identity: gradients are added to it
        if type(value) is torch.Tensor and value.layout is torch.strided:
            return _copied_on_devices(value, device)
    if value.layout in _COMPRESSED:  # torch makes one there of which nothing can be read
        raise _unsupported(value, device)
    try:
        # Only a tensor with a graph needs one for its move.
        moved = (value.detach() if value.is_leaf else value).to(device, copy=True)
    except NotImplementedError as error:
        raise _unsupported(value, device) from error
    return _of_the_same_kind(moved, value)


def _copied_on_devices(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor that an ltc device has, as another one, of which writes to the first show nothing."""
    state = device_tensor.state_of(value)
    if state.device.torch_device != device or state.base is not None:
        moved = device_tensor.upload_many([device_tensor.host_tensor(value)], device)[0]
        return moved.requires_grad_(value.requires_grad)
    buffer = ready_buffer(state)
    buffer.shared = True  # then no program may write into it
    return device_tensor.wrap_buffer(buffer, state.device)


def _of_the_same_kind(moved: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The moved tensor as of the class, with the attributes and the `requires_grad`, of the other."""
    if type(moved) is not type(value):
        moved = moved.as_subclass(type(value))
    for name, attribute in getattr(value, "__dict__", {}).items():
        vars(moved).setdefault(name, attribute)
    return moved.requires_grad_() if value.is_leaf and value.requires_grad else moved


def _moved_by_itself(value: Any, device: torch.device) -> Any:
    """Return the result of the object's own `to`, called on a copy, because many change themselves."""
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, (torch.UntypedStorage, torch.TypedStorage)):
        raise Unsupported(f"A batch has a {name}, but ltc has no storages. Pass a tensor of it.")
    copied_value = copy.deepcopy(value) if isinstance(value, torch.nn.Module) else copy.copy(value)
    moved = copied_value.to(device)
    if not isinstance(moved, type(value)):
        raise TypeError(
            f"{name}.to({str(device)!r}) of an object in a batch returned a "
            f"{type(moved).__name__}: it must return the {type(value).__name__} on that device."
        )
    return moved


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_ADVICE = {
    "meta": "It has no data: fill it before it becomes part of a batch.",
    "quantized": "Pass its dequantize(), or remove it from the batch.",
    "nested": "Make it with layout=torch.jagged.",
    "compressed": "Pass its to_sparse(), which has coordinates, or its to_dense().",
    "other": "Pass its to_dense(), or remove it from the batch.",
}


def _unsupported(value: torch.Tensor, device: torch.device) -> Unsupported:
    if value.device.type == "meta":
        kind = "meta"
    elif value.is_quantized:
        kind = "quantized"
    elif value.layout in _COMPRESSED:
        kind = "compressed"
    else:
        kind = "nested" if value.is_nested else "other"
    return Unsupported(
        f"A batch has a tensor that cannot be moved to {device}: a {type(value).__name__} on "
        f"{value.device}, {value.layout}, {value.dtype}{', nested' if value.is_nested else ''}. "
        f"{_ADVICE[kind]}"
    )


def check_view_sharing(obj: Any) -> None:
    """Raise RuntimeError if two different tensors of `obj` are views of the same memory.

    Written one by one, they would come back as two that no longer share anything. The same tensor
    twice is fine, and so are two that cover the same elements, such as tied parameters.

    Args:
        obj: A tensor, or containers and objects that hold some.

    Raises:
        RuntimeError: If two different tensors are views of the same memory.

    Example:
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
    """Return a key that is equal for two tensors that share memory; None if no other shares it."""
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
