"""The loaded core: what Python calls of it, and where Python's own kernels lie beside it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ltc import config
from ltc.explaining import history
from ltc.explaining.explanation import TIERS, Explanation
from ltc.native import core_build


class Counted(NamedTuple):
    """The calls of a session since they were counted last.

    Attributes:
        calls: The number of calls.
        read_at: The number of them before the last read that Python has not heard of; -1: none.
        passed: The ends of recordings that were passed since.
        passed_at: The number of calls before the last of these.
    """

    calls: int
    read_at: int
    passed: int
    passed_at: int


class Summed(NamedTuple):
    """The sum of a recording's calls.

    Attributes:
        exact, shape: Hashes of the calls with their sizes, and without.
        calls: Their number; one of lists counts once for each tensor, a recurrence five times for each step.
        entries: The number of calls as they were made.
        nbytes: The bytes of their results.
        inputs: The number of their operands that are older than the recording.
        reads, marks: The ends that were passed since the last one that Python has heard of.
        exact_behind, shape_behind: The hashes of the recording before this one.
        exact_before, shape_before: The hashes of the recording before that one.
    """

    exact: int = 0
    shape: int = 0
    calls: int = 0
    entries: int = 0
    nbytes: int = 0
    inputs: int = 0
    reads: int = 0
    marks: int = 0
    exact_behind: int = 0
    shape_behind: int = 0
    exact_before: int = 0
    shape_before: int = 0


_COUNTED, _SUMMED = len(Counted._fields), len(Summed._fields)
_Counted, _Summed = ctypes.c_int64 * _COUNTED, ctypes.c_int64 * _SUMMED
_Cut = ctypes.c_int64 * (_COUNTED + 1 + _SUMMED)


class Core:
    """The functions of the shared library.

    Those of `library` are called without the interpreter's lock: they wait, run programs, or drop tensors. That
    lock orders the others, which threads call of one another's sessions.
    """

    def __init__(self, file: Path) -> None:
        library, ordered = ctypes.CDLL(str(file)), ctypes.PyDLL(str(file))
        count, pointer, flag = ctypes.c_int64, ctypes.c_void_p, ctypes.c_bool
        self.define = _function(library.ltc_define, None)
        self.register = _function(library.ltc_register, count)
        self.session = _function(ordered.ltc_session, pointer)
        self.arm = _function(ordered.ltc_arm, None, pointer, flag)
        self.enter = _function(ordered.ltc_enter, None, pointer, count, count, flag)
        self.leave = _function(library.ltc_leave, None, pointer)
        self.sketch = _function(ordered.ltc_sketch, None, pointer)
        self.lengthen = _function(ordered.ltc_lengthen, None, count)
        self._sketched = _function(ordered.ltc_sketched, None, pointer, ctypes.POINTER(count))
        self._cut = _function(ordered.ltc_cut, None, pointer, count, ctypes.POINTER(count))
        self.passes_cut = _function(ordered.ltc_passes_cut, flag, pointer, flag)
        self.settle = _function(ordered.ltc_settle, None, pointer, count)
        self.limit_cuts = _function(ordered.ltc_limit_cuts, None, pointer, count, flag)
        self.note_trained = _function(ordered.ltc_note_trained, flag, pointer, flag)
        self.learn = _function(library.ltc_learn, None, pointer)
        self.learned = _function(library.ltc_learned, pointer, pointer, count)
        self.drop_track = _function(library.ltc_drop_track, None, pointer)
        self.walked = _function(ordered.ltc_walked, count, pointer)
        self.walk = _function(library.ltc_walk, None, pointer, pointer, flag)
        self._keep_exit = _function(library.ltc_keep_exit, None, pointer, ctypes.POINTER(count))
        self.finish = _function(library.ltc_finish, count, pointer, count, count, count)
        self.frame = _function(library.ltc_frame, count)
        self._calls = _function(ordered.ltc_calls, None, pointer, ctypes.POINTER(count))
        self.calls_of_step = _function(ordered.ltc_calls_of_step, count, pointer, count)
        self._take_reads = _function(ordered.ltc_take_reads, count, flag, ctypes.POINTER(count))
        self.begin_backward = _function(
            library.ltc_begin_backward, pointer, pointer, pointer, pointer
        )
        self.end_backward = _function(library.ltc_end_backward, None, pointer, pointer)
        self.ran = _function(library.ltc_ran, count)  # how many calls the core has run
        # How many it has followed, of which nothing ran when they were made.
        self.followed = _function(library.ltc_followed, count)
        self.bytes = _function(library.ltc_bytes, count)
        self._take_uploads = _function(
            library.ltc_take_uploads, count, ctypes.POINTER(count), count
        )
        self._view_strides = _function(
            library.ltc_view_strides, count, pointer, ctypes.POINTER(count), count
        )
        self._left = _function(library.ltc_left, count, ctypes.c_char_p, count)

    def counted(self, session: int) -> Counted:
        """Return a session's calls since they were counted last; from now on they are counted."""
        found = _Counted()
        self._calls(session, found)
        return Counted._make(found)

    def sketched(self, session: int) -> Summed:
        """End the sketch of a session's calls, behind which no other begins."""
        found = _Summed()
        self._sketched(session, found)
        return Summed._make(found)

    def cut(self, session: int, since: int) -> tuple[Counted, bool, Summed]:
        """Count a session's calls; if there are any, they are summed up, and another sketch begins.

        Args:
            since: calls that Python has counted already.

        Returns:
            (counted, is_entered, summed): `is_entered` if the core goes on to run calls.
        """
        found = _Cut()
        self._cut(session, since, found)
        words = found[:]
        counted, summed = words[:_COUNTED], words[_COUNTED + 1 :]
        return Counted(*counted), bool(words[_COUNTED]), Summed(*summed)

    def keep_exit(self, track: int, words: Sequence[int]) -> None:
        """Let walks along a track end in the core; `words`: see Exit in exits.h."""
        self._keep_exit(track, (ctypes.c_int64 * len(words))(*words))

    def uploads(self) -> list[tuple[float, int, int]]:
        """Return the copies to the device since the last time: moment, nanoseconds and bytes."""
        room = 512
        found = (ctypes.c_int64 * (3 * room))()
        taken = self._take_uploads(found, room)
        numbers = found[: 3 * taken]
        return [(m * 1e-9, t, n) for m, t, n in zip(numbers[::3], numbers[1::3], numbers[2::3])]

    def reads(self, of_numbers: bool) -> tuple[int, int]:
        """Return how many numbers were read since the last time, or else copies, and their bytes."""
        nbytes = ctypes.c_int64()
        return int(self._take_reads(of_numbers, nbytes)), nbytes.value

    def view_strides(self, storage: int) -> tuple[int, ...] | int:
        """Return the strides of a view that the core has; none where it is no view, or contiguous.

        -1 where the core does not know them, -2 where the view is followed.
        """
        room = 64
        strides = (ctypes.c_int64 * room)()
        found = int(self._view_strides(storage, strides, room))
        return found if found < 0 else tuple(strides[:found])

    def left_to_python(self) -> dict[str, int]:
        """Return the overloads whose calls were left to Python, each with how many were."""
        size = self._left(None, 0) + 4096
        text = ctypes.create_string_buffer(size)
        self._left(text, size)
        lines = text.value.decode().splitlines()
        return {name: int(count) for name, count in map(str.split, lines)}


