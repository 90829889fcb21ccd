"""The policy of how a step runs: events in, decision out.

A *path* is a list of calls between two marks or reads. Calls run when they are made, and the path
that they take is noted. A path that comes back gets a program; where the path that is expected next
has one, its calls are only followed, and the program runs at the end. After a side exit from such a
path, calls run at once. The policy decides by counts alone: it knows no tensor and no clock.
"""

from __future__ import annotations

import enum
from typing import Any, Protocol

MIN_RETURNS = 1  # times a path comes back before its program is asked for
MAX_IDLE_PROGRAMS = 8  # programs that nothing has followed yet; with more, a path returns once more
LAUNCH_CALLS = 16  # calls in the time of a launch and a read of its result: half is the launch
CALLS_OF_CORE = 6  # calls that take as long in the core as one in Python
BYTES_OF_A_CALL = 150_000  # that are written in the time of a call
SHORT_PATHS = 8  # paths in a row as short as that, after which calls are not noted
MAX_NEW_PATHS = 256  # more than come back, after which it is doubted that paths come back
NEW_PATHS = 8  # as many as one that comes back outweighs; then calls rest from being noted
UNNOTED_CALLS = 256  # after which a read ends a session that notes nothing: a step may come back
MAX_VARIANTS = 6  # programs of one path of symbols: each is right for some sizes
MIN_RUN = 2  # alike in a row, after which the next is expected to be: paths with programs, sizes
MAX_PAUSE = 64  # recordings, in each back-off; and in a row that the core ends by itself


class Begin(enum.Enum):
    """The state of a recording's calls."""

    NOTE = "run at once, and are noted"
    FOLLOW = "are followed along a path that has a program"
    LEAVE_ALONE = "run at once, and are not noted"
    SKETCH = "run at once, and are summed up in a hash"


class Settles(enum.Enum):
    """The ends that are settled from now on: each changes nothing but counts, so that the core passes it.

    The values are the core's.
    """

    THIS = 0  # so is the one that was heard of
    NOT_HERE = 1  # neither it, nor the one behind which its recording began
    NONE = 2
    ALIKE = 3  # all that differ from it in sizes alone


class HasProgram(Protocol):
    """The interface of a path's program to the policy."""

    @property
    def is_ready(self) -> bool:
        """True if a launch runs compiled code."""

    @property
    def is_kept(self) -> bool:
        """False once it was dropped for others: then it may be asked for again."""


class Junction:
    """A place where recordings begin: behind one path, or behind one that came behind another.

    Attributes:
        following: The path that began here the last time.
        pause: Recordings that are noted here before one is followed again.
        backoff: The length of the last pause, or 1 behind a guess that cost none; 0 where the last guess was right.
        awaits: True if what comes is to be noted, since its sketch has come back.
        learned: The recorder's own record of what begins here.
    """

    __slots__ = ("following", "pause", "backoff", "awaits", "learned")

    def __init__(self) -> None:
        self.following: Path | None = None
        self.learned: Any = None
        self.pause = self.backoff = 0
        self.awaits = False


