"""Torch's CPU kernels for overloads that add: each is given float32 where it would add in 16 bits.

In bfloat16 a sum that is rounded after each addition stays at 256 once it is there: 257 is no such
number.  Most CPU kernels add float16 and bfloat16 in float32 and round once.  Those listed here do not,
while generated kernels always do, so that the same call would give another number once it is compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ltc.aten.schema import schema_of
from ltc.ir.node import Node, is_number
from ltc.ir.tensor_type import LOW_PRECISION
from ltc.support.torch_private import function_of, schema_of_overload

_LISTS = frozenset({list, tuple})

# Operations in all their forms -> the argument without which one of them adds nothing.
ADD_IN_16_BITS: dict[str, str | None] = {
    "aten::addbmm": None,
    "aten::index_add": None,
    "aten::index_reduce": None,
    "aten::_index_put_impl": "accumulate",
    "aten::_unsafe_index_put": "accumulate",
    "aten::index_put": "accumulate",
    "aten::put": "accumulate",
    "aten::prod": None,
    "aten::histc": None,
    "aten::segment_reduce": None,
    "aten::_segment_reduce_backward": None,
    "aten::col2im": None,
    "aten::unfold_backward": None,
    "aten::embedding_dense_backward": None,
    "aten::_embedding_bag_backward": None,
    "aten::_embedding_bag_dense_backward": None,
    "aten::native_layer_norm_backward": None,
    "aten::_adaptive_avg_pool3d": None,
    "aten::adaptive_avg_pool3d": None,
    "aten::_adaptive_avg_pool2d_backward": None,
    "aten::_adaptive_avg_pool3d_backward": None,
    "aten::adaptive_avg_pool3d_backward": None,
    "aten::adaptive_max_pool2d_backward": None,
    "aten::adaptive_max_pool3d_backward": None,
    "aten::avg_pool2d_backward": None,
    "aten::avg_pool3d_backward": None,
    "aten::max_pool2d_with_indices_backward": None,
    "aten::max_pool3d_with_indices_backward": None,
    "aten::fractional_max_pool2d_backward": None,
    "aten::fractional_max_pool3d_backward": None,
    "aten::grid_sampler_2d_backward": None,
    "aten::grid_sampler_3d_backward": None,
    "aten::reflection_pad1d_backward": None,
    "aten::reflection_pad2d_backward": None,
    "aten::reflection_pad3d_backward": None,
    "aten::replication_pad1d_backward": None,
    "aten::replication_pad2d_backward": None,
    "aten::replication_pad3d_backward": None,
}


def adds_in_16_bits(name: str) -> bool:
    """Return True if the CPU's kernel of that overload ("aten::put_") adds 16-bit numbers as such."""
    return _base(name) in ADD_IN_16_BITS


def _base(name: str) -> str:
    base = name.partition(".")[0]
    return base[:-1] if base.endswith("_") else base


def narrow_sum(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """The 16-bit dtype in which the CPU's kernel would add; None where it adds in a wider one.

    Operands of several floating dtypes are passed on as they are: a kernel either refuses them, or
    adds in the wider one.

    Args:
        args, kwargs: The call's arguments, with tensors or nodes as operands.
    """
    if not adds_in_16_bits(name):
        return None
    given, condition = given_by_name(name, args, kwargs), ADD_IN_16_BITS[_base(name)]
    dtypes = _floats(list(given.values()))
    dtype = given.get("dtype") or (dtypes.pop() if len(dtypes) == 1 else None)
    adds = condition is None or given.get(condition, False)
    return dtype if adds and dtype in LOW_PRECISION else None


def given_by_name(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in schema_of(name).arguments]
    return {**dict(zip(names, args)), **kwargs}


def _floats(arguments: Sequence[Any]) -> set[torch.dtype]:
    """The dtypes of all operands that are floats."""
    found = set()
    for argument in arguments:
        if argument.__class__ in _LISTS:
            found |= _floats(argument)
        elif isinstance(argument, (torch.Tensor, Node)) and not is_number(argument):
            found |= {argument.dtype} if argument.dtype.is_floating_point else set()
    return found


# --- torch's kernels -------------------------------------------------------------------------------


def cpu_function_of(overload: Any) -> Callable[..., Any]:
    """Return the function that runs an overload on CPU tensors, and adds in float32 or wider."""
    return in_wide_sums(overload, function_of(overload))


@functools.cache
def in_wide_sums(overload: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which comes to that overload, as it is or with wider operands."""
    return WideSum(overload, function) if adds_in_16_bits(overload.name()) else function


class WideSum:
    """Calls an overload with float32 in place of 16-bit operands, and rounds what it gives once."""

    def __init__(self, overload: Any, function: Callable[..., Any]) -> None:
        self._name, self._function = overload.name(), function
        arguments = schema_of_overload(overload).arguments
        self._names = [argument.name for argument in arguments]
        self._written = [a.name for a in arguments if a.alias_info and a.alias_info.is_write]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # what is added is the first operand of each, and mostly of 32 bits
        if args[0].dtype not in LOW_PRECISION and kwargs.get("dtype") is None:
            return self._function(*args, **kwargs)
        dtype = narrow_sum(self._name, args, kwargs)
        if dtype is None:
            return self._function(*args, **kwargs)
        given = given_by_name(self._name, args, kwargs)
        if given.get("dtype") is not None:  # the operand is rounded to it before it is added
            given[self._names[0]], given["dtype"] = _cast(given[self._names[0]], dtype), None
        wide = {name: _widened(argument) for name, argument in given.items()}
        positional = [wide.pop(name) for name in self._names[: len(args)]]
        made = self._function(*positional, **wide)
        if not self._written:
            return _narrowed(made, dtype)
        return self._written_back(given, made if isinstance(made, tuple) else (made,))

    def _written_back(self, given: dict[str, Any], made: tuple[torch.Tensor, ...]) -> Any:
        """The arguments that were to be written to, with what the kernel has left in wider ones."""
        targets = [given[name] for name in self._written]
        for target, result in zip(targets, made, strict=True):
            if target.shape != result.shape:
                target.resize_(result.shape)
            target.copy_(result)
        return targets[0] if len(targets) == 1 else tuple(targets)


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    made: torch.Tensor = torch.ops.aten._to_copy.default(x, dtype=dtype)
    return made


def _widened(argument: Any) -> Any:
    if argument.__class__ in _LISTS:
        return [_widened(part) for part in argument]
    if isinstance(argument, torch.Tensor) and argument.dtype in LOW_PRECISION:
        return _cast(argument, torch.float32)
    return argument


def _narrowed(made: Any, dtype: torch.dtype) -> Any:
    if made.__class__ in _LISTS:
        return tuple([_narrowed(part, dtype) for part in made])
    return _cast(made, dtype) if made is not None and made.dtype is torch.float32 else made
