"""`ltc.compile`: the function that a user calls."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Callable
from threading import get_ident
from typing import Any

from ltc import config
from ltc.device.call_observer import watching
from ltc.device.recording.recorder import Recorder, devices
from ltc.device.recording.sync import flush
from ltc.device.user_line import warn_user
from ltc.errors import StepDiffers
from ltc.replay.contents import attribute
from ltc.replay.guard import Changed
from ltc.replay.handed_over import ChangesByItself
from ltc.replay.observation import Observation, observed
from ltc.replay.reachable import Reachable
from ltc.replay.replay_plan import ReplayPlan, replays_now
from ltc.support.observation import metrics, spans
from ltc.support.process.held_signals import held
from ltc.tracebacks import shorten

_PLANS = 16  # of one function and thread: kinds of calls that are replayed
_SEEN = 64  # kinds of calls of which one was recorded
_CALLS = 4  # of each kind that are compared
_TRIES = 64  # calls in a row that are recorded, before the function is given up
_SAME_OBSTACLE = 3  # times in a row that an obstacle is met


class CompiledStep:
    """A step function, called as before: recorded until two calls are alike, then replayed.

    Attributes:
        refusal: The reason why calls of the calling thread are not replayed; "" if they are, or may
        be.
    """

    refusal = property(lambda self: self._replays().refusal)

    def __init__(self, function: Callable) -> None:
        shown = [name for name in functools.WRAPPER_ASSIGNMENTS if attribute(function, name)]
        functools.update_wrapper(self, function, assigned=shown, updated=())
        self._function = function
        self._threads: dict[int, _Replays] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        held.deliver()
        try:
            if spans.timeline is not None:
                with spans.timeline.call(attribute(self._function, "__qualname__", "a function")):
                    return self._replays().call(args, kwargs)
            return self._replays().call(args, kwargs)
        except BaseException as error:
            shorten(error)
            raise

    def __getattr__(self, name: str) -> Any:
        """Look up attributes of the function, such as parameters() and train() of a module."""
        if name in ("_function", "_threads"):  # a copy that is being made has neither yet
            raise AttributeError(name)
        return getattr(self._function, name)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Bind a method, whose instance becomes its first argument."""
        return self if instance is None else types.MethodType(self, instance)

    def _replays(self) -> _Replays:
        """Return the replays of the calling thread; drop the replays of threads that have ended."""
        thread = get_ident()
        found = self._threads.get(thread)
        if found is None:
            running = {one.thread for device in devices() for one in device.all_recorders()}
            self._threads = {t: one for t, one in self._threads.items() if t in running}
            found = self._threads[thread] = _Replays(self._function)
        return found


