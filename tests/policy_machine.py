"""Recordings as the policy meets them: what the recorder does with its answers, without a tensor.

Every event is that of a whole recording.  What is told of it: the function that was called, the sizes
it had, how many calls it made, and what ended it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable
from typing import NamedTuple

from ltc.device.policy import LAUNCH_CALLS, UNNOTED_CALLS, Begin, Path, Policy


class Event(NamedTuple):
    """A recording.

    size      the same function at another size is one path of symbols with it
    is_read   a read ends it, in place of a mark
    has_step  an optimizer has made a step in it
    is_lost   nothing that it made lives on: there is no program to ask for
    """

    function: Hashable
    size: int = 0
    calls: int = 20
    is_read: bool = False
    has_step: bool = False
    is_lost: bool = False


class Program:
    """A program that is ready so many recordings after it was asked for."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._at = machine, machine.recordings + machine.compile_recordings

    is_kept = True

    @property
    def is_ready(self) -> bool:
        return self._machine.recordings >= self._at


class Machine:
    """One recorder.

    compile_recordings  how many recordings end before a program that is asked for is ready
    begins_alike        every two functions do: what leaves a path ends the recording of its beginning
    recordings          how many have ended
    how                 how many were noted, followed, left alone
    wrong               how many began to follow, and had no program at their end
    seen                how often each function came
    asked, followed     function -> at which of its recordings that was so first
    """

    def __init__(self, compile_recordings: int = 0, begins_alike: bool = False) -> None:
        self.compile_recordings, self.begins_alike = compile_recordings, begins_alike
        self.policy = Policy()
        self.recordings = self.wrong = 0
        self.how: Counter[str] = Counter()
        self.seen: Counter[Hashable] = Counter()
        self.asked: dict[Hashable, int] = {}
        self.followed: dict[Hashable, int] = {}
        self.latest: Begin | str = ""
        self._behind = Path()
        self._paths: defaultdict[Hashable, Path] = defaultdict(Path)
        self._sizes: dict[Hashable, int] = {}  # of the first recording of a function
        self._symbolic: set[Hashable] = set()
        self._unnoted: int | None = None  # calls of the session that notes nothing
        self._since_read = 0

    def run(self, events) -> Machine:
        for event in events:
            self.record(Event(*event) if isinstance(event, tuple) else Event(event))
        return self

    def path(self, event: Event) -> Path:
        """The path that a recording goes along."""
        function = event.function
        return self._paths[function if function in self._symbolic else (function, event.size)]

    def record(self, event: Event) -> None:
        self.recordings += 1
        self.seen[event.function] += 1
        if self._goes_on(event):
            self.how["left alone"] += 1
            return
        begins = self.policy.begin(self._behind)
        if begins is Begin.LEAVE_ALONE:
            self.how["left alone"] += 1
            self._leave_alone(event)
        elif begins is Begin.NOTE:
            self.how["noted"] += 1
            self._note(event)
        else:
            self._follow(event)

    def _reads(self, event: Event) -> bool:
        return event.is_read and not event.has_step

    # --- left alone

    def _goes_on(self, event: Event) -> bool:
        """Whether a session that notes nothing goes on through this recording."""
        if self._unnoted is None:
            return False
        self._unnoted += event.calls
        since_read = self._since_read + event.calls
        self._since_read = 0 if event.is_read else since_read
        if event.has_step:
            self.policy.trained()
        if self.policy.late(since_read):  # the calls behind are noted, in a recording of their own
            self._unnoted = None
            rest = min(since_read - 2 * LAUNCH_CALLS, event.calls)
            self.record(event._replace(calls=max(1, rest)))
        elif self._unnoted >= UNNOTED_CALLS or not self.policy.follows_reads:
            self._unnoted = None
        return True

    def _leave_alone(self, event: Event) -> None:
        self._behind = self.policy.unnoted
        if self.policy.follows_reads:
            self._unnoted, self._since_read = 0, 0

    # --- noted

    def _note(self, event: Event) -> None:
        path = self.path(event)
        joined = self._joined(event, path) if path.returns < 0 else path
        joins, path = joined is not path, joined
        if self.policy.noted(path, self._behind, event.calls, self._reads(event), joins):
            if not event.is_lost:
                self._ask(path, event)
        self._behind = path

    def _joined(self, event: Event, path: Path) -> Path:
        """The path of symbols of two sizes, where this is the second."""
        first = self._sizes.setdefault(event.function, event.size)
        if first == event.size:
            return path
        self._symbolic.add(event.function)
        return self.path(event)

    def _ask(self, path: Path, event: Event) -> None:
        self.policy.asked(path, Program(self))
        self.asked.setdefault(event.function, self.seen[event.function])

    # --- followed

    def _follow(self, event: Event) -> None:
        path = self.path(event)
        if path.program is not None and path.program.is_ready:
            self.how["followed"] += 1
            self.followed.setdefault(event.function, self.seen[event.function])
            self.policy.followed(path, self._behind, event.calls, self._reads(event))
            self._behind = path
            return
        self.wrong += 1
        self.policy.left(self._behind)
        if self.begins_alike:  # the recording of what both have in common ends, and another begins
            self.policy.begin(self._paths["common"])
        self._note(event)
