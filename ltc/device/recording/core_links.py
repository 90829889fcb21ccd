"""Links of views as the core has them, and as Python has them: see `links_of` in overload.cpp."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ltc.aten.schema import overload_named
from ltc.device.recording.signature import Signature

_signature = functools.cache(lambda name: Signature(overload_named(name)))


def link_of(name: str, arguments: Sequence[Any], index: int) -> tuple:
    """Return a link of a chain: overload, arguments, keywords, index among its results."""
    signature = _signature(name)
    args, kwargs = [], {}
    for argument, given in zip(signature.arguments[1:], arguments):
        if not argument.keyword_only:
            args.append(given)
        elif given is not None:
            kwargs[argument.name] = given
    return signature.overload, tuple(args), kwargs, None if index < 0 else index


def told_of(overload: Any, args: tuple, kwargs: dict, index: int | None) -> tuple | None:
    """Return a link as the core has it: the inverse of `link_of`; None where it has no such link."""
    signature = _signature(overload.name())
    arguments = signature.in_schema_order((None, *args), kwargs)[1:]
    given = [list(one) if isinstance(one, (tuple, list)) else one for one in arguments]
    if any([one == [] or isinstance(one, torch.dtype) for one in given]):
        return None  # to the core an empty list has no type, and a dtype is a number
    return signature.name, tuple(given), -1 if index is None else index
