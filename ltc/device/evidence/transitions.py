"""The transitions of a recorder between the states of docs/states_of_a_step.md, as LTC_LOG=tiers prints them.

They are printed with their reasons and numbers and not kept. `ltc.explain` has those that cost time: side
exits and programs.
"""

from __future__ import annotations

from ltc.device.policy import (
    LAUNCH_CALLS,
    MAX_NEW_PATHS,
    MIN_RUN,
    SHORT_PATHS,
    Begin,
    Path,
    Policy,
)
from ltc.explaining import history
from ltc.explaining.explanation import TIERS, Explanation
from ltc.explaining.user_stack import user_stack


def show_begin(policy: Policy, behind: Path, before: Begin, begins: Begin) -> None:
    """Print that the calls behind a path run in another state than those before."""
    if history.is_shown(TIERS):
        _show(f"the next calls {begins.value}", _reason(policy, behind, before, begins))


def show_asked(path: Path, calls: int) -> None:
    """Print that a path is hot."""
    if history.is_shown(TIERS):
        what = f"a path of {calls} calls is hot: its program is asked for"
        _show(what, f"it came back {_times(path.returns)}")


def show_left(policy: Policy, behind: Path, calls: int, why: str) -> None:
    """Print the back-off after a wrong guess.

    Args:
        calls: Number of followed calls.
    """
    if history.is_shown(TIERS):
        pause = policy.place_of(behind).pause
        _show(
            f"{calls} calls were followed in vain: {why}",
            f"back-off: paths that begin there are noted {_times(pause)}, then followed again",
        )


def _show(what: str, why: str) -> None:
    history.show(Explanation(TIERS, user_stack(), what, why))


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _reason(policy: Policy, behind: Path, before: Begin, begins: Begin) -> str:
    if begins is Begin.FOLLOW:
        return _reason_to_follow(policy, behind)
    if begins is Begin.LEAVE_ALONE:
        if policy.follows_reads:
            return f"{SHORT_PATHS} paths in a row, of at most {LAUNCH_CALLS} calls, ended in a read"
        return f"{MAX_NEW_PATHS} more paths were new than came back"
    if before is Begin.LEAVE_ALONE:
        return (
            f"{policy.calls_without_read} calls passed without a read, an optimizer has made a step, or "
            f"the pause after new paths is over"
        )
    place = policy.place_of(behind)
    if place.backoff:
        return f"back-off: the path followed from here was left; {place.pause} more to be noted"
    if place.pause:
        return f"its sizes stay the same; {place.pause} more to be noted at these sizes"
    return "no path that is expected next has a program"


def _reason_to_follow(policy: Policy, behind: Path) -> str:
    path = policy.expected(behind)
    if path.program is not None and path.program.is_ready:
        return f"the path expected next has a program, and came back {_times(path.returns)}"
    return f"the latest {MIN_RUN} paths had programs"
