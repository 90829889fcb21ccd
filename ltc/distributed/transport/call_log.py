"""The calls of each member of a process group: tags of its latest ones, where all members see them.

Each member writes the tag of a call before it makes it, and then looks at the others' tags of the
same call. Of two members whose tags differ, the later one sees it: so never do both go on.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
from typing import Protocol

from ltc.distributed.transport.shm_segment import LINE
from ltc.distributed.transport.wire import Mismatch
from ltc.errors import LtcError
from ltc.support.process.private_folder import reserve, shared_file

MAX_CALLS = 256  # tags that are kept of a lane; a running hash tells of those before them
LANES = 16  # calls of one lane have one order: a lane is a kind of thread of a rank


_LANE_WORDS = LINE // 8 + MAX_CALLS


class CallLog(Protocol):
    """The log of one group, as one of its members uses it."""

    def compare(self, lane: int, number: int, tag: int) -> None:
        """Write the tag of this member's call number `number`, the first being 1; look at the others'.

        Raises Mismatch where another member has made another call.
        """

    def absent(self, number: int) -> list[int]:
        """The members that have not come to call number `number` of lane 0, where all ask for this."""


class SharedMemoryCallLog:
    """A log in a file that all members have mapped.

    The words of a lane of a member are its number of calls, in a cache line, and the latest tags.
    """

    def __init__(self, path: str, member: int, members: int) -> None:
        self.member, self.members = member, members
        nbytes = _LANE_WORDS * 8 * LANES * members
        file = shared_file(path, nbytes)
        reserve(file, 0, nbytes)
        self.memory = mmap.mmap(file, nbytes)
        os.close(file)
        self.words = memoryview(self.memory).cast("q")

    def compare(self, lane: int, number: int, tag: int) -> None:
        at = self._start(self.member, lane)
        self.words[at + LINE // 8 + number % MAX_CALLS] = tag
        self.words[at] = number
        for other in range(self.members):
            found = self._tag_of(other, lane, number)
            if found is not None and found != tag:
                raise Mismatch(other, found)

    def absent(self, number: int) -> list[int]:
        words = self.words
        return [m for m in range(self.members) if words[self._start(m, 0)] < number]

    def _start(self, member: int, lane: int) -> int:
        return (member * LANES + lane) * _LANE_WORDS

    def _tag_of(self, member: int, lane: int, number: int) -> int | None:
        """None where the member has not come to the call, or has made too many since."""
        at = self._start(member, lane)
        if self.words[at] < number:
            return None
        tag = self.words[at + LINE // 8 + number % MAX_CALLS]
        return tag if self.words[at] < number + MAX_CALLS else None


class StoreCallLog:
    """A log in a store: one entry for all members, which the first to come writes.

    Args:
        store: Its keys are this group's own.
    """

    def __init__(self, store, member: int, members: int) -> None:
        self.store, self.member, self.members = store, member, members
        self._before: dict[str, str] = {}  # by place: what this member has last seen there
        self._said = 0  # the call that this member has last said to have come to

    def compare(self, lane: int, number: int, tag: int) -> None:
        place = f"{lane}/{number % MAX_CALLS}"
        mine = f"{number} {tag} {self.member}"
        found = self.store.compare_set(f"call/{place}", self._before.get(place, ""), mine).decode()
        self._before[place] = found
        found_number, found_tag, found_by = _numbers_in(found)
        if found_number == number and found_tag != tag:
            raise Mismatch(found_by % self.members, found_tag)

    def absent(self, number: int) -> list[int]:
        if self._said < number:
            self._said = number
            self.store.set(f"number/{self.member}", str(number))
        return [member for member in range(self.members) if self._number_of(member) < number]

    def _number_of(self, member: int) -> int:
        key = f"number/{member}"
        with contextlib.suppress(RuntimeError, ValueError):  # it has gone, or holds no number
            if self.store.check([key]):
                return int(self.store.get(key))
        return 0


def _numbers_in(entry: str) -> tuple[int, int, int]:
    """Raises LtcError for what no member of a group has written."""
    parts = entry.split()
    if len(parts) != 3 or not all(re.fullmatch("[0-9]{1,20}", part) for part in parts):
        raise LtcError(
            f"A process group's store holds {entry[:40]!r} in place of a call: something else writes "
            f"to it. Keep its port (MASTER_PORT) from other users and machines."
        )
    number, tag, member = map(int, parts)
    return number, tag, member
