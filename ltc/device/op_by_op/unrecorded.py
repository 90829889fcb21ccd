"""A recording of which nothing is recorded: every call of it has run when it returns.

Tensors hold computed values meanwhile.  At its end, which comes where any recording would end,
each becomes a buffer as a program would have made it, and the next recording begins as ever.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch

from ltc import config
from ltc.aten.call import Call, CallResult
from ltc.backends.interpreter.call_kernel import ALONE
from ltc.backends.interpreter.view_chains import viewed, write_through
from ltc.backends.plain_dispatch import PlainDispatch, is_plain_now
from ltc.debug import metrics
from ltc.debug.often import Often
from ltc.device.op_by_op import call_runs
from ltc.device.op_by_op.computed import FEW, computed
from ltc.device.op_by_op.short_reads import LATE, now
from ltc.device.timed_calls import note_call
from ltc.explaining.no_sync import reads_are_forbidden
from ltc.profiling import spans
from ltc.runtime import backend_errors
from ltc.runtime.buffer import Buffer, input_key
from ltc.runtime.executor import executor_of
from ltc.support.reference_counts import IN_ONE_LIST, reference_counts
from ltc.support.torch_private import plain_functions, storage_identity, storage_use_count

LONG = 256  # calls after which a read ends a session: what follows may be a step that comes back
_STEPS = Often((), (), ("OpByOpSteps", "OpByOpCalls"))
sessions: dict[int, OpByOp] = {}  # what the calls of a thread run in, where they are not recorded


class CallRun:
    """A call that has run, as an entry of a path is to whoever gives tensors its results.

    call   with the computed results
    value  the first of them
    link   of a view: the link it adds to its chain
    """

    __slots__ = ("call", "value", "link")

    def __init__(self, call: Call) -> None:
        self.call, self.link = call, None
        self.value: Any = call.results[0] if call.results else None


class OpByOp:
    """The calls of one thread on one device, until its recording ends.

    follows_reads  whether it was begun since reads follow one another
    is_over        whether it ends before the next call, since they do no more
    """

    def __init__(self, recorder: Any) -> None:
        """`recorder`: a Recorder that has nothing pending, whose states are LivingStates."""
        self.recorder, self._device = recorder, recorder.device.index
        self.calls = self._read_at = 0
        self.follows_reads = recorder.short_reads.run_at_once
        self._late_at = LATE if self.follows_reads else sys.maxsize
        self.is_over, self._since_read, self._reads = False, now(), 0
        self._noted_at = -1
        self.next_look = min(FEW, self._late_at)
        self.made_states, self.bound_states = recorder.live.refer, recorder.bound.refer
        executor_of(self._device).wait()  # programs under way read what calls may write over
        self._owns_inputs = recorder.device.has_one_recorder()
        sessions[recorder.thread] = self
        metrics.count("OpByOpSteps")

    # --- values

    def forget_dead(self) -> None:
        """Looked at again after so many calls as leave the list at most twice as long as it has to be.

        Where reads are late, the next call ends the session: see `is_over`.
        """
        if self.calls >= self._late_at and not self.is_over:
            self.recorder.short_reads.note_late()
            self.end_at_next_call()
        living = self.recorder.live.forget_dead() + self.recorder.bound.forget_dead()
        self.next_look = min(self.calls + max(FEW, living), max(self._late_at, self.calls))

    def end_at_next_call(self) -> None:
        """Kernels then ask; the call that has run has not given its result to a tensor yet."""
        self.is_over, self.recorder.now = True, None

    def note_read(self) -> None:
        """A value was read that was there."""
        if not self.follows_reads:
            return
        moment, calls, short_reads = now(), self.calls, self.recorder.short_reads
        if self._has_trained():
            short_reads.note_training()
        else:
            short_reads.note_calls(calls - self._read_at, moment - self._since_read)
        self._read_at, self._since_read, self._late_at = calls, moment, calls + LATE
        self._reads += 1
        if not short_reads.run_at_once:
            self.end_at_next_call()

    def _has_trained(self) -> bool:
        """Whether an optimizer has made a step since this was last asked."""
        has_trained = bool(self.recorder.optimizer_steps)
        self.recorder.optimizer_steps.clear()
        return has_trained

    def bind(self, state: Any) -> CallResult:
        """The value of a state that has a buffer."""
        buffer: Buffer = state.buffer
        value = computed(self.recorder, buffer.ready())
        value.buffer = buffer
        self.bound_states(ref(state))
        return value

    @property
    def goes_on(self) -> bool:
        """Whether a read leaves the session as it is: beginning one anew costs as much as many calls.

        A longer one ends there, as a recording would, so that a loop which reads and marks nothing is
        recorded when its steps are alike.
        """
        return self.calls < LONG

    def passes_mark(self) -> bool:
        """Whether the end of a step leaves the session as it is, for the same reason."""
        goes_on = self.follows_reads and self.goes_on and not self.is_over
        if not goes_on or self.recorder.now is not self or reads_are_forbidden():
            return False
        self._note_step()
        return self.recorder.short_reads.run_at_once and self.recorder.may_go_op_by_op()

    @property
    def has_passed_mark(self) -> bool:
        """Whether there may be values that a step left whose end has been marked: nothing is awaited."""
        return self._noted_at >= 0

    def _note_step(self) -> None:
        """A step is over, or the session is."""
        if self.follows_reads:
            if self._has_trained():
                self.recorder.short_reads.note_training()
            elif not self._reads:
                self.recorder.short_reads.note_unread()
        _STEPS.happened(self._noted_at > 0, self.calls - max(0, self._noted_at))
        self._noted_at, self._reads = self.calls, 0
        self.recorder.optimizer_steps.clear()

    def bind_all(self, states: list[Any]) -> list[CallResult]:
        """Values for states of which none has one yet; raises AttributeError where one has no buffer."""
        values: list[CallResult] = [
            computed(self.recorder, state.buffer.ready()) for state in states
        ]
        for state, value in zip(states, values):
            state.value, value.buffer = value, state.buffer
        for state in states:
            self.bound_states(ref(state))
        return values

    def share_inputs(self) -> None:
        """Another thread begins to use the device: its programs may read buffers while calls run."""
        self._owns_inputs = False

    def own(self, state: Any, *others: Any) -> torch.Tensor:
        """The value of a state that has one here, as what a kernel may write to.

        others  what the kernel reads besides: values, tensors, whatever else
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

    def _owns(self, buffer: Buffer | None) -> bool:
        return buffer is None or (self._owns_inputs and not buffer.shared)

    def shows_to_all(self, state: Any, others: Sequence[Any] = ()) -> bool:
        """Whether what is written to the memory of a state that has a value is seen by who has to see it.

        That is where nothing lies in it but the base and views of it.  Views that lie elsewhere are
        stale from then on.  The write is taken for done.

        others  what is read meanwhile: none may lie there
        """
        if state.views is None:
            if not self._owns(state.buffer) or not _fills_its_memory(state.value.tensor):
                return False
            state.buffer = None
            return True
        base = state.base or state
        whole, value = base.value, state.value
        if whole is None or whole.recorder is not self.recorder or not self._owns(base.buffer):
            return False
        storage = whole.tensor.untyped_storage()
        memory = storage_identity(storage)
        if storage.nbytes() != whole.tensor.nbytes or not _lies_in(memory, value):
            return False
        views = [view for view in base.living_views() if view.value is not None]
        inside = [view for view in views if _lies_in(memory, view.value)]
        tensors = {id(view.value.tensor) for view in inside} | {id(whole.tensor)}
        if storage_use_count(memory) != ALONE + len(tensors) - 1:
            return False
        if any([_lies_in(memory, one) for one in others if _tensor_of(one) is not value.tensor]):
            return False
        for view in views:
            if view not in inside:
                view.value = None
        base.buffer = None
        return True

    # --- calls

    def advance(self, key: tuple, make_call: Callable[[], Call]) -> CallRun:
        """Run a call; `Recorder.advance` of a recording."""
        return self.run(make_call(), ())

    def run(self, call: Call, numbers: Any) -> CallRun:
        """Run a call of computed values; `numbers`: of its scalars, by their slots."""
        began = spans.now()
        try:
            made = call_runs.run(call, numbers, self._device)
        except Exception as error:
            raise backend_errors.in_a_program(error, self._device, None)  # noqa: B904  it may be it
        call.results = tuple([None if x is None else computed(self.recorder, x) for x in made])
        self.calls += 1
        if spans.timeline is not None:
            note_call(call.overload, call.args, call.kwargs, call.results, began)
        return CallRun(call)

    def viewed(
        self, value: CallResult, overload: Any, args: tuple, kwargs: dict
    ) -> tuple[CallResult, ...]:
        """What a view overload makes of a value."""
        if is_plain_now():
            made = viewed(value.tensor, overload, args, kwargs)
        else:
            with PlainDispatch():
                made = viewed(value.tensor, overload, args, kwargs)
        views = [made] if isinstance(made, torch.Tensor) else made
        return tuple([computed(self.recorder, view) for view in views])

    def with_written(
        self, base: Any, new: CallResult, chain: Sequence[tuple[Any, ...]]
    ) -> CallResult:
        """The value of the state `base` with what a chain of views shows of it replaced."""
        with PlainDispatch():
            whole = self.own(base)
            write_through(whole, chain, new.tensor)
        return computed(self.recorder, whole)

    # --- the end

    def end(self) -> None:
        """Every state that somebody holds has a buffer; views are derived from their bases."""
        recorder = self.recorder
        if sessions.get(recorder.thread) is self:
            del sessions[recorder.thread]
        if self.calls != self._noted_at:
            self._note_step()
        made, states = recorder.live.made, [*recorder.live, *recorder.bound]
        mine = [s for s in states if s.value is not None and s.value.recorder is recorder]
        with plain_functions():
            self._end_views(states, mine)
            left = [state for state in mine if state.base is None and state.value is not None]
            for state in left:
                self._settle(state)
        metrics.note(
            (
                ("CreateLtcTensor", made),
                ("DestroyLtcTensor", max(0, made - len(left))),
            )
        )

    def _end_views(self, states: list[Any], mine: list[Any]) -> None:
        """Views are derived again from their bases; one whose base nobody else has is a tensor of
        its own from now on, so that memory which nobody sees goes.

        mine  those of the states that have a value here
        """
        views = [state for state in mine if state.base is not None]
        if not views:
            return
        of_base = Counter([id(view.base) for view in views])
        held = Counter(of_base)
        held.update(map(id, states))
        held.update(map(id, mine))
        bases = list({id(view.base): view.base for view in views}.values())
        only_viewed = {
            id(base): base
            for base, count in zip(bases, reference_counts(bases))
            if count == IN_ONE_LIST + held[id(base)] and of_base[id(base)] == 1
        }
        for view in views:
            base = only_viewed.get(id(view.base))
            if base is None or base.buffer is not None or hasattr(base, "number"):
                view.value = None
            else:
                view.leave_base()
                base.value = None

    def _settle(self, state: Any) -> None:
        if state.buffer is None:
            state.buffer = self._buffer_before(state.value) or self._new_buffer(state.value)
        state.value = None
        if state.views is not None:
            state.forget_ended_views()

    def _buffer_before(self, value: CallResult) -> Buffer | None:
        """The buffer that the value is in, where all that was done was to write into its memory."""
        buffer: Buffer | None = getattr(value, "buffer", None)
        value.buffer = None  # one tensor's at most
        if buffer is None or not self._owns_inputs or buffer.handle is not value.tensor:
            return None
        return None if buffer.shared or buffer.failure() is not None else buffer

    def _new_buffer(self, value: CallResult) -> Buffer:
        x = value.tensor
        if x.is_neg() or not _fills_its_memory(x):
            with PlainDispatch():
                x = x.resolve_neg().clone(memory_format=torch.contiguous_format)
        return Buffer(input_key(value.shape, value.dtype), self._device, x)