def _function(function: Any, result: Any, *arguments: Any) -> Callable[..., Any]:
    function.restype, function.argtypes = result, arguments
    loaded: Callable[..., Any] = function
    return loaded


class CoreRequired(ImportError):
    """LTC_NATIVE=require asks for a core that there is not."""


def _loaded() -> tuple[Core | None, str]:
    """Return the core, and why there is none."""
    tried = config.value(core_build.TRIED)
    if tried:
        return Core(Path(tried)), ""
    asked = config.value("LTC_NATIVE")
    if asked == "0":
        return None, "LTC_NATIVE is 0"
    core, why = _of_cache()
    if core is None and asked == "require":
        raise CoreRequired(f"LTC_NATIVE=require, and there is no native core: {why}")
    return core, why


def _of_cache() -> tuple[Core | None, str]:
    built = core_build.found()
    if built is None:
        without_compiler = core_build.no_compiler()
        if without_compiler:
            _explain(without_compiler, "install g++ or clang++")
        return None, core_build.why_none()
    if built.failure:
        _explain(built.failure, "mend that, then run python -m ltc build")
        return None, built.failure
    try:
        return Core(_as_file(built.library)), ""
    except (OSError, AttributeError) as error:
        return None, f"the library that was built cannot be loaded: {error}"


def _explain(why: str, cure: str) -> None:
    """Keep for `ltc.explain` that there will be no core until the user changes something."""
    what = "there is no native core: calls that are not compiled run in Python"
    history.note(Explanation(TIERS, (), what, why.splitlines()[0], cure, "core"))


def _as_file(library: bytes) -> Path:
    """A file of the library's bytes, in memory: what was read from the cache is what is loaded."""
    descriptor = os.memfd_create("ltc_core")
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(library)
    return Path(f"/proc/self/fd/{descriptor}")


CORE, WHY_NOT = _loaded()
# Where the kernels of Python are registered: behind those of the core, which leave calls to them.
KERNEL_KEY = "PrivateUse1" if CORE is None else "PrivateUse2"
