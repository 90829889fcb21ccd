"""Who still holds an object, told by CPython's reference counts.

All that hangs on a count is counted by `reference_counts` and compared with a constant from here.
The constants are not computed: each is what the same look says, at import, of an object that is
held in just that way.
"""

from __future__ import annotations

from sys import getrefcount


def reference_counts(objects: list) -> list[int]:
    """How many references lead to each object: that of the list, and those of this look, too."""
    return list(map(getrefcount, objects))


class _Probe:
    __slots__ = ("base",)
    base: object


def _in_one_list() -> int:
    return reference_counts([_Probe()])[0]


def _in_two_lists() -> int:
    recorded = [_Probe()]
    return reference_counts(recorded + [])[0]


def _in_two_lists_and_a_view() -> int:
    recorded, view = [_Probe()], _Probe()
    view.base = recorded[0]
    return reference_counts([view.base])[0]


IN_ONE_LIST = _in_one_list()
IN_TWO_LISTS = _in_two_lists()
IN_TWO_LISTS_AND_A_VIEW = _in_two_lists_and_a_view()


def each_holder_counts() -> bool:
    """Whether this Python counts one more reference for one more holder, as liveness needs it."""
    found = (IN_ONE_LIST, IN_TWO_LISTS, IN_TWO_LISTS_AND_A_VIEW)
    return found == tuple(range(IN_ONE_LIST, IN_ONE_LIST + len(found)))
