"""What the CPU keeps a norm's statistics in, where torch's Meta kernels tell what CUDA would.

A backward asks its kernel with the statistics that the forward gave, so both have to agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ltc.aten.call import CallResult
from ltc.support.torch_private import schema_of_overload

_NARROW = (torch.bfloat16, torch.float16)
_PARAMETERS = frozenset({"weight", "bias", "running_mean", "running_var"})

# Overload -> whether it normalizes with the batch's own statistics; None: `training` says it.
_NORMS: dict[str, bool | None] = {
    "aten::native_layer_norm": True,
    "aten::native_group_norm": True,
    "aten::native_batch_norm": None,
    "aten::_native_batch_norm_legit": None,
    "aten::_native_batch_norm_legit.no_stats": True,
    "aten::_native_batch_norm_legit_functional": None,
    "aten::_native_batch_norm_legit_no_training": False,
    "aten::_batch_norm_with_update": True,
    "aten::_batch_norm_with_update_functional": True,
    "aten::_batch_norm_no_update": False,
}


def as_on_cpu(overload: Any, args: Sequence[Any], kwargs: dict, types: tuple) -> tuple:
    """The types of a call's results, given those that Meta tells; the same where it is no norm.

    Statistics are float32 where a narrow operand has float32 parameters, else of the operand's
    dtype; a batch norm with running statistics alone keeps none.  Running statistics that come
    back have the dtype that they came with.
    """
    name = overload.name()
    if name not in _NORMS:
        return types
    given = {
        a.name: value for a, value in zip(schema_of_overload(overload).arguments, args)
    } | kwargs
    kept = given["training"] if _NORMS[name] is None else _NORMS[name]
    dtype = _statistics_dtype(given)
    written = len(types) - len(
        schema_of_overload(overload).returns
    )  # arguments come before results
    first = written + 1  # behind the normalized operand
    corrected = list(types)
    for place in (first, first + 1):
        corrected[place] = (types[place][0] if kept else (0,), dtype)
    for place, returned in enumerate(schema_of_overload(overload).returns, written):
        if returned.name in ("running_mean_out", "running_var_out"):
            corrected[place] = (types[place][0], given[returned.name.removesuffix("_out")].dtype)
    return tuple(corrected)


def _statistics_dtype(given: dict) -> torch.dtype:
    dtype = given["input"].dtype
    parameters = [
        v.dtype for n, v in given.items() if n in _PARAMETERS and v.__class__ is CallResult
    ]
    return torch.float32 if dtype in _NARROW and torch.float32 in parameters else dtype
