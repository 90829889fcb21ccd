"""Names for what lines of Python that are made here refer to."""

from __future__ import annotations

from typing import Any


class Names:
    """What lines of Python call the objects that they refer to.

    namespace  the objects by their names
    """

    def __init__(self) -> None:
        self.namespace: dict[str, Any] = {}
        self._known: dict[int, str] = {}

    def of(self, thing: Any) -> str:
        name = self._known.setdefault(id(thing), f"n{len(self._known)}")
        self.namespace[name] = thing
        return name
