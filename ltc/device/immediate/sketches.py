"""Paths that the core has summed up, by their hashes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ltc.device.policy import Path
from ltc.support.bounded_table import BoundedTable


class Sketches:
    """Each known hash, with the entry that stands for its path.

    An entry stands for the path that ends there: one of the tree where the path was noted, else one
    that has no calls.
    """

    def __init__(self, make_entry: Callable[[], Any]) -> None:
        self._make_entry = make_entry
        self._exact: BoundedTable[int, Any] = BoundedTable("SketchesOfPaths", 4096)
        self._of_symbols: BoundedTable[int, Any] = BoundedTable("SketchesOfSymbols", 4096)
        self._like: BoundedTable[int, Path] = BoundedTable("SketchesBySizes", 4096)

    def entry_of(self, exact: int, shape: int) -> Any:
        """Return the entry that stands for a path: its own if it was noted, else one of any size."""
        known = self._exact.get(exact)
        if known is not None and known.call is not None:
            return known
        return self._of_symbols.get(shape) or known or self._exact.keep(exact, self._make_entry())

    def like(self, shape: int) -> Path | None:
        """Return the memory of the paths that differ in sizes alone; None of the first one."""
        known = self._like.get(shape)
        if known is None:
            self._like.keep(shape, Path())
        return known

    def noted(self, exact: int, shape: int, leaf: Any) -> None:
        """A path was noted, which ends at `leaf`: its sketch stands for it from now on."""
        self._exact.pop(exact, None)
        self._exact.keep(exact, leaf)
        if leaf.of is not None:
            self._of_symbols.pop(shape, None)
            self._of_symbols.keep(shape, leaf)