def _lies_in(memory: int, value: Any) -> bool:
    """Whether a value that was computed, or a tensor, lies in that memory."""
    x = _tensor_of(value)
    return isinstance(x, torch.Tensor) and storage_identity(x.untyped_storage()) == memory


def _tensor_of(value: Any) -> Any:
    return getattr(value, "tensor", value)


def _end_where_settings_ask() -> None:
    """Calls that come next are recorded where a setting asks for programs from now on."""
    for session in list(sessions.values()):
        try:
            may_go_on = session.recorder.may_go_op_by_op()
        except ValueError:  # whoever next asks for the setting tells of it
            continue
        if not may_go_on:
            session.end_at_next_call()


def _go_the_thorough_way() -> None:
    """Who profiles is told of each call from there, and nobody by a kernel that runs it."""
    for session in list(sessions.values()):
        session.recorder.now = None


config.call_after_override(_end_where_settings_ask)
spans.call_before_profiles(_go_the_thorough_way)


def _fills_its_memory(x: torch.Tensor) -> bool:
    """Whether it is contiguous, and neither another tensor nor anything else lies in its memory."""
    storage = x.untyped_storage()
    alone = storage_use_count(storage_identity(storage)) == ALONE
    return alone and storage.nbytes() == x.nbytes and x.is_contiguous()
