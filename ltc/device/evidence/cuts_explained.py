"""Explanations of steps that ended before their mark, and of calls run at once, not recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ltc.aten.call import CallResult
from ltc.device.evidence.forks_explained import CURES, Fork, value_text
from ltc.device.evidence.reads_explained import BEFORE_THE_MARK, ReadCut
from ltc.explaining.explanation import CUTS, FALLBACKS, TIERS, Explanation
from ltc.explaining.history import again, note
from ltc.explaining.user_stack import user_frame, user_stack
from ltc.support.bounded_table import BoundedTable

_MARK = "call ltm.mark_step() once per step, after optimizer.step()"
_SMALLER = "if each step is marked, use smaller batches, or raise LTC_MAX_PENDING_BYTES"
_OTHER_THREAD = "mark the step in the thread that made the tensor before another one uses it"
_EAGERLY = "use fixed shapes, which stay in the program: multiply by the mask, torch.where, topk"


# with the code of the place, so that no other has its identity
_known: BoundedTable[tuple[object, ...], tuple[Explanation, object]]
_known = BoundedTable("ExplainedCuts", 1024)


def _noted(
    difference: tuple[object, ...],
    make: Callable[[], Explanation],
    before_again: Callable[[Any], object] = bool,
) -> Explanation:
    """Return the explanation of a place in the user's program: made once, counted from then on.

    Args:
        before_again: Called with it before it is counted once more.
    """
    frame = user_frame(
        above=2
    )  # above the function that reports the event to another module of ltc
    # no line: finding it takes longer than all else, and the instruction identifies the place
    code, instruction = (None, 0) if frame is None else (frame.f_code, frame.f_lasti)
    key = (difference, id(code), instruction)
    known = _known.get(key)
    if known is not None:
        before_again(known[0])
        return again(known[0])
    return _known.keep(key, (note(make()), code))[0]


def read_of(value: CallResult, marks: int) -> Explanation:
    """Explain a cut by a read of a pending value.

    Args:
        marks: Number of step marks on the device so far.
    """

    def make() -> Explanation:
        text = f"expected the mark, got a read of {value_text(value)}"
        what = "the step was cut by a read"
        made = ReadCut(CUTS, user_stack(), what, text, BEFORE_THE_MARK, "read")
        made.come(marks)
        return made

    call = value.call
    # the size is left out: one explanation for each size would take longer than the read
    kind = call.overload, call.line, len(value.shape), value.dtype
    return _noted(kind, make, lambda known: known.come(marks))


def ran_eagerly(name: str) -> Explanation:
    """Explain a call that ran on the CPU immediately."""

    def make() -> Explanation:
        text = "expected a call that can be recorded, got one whose result depends on data"
        what = f"{name} ran eagerly on the CPU"
        return Explanation(FALLBACKS, user_stack(), what, text, _EAGERLY, "eager")

    return _noted((name,), make)


def too_much_pending(calls: int, nbytes: int, marks: int) -> Explanation:
    """Explain a cut at the limits of pending calls and bytes.

    Args:
        marks: Number of step marks before.
    """

    def make() -> Explanation:
        text = f"expected a mark, got {calls} pending calls with {nbytes >> 20} MiB of results"
        what = "the step was cut because it grew too long"
        cure = f"{_MARK}; {_SMALLER}" if marks else _MARK
        return Explanation(CUTS, user_stack(), what, text, cure, "unmarked")

    return _noted(("length",), make)


def pending_elsewhere() -> Explanation:
    """Explain the cut of another thread's step: a tensor pending there is used here."""

    def make() -> Explanation:
        text = "expected a mark in the thread that recorded the tensor, got a use in this thread"
        what = "the step of another thread was cut"
        return Explanation(CUTS, user_stack(), what, text, _OTHER_THREAD, "thread")

    return _noted(("thread",), make)


def default_dtype_changed() -> Explanation:
    """Explain a cut by torch.set_default_dtype while calls were pending."""

    def make() -> Explanation:
        text = "expected the mark, got another default dtype, which decides the dtypes of results"
        what = "the step was cut by torch.set_default_dtype"
        return Explanation(CUTS, user_stack(), what, text, "set it before the step", "dtype")

    return _noted(("default dtype",), make)


def explain_side_exit(fork: Fork | None) -> None:
    """Explain a side exit: the rest of the step runs immediately."""
    if fork is None:
        return

    reason, text = fork.difference
    what = "a side exit: the step left the followed path, and the rest ran call by call"
    note(Explanation(TIERS, fork.stack, what, text, CURES.get(reason, ""), reason))
