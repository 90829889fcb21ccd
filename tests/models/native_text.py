"""The atomic actions that stand in LLVM's text, by the names that models give them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ltc.llvm.native import futex

_FUTEX = {str(number): name for name, number in futex.CALLS.items()}
_PATTERNS = {
    r"(?P<kind>load) atomic \S+, ptr (?P<at>\S+) (?P<order>\w+)": "",
    r"(?P<kind>store) atomic \S+ \S+, ptr (?P<at>\S+) (?P<order>\w+)": "",
    r"(?P<kind>load) \S+, ptr (?P<at>[@%]\S+), align": "plain",
    r"(?P<kind>store) \S+ \S+, ptr (?P<at>[@%]\S+), align": "plain",
    r"(?P<kind>cmpxchg) ptr (?P<at>\S+), \S+ \S+, \S+ \S+ (?P<order>\w+)": "",
    r"atomicrmw (?P<kind>\w+) ptr (?P<at>\S+), \S+ \S+ (?P<order>\w+)": "",
    r"(?P<kind>fence) (?P<order>\w+)": "",
    r"@syscall\(i64 \d+, ptr (?P<at>\S+), i64 (?P<kind>\d+),": "",
}


def actions_of(text: str, variables: Mapping[str, str]) -> set[str]:
    """The names of all actions on these variables, and of all fences.

    variables  register or global of the text -> variable of the model
    """
    return {name for block, line in _lines(text) for name in _named(block, line, variables)}


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """Every instruction with its block."""
    function = block = ""
    for line in text.splitlines():
        if defined := re.match(r"define .*?@([\w.]+)\(", line):
            function = block = defined[1]
            block += ".start"
        elif label := re.fullmatch(r"([\w.]+):", line):
            block = f"{function}.{label[1]}"
        else:
            yield block, line


def _named(block: str, line: str, variables: Mapping[str, str]) -> Iterator[str]:
    for pattern, order in _PATTERNS.items():
        found = re.search(pattern, line)
        if found is None:
            continue
        parts = found.groupdict()
        kind = _FUTEX.get(parts["kind"], parts["kind"])
        place = parts.get("at", "").rstrip(",")
        if kind == "fence" or place in variables:
            words = block, kind, variables.get(place, ""), parts.get("order") or order
            yield " ".join(filter(None, words))
