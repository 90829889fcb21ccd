"""Views that hold other numbers than their base: no position in it tells where they are."""

from __future__ import annotations

from typing import Any

from ltc.aten.call import name_of_overload

_VALUE_VIEWS = frozenset(
    {
        "aten::view.dtype",
        "aten::view_as_real",
        "aten::view_as_complex",
        "aten::_conj",
        "aten::_neg_view",
    }
)


def changes_values(overload: Any) -> bool:
    """Return True if the view, an overload of torch's or its name, holds other numbers than its
    base.
    """
    return name_of_overload(overload) in _VALUE_VIEWS
