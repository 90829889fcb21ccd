"""A recording whose calls have run when they return.

Tensors hold computed values meanwhile.  At its end, which comes where any recording would end,
each becomes a buffer as a program would have made it, and the next recording begins as ever.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import repeat
from threading import get_ident
from typing import Any

import torch

from ltc import config
from ltc.aten.call import Call, CallResult
from ltc.backends.interpreter.by_rule import ByRule
from ltc.backends.interpreter.view_chains import shown, viewed, write_through
from ltc.backends.kernel_call import ALONE
from ltc.backends.plain_dispatch import PlainDispatch, is_plain_now
from ltc.device.evidence.hints import End, hears_reads, iteration_ended
from ltc.device.immediate import call_runs
from ltc.device.immediate.computed import FEW, computed
from ltc.device.immediate.memory import (
    buffer_before,
    buffer_of,
    end_views,
    fills_its_memory,
    lies_in,
    tensor_of,
)
from ltc.device.immediate.notes import NO_NUMBERS, UNNOTED, FollowedPart, Notes, written_key
from ltc.device.immediate.permission import is_forced
from ltc.device.policy import UNNOTED_CALLS, Begin, Settles
from ltc.device.symbolic.derive import WRITE_VIEW
from ltc.device.timed_calls import note_call
from ltc.device.user_line import user_line
from ltc.explaining.no_sync import call_before_blocks, reads_are_forbidden, require_reads
from ltc.native.core import CORE, Counted, Summed
from ltc.runtime import backend_errors
from ltc.runtime.background import core_build_behind
from ltc.runtime.buffer import Buffer
from ltc.runtime.executor import executor_of
from ltc.support.observation import metrics, spans
from ltc.support.observation.often import Often
from ltc.support.torch_private import plain_functions, storage_identity, storage_use_count

NEVER = sys.maxsize // 2  # calls
STEPS = Often((), (), ("ImmediateSteps", "ImmediateCalls"))
# What the calls of a thread run in, where they run at once.
sessions: dict[int, ImmediateSession] = {}


class ImmediateSession:
    """The calls of one thread on one device, until its recording ends.

    Attributes:
        notes: The notes of these calls; None where they are left alone.
        is_over: True if it ends before the next call.
        ended_at: The entry at which its recording has ended for the policy, which knows of it by then.
        written_in_lists: The number of tensors that calls on lists have written to, less one for each call.
    """

    def __init__(self, recorder: Any, part: FollowedPart | None = None) -> None:
        """
        Args:
            recorder: a Recorder that has nothing pending, whose states are LivingStates.
            part: what was followed before; its values are in buffers.
        """
        self.recorder, self._device = recorder, recorder.device.index
        self.policy = recorder.policy
        self.calls = self.written_in_lists = self._read_at = 0
        self.ended_at: Any = None
        self._in_core = 0 if CORE is None else CORE.session()
        self._owns_inputs = recorder.device.has_one_recorder()
        is_noted = recorder.begins in (Begin.NOTE, Begin.SKETCH) and not is_forced()
        may_sketch = is_noted and part is None and self._owns_inputs
        self.is_sketched = recorder.begins is Begin.SKETCH and may_sketch
        self.notes: Notes | None = (
            Notes(recorder, part) if is_noted and not self.is_sketched else None
        )
        self.numbers: Any = NO_NUMBERS if self.notes is None else self.notes.numbers
        self.is_over, self._noted_at = False, -1
        # Of the calls before a cut, behind which others are summed up.
        self._summed: Summed | None = None
        self._core_goes_on = False  # behind that cut
        # The calls so far when one has drawn by its rule, and that.
        self._last_draw: tuple[int, ByRule] | None = None
        self._begin(may_sketch)
        self.made_states = recorder.live.refer
        executor_of(self._device).wait()  # programs under way read what calls may write over
        sessions[recorder.thread] = self
        metrics.count("ImmediateSteps")

    def _begin(self, is_summed_up: bool) -> None:
        """Begin a recording: the first one, or one behind a cut that the session has passed."""
        is_left_alone = self.notes is None and not self.is_sketched
        self._follows_reads = is_left_alone and self.policy.follows_reads
        self._read_at = self._began_at = self.calls
        self.next_look = self.calls + (1 if self._follows_reads else FEW)
        if CORE is not None and is_summed_up:
            CORE.sketch(self._in_core)

    # --- the core

    def sketched(self) -> Summed:
        """Return the sum of the calls, which ends here."""
        summed, self._summed = self._summed, None
        if summed is None:
            return Summed() if CORE is None else CORE.sketched(self._in_core)
        return summed

    def _stop_summing(self) -> None:
        self._summed = None
        self.sketched()

    def go_on(self) -> None:
        """Kernels may run calls, those of the core too where they are not noted."""
        self.recorder.now = self
        if self._may_enter():
            looks_after = max(0, self.next_look - self.calls) if self._follows_reads else NEVER
            CORE.enter(self._in_core, looks_after, *self._unheard_reads())  # type: ignore[union-attr]

    def _unheard_reads(self) -> tuple[int, bool]:
        """Return the number of calls within which a read leaves the session as it is, and if it does
        where all that it does is settled.
        """
        if reads_are_forbidden() or hears_reads():
            return 0, False
        if self.is_sketched:
            return 0, True
        unnoted = UNNOTED_CALLS - self.calls + self._began_at
        return NEVER if is_forced() else unnoted, False

    def _may_enter(self) -> bool:
        return (
            CORE is not None
            and self.notes is None
            and self._owns_inputs
            and self._device == 0
            and not self.is_over
            and self.recorder.thread == get_ident()
        )

    def stop(self) -> None:
        """No kernel goes on; that of the core is over where this returns."""
        self.recorder.now = None
        self.leave_core()

    def leave_core(self) -> None:
        """The core runs no call of this session from now on."""
        if CORE is not None:
            CORE.leave(self._in_core)
            self._count_core()

    def _count_core(self) -> None:
        if CORE is not None:
            self._add(CORE.counted(self._in_core))

    def _add(self, counted: Counted) -> None:
        """Add calls of the core's to those of Python's, and the steps that have ended there."""
        for steps in self._added(counted):
            STEPS.happened(*steps)

    def _added(self, counted: Counted) -> list[tuple[int, int]]:
        calls, read_at, passed, passed_at = counted
        before, self.calls = self.calls, self.calls + calls
        if not self._follows_reads:
            self.next_look += calls  # they leave no references
        if read_at >= 0:
            self._read_at = before + read_at
        if not passed:
            return []
        steps = passed - (self._noted_at <= 0), before + passed_at - max(0, self._noted_at)
        self._noted_at = before + passed_at
        return [steps]

    def steps_passed(self) -> list[tuple[int, int]]:
        """Return the steps that have ended in the core since its calls were counted, and their calls."""
        return [] if CORE is None else self._added(CORE.counted(self._in_core))

    @property
    def calls_of_step(self) -> int:
        """Return how many calls have run since the last step ended; another thread's count may be behind."""
        since = self.calls - max(0, self._noted_at)
        return since if CORE is None else CORE.calls_of_step(self._in_core, since)

    # --- notes

    @property
    def cursor(self) -> Any:
        """The entry that is expected next, as kernels compare it."""
        return UNNOTED if self.notes is None else self.notes.cursor

    @property
    def path_calls(self) -> int:
        """Return how many calls the path has, followed ones included; one that writes to a list
        counts for each of its tensors.
        """
        part = None if self.notes is None else self.notes.part
        return self.calls + self.written_in_lists + (0 if part is None else part.calls)

    def view_followed(self, state: Any, whole: Any) -> CallResult | None:
        """Return the value of a view that was followed before; None if it is to be noted anew.

        Args:
            whole: the value of its base.
        """
        part = None if self.notes is None else self.notes.part
        held = None if part is None else part.value_of(state, whole.noted)
        if held is None:
            return None
        with PlainDispatch():
            return computed(self.recorder, shown(whole.tensor, state.chain), held)

    @property
    def depth(self) -> int:
        """Return how many calls are noted."""
        return 0 if self.notes is None else self.notes.last.depth

    def move_along(self, entry: Any) -> None:
        """A kernel has run the call of the entry at the cursor."""
        if entry is not UNNOTED:
            self.notes.last, self.notes.cursor = entry, entry.next  # type: ignore[union-attr]

    def stop_noting(self) -> None:
        """Leave the rest alone: what comes cannot be noted."""
        self.notes, self.numbers = None, NO_NUMBERS

    def noted(
        self, make_key: Callable[[], Any], make_call: Callable[[], Call]
    ) -> tuple[CallResult | None, ...] | None:
        """Note a call that has run; return its noted results, None where nothing is noted."""
        if self.notes is None:
            return None
        results: tuple[CallResult | None, ...] = self.notes.note(make_key, make_call).call.results
        return results

    def noted_one(
        self, make_key: Callable[[], Any], make_call: Callable[[], Call]
    ) -> CallResult | None:
        """Note a call that has one result; return that, None where nothing is noted."""
        results = self.noted(make_key, make_call)
        return None if results is None else results[0]

    def note_written(self, state: Any, noted: CallResult) -> None:
        """A kernel has written to the memory of a state, which holds the value `noted` now."""
        state.value.noted = noted
        if state.views is None:
            return
        base = state.base or state
        if base is not state:
            base.value.noted = self.noted_write(base.value, state.value, state.chain)
        for view in base.living_views():
            if view is not state:
                view.value = None

    def noted_write(self, base: Any, new: Any, chain: Any) -> CallResult | None:
        """Note a write through views; return the base's noted value."""

        def make_call() -> Call:
            call = Call(WRITE_VIEW, (base.noted, new.noted, chain), {}, line=user_line())
            self.recorder.values(call, [(base.noted.shape, base.noted.dtype)])
            return call

        return self.noted_one(lambda: written_key(base.noted, new.noted, chain), make_call)

    # --- values

    def forget_dead(self) -> None:
        """Look again after so many calls as leave the list at most twice as long as it has to be.

        Where reads are late, the next call ends the session: see `is_over`.
        """
        if self._follows_reads and self.policy.late(self.calls - self._read_at):
            self.end_at_next_call()
        self._count_core()
        living = self.recorder.live.forget_dead() + self.recorder.bound.forget_dead()
        self.next_look = self.calls + max(FEW, living)
        if self._follows_reads:
            self.next_look = min(self.next_look, self._read_at + self.policy.calls_without_read)
        if self.recorder.now is self:
            self.go_on()

    def end_at_next_call(self) -> None:
        """Kernels then ask; the call that has run has not given its result to a tensor yet."""
        self.is_over = True
        self.stop()

    def look_at_values(self, name: str) -> None:
        """A call looks at values, as a read does."""
        require_reads(name)
        self.note_read()

    def note_read(self) -> None:
        """A value was read that was there."""
        iteration_ended(End.READ)
        self._count_core()
        self._read_at = self.calls
        if self._note_trained() and self._follows_reads:
            self.end_at_next_call()

    def note_step_made(self) -> None:
        """An optimizer has made a step: the next end is no read's alone."""
        if CORE is not None and self.is_sketched and not CORE.note_trained(self._in_core, True):
            self.recorder.optimizer_steps.clear()  # the core has passed the end of their recording

    def _note_trained(self) -> bool:
        """The policy hears of it if an optimizer has made a step since the last check; returns True then."""
        if not self.recorder.optimizer_steps:
            return False
        self.recorder.optimizer_steps.clear()
        if CORE is not None:
            CORE.note_trained(self._in_core, False)
        self.policy.trained()
        return True

    def bind(self, state: Any) -> CallResult:
        """The value of a state that has a buffer."""
        buffer: Buffer = state.buffer
        value = computed(self.recorder, buffer.ready())
        if self.notes is not None:
            value.noted = self.notes.note_input(state, buffer)
        value.buffer = buffer
        self.recorder.bound.append(state)
        return value

    @property
    def goes_on(self) -> bool:
        """True if a read leaves the session as it is, and the recording too.

        Noted calls end at each read, as followed ones do, and so does what is summed up.  Of others,
        a session that is long ends there, so that a loop which reads and marks nothing is noted when
        its steps are alike.
        """
        if self.notes is not None or self.is_sketched:
            return False
        self._count_core()
        return self.calls - self._began_at < UNNOTED_CALLS or is_forced()

    def passes_alike(self, is_read: bool) -> bool:
        """Return True if a cut changes nothing, so that the policy need not be asked."""
        if not is_forced():
            if is_read or not (self._follows_reads and self.policy.follows_reads and self.goes_on):
                return False
        self._note_step()
        return is_forced() or self.policy.follows_reads

    def passes_settled(self, is_read: bool) -> bool:
        """Return True if the recording ends here, and the next one begins, with nothing for the policy."""
        if not self.is_sketched or not CORE.passes_cut(self._in_core, is_read):  # type: ignore[union-attr]
            return False
        self._note_trained()
        return True

    def settle(self, settles: Settles | None) -> None:
        """The policy has heard of an end; None where nothing changes of what is settled."""
        if CORE is not None:
            _, reads_pass = self._unheard_reads()
            CORE.limit_cuts(self._in_core, self.policy.ends_unheard, reads_pass)
            if settles is not None:
                CORE.settle(self._in_core, settles.value)

    def has_calls_since_cut(self) -> bool:
        """Return True if the present recording has calls.

        If they are summed up, their sum is `sketched` from now on, and what comes is another one.
        """
        since = self.calls - max(0, self._noted_at)
        if not self.is_sketched:
            self._count_core()
            return self.calls > max(0, self._noted_at)
        counted, self._core_goes_on, summed = CORE.cut(self._in_core, since)  # type: ignore[union-attr]
        self._add(counted)
        has_calls = bool(summed.calls if counted.passed else since + counted.calls)
        self._summed = summed if has_calls else None
        return has_calls

    def may_pass(self) -> bool:
        """Return True if a recording may end, and the next one begin, with the values where they are."""
        if self.notes is not None or self.is_over or not self._owns_inputs:
            return False
        return self.recorder.now is self and not reads_are_forbidden()

    def pass_cut(self, begins: Begin) -> None:
        """The next recording begins, which is not noted either; its calls were counted."""
        self._note_step()
        was_sketched, self.is_sketched = self.is_sketched, begins is Begin.SKETCH
        self._begin(self.is_sketched and not was_sketched)
        if was_sketched and self.is_sketched and self._core_goes_on:
            return
        if was_sketched and not self.is_sketched:
            self._stop_summing()
        self.go_on()

    @property
    def has_passed_mark(self) -> bool:
        """True if there may be values of a step that was marked: nothing of it is awaited."""
        return self._noted_at >= 0

    def _note_step(self) -> None:
        """A step is over, or the session is; its calls were counted."""
        self._note_trained()
        if CORE is None:
            core_build_behind.step_ended()
        STEPS.happened(self._noted_at > 0, self.calls - max(0, self._noted_at))
        self._noted_at = self.calls

    def bind_all(self, states: list[Any]) -> list[CallResult]:
        """Values for states of which none has one yet; raises AttributeError where one has no buffer."""
        if None in [state.buffer for state in states]:
            raise AttributeError("it is pending")
        for state in states:
            if state.value is None:  # the second time it has one
                state.value = self.bind(state)
        return [state.value for state in states]

    def share_inputs(self) -> None:
        """Another thread begins to use the device: its programs may read buffers while calls run."""
        self._owns_inputs = False
        self.leave_core()

    def own(self, state: Any, *others: Any) -> torch.Tensor:
        """Return the value of a state that has one here, as a tensor that a kernel may write to.

        Args:
            others: Other operands of the kernel: values, tensors, or anything else.
        """
        value = state.value
        if value.recorder is not self.recorder:
            raise AttributeError("it is another thread's")
        x: torch.Tensor = value.tensor
        if x.is_contiguous() and self.shows_to_all(state, others):
            return x
        return x.clone(memory_format=torch.contiguous_format)

    def own_all(self, states: list[Any]) -> list[torch.Tensor]:
        """`own` of each."""
        return [self.own(state) for state in states]

    def owns(self, buffer: Buffer | None) -> bool:
        """Return True if nothing else reads the buffer, so that calls may write to it."""
        return buffer is None or (self._owns_inputs and not buffer.shared)

    def shows_to_all(self, state: Any, others: Sequence[Any] = ()) -> bool:
        """Return True if a write to the memory of this state is seen by all tensors that share it.

        That holds if only the base and views of it lie in that memory. Views that lie elsewhere are
        stale from then on. The write is assumed to happen.

        Args:
            others: Operands that are read meanwhile: none may lie there.
        """
        if state.views is None:
            if not self.owns(state.buffer) or not fills_its_memory(state.value.tensor):
                return False
            state.buffer = None
            return True
        base = state.base or state
        whole, value = base.value, state.value
        if whole is None or whole.recorder is not self.recorder or not self.owns(base.buffer):
            return False
        storage = whole.tensor.untyped_storage()
        memory = storage_identity(storage)
        if storage.nbytes() != whole.tensor.nbytes or not lies_in(memory, value):
            return False
        views = [view for view in base.living_views() if view.value is not None]
        inside = [view for view in views if lies_in(memory, view.value)]
        tensors = {id(view.value.tensor) for view in inside} | {id(whole.tensor)}
        if storage_use_count(memory) != ALONE + len(tensors) - 1:
            return False
        if any([lies_in(memory, one) for one in others if tensor_of(one) is not value.tensor]):
            return False
        for view in views:
            if view not in inside:
                view.value = None
        base.buffer = None
        return True

    # --- calls

    def run(self, call: Call, numbers: Any) -> call_runs.CallRun:
        """Run a call of computed values; `numbers`: of its scalars, by their slots.

        The results are not noted yet.
        """
        began = spans.now()
        try:
            made, rule = call_runs.run(call, numbers, self._device)
        except Exception as error:
            if isinstance(error, IndexError):
                backend_errors.note_step(error, executor_of(self._device).marks)
            raise backend_errors.in_a_program(error, self._device, None)  # noqa: B904  it may be it
        call.results = tuple([None if x is None else computed(self.recorder, x) for x in made])
        self.calls += 1
        self._last_draw = None if rule is None or call.seed is None else (self.calls, rule)
        if spans.timeline is not None:
            note_call(call.overload, call.args, call.kwargs, call.results, began)
        return call_runs.CallRun(call)

    def words_of_last_draw(self) -> list[int]:
        """Return how the core launches the program by which the last call has drawn; none if none has."""
        calls, rule = self._last_draw or (-1, None)
        return rule.words_for_core() if rule is not None and calls == self.calls else []

    def viewed(
        self, value: CallResult, overload: Any, args: tuple, kwargs: dict
    ) -> tuple[CallResult, ...]:
        """Return the results of a view overload for a value."""
        if is_plain_now():
            made = viewed(value.tensor, overload, args, kwargs)
        else:
            with PlainDispatch():
                made = viewed(value.tensor, overload, args, kwargs)
        views = [made] if isinstance(made, torch.Tensor) else made

        def make_call() -> Call:
            call = Call(overload, (value.noted, *args), kwargs, line=user_line())
            self.recorder.values(call, [(tuple(view.shape), view.dtype) for view in views])
            return call

        noted = self.noted(lambda: (overload, value.noted, args, tuple(kwargs.items())), make_call)
        return tuple([computed(self.recorder, v, n) for v, n in zip(views, noted or repeat(None))])

    def with_written(
        self, base: Any, old: Any, new: CallResult, chain: Sequence[tuple[Any, ...]]
    ) -> CallResult:
        """The value of the state `base`, `old` here, with what a chain of views shows of it replaced."""
        with PlainDispatch():
            is_here = base.value is old
            whole = self.own(base) if is_here else old.tensor.contiguous().clone()
            write_through(whole, chain, new.tensor)
        return computed(self.recorder, whole, self.noted_write(old, new, chain))

    # --- the end

    def end(self) -> None:
        """Every state that is referenced has a buffer; views are derived from their bases."""
        recorder = self.recorder
        self.leave_core()
        if self.is_sketched:
            self._stop_summing()
        if sessions.get(recorder.thread) is self:
            del sessions[recorder.thread]
        if self.calls != self._noted_at:
            self._note_step()
        made, states = recorder.live.made, [*recorder.live, *recorder.bound]
        mine = [s for s in states if s.value is not None and s.value.recorder is recorder]
        with plain_functions():
            end_views(states, mine)
            left = [state for state in mine if state.base is None and state.value is not None]
            for state in left:
                self._settle(state)
        metrics.note(
            (
                ("CreateLtcTensor", made),
                ("DestroyLtcTensor", max(0, made - len(left))),
            )
        )

    def _settle(self, state: Any) -> None:
        if state.buffer is None:
            state.buffer = buffer_before(state.value, self._owns_inputs) or buffer_of(
                state.value, self._device
            )
        state.value = None
        if state.views is not None:
            state.forget_ended_views()


def _end_where_settings_ask() -> None:
    """Calls that come next are recorded where a setting asks for programs from now on."""
    for session in list(sessions.values()):
        try:
            may_go_on = session.recorder.may_run_at_once()
        except ValueError:  # whoever next asks for the setting tells of it
            continue
        if not may_go_on:
            session.end_at_next_call()
        session.leave_core()  # it comes back on the terms of the settings


def _go_the_thorough_way() -> None:
    """Take the slow path from the next call on: it reports calls to a profiler."""
    for session in list(sessions.values()):
        session.stop()


def _hear_of_reads() -> None:
    """In a block that forbids reads each one is heard of."""
    if session := sessions.get(get_ident()):
        session.leave_core()


config.call_after_override(_end_where_settings_ask)
call_before_blocks(_hear_of_reads)
spans.call_before_profiles(_go_the_thorough_way)
