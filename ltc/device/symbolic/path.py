"""A path whose sizes are symbols: its entries are given other sizes when a call brings these.

The entries lie behind a place where recordings go on with other sizes each time.  A recording walks
along them as along any path; the first call of a new size is matched with the entry that is next, all
entries get the sizes that follow, and the walk goes on.  Every call is compared with its entry as
ever, so what was taken for an expression and is none ends the walk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ltc.aten.call import Call, CallResult
from ltc.device.policy import MIN_RUN
from ltc.device.symbolic.derive import INPUT, Derived, derived
from ltc.device.symbolic.pattern import PatternCall, SizeHole, SymbolSizes, filled, has_hole
from ltc.runtime.buffer import input_key
from ltc.runtime.program_of_sizes import ProgramOfSizes
from ltc.support.sizes.extent import SMALLEST, Extent, SizeTrace

REFUSED: Any = object()  # in place of an earlier path: no program can be made for all sizes

# The key of an entry whose types are not known at the present sizes: no call equals it.
_CLOSED = ("ltc::closed",)


class SymbolicPath:
    """A path whose sizes are symbols; it goes on from the entry `place`.

    Attributes:
        sizes: The symbols, with their values in the two recordings.
        entries: The entries of this path.
        values: The present values of the symbols in the entries.
        ends: The programs of recordings that end here: (position of the last entry, outputs,
            replaced).
    """

    def __init__(
        self,
        recorder: Any,
        place: Any,
        pattern: Sequence[PatternCall],
        sizes: SymbolSizes,
        make_entry: Any,
    ) -> None:
        """
        Args:
            place: The entry from which the path goes on.
            pattern: The calls of two recordings, with holes for the numbers that differ.
            make_entry: Gives an entry for (key, parent, call).
        """
        self.place, self._pattern, self.sizes = place, pattern, sizes
        self._device, self._by_shape = recorder.device.index, recorder.by_shape
        self.values: tuple[int, ...] = tuple(a for a, _ in sizes.pairs)
        self._derived = derived(pattern, self.values)
        self._check_types()
        self.entries: list[Any] = []
        self._value: dict[CallResult, CallResult] = {}  # of the pattern -> of the entries
        self._make_entries(recorder, make_entry)
        self._derived_value = {self._value[old]: new for old, new in self._derived.value.items()}
        self._inputs = self._inputs_by_position()
        self._resize = self._resizing()
        self._fits, self._guards = self._conditions()
        self._bytes = self._size_in_bytes()
        self.ends: dict[Any, ProgramOfSizes] = {}
        self._latest: tuple[int, ...] | None = None
        self._repeats = 0
        self._set(self.values)

    def _check_types(self) -> None:
        """The derived types are those of both recordings: else a formula is wrong."""
        trace = self._derived.trace
        for one, call in zip(self._pattern, self._derived.calls):
            for pair, result in zip(one.types, call.results):
                if pair is None or result is None:
                    continue
                shown = [n.source if isinstance(n, Extent) else str(n) for n in result.shape]
                shape_at = trace.function(f"({', '.join([*shown, ''])})")
                for side in (0, 1):
                    values = [pair_of_sizes[side] for pair_of_sizes in self.sizes.pairs]
                    if shape_at(*values) != pair[side][0]:
                        raise AssertionError(f"{call.name} gives {pair[side]}, not {shown}")

    def _make_entries(self, recorder: Any, make_entry: Any) -> None:
        numbers = derived(self._pattern, self.values, False)
        parent = self.place

        def fill(part: Any) -> Any:
            if isinstance(part, SizeHole):
                return eval(part.source, {"__builtins__": {}}, symbols)
            return self._value.get(part, part)

        symbols = {f"s{k}": value for k, value in enumerate(self.values)}
        for position, (one, call) in enumerate(zip(self._pattern, numbers.calls)):
            old = one.call
            args = old.args if one.args is None else filled(one.args, fill)
            made = Call(
                old.overload,
                args,
                filled(one.kwargs, fill),
                old.mutated,
                old.returned,
                old.line,
                old.seed,
            )
            recorder.values(made, [None if r is None else (r.shape, r.dtype) for r in call.results])
            for before, result in zip(old.results, made.results):
                if before is not None and result is not None:
                    self._value[before] = result
            key = None if one.shape is not None else filled(one.key, fill)
            if one.shape is not None:
                (value,) = made.results
                assert value is not None
                key = input_key(value.shape, value.dtype)
            entry = make_entry(key, parent, made)
            entry.link = filled(one.link, fill)
            entry.of = (self, position)
            if position:
                parent.next = entry
            self.entries.append(entry)
            parent = entry

    def _inputs_by_position(self) -> dict[int, CallResult]:
        found = {}
        entry = self.entries[-1]
        while entry.call is not None:
            if entry.call.overload == INPUT:
                found[entry.call.args[0]] = entry.value
            entry = entry.parent
        return found

    def _resizing(self) -> Any:
        text = ResizingText(self._derived)
        inputs: list[Any] = []  # that come one after the other
        for one, entry, call, guards in zip(
            self._pattern, self.entries, self._derived.calls, self._derived.guards
        ):
            if guards:
                text.restore_key(entry)
            text.add(one, entry, self._value, call)
            inputs = [*inputs, entry] if one.shape is not None else []
            if one.is_open:
                for before in inputs:
                    text.clear_run(before)
        return text.function()

    def _conditions(self) -> tuple[Any, list[tuple[int, Any]]]:
        """Return the condition that all types are known at given sizes, and each guarded entry's
        own.
        """
        trace = self._derived.trace
        asking = [(k, guards) for k, guards in enumerate(self._derived.guards) if guards]
        conditions = [" and ".join(f"({guard})" for guard in guards) for _, guards in asking]
        each = [(k, trace.function(text)) for (k, _), text in zip(asking, conditions)]
        return trace.function(" and ".join(conditions) or "True"), each

    def _size_in_bytes(self) -> Any:
        total: Any = 0
        for call in self._derived.calls:
            for value in call.results:
                if value is not None:
                    nbytes: Any = value.dtype.itemsize
                    for extent in value.shape:
                        nbytes = nbytes * extent
                    total = total + nbytes
        source = total.source if isinstance(total, Extent) else str(total)
        return self._derived.trace.function(source)

    def refuse(self) -> None:
        """Let no path of symbols be made of these calls again."""
        self._by_shape.pop(self.entries[-1].shape_hash, None)
        self._by_shape.keep(self.entries[-1].shape_hash, REFUSED)

    # --- a call

    def entry_at(self, position: int, key: Any, most_bytes: int) -> Any:
        """Return the entry at a position if a call of that key belongs there at any size; else None.

        Args:
            most_bytes: The most bytes that all results of the path may have.
        """
        if position >= len(self.entries):
            return None
        found = dict[int, int]()
        if not self._matches(position, key, found):
            return None
        values = tuple(found.get(k, value) for k, value in enumerate(self.values))
        try:
            if min(values) < SMALLEST or self._bytes(*values) > most_bytes:
                return None
            if values != self.values:
                self._set(values)
        except ArithmeticError:  # what was taken for an expression, of a stride say, is 0 there
            return None
        entry = self.entries[position]
        return entry if entry.key == key else None

    def begins_as(self, other: SymbolicPath, count: int, key: Any, most_bytes: int) -> bool:
        """Return True if the other path's first `count` entries, then a call of that key, match
        this path.

        It has their sizes then.
        """
        values: dict[CallResult, CallResult] = {}
        for position, entry in enumerate(other.entries[:count]):
            wanted = filled(entry.key, lambda value: values.get(value, value))
            mine = self.entry_at(position, wanted, most_bytes)
            if mine is None or len(mine.call.results) != len(entry.call.results):
                return False
            values.update(
                (a, b) for a, b in zip(entry.call.results, mine.call.results) if a is not None
            )
        wanted = filled(key, lambda value: values.get(value, value))
        return self.entry_at(count, wanted, most_bytes) is not None

    def _matches(self, position: int, key: Any, found: dict[int, int]) -> bool:
        """Return True if the call may be the entry's; `found` gets the symbols that it brings."""
        one = self._pattern[position]
        if one.shape is not None:
            if key.__class__ is not tuple or len(key) != 4 or key[0] != INPUT:
                return False
            return len(key[1]) == len(one.shape) and self._brings(
                position, one.shape, key[1], found
            )
        return self._brings(position, one.key, key, found)

    def _brings(self, position: int, pattern: Any, part: Any, found: dict[int, int]) -> bool:
        if pattern.__class__ is SizeHole:
            if part.__class__ is not int:
                return False
            name = pattern.source
            if name[1:].isdigit() and self.sizes.born[int(name[1:])] == position:
                found.setdefault(int(name[1:]), part)
            return True
        if pattern.__class__ in (list, tuple):
            if part.__class__ is not pattern.__class__ or len(part) != len(pattern):
                return False
            return all(self._brings(position, a, b, found) for a, b in zip(pattern, part))
        return True  # compared when the sizes are set

    def _set(self, values: tuple[int, ...]) -> None:
        """Give all entries these sizes; one whose types are not known then is closed."""
        self._resize(*values)  # before the first assignment it raises where it does
        self.values = values
        if not _holds(self._fits, values):
            for position, fits in self._guards:
                if not _holds(fits, values):
                    self.entries[position].key = _CLOSED
                    return

    # --- the end

    def calls_at(
        self, values: Sequence[int], symbolic: bool, position: int, outputs: Sequence[CallResult]
    ) -> tuple[SizeTrace, list[Call], tuple[CallResult, ...]]:
        """The calls up to an entry at any sizes, on no path, and the path's `outputs` among them."""
        made = derived(self._pattern[: position + 1], values, symbolic)
        of_entry = {self._value[old]: new for old, new in made.value.items() if old in self._value}
        calls, entry = made.calls, self.place
        before = []
        while entry.call is not None:
            before.append(entry.call)
            entry = entry.parent
        return made.trace, [*reversed(before), *calls], tuple(of_entry.get(o, o) for o in outputs)

    def note_end(self) -> bool:
        """A recording has ended here; whether the present sizes have come several times in succession."""
        self._repeats = self._repeats + 1 if self.values == self._latest else 0
        self._latest = self.values
        return self._repeats >= MIN_RUN

    @property
    def stays(self) -> bool:
        """True while the present sizes are those that have come several times in succession."""
        return self._repeats >= MIN_RUN and self.values == self._latest

    def has_size_of_input(self, value: CallResult, position: int) -> bool:
        """Return True if a result has the shape of an input at all sizes.

        Args:
            position: The input's position among those of the recording.
        """
        return self._shape_text(value) == self._shape_text(self._inputs[position])

    def _shape_text(self, value: CallResult) -> tuple[str, ...]:
        made = self._derived_value.get(value, value)
        return tuple(map(str, made.shape))


def _holds(condition: Any, values: Sequence[int]) -> bool:
    try:
        return bool(condition(*values))
    except ArithmeticError:
        return False


# The Python text that gives a path's entries the sizes of other symbols: shapes, keys, arguments.


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
        """Add the parts of an entry that differ by size.

        Args:
            values: Values of the pattern -> values of the path.
            derived: The call with Extents.
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