class _Replays:
    """The calls of a function in one thread.

    Attributes:
        refusal: The reason why no call is replayed any more; "" if they are, or may be.
    """

    def __init__(self, function: Callable) -> None:
        self._function = function
        self.refusal = ""
        self._plans: OrderedDict[int, ReplayPlan] = OrderedDict()
        self._alike: OrderedDict[int, list[Observation]] = OrderedDict()
        self._last: Reachable | None = None  # what the call recorded last could use
        self._difference = ""  # of that call from one before
        self._recorded = 0  # calls in a row
        self._unchecked = 0  # calls that were replayed since one was checked
        self._obstacles: list[str] = []  # in a row

    def call(self, args: tuple, kwargs: dict) -> Any:
        if get_ident() in watching:  # it is a part of another such function
            return self._function(*args, **kwargs)
        for recorder in self._recorders():
            flush(recorder)
        if self.refusal or not replays_now():
            return self._plainly(args, kwargs)
        for situation, plan in reversed(self._plans.items()):
            try:
                prepared = plan.prepare(args, kwargs)
            except Changed:
                continue
            if self._is_to_be_checked(plan):
                return self._check(situation, plan, prepared.scalars, args, kwargs)
            if next(reversed(self._plans)) != situation:
                self._plans.move_to_end(situation)
            self._recorded = 0
            self._unchecked += 1
            return plan.run(prepared)
        result, seen = observed(self._function, args, kwargs, self._recorders)
        self._note(seen, args, kwargs)
        return result

    def _recorders(self) -> list[Recorder]:
        thread = get_ident()
        found = [device.recorders.get(thread) for device in devices()]
        return [recorder for recorder in found if recorder is not None]

    def _plainly(self, args: tuple, kwargs: dict) -> Any:
        """Call the function in a recording of its own, as a call that is recorded to be replayed."""
        result = self._function(*args, **kwargs)
        for recorder in self._recorders():
            flush(recorder)
        return result

    # --- calls that were recorded

    def _note(self, seen: Observation, args: tuple, kwargs: dict) -> None:
        """Replay further calls like this one, if there was one before."""
        metrics.count("ReplayRecordings")
        self._recorded += 1
        obstacle = seen.obstacle or self._plan(seen, args, kwargs)
        self._obstacles = [*self._obstacles, obstacle] if obstacle else []
        if self._obstacles[-_SAME_OBSTACLE:] == [obstacle] * _SAME_OBSTACLE:
            self._refuse(obstacle)
        elif self._recorded > _TRIES:
            self._refuse(f"{_TRIES} calls in a row were different; the last: {self._difference}")

    def _plan(self, seen: Observation, args: tuple, kwargs: dict) -> str:
        """Make a plan where an earlier call was like this one; return the obstacle, or ""."""
        situation = seen.situation
        calls = self._alike.pop(situation, [])
        if calls:
            self._difference = calls[-1].difference(seen)
        else:
            self._difference = seen.reachable.difference(self._last)
        self._last = seen.reachable
        if calls and (constant := calls[-1].origins.other_constant(seen.origins)):
            _keep(self._alike, situation, [seen], _SEEN)
            return constant
        calls = [seen] if self._difference else [*calls[1 - _CALLS :], seen]
        _keep(self._alike, situation, calls, _SEEN)
        if len(calls) < 2:
            return ""
        try:
            plan = ReplayPlan(calls)
        except ChangesByItself as reason:
            return str(reason)
        if changed := plan.changed_itself(args, kwargs):
            return changed
        self._plans.pop(situation, None)
        _keep(self._plans, situation, plan, _PLANS)
        return ""

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        replayed = sum(plan.replayed for plan in self._plans.values())
        self._plans.clear()
        self._alike.clear()
        metrics.count("ReplayRefused")
        name = attribute(self._function, "__qualname__", repr(self._function))
        before = f" Check the {replayed} calls that were replayed before." if replayed else ""
        warn_user(f"ltc.compile({name}) will not replay any further call: {reason}.{before}")

    # --- calls that are checked

    def _is_to_be_checked(self, plan: ReplayPlan) -> bool:
        """Return True for every n-th call of a kind, and of all kinds together: kinds may be forgotten."""
        interval = _check_interval()
        return (plan.replayed + 1) % interval == 0 or self._unchecked + 1 >= interval

    def _check(
        self, situation: int, plan: ReplayPlan, scalars: list, args: tuple, kwargs: dict
    ) -> Any:
        """Record a call that would be replayed; raise StepDiffers if it differs from the replay."""
        metrics.count("ReplayChecks")
        self._unchecked = 0
        plan.replayed += 1
        result, seen = observed(self._function, args, kwargs, self._recorders)
        expected = plan.calls[-1]
        if not seen.obstacle and seen.root is not expected.root:
            self._plans.pop(situation)  # recorded paths were forgotten meanwhile
            self._note(seen, args, kwargs)
            return result
        difference = seen.obstacle or expected.difference(seen) or seen.other_number(scalars)
        if difference:
            self._plans.pop(situation)
            self._alike.pop(situation, None)
            name = attribute(self._function, "__qualname__", repr(self._function))
            raise StepDiffers(
                f"ltc.compile({name}): {plan.replayed - 1} calls were replayed, and this one, which "
                f"was recorded to check them, is different: {difference}. A replayed function may "
                f"depend only on its arguments and on the objects that it closes over. The present "
                f"call is right; the replayed calls before it may be wrong. LTC_REPLAY_CHECK=1 checks "
                f"each call."
            )
        return result


def _keep(table: OrderedDict, key: Any, value: Any, most: int) -> None:
    table[key] = value
    while len(table) > most:
        table.popitem(last=False)
        metrics.count("Forgotten.Replays")


def _check_interval() -> int:
    """Return n, where every n-th call that could be replayed is recorded."""
    if config.value("LTC_CHECK"):
        return 1
    interval: int = config.value("LTC_REPLAY_CHECK")
    return interval
