"""The loaded core: what Python calls of it, and where Python's own kernels lie beside it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ltc import config
from ltc.explaining import history
from ltc.explaining.explanation import TIERS, Explanation
from ltc.native import core_build

_Five, _Seven = ctypes.c_int64 * 5, ctypes.c_int64 * 7


class Core:
    """The functions of the shared library.

    Each is called without the interpreter's lock.
    """

    def __init__(self, file: Path) -> None:
        library = ctypes.CDLL(str(file))
        count, pointer, flag = ctypes.c_int64, ctypes.c_void_p, ctypes.c_bool
        self.define = _function(library.ltc_define, None)
        self.register = _function(library.ltc_register, count)
        self.session = _function(library.ltc_session, pointer)
        self.arm = _function(library.ltc_arm, None, pointer, flag)
        self.enter = _function(library.ltc_enter, None, pointer, count, count)
        self.leave = _function(library.ltc_leave, None, pointer)
        self.sketch = _function(library.ltc_sketch, None, pointer)
        self.lengthen = _function(library.ltc_lengthen, None, count)
        self._sketched = _function(library.ltc_sketched, None, pointer, ctypes.POINTER(count))
        self._cut = _function(library.ltc_cut, None, pointer, count, count, ctypes.POINTER(count))
        self.learn = _function(library.ltc_learn, None, pointer)
        self.learned = _function(library.ltc_learned, pointer, pointer)
        self.track_calls = _function(library.ltc_track_calls, count, pointer)
        self.drop_track = _function(library.ltc_drop_track, None, pointer)
        self.walked = _function(library.ltc_walked, count, pointer)
        self.walk = _function(library.ltc_walk, None, pointer, pointer)
        self.calls = _function(library.ltc_calls, count, pointer)
        self.uncounted_calls = _function(library.ltc_uncounted_calls, count, pointer)
        self.read_at = _function(library.ltc_read_at, count, pointer)
        self._take_reads = _function(library.ltc_take_reads, count, flag, ctypes.POINTER(count))
        self.begin_backward = _function(library.ltc_begin_backward, pointer, pointer, pointer)
        self.end_backward = _function(library.ltc_end_backward, None, pointer, pointer)
        self.count = _function(library.ltc_count, count, count)
        self.bytes = _function(library.ltc_bytes, count)
        self._take_uploads = _function(
            library.ltc_take_uploads, count, ctypes.POINTER(count), count
        )
        self._view_strides = _function(
            library.ltc_view_strides, count, pointer, ctypes.POINTER(count), count
        )
        self._left = _function(library.ltc_left, count, ctypes.c_char_p, count)

    def sketched(self, session: int) -> tuple[int, ...]:
        """End the sketch of a session's calls.

        Returns:
            (exact, shape, calls, nbytes, inputs): a hash of the calls with their sizes, one without,
            how many there were, the bytes of what they made, and how many tensors from before they
            were given.
        """
        found = _Five()
        self._sketched(session, found)
        return tuple(found)

    def cut(self, session: int, since: int, looks_after: int) -> tuple[int, bool, tuple[int, ...]]:
        """Count a session's calls; if there are any, `sketched` is of these, and another sketch begins.

        Args:
            since: calls that Python has counted already.
            looks_after: calls of the core's behind which Python looks.

        Returns:
            (calls, is_entered, sketched): calls since they were counted last, and whether the core
            goes on to run calls.
        """
        found = _Seven()
        self._cut(session, since, looks_after, found)
        *sketched, calls, is_entered = found
        return calls, bool(is_entered), tuple(sketched)

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

    def followed(self) -> int:
        """Return how many calls the core has followed, of which nothing ran when they were made."""
        return int(self.count(-2))

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
    """Keep for `ltc.explain` that there will be no core before somebody changes something."""
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
