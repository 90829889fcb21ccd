"""What ended a step before its mark, and what was run at once instead of recorded."""

from __future__ import annotations

from collections.abc import Callable

from ltc.aten.call import CallResult
from ltc.device.evidence.forks_explained import CURES, Fork, value_text
from ltc.explaining.explanation import CUTS, FALLBACKS, TIERS, Explanation
from ltc.explaining.history import again, note
from ltc.explaining.user_stack import user_frame, user_stack
from ltc.support.bounded_table import BoundedTable

AFTER_THE_MARK = (
    "read it after ltm.mark_step() or in a step closure; keep decisions on the device: torch.where"
)
_MARK = "call ltm.mark_step() once per step, after optimizer.step()"
_OTHER_THREAD = "mark the step in the thread that made the tensor before another one uses it"
_EAGERLY = "fixed shapes stay in the program: a mask that is multiplied, torch.where, topk"


# with the code of the place, so that no other has its identity
_known: BoundedTable[tuple[object, ...], tuple[Explanation, object]]
_known = BoundedTable("ExplainedCuts", 1024)


def _noted(difference: tuple[object, ...], make: Callable[[], Explanation]) -> Explanation:
    """The explanation of a place in the user's program: made the first time, counted from then on."""
    frame = user_frame(above=2)  # of whoever tells of it, for another module of ltc's
    # no line: to find it takes longer than all else, and the same place is all that is asked for
    code, instruction = (None, 0) if frame is None else (frame.f_code, frame.f_lasti)
    key = (difference, id(code), instruction)
    known = _known.get(key)
    if known is not None:
        return again(known[0])
    return _known.keep(key, (note(make()), code))[0]


def read_of(value: CallResult) -> Explanation:
    """A value was asked for while it was pending."""

    def make() -> Explanation:
        text = f"expected the mark; a read of {value_text(value)} came"
        what = "the step was cut by a read"
        return Explanation(CUTS, user_stack(), what, text, AFTER_THE_MARK, "read")

    call = value.call
    # at whatever size: one explanation for each would take longer than the read
    return _noted((call.overload, call.line, len(value.shape), value.dtype), make)


def ran_eagerly(name: str) -> Explanation:
    """A call was run on the CPU at once."""

    def make() -> Explanation:
        text = "expected a call that can be recorded; one came whose result hangs on the data"
        what = f"{name} ran eagerly on the CPU"
        return Explanation(FALLBACKS, user_stack(), what, text, _EAGERLY, "eager")

    return _noted((name,), make)


def too_much_pending(calls: int, nbytes: int) -> Explanation:
    """Nobody marked a step for a long while."""

    def make() -> Explanation:
        text = f"expected a mark; {calls} calls with {nbytes >> 20} MiB of results were pending"
        return Explanation(
            CUTS, user_stack(), "the step was cut for its length", text, _MARK, "unmarked"
        )

    return _noted(("length",), make)


def pending_elsewhere() -> Explanation:
    """A tensor is needed here that another thread has not marked yet."""

    def make() -> Explanation:
        text = "expected its mark in the thread that recorded it; a use in this thread came"
        what = "the step of another thread was cut"
        return Explanation(CUTS, user_stack(), what, text, _OTHER_THREAD, "thread")

    return _noted(("thread",), make)


def default_dtype_changed() -> Explanation:
    """torch.set_default_dtype was called while something was pending."""

    def make() -> Explanation:
        text = "expected the mark; another default dtype came, which types of results depend on"
        what = "the step was cut by torch.set_default_dtype"
        return Explanation(CUTS, user_stack(), what, text, "set it before the step", "dtype")

    return _noted(("default dtype",), make)


def explain_short_reads() -> None:
    """What follows runs call by call, as reads have come after few calls each."""

    def make() -> Explanation:
        text = "expected many calls before a read; reads came after few, time and again"
        what = "what follows runs op by op, unrecorded, while reads go on to come so soon"
        return Explanation(TIERS, user_stack(), what, text, AFTER_THE_MARK, "short reads")

    _noted(("short reads",), make)


def explain_op_by_op(fork: Fork | None) -> None:
    """What follows runs call by call; `fork` is None where that was asked for."""
    if fork is None:
        return

    def make() -> Explanation:
        reason, text = fork.difference
        what = "the rest of the step runs op by op, unrecorded: its path goes on in many ways"
        return Explanation(TIERS, fork.stack, what, text, CURES.get(reason, ""), reason)

    _noted(("op by op", fork.came[0]), make)
