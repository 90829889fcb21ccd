"""Torch's facts about an overload, looked up by name."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ltc.support.torch_private import schema_named


def overload_named(name: str) -> Any:
    """Return the overload that torch calls so: "aten::relu", "aten::add.Tensor".

    Raises:
        AttributeError: This torch has none.
    """
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")


@functools.cache
def schema_of(overload: str) -> Any:
    """The overload's schema, or None where this torch has no such overload."""
    name, _, variant = overload.partition(".")
    try:
        return schema_named(name, variant)
    except RuntimeError:
        return None


@functools.cache
def optional_tensors(overload: str) -> frozenset[int | str]:
    """Positions and names of the `Tensor?` arguments, which take no Python number."""
    schema = schema_of(overload)
    if schema is None:
        return frozenset()
    found = [(i, a.name) for i, a in enumerate(schema.arguments) if str(a.type) == OPTIONAL_TENSOR]
    return frozenset(place for pair in found for place in pair)


OPTIONAL_TENSOR = "Optional[Tensor]"
