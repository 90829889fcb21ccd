"""Calls that run one by one, reported to a profiler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ltc.aten.call import name_of_overload
from ltc.backends.capabilities import KernelFacts
from ltc.backends.interpreter.call_facts import facts_of
from ltc.device.call_place import place_of_call
from ltc.device.user_line import user_line
from ltc.ir.graph import Origin
from ltc.support.bounded_table import BoundedTable
from ltc.support.observation import spans

_known: BoundedTable[tuple, KernelFacts] = BoundedTable("CallFacts", 4096)


def note_call(
    overload: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    made: Iterable[Any],
    began: int,
) -> None:
    """A call has run in the calling thread.

    Args:
        args, kwargs, made: With whatever has a shape and a dtype in place of tensors.
    """
    end, timeline = spans.now(), spans.timeline
    if timeline is None:
        return
    line = user_line()
    module, forward = place_of_call(line)
    name = name_of_overload(overload)
    place = Origin(name, line, module=module, forward=forward)
    reads = _typed((*args, *kwargs.values()))
    writes = _typed(made)
    key = overload, place, *[(tuple(one.shape), one.dtype) for one in (*reads, *writes)]
    facts = _known.get(key)
    if facts is None:
        facts = _known.keep(key, facts_of(overload, args, kwargs, reads, writes, place))
    timeline.called(facts, began, end)


def _typed(arguments: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for one in arguments:
        if isinstance(one, (list, tuple)):
            found += _typed(one)
        elif hasattr(one, "dtype") and hasattr(one, "shape"):
            found.append(one)
    return found
