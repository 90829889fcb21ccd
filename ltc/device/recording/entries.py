"""The entries of recorded, noted and followed paths: they form a tree.

The entries that can follow one another form a tree; a kernel compares one tuple with the entry at the
cursor and moves on, or, where they differ, takes another branch or makes a new entry.  Numbers, seeds and
buffers are no part of an entry: they are put on side lists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ltc.aten.call import Call, CallResult
from ltc.device.policy import Path
from ltc.runtime.buffer import byte_size

INPUT = "ltc::input"
KERNEL_FILE = "<ltc kernel>"  # the file name of generated kernels, as frames show it


_NONE: dict = {}  # of an entry at which no recording has ended: never changed


def _without_sizes(part: Any) -> Any:
    """A key without its numbers and operands: equal for calls of one kind at any sizes."""
    kind = part.__class__
    if kind is tuple or kind is list:
        return tuple([_without_sizes(one) for one in part])
    return kind if kind is int or kind is CallResult else part


class Entry:
    """One call on a recorded path.

    Attributes:
        key: The parts that the kernel compares: overload, producers, attributes, kinds of numbers.
        next: The entry that followed the last time; END where none has.
        branches: Every entry that has ever followed, by its key; None while `next` is the only one.
        parent: The entry before it.
        call: The recorded call.
        value: The first of `call.results`; most calls have one.
        link: The link that a view adds to its chain.
        depth, size: Entries and bytes of results on the path up to here.
        bindings: Programs for recordings that end here, by the live values.
        ended: The result of the latest such end, or None.
        run: (types, values, last entry) of several inputs that were bound to a list, on the entry of
        the first one; else None.
        follow: The entry that began the recording after one that ended here.
        memory: The policy's record of the path that ends here; None where none has ended.
        follows_default: True if a call on the path up to here depends on torch's default dtype.
        symbolic: The paths of symbols that go on from here; None where there is none.
        of: (path, position) of an entry of a path of symbols; else None.
    """

    __slots__ = (
        "key",
        "next",
        "branches",
        "parent",
        "call",
        "value",
        "link",
        "depth",
        "size",
        "bindings",
        "ended",
        "run",
        "follow",
        "memory",
        "_shape_hash",
        "follows_default",
        "symbolic",
        "of",
    )
    next: Entry
    parent: Any  # an Entry; None of a root
    call: Any  # a Call; None of a root
    link: Any
    ended: Any  # of exit_liveness.py
    follow: Entry
    branches: dict[Any, Entry] | None
    depth: int
    size: int
    value: Any  # a CallResult, but where the call has no result at all
    run: tuple[list[Any], list[CallResult], Entry] | None
    memory: Path | None
    symbolic: Any
    of: Any  # of device/symbolic/

    def __init__(self, key: Any, parent: Entry | None, call: Call | None) -> None:
        self.key, self.parent, self.call = key, parent, call
        self.next, self.branches, self.follow = END, None, END
        self.bindings, self.ended, self.run, self.memory = _NONE, None, None, None
        self.symbolic = self.of = None
        self._shape_hash: int | None = None
        self.value = call.results[0] if call is not None and call.results else None
        self.link = None
        self.follows_default: bool = (parent is not None and parent.follows_default) or (
            call is not None and call.default is not None
        )
        self.depth = 0 if parent is None else parent.depth + 1
        self.size = 0 if parent is None or call is None else parent.size + _bytes_of(call)

    def branch(self, key: tuple) -> Entry | None:
        """The entry that has followed under this key, if any has; `next` is not looked at."""
        return self.branches.get(_hashable(key)) if self.branches is not None else None

    @property
    def shape_hash(self) -> int:
        """Hash of the path up to here but for sizes: equal for two that may be one path of symbols."""
        entry, unknown = self, []
        while entry._shape_hash is None and entry.parent is not None:
            unknown.append(entry)
            entry = entry.parent
        known = entry._shape_hash or 0
        for entry in reversed(unknown):
            known = entry._shape_hash = hash((known, _without_sizes(entry.key)))
        return known

    @property
    def ended_path(self) -> Path:
        """Return the policy's record of the path that ends here."""
        if self.memory is None:
            self.memory = Path()
        return self.memory

    def path_to(self) -> list[Call]:
        """Return the calls up to this entry, in order."""
        calls, entry = [], self
        while entry.call is not None:
            calls.append(entry.call)
            entry = entry.parent
        calls.reverse()
        return calls

    def prefer_others(self) -> None:
        """Expect one of the branches next, which no path of symbols is among."""
        if self.branches:
            self.next = next(iter(self.branches.values()))

    def add_branch(self, entry: Entry) -> None:
        """Let `entry` follow this one; the caller makes it `next`."""
        if self.next is END:
            return  # most entries are only ever followed by one: it needs no table
        if self.branches is None:
            self.branches = {_hashable(self.next.key): self.next}
        self.branches[_hashable(entry.key)] = entry


END: Any = None  # compared with every key, equal to none
END = Entry(None, None, None)
END.next = END.follow = END
STOPPED = Entry(None, None, None)  # the cursor while another thread ends the recording: see sync.py


def _bytes_of(call: Call) -> int:
    return sum([byte_size(v.shape, v.dtype) for v in call.results if v is not None])


def _hashable(key: Any):
    """`key` with its lists as tuples: attributes arrive as lists, which compare but do not hash."""
    return tuple([_hashable(p) if p.__class__ is list or p.__class__ is tuple else p for p in key])


class Interrupted(AttributeError):
    """Another thread ended the recording while a kernel was reading its operands.

    An AttributeError, as kernels meet it with every operand that is not theirs: they then go the
    thorough way, which reads all of them again.
    """


class RunsAtOnce(Interrupted):
    """Raised where the next call is not followed: it runs at once, as all calls after it do."""

    def __init__(self, recorder: Any) -> None:
        super().__init__()
        self.recorder = recorder


class TakesOtherPath(Interrupted):
    """Raised where the recorded calls become the beginning of another path, by `way`."""

    def __init__(self, recorder: Any, way: Callable[[], object]) -> None:
        super().__init__()
        self.recorder, self.way = recorder, way
