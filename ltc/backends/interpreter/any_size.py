"""The calls of a path of symbols, run in order at whatever sizes: these are filled in as numbers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch

from ltc.aten.call import Call, CallResult, Numbering
from ltc.backends.interpreter.call_kernel import CallKernel, NotInterpretable, Slots
from ltc.backends.interpreter.expanded_call import Compile, ExpandedAtAnySize
from ltc.backends.interpreter.interpreted import InterpretedComputation
from ltc.backends.interpreter.large_values import largest_at
from ltc.support.process import machine_memory
from ltc.support.sizes.choices import tracing
from ltc.support.sizes.extent import Extent, SizeTrace


class InterpretedAtAnySize:
    """Gives what runs the calls at each size."""

    def __init__(
        self,
        trace: SizeTrace,
        calls: Sequence[Call],
        outputs: Sequence[CallResult],
        numbering: Numbering,
        donated: frozenset[int],
        compile: Compile,
    ) -> None:
        """
        trace    of the calls' sizes
        compile  makes what the reference would round otherwise
        The rest is as InterpretedComputation takes it.  Raises NotInterpretable where sizes decide
        how a call is run.
        """
        self._trace, self._compile, decided = trace, compile, len(trace.guards)
        self._is_made = False
        with tracing(trace):
            self._now = InterpretedComputation(calls, outputs, numbering, donated, self._expanded)
        self._is_made = True
        if len(trace.guards) != decided:
            raise NotInterpretable("something is decided by sizes")
        text = _FilledText()
        shown = [(slot, text.of(value)) for slot, value in enumerate(self._now.start)]
        self._slots = [slot for slot, source in shown if source is not None]
        sources = [source for _, source in shown if source is not None]
        self._largest = largest_at(trace, calls)
        self._filled = trace.procedure([f"return ({', '.join([*sources, ''])})"], text.names)

    def _expanded(self, call: Call, slots: Slots) -> CallKernel:
        if self._is_made:  # torch's kernel has failed; what it is given is of one size by now
            raise NotInterpretable(f"{call.name} is to be expanded at sizes that are not known")
        return ExpandedAtAnySize(call, slots, self._compile)

    def at(self, values: Sequence[int]) -> InterpretedComputation:
        """What runs them at these values of the symbols; NotInterpretable where it needs too much."""
        if self._largest(*values) > machine_memory.total():
            raise NotInterpretable("a value is larger than all memory")
        made = copy.copy(self._now)
        made.start = start = self._now.start.copy()
        for slot, value in zip(self._slots, self._filled(*values)):
            start[slot] = value
        made.sized = functools.partial(_AtSizes, self._trace, values)
        return made


class _Sized:
    """A value of which only the type is asked."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype


class _AtSizes:
    """Arguments and results of calls as they are at given sizes: what profiles tell."""

    def __init__(self, trace: SizeTrace, values: Sequence[int]) -> None:
        self._trace, self._values = trace, values
        self._sized: dict[CallResult, _Sized] = {}

    def __call__(self, x: Any) -> Any:
        if isinstance(x, Extent):
            return self._trace.function(x.source)(*self._values)
        if isinstance(x, (tuple, list)):
            return type(x)(map(self, x))
        if not isinstance(x, CallResult):
            return x
        if x not in self._sized:
            self._sized[x] = _Sized(self(tuple(x.shape)), x.dtype)
        return self._sized[x]


class _FilledText:
    """Constants as Python expressions of the symbols.

    names  what else these expressions refer to
    """

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}

    def of(self, value: Any) -> str | None:
        """None where it is the same at all sizes."""
        if isinstance(value, Extent):
            return value.source
        if isinstance(value, dict):
            parts = [(self._named(key), self.of(part), part) for key, part in value.items()]
            if all(source is None for _, source, _ in parts):
                return None
            return "{" + ", ".join(f"{k}: {s or self._named(v)}" for k, s, v in parts) + "}"
        if not isinstance(value, (tuple, list)):
            return None
        sources = [self.of(part) for part in value]
        if all(source is None for source in sources):
            return None
        shown = ", ".join(s or self._named(part) for s, part in zip(sources, value))
        return f"[{shown}]" if isinstance(value, list) else f"({shown},)"

    def _named(self, value: Any) -> str:
        if type(value) in (int, bool, type(None)):
            return repr(value)
        name = f"constant{len(self.names)}"
        self.names[name] = value
        return name
