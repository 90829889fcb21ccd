"""The map of used parameters that DistributedDataParallel's reducer sums over the ranks.

The reducer, written in C++, copies the map through pinned memory to every device but the CPU, and a
device written in Python has no pinned memory.  So the reducer gets a tensor that says it is on the
CPU, and each call on that tensor goes to the lazy tensor that it stands for: the sum is recorded
among the sums of gradients, and read only where a parameter took no part.
"""

from __future__ import annotations

from typing import Any

import torch

from ltc.device.recording.tensors import is_lazy
from ltc.support.torch_private import DispatchMode, map_leaves, wrapper_on_cpu


class UsedMap(torch.Tensor):
    """A tensor on the CPU by its type, and a lazy one by what it does.

    lazy  the tensor that it stands for
    """

    lazy: torch.Tensor

    @staticmethod
    def __new__(cls, lazy: torch.Tensor) -> UsedMap:
        found: UsedMap = wrapper_on_cpu(cls, lazy)
        found.lazy = lazy
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a function, not a method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        standing_for: dict[int, UsedMap] = {}

        def lazy_of(value: Any) -> Any:
            if not isinstance(value, UsedMap):
                return value
            standing_for[id(value.lazy)] = value
            return value.lazy

        args, kwargs = map_leaves(lazy_of, (args, kwargs or {}))
        return map_leaves(lambda x: standing_for.get(id(x), x), func(*args, **kwargs))


class UsedMaps(DispatchMode):
    """A mode under which the reducer's map, the only int32 tensor it makes on a device, is a UsedMap."""

    def __torch_dispatch__(self, call, types, args=(), kwargs=None) -> Any:
        made = call(*args, **(kwargs or {}))
        is_map = (
            call is torch.ops.aten.empty.memory_format
            and made.dtype is torch.int32
            and is_lazy(made)
        )
        return UsedMap(made) if is_map else made
