"""Expressions of sizes as JSON, so that another process, or a later one, goes on with them."""

from __future__ import annotations

import json
from typing import Any

from ltc.support.sizes.extent import Extent, SizeTrace


def dumped(record: Any) -> str:
    """Lists, numbers and texts as JSON; Extents may be among them."""
    return json.dumps(record, separators=(",", ":"), default=_of_extent)


def loaded(text: str | bytes, trace: SizeTrace) -> Any:
    """Return the dumped value; its Extents are of this trace."""

    def read(found: dict[str, Any]) -> Any:
        if found.keys() != {"terms", "value"}:
            return found
        terms = tuple((tuple(monomial), factor) for monomial, factor in found["terms"])
        return Extent(trace, terms, found["value"])

    return json.loads(text, object_hook=read)


def _of_extent(x: object) -> dict[str, Any]:
    if not isinstance(x, Extent):
        raise TypeError(f"{type(x).__name__} is not kept as JSON")
    return {"terms": x.terms, "value": x.value}


def record_of_trace(trace: SizeTrace) -> list[Any]:
    """Return the facts that a trace has collected so far."""
    return [trace.values, list(trace.guards), trace.parts, trace.bounds]


def fill_trace(trace: SizeTrace, record: list[Any]) -> None:
    """Let a new trace have found out what the record says."""
    values, guards, parts, bounds = record
    trace.values.extend(values)
    trace.guards.update(dict.fromkeys(guards))
    trace.parts.update(parts)
    trace.bounds.update({name: (low, high) for name, (low, high) in bounds.items()})
