"""Powers of bools, which torch's Meta kernels take for those of integers where the exponent is a bool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ltc.aten.call import Scalar

_POWERS = frozenset(
    {"aten::pow.Tensor_Scalar", "aten::_foreach_pow.Scalar", "aten::_foreach_pow.ScalarList"}
)


def as_on_cpu(overload: Any, args: Sequence[Any], types: tuple) -> tuple:
    """The types of a call's results, given those that Meta tells."""
    if overload.name() not in _POWERS:
        return types
    bases, exponents = _listed(args[0]), _listed(args[1])
    if len(exponents) < len(bases):
        exponents = [*exponents] * len(bases)
    return tuple(
        [
            (shape, torch.bool if base.dtype is torch.bool and _is_bool(exponent) else dtype)
            for (shape, dtype), base, exponent in zip(types, bases, exponents)
        ]
    )


def _listed(argument: Any) -> Sequence[Any]:
    return argument if isinstance(argument, (list, tuple)) else [argument]


def _is_bool(exponent: Any) -> bool:
    return isinstance(exponent.sample if exponent.__class__ is Scalar else exponent, bool)
