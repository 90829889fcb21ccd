"""The Python text that gives a path's entries the sizes of other symbols: shapes, keys, arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ltc.aten.call import CallResult
from ltc.device.symbolic.derive import INPUT, Derived
from ltc.device.symbolic.pattern import PatternCall, SizeHole, filled, has_hole
from ltc.runtime.buffer import input_key
from ltc.support.sizes.extent import Extent


class ResizingText:
    """Collects assignments; `function` is what makes them."""

    def __init__(self, derived: Derived) -> None:
        self._trace = derived.trace
        self._lines: list[str] = []
        self._names: dict[str, Any] = {"input_key": input_key}
        self._shapes: dict[str, str] = {}

    def add(
        self, one: PatternCall, entry: Any, values: dict[CallResult, CallResult], derived: Any
    ) -> None:
        """What of an entry differs by size.

        values   of the pattern -> those of the path
        derived  the call with Extents
        """
        for result, call_result in zip(entry.call.results, derived.results):
            if result is not None and any(isinstance(n, Extent) for n in call_result.shape):
                self._set(result, "shape", self._shape(call_result.shape))
        if one.shape is not None:
            if has_hole(one.shape):
                value = self._name(entry.call.results[0])
                self._set(entry, "key", f"input_key({value}.shape, {value}.dtype)")
            return
        for holder, name, pattern in (
            (entry, "key", one.key),
            (entry, "link", one.link),
            (entry.call, "args", one.args),
            (entry.call, "kwargs", one.kwargs),
        ):
            if has_hole(pattern):
                self._set(holder, name, self._text(pattern, values))

    def restore_key(self, entry: Any) -> None:
        """A key that does not differ, and may have been taken away."""
        self._set(entry, "key", self._name(entry.key))

    def clear_run(self, entry: Any) -> None:
        self._set(entry, "run", "None")

    def _set(self, holder: Any, name: str, text: str) -> None:
        self._lines.append(f"{self._name(holder)}.{name} = {text}")

    def _name(self, holder: Any) -> str:
        name = f"h{id(holder)}"
        self._names[name] = holder
        return name

    def _shape(self, shape: Sequence[Any]) -> str:
        parts = [n.source if isinstance(n, Extent) else str(n) for n in shape]
        text = f"({', '.join([*parts, ''])})"
        name = self._shapes.get(text)
        if name is None:
            name = self._shapes[text] = f"shape{len(self._shapes)}"
            self._lines.append(f"{name} = {text}")
        return name

    def _text(self, pattern: Any, values: dict[CallResult, CallResult]) -> str:
        if not has_hole(pattern):
            return self._name(filled(pattern, lambda value: values.get(value, value)))
        if isinstance(pattern, SizeHole):
            return pattern.source
        if isinstance(pattern, dict):
            parts = [f"{name!r}: {self._text(part, values)}" for name, part in pattern.items()]
            return f"{{{', '.join(parts)}}}"
        parts = [self._text(part, values) for part in pattern]
        if isinstance(pattern, list):
            return f"[{', '.join(parts)}]"
        return f"({', '.join([*parts, ''])})"

    def function(self) -> Callable[..., None]:
        """Sets all of it, given the values of the symbols."""
        made: Callable[..., None] = self._trace.procedure(self._lines, self._names)
        return made


__all__ = ["INPUT", "ResizingText"]
