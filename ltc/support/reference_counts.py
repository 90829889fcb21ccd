"""The holders of an object, counted by CPython's reference counts.

All code that depends on a count uses `reference_counts` and compares with a constant from here. The
constants are not computed: each is the count, at import, of an object held in just that way.

Only objects hold here: lists, slots, the dictionary of a storage. Python counts each of these. It does
not count every variable: from 3.14 on, an argument and the interpreter's stack may borrow the reference
of the caller's variable. So no comparison expects a variable's reference. One that counts on top makes
a dead tensor look alive, which costs memory; one that was expected and does not count would make a
living one look dead.
"""

from __future__ import annotations

import sys
from sys import getrefcount


def reference_counts(objects: list) -> list[int]:
    """Return how many references lead to each object, the list's and this call's included."""
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
    """Return True if this Python counts one more reference for one more holder, as liveness needs
    it.
    """
    found = (IN_ONE_LIST, IN_TWO_LISTS, IN_TWO_LISTS_AND_A_VIEW)
    if "t" in sys.abiflags:
        return False  # threads of a free-threaded build count apart, and add later
    return found == tuple(range(IN_ONE_LIST, IN_ONE_LIST + len(found)))
