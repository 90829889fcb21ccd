"""Through which of the user's own lines something came."""

from __future__ import annotations

import linecache
import sys
from types import FrameType
from typing import NamedTuple

from ltc.support.bounded_table import BoundedTable
from ltc.tracebacks import is_of_python, is_of_the_program, is_users

MOST_FRAMES = 4  # that are kept of one stack
_OURS, _PACKAGE, _PROGRAM = range(3)  # ltc's, torch's, Python's; a package's; the user's own
_owners: BoundedTable[str, int] = BoundedTable("FileOwners", 4096)
_our_files: set[str] = set()  # of these, ours: every search passes some


class UserFrame(NamedTuple):
    """A line of the user's, and the function it stands in."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"

    @property
    def source(self) -> str:
        """The text of the line; "" where there is none."""
        return linecache.getline(self.file, self.line).strip()


def frame_of(line: str) -> UserFrame | None:
    """Return the frame that "file.py:12 in function" names; None if the text is no such line."""
    place, _, function = line.rpartition(" in ")
    file, _, number = place.rpartition(":")
    return UserFrame(file, int(number), function) if number.isdigit() else None


def user_stack() -> tuple[UserFrame, ...]:
    """The innermost frame outside ltc, torch and Python's own library, then those that led to it.

    Of the latter, only those of the user's program: no installed packages.
    """
    return stack_of(sys._getframe(1))


def user_stack_from(line: str) -> tuple[UserFrame, ...]:
    """Return the user's stack, with the frame that "file.py:12 in function" names as its innermost."""
    place, stack = frame_of(line), stack_of(sys._getframe(1))
    if place is None:
        return stack
    return place, *[frame for frame in stack if frame != place]


def stack_of(frame: FrameType | None) -> tuple[UserFrame, ...]:
    """The same of any thread's innermost frame."""
    frames: list[UserFrame] = []
    while frame is not None and len(frames) < MOST_FRAMES:
        code = frame.f_code
        owner = _owner(code.co_filename)
        if owner == _PROGRAM or (owner == _PACKAGE and not frames):
            found = UserFrame(code.co_filename, frame.f_lineno, code.co_name)
            if found not in frames[-1:]:  # see user_line.called_from
                frames.append(found)
        frame = frame.f_back
    return tuple(frames)


def user_frame(above: int = 0) -> FrameType | None:
    """Return the innermost user frame itself; holding it keeps its function's values alive.

    Args:
        above: Number of the caller's callers that are known to be ltc's.
    """
    frame: FrameType | None = sys._getframe(1 + above)
    while frame is not None:
        file = frame.f_code.co_filename
        if file not in _our_files and _owner(file) != _OURS:
            return frame
        frame = frame.f_back
    return None


def _owner(file: str) -> int:
    owner = _owners.get(file)
    if owner is None:
        owner = _owners.keep(file, _owner_of(file))
        if owner == _OURS and len(_our_files) < _owners.most:
            _our_files.add(file)
    return owner


def _owner_of(file: str) -> int:
    if is_of_the_program(file):
        return _PROGRAM
    return _PACKAGE if is_users(file) and not is_of_python(file) else _OURS