class Path(Junction):
    """The policy's memory of one path, and of the place behind it.

    Attributes:
        returns: The number of times that it came back.
        program: Its program, once asked for.
        places: The places behind paths that came behind it, by these: a short path, such as a check, comes
            several times in a step, each time behind another one. A place keeps nothing older alive.
        ends_in_core: False if Python has to end what is followed along it.
        weight: The calls that take as long as what its program has saved; None where it was not followed.
        in_core: True if the core has followed it, or would have.
        is_of_reads: True if a read has ended it the last time.
        follows: The number of times that it was followed since it was summed up.
        calls: The most calls that were counted along it: the core counts the steps of a recurrence.
    """

    __slots__ = (
        "returns", "program", "places", "is_followed", "ends_in_core", "weight", "calls",
        "in_core", "is_of_reads", "follows",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.returns = -1
        self.program: HasProgram | None = None
        self.places: dict[Path, Junction] = {}
        self.is_followed = self.in_core = self.is_of_reads = False
        self.weight: int | None = None
        self.ends_in_core, self.calls, self.follows = True, 0, 0

    def place_behind(self, path: Path) -> Junction:
        """Return the place behind a path that came behind this one."""
        place = self.places.get(path)
        if place is None:
            if len(self.places) >= MAX_NEW_PATHS:
                self.places.clear()
            place = self.places[path] = Junction()
        return place


class PathsAlike:
    """The policy's memory of all paths that differ in sizes alone.

    Attributes:
        returns: The number of new ones, where a path of symbols is worth a program.
        are_alike: True if none is worth a program, the path of symbols neither.
    """

    __slots__ = ("returns", "are_alike", "_ends", "_commonest")

    def __init__(self) -> None:
        self.returns = self._ends = self._commonest = 0
        self.are_alike = False

    def ended(self, path: Path, is_worth_symbols: bool, is_short: bool) -> None:
        """One of them has ended, which was noted; a short one is worth no program however often it comes."""
        self.returns += is_worth_symbols and path.returns == 0
        follows, path.follows = min(path.follows, MAX_PAUSE), 0
        self._commonest = max(self._commonest + follows, path.returns + 1)
        # Of so many sizes, equally common, each program would lie idle most of the time.
        times = 2 * MAX_IDLE_PROGRAMS * self._commonest
        self._ends = min(self._ends, times) + 1  # no more count: one that is common later is found
        self.are_alike = not is_worth_symbols and self._ends > (MIN_RUN if is_short else times)


class Policy:
    """The policy of one recorder.

    Attributes:
        sketches: True if calls can be summed up in a hash, which takes no time: then a path is
            noted once its hash has come back.
        unnoted: The path that stands for all calls that were left alone, and for all that came
            once: one place, so that what comes back between them is known by where it comes.
    """

    def __init__(self, sketches: bool = False) -> None:
        self.sketches = sketches
        self._wanted = 0  # recordings that are noted, since a sketch has come back
        self.unnoted = Path()
        self._before = self.unnoted  # the path that the last one came behind
        self._is_sure = False  # the same path came twice behind that
        self._short = 0  # paths in a row
        self._new = 0  # paths that never came before, less those that came back
        self._rest = self._backoff = 0  # recordings that are left alone, and were the last time
        self._idle = 0  # programs that were asked for and not followed yet
        self._hits = 0  # paths in a row whose programs were ready
        self._awaited: list[
            HasProgram
        ] = []  # asked for, and not ready when it was last said what is settled

    def begin(self, behind: Path) -> Begin:
        """Decide how the recording behind a path runs."""
        place = self.place_of(behind)
        if place.pause:
            place.pause -= 1
            return self._note(place)
        if self._hits >= MIN_RUN or self._is_worth_it(self.expected(behind)):
            return Begin.FOLLOW
        if self._rest:
            self._rest -= 1
            return Begin.LEAVE_ALONE
        # a sketch takes no time, and tells where a path begins that is worth a program
        rests = self.follows_reads and behind is not self.unnoted and not self.sketches
        return Begin.LEAVE_ALONE if rests else self._note(place)

    def expected(self, behind: Path) -> Path:
        """Return the path that is expected behind another; that one itself, as in a loop, if none is."""
        place = self.place_of(behind)
        is_sure = place is not self.unnoted or self._is_sure
        return place.following if is_sure and place.following is not None else behind

    def _note(self, place: Junction) -> Begin:
        if self.sketches and not (self._wanted or place.awaits):
            return Begin.SKETCH
        place.awaits = False
        self._wanted = max(0, self._wanted - 1)
        return Begin.NOTE

    def weight(
        self, calls: int, nbytes: int, inputs: int, followed: int = 0, in_core: bool = False
    ) -> int:
        """Return how many calls would take as long as what a program of these would save.

        They are calls in Python, where a launch takes LAUNCH_CALLS of them; or in the core, where a
        launch takes as many of those.

        Args:
            nbytes: of what these calls make.
            inputs: tensors from before: a launch in Python hands each over in the time of a call of the core.
            followed: those that Python would follow: all of a path of symbols, which the core does not know.
            in_core: the core would follow and launch.
        """
        if not self.calls_are_quick:
            return calls
        if in_core:
            return calls + CALLS_OF_CORE * nbytes // BYTES_OF_A_CALL
        return (calls - inputs) // CALLS_OF_CORE + nbytes // BYTES_OF_A_CALL - followed

    @property
    def calls_are_quick(self) -> bool:
        """True if the core runs calls: more of them take as long as a launch."""
        return self.sketches

    def _is_short(self, weight: int, is_of_reads: bool, in_core: bool = False) -> bool:
        """Return True if a launch takes longer than the calls, so that no program is worth it.

        Without the core, one that a mark ends runs beside the calls behind it.
        """
        return weight <= _launch_calls(is_of_reads, in_core) and (
            is_of_reads or self.calls_are_quick
        )

    def _pays(self, path: Path, is_alone: bool) -> bool:
        """Return True if following the path takes no longer than its calls, as far as that is known.

        Args:
            is_alone: calls run at once before it. To begin a walk, and to come back, takes as long as three launches
                of the core; it is nothing beside one of Python's.
        """
        if path.weight is None or not self.calls_are_quick:
            return True
        launches = 4 if is_alone and path.in_core else 1
        return path.weight > launches * _launch_calls(path.is_of_reads, path.in_core)

    def _is_worth_it(self, path: Path) -> bool:
        return _is_ready(path) and self._pays(path, is_alone=not self._hits)

    def _may_be_followed(self, path: Path) -> bool:
        return _is_ready(path) and self._pays(path, is_alone=True)

    def _is_in_chain(self, path: Path, behind: Path, following: Path | None) -> bool:
        """Return True if the path may be followed: alone, or beside another one that may."""
        if self._may_be_followed(path):
            return True
        pays = [
            _is_ready(one) and self._pays(one, is_alone=False)
            for one in (path, behind, following)
            if one
        ]
        return pays[0] and any(pays[1:])

    def _settles(
        self, path: Path, behind: Path, is_known: bool, is_short: bool, are_alike: bool
    ) -> Settles | None:
        """Return what `sketched` does, of a path that it has heard of by now."""
        place = self.place_of(path)
        if place.awaits or place.pause:
            return None
        following = None if place is self.unnoted else place.following
        if self._may_be_followed(self.expected(path)):
            return None
        if path.program is None:
            gets_none = path.returns > LAUNCH_CALLS  # a program would have paid
        else:
            gets_none = not self._is_in_chain(path, behind, following)
        is_settled = is_known and (gets_none or is_short)
        return Settles.THIS if is_settled else Settles.ALIKE if are_alike else None

    def passed(self, reads: int, marks: int, before: Path) -> None:
        """So many settled paths have ended in reads and at marks: the policy was not asked then.

        Args:
            before: the path that the last of them came behind.
        """
        self._before = before
        self._new, self._backoff = max(0, self._new - NEW_PATHS * (reads + marks)), 0
        self._short = min(SHORT_PATHS, self._short + reads)

    def sketched(
        self,
        path: Path,
        behind: Path,
        weight: int,
        of_symbols: int,
        is_of_reads: bool,
        like: PathsAlike | None,
        in_core: bool = False,
    ) -> Settles | None:
        """A path that was summed up has ended: note the next ones if it has come back.

        Return what changes of the ends that are settled; None if nothing does. This one is settled if the path gets
        no program, no other is looked for, and what comes behind it is not to be followed. It is so no longer, nor
        is the end behind which it began, if the path is to be noted there, or followed.

        Args:
            weight, of_symbols: of its calls, and of them on a path of symbols.
            like: the memory of all paths that differ from it in sizes alone; None if it is the first.
            in_core: the weight is that of a path which the core would follow and launch.
        """
        is_known = path.returns >= 0 and _is_like(self.place_of(behind).following, path)
        place = self._own_place(behind)
        comes_back = self.noted(path, behind, weight, is_of_reads, like is not None, in_core)
        if comes_back and is_power_of_two(path.returns) and path.returns <= LAUNCH_CALLS:
            place.awaits = True
        is_short = self._is_short(weight, is_of_reads, in_core)
        were_alike = are_alike = False
        if like is not None:
            were_alike = like.are_alike
            are_alike = self._are_alike(
                path, like, is_short, not self._is_short(of_symbols, is_of_reads)
            )
        if self._has_come():
            return Settles.NONE
        if place.awaits or self._may_be_followed(path) or (were_alike and not are_alike):
            return Settles.NOT_HERE
        return self._settles(path, behind, is_known, is_short, are_alike)

    def _are_alike(
        self, path: Path, like: PathsAlike, is_short: bool, is_worth_symbols: bool
    ) -> bool:
        """Return True if no more is to be heard of paths that differ in sizes alone from one that has ended."""
        like.ended(path, is_worth_symbols, is_short)
        if is_worth_symbols and path.returns == 0 and is_power_of_two(like.returns):
            self._wanted = 2  # the path of symbols is found from two
        return like.are_alike

    def _has_come(self) -> bool:
        """Return True if a program that was asked for is ready: until then its path is none to be followed."""
        awaited, self._awaited = (
            self._awaited,
            [one for one in self._awaited if one.is_kept and not one.is_ready],
        )
        return len(self._awaited) < len(awaited)

    def noted(
        self,
        path: Path,
        behind: Path,
        weight: int,
        is_of_reads: bool,
        joins: bool = False,
        in_core: bool = False,
    ) -> bool:
        """A noted path has ended. Return True if its program is to be asked for now.

        Args:
            weight: of its calls; 1 of a single one.
            is_of_reads: a read ends it, and no optimizer made a step: it may be one of many reads.
            joins: the path is one of symbols, of which this is the second size.
            in_core: the weight is that of a path which the core would follow and launch.
        """
        self._note_place(path, behind)
        path.returns += 1
        path.is_of_reads = is_of_reads
        self._hits = self._hits + 1 if _is_ready(path) and self._pays(path, is_alone=False) else 0
        self._count_new(path.returns == 0 and not joins)
        self._count_short(weight, is_of_reads)
        if self._is_short(weight, is_of_reads, in_core) or weight < 2 or _is_asked_for(path):
            return False
        if (
            in_core
            and self.calls_are_quick
            and path.returns * weight < _launch_calls(is_of_reads, in_core) ** 2
        ):  # launches that it would have saved
            return False
        return path.returns >= MIN_RETURNS + (self._idle >= MAX_IDLE_PROGRAMS)

    def asked(self, path: Path, program: HasProgram) -> None:
        """The program of a path was asked for."""
        path.program = program
        self._idle += 1
        if self.sketches:
            self._awaited.append(program)

    def followed(
        self,
        path: Path,
        behind: Path,
        weight: int,
        is_of_reads: bool,
        in_core: bool = False,
        has_left_core: bool = False,
    ) -> None:
        """A recording was followed to the end of a path.

        Args:
            in_core: by the core, or it would have been; the weight is of its calls.
            has_left_core: Python has followed what is left of the path, which takes longer than its calls: it is
                followed ever less, and in the end no more.
        """
        place = self._note_place(path, behind)
        path.weight = 0 if has_left_core and place.backoff == MAX_PAUSE else weight
        path.in_core, path.is_of_reads = in_core, is_of_reads
        path.follows += 1
        self._hits = self._hits + 1 if self._pays(path, is_alone=False) else 0
        if not path.is_followed:
            path.is_followed, self._idle = True, max(0, self._idle - 1)
        self._count_new(False)
        self._count_short(weight, is_of_reads)
        if has_left_core:
            self._pause_if_again(place)
        else:
            place.backoff = 0

    def left(self, behind: Path) -> None:
        """The recording has left what was followed, in the core at least, or its end has no program."""
        self._pause(self.place_of(behind))

    def cut_short(self, behind: Path) -> None:
        """A read has ended what was followed, with a single call: nothing is lost.

        So a loop that reads a value now and then is followed at once behind it. A second time in a row, it is as if
        the recording had left what was followed.
        """
        self._pause_if_again(self.place_of(behind))

    def _pause_if_again(self, place: Junction) -> None:
        if place.backoff:
            self._pause(place)
        else:
            place.backoff, self._hits, self._is_sure = 1, 0, False

    def _pause(self, place: Junction) -> None:
        place.pause = place.backoff = min(MAX_PAUSE, max(1, 2 * place.backoff))
        self._hits, self._is_sure = 0, False

    def note_again(self, behind: Path) -> None:
        """Note what follows this path twice: it may have a better continuation."""
        place = self.place_of(behind)
        place = behind if place is self.unnoted else place
        place.pause = max(place.pause, 2)

    def late(self, calls_since_read: int) -> bool:
        """Return True if calls that were left alone for their reads are to be noted again.

        The first path of these is the rest of a step: whole ones are noted behind it.
        """
        if calls_since_read < self.calls_without_read:
            return False
        self._short = 0
        return True

    @property
    def calls_without_read(self) -> int:
        """The calls after which reads are late: they take as long as two launches."""
        return 2 * LAUNCH_CALLS * (CALLS_OF_CORE if self.calls_are_quick else 1)

    def trained(self) -> None:
        """An optimizer has made a step: it outweighs two reads."""
        self._short = max(0, self._short - 2)

    @property
    def ends_unheard(self) -> int:
        """The number of settled ends that may pass in a row: none where what begins next does not depend on its
        place alone.
        """
        if self._wanted or self._rest or self._hits:
            return 0
        return (
            MIN_RUN if self._awaited else MAX_PAUSE
        )  # a program is followed a few steps after it has come

    @property
    def follows_reads(self) -> bool:
        """True while calls are left alone since reads follow one another."""
        return self._short >= SHORT_PATHS

    def place_of(self, behind: Path) -> Junction:
        """Return the place behind a path: of what came before that, else of the path alone, if known.

        Else it is the one of all paths that came once.
        """
        place = self._before.places.get(behind, behind)
        known = place if place.following else behind
        return known if known.following else self.unnoted

    def _own_place(self, behind: Path) -> Junction:
        """Return the place to remember what comes behind a path: one that came once has one place alone."""
        return self._before.place_behind(behind) if behind.returns > 0 else behind

    def _note_place(self, path: Path, behind: Path) -> Junction:
        """Note what has come behind a path; return the place where it was expected."""
        place = self.place_of(behind)
        if place is self.unnoted:
            self._is_sure = place.following is path
        behind.following = place.following = self._own_place(behind).following = path
        self._before = behind
        return place

    def _count_new(self, is_new: bool) -> None:
        if not is_new:
            self._new, self._backoff = max(0, self._new - NEW_PATHS), 0
            return
        self._new += 1
        if self._new >= MAX_NEW_PATHS:
            self._backoff = min(MAX_PAUSE, max(1, 2 * self._backoff))
            self._rest, self._new = self._backoff, MAX_NEW_PATHS - NEW_PATHS

    def _count_short(self, weight: int, is_of_reads: bool) -> None:
        if weight > LAUNCH_CALLS:
            self._short = max(0, self._short - 2)
        elif is_of_reads:
            self._short = min(SHORT_PATHS, self._short + 1)


def _is_like(expected: Path | None, path: Path) -> bool:
    """Return True if nothing depends on which of the two is expected: neither has a program."""
    return expected is path or (expected is not None and not (expected.program or path.program))


def _launch_calls(is_of_reads: bool, in_core: bool) -> int:
    """Return how many calls take as long as a launch and a read of its result; none waits for one at a mark.

    In Python it takes as many, where it may run beside the calls behind it.
    """
    return LAUNCH_CALLS // 2 if in_core and not is_of_reads else LAUNCH_CALLS


def is_power_of_two(number: int) -> bool:
    """Return True for 1, 2, 4, 8 and so on: the distances of a back-off that doubles."""
    return number & (number - 1) == 0


def _is_ready(path: Path) -> bool:
    return path.program is not None and path.program.is_ready


def _is_asked_for(path: Path) -> bool:
    return path.program is not None and path.program.is_kept
