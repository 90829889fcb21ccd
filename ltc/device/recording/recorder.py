"""A step as a path of recorded calls: one like an earlier one only moves a cursor.

Each (device, thread) has its own recorder.  The entries that can follow one another form a tree;
a kernel compares one tuple with the entry at the cursor and moves on, or, where they differ, takes
another branch or makes a new entry.  Numbers, seeds and buffers are no part of an entry: they are
put on side lists, so a learning rate may change without anything being recorded anew.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, TypeAlias
from weakref import ref

import torch

from ltc import config
from ltc.aten.call import Call, CallResult
from ltc.aten.unnamed_dtype import default_of
from ltc.device.call_observer import watching
from ltc.device.call_place import place_of_call
from ltc.device.evidence import hints
from ltc.device.evidence.forks_explained import Fork, fork_at
from ltc.device.evidence.transitions import show_begin
from ltc.device.immediate.computed import LivingStates
from ltc.device.immediate.immediate_session import ImmediateSession, sessions
from ltc.device.immediate.notes import FollowedPart, Sketches
from ltc.device.immediate.permission import is_forced, may_run
from ltc.device.policy import Begin, Policy
from ltc.device.random_state import RandomState
from ltc.device.recording.entries import (
    END,
    INPUT,
    STOPPED,
    Entry,
    Interrupted,
    RunsAtOnce,
    TakesOtherPath,
)
from ltc.device.recording.state import State
from ltc.device.recording.tracks import Learner, Start, Walk
from ltc.device.symbolic.path_selection import entry_for, other_way
from ltc.device.torch_device import empty_tensor
from ltc.device.user_line import warn_user
from ltc.explaining.explanation import Explanation
from ltc.native.core import CORE, Core
from ltc.runtime.buffer import Buffer, input_key
from ltc.runtime.executor import all_executors
from ltc.runtime.transfers import backend, capabilities
from ltc.support.bounded_table import BoundedTable
from ltc.support.observation import metrics, spans
from ltc.support.process.fork_safe_lock import renewed_lock
from ltc.support.process.thread_frames import thread_frames
from ltc.support.reference_counts import IN_TWO_LISTS, reference_counts
from ltc.support.torch_private import DEVICE_TYPE, create_empty_tensor, plain_functions

_most_pending = config.reader("LTC_MAX_PENDING_NODES", "LTC_MAX_PENDING_BYTES")
NOBODY = 0  # a number that no thread has

# By id, since an optimizer may have no hash: which one it is, and its count.
OptimizerSteps: TypeAlias = "dict[int, tuple[ref[torch.optim.Optimizer], int]]"


class Recorder:
    """The recording of one thread on one device.

    Attributes:
        cursor: The entry expected next.
        last: The entry recorded last.
        live: States made by calls of this recording, newest last.
        bound: States whose buffer is an input of this recording, parallel to `inputs`.
        inputs: Buffers, in the order of the path's input entries.
        scalars: Numbers, 0-dim CPU tensors and seeds, in the order the entries refer to them.
        foreign: Values in this recording of states that another thread's recording uses as well.
        token: The token of the collective recorded last, or None. It is alive at the recording's
        end, so that all collectives run, read or not.
        replica: The replica as which the thread records collectives.
        exchanges: True if it has collectives: then it is one program.
        roots: The first entries of paths, by torch's default dtype: it decides types that no call
        names.
        recordings: Number of recordings that have ended.
        interrupted: True if another thread ended the recording: a kernel under way must read anew.
        optimizer_steps: Each optimizer's steps in this recording, or since a read in it.
        steps_since_mark: Steps of each optimizer since the user's last mark.
        steps_between_marks: The same between the last marks but one, and between the last two.
        marked_by: A weak reference to the optimizer whose step ends a recording, if the program
        marks no steps; else None.
        drawn: The seed of the random call that is being recorded, which may have to begin anew.
        fork_evidence: The first place where it left every known path; else None.
        cut_by: The Explanation of the read that ended the previous recording; else None.
        cut_here: The Explanation of the read that ends this one; else None.
        policy: The policy that decides how its recordings run.
        begins: The policy's decision for the present recording.
        decided: Its decision for the next one, where it was asked before this one ends; else None.
        is_left: True after a side exit: the end of the recording is no path's end.
        unnoted: The entry that stands for all calls that were not noted.
        sketches: The paths of which only a hash is kept.
        ended, before: The last entries of the path before this recording, and of the one before that.
        by_shape: The last entry of the latest path of each `shape_hash`.
        immediate: The session that runs every call of this recording; None if calls are followed.
        now: The same session for kernels: None while another thread ends the recording.
        session: The core's record of the recorder's thread; 0 without a core.
        walk: The core follows this recording; None if Python does.
        learner: Notes what Python follows, for the core; else None.
        walked: The walk that has come to the end of its track, from where Python goes on; else None.
        has_left_track: True if calls of this recording have left the core's track: Python follows.
        is_unlearned: True if the core could not learn what Python follows now.
    """

    __slots__ = (
        "device", "thread", "new_tensor", "roots", "root", "cursor", "last", "live", "bound",
        "inputs", "scalars", "foreign", "token", "replica", "exchanges", "recordings",
        "interrupted", "immediate", "now", "drawn", "optimizer_steps", "steps_since_mark",
        "steps_between_marks", "marked_by", "policy", "begins", "is_left", "unnoted", "sketches",
        "by_shape", "fork_evidence", "cut_by", "cut_here", "before", "ended", "entries", "has_grown",
        "lock", "draw", "session", "walk", "walked", "is_unlearned", "learner", "decided",
        "has_left_track", "__weakref__",
    )  # fmt: skip

    def __init__(self, device: Device) -> None:
        self.device, self.thread = device, get_ident()
        self.new_tensor, self.draw = device.new_tensor, device.random.draw
        self.live: Any = []  # of State; LivingStates where calls run at once
        self.bound: Any = []
        self.immediate: ImmediateSession | None = None
        self.now: ImmediateSession | None = None
        self.drawn: int | None = None
        self.optimizer_steps: OptimizerSteps = {}
        self.steps_since_mark: OptimizerSteps = {}
        self.steps_between_marks: tuple[OptimizerSteps, OptimizerSteps] = ({}, {})
        self.marked_by: ref[torch.optim.Optimizer] | None = None
        self.fork_evidence: Fork | None = None
        self.cut_by: Explanation | None = None
        self.cut_here: Explanation | None = None
        self.inputs: list[Buffer] = []
        self.scalars: list = []
        self.foreign: dict[State, CallResult] = {}
        self.token: CallResult | None = None
        self.replica: Any = None
        self.exchanges = self.is_left = self.is_unlearned = self.has_left_track = False
        self.begins = Begin.NOTE
        self.decided: Begin | None = None
        self.recordings = 0
        self.session = CORE.session() if CORE is not None and not device.index else 0
        self.walk: Walk | None = None
        self.walked: Walk | None = None
        self.learner: Learner | None = None
        self.lock = threading.RLock()
        self._plant()

    def _plant(self) -> None:
        self.catch_up()
        self.roots: dict[torch.dtype, Entry] = {}
        self.policy = Policy(sketches=CORE is not None and not self.device.index)
        self.sketches = Sketches(lambda: Entry(None, None, None))
        self.unnoted = Entry(None, None, None)
        self.unnoted.memory = self.policy.unnoted
        self.by_shape: BoundedTable[int, Entry] = BoundedTable("PathsByShape", 4096)
        self.root: Any = None  # an Entry, from the next line on
        self.entries, self.has_grown = 0, False
        self.choose_paths()

    def choose_paths(self) -> None:
        """Begin a recording among the paths recorded under torch's present default dtype.

        Where another thread begins it, no kernel may go on in it at once: one that is under way may
        have read values of the recording that has ended.
        """
        self.catch_up()
        self.learner = None
        dtype = torch.get_default_dtype()
        root = self.roots.get(dtype)
        if root is None:
            root = self.roots[dtype] = Entry(None, None, None)
        if root is not self.root:
            self.root = self.ended = self.before = root
        self.last = root
        self.begins = Begin.NOTE if self.is_left else self.decided or self.decide(self.ended)
        self.decided = None
        self.interrupted = self.thread != get_ident()
        self.cursor = STOPPED if self.interrupted else self._expected()
        if CORE is not None and self.session and not self.interrupted:
            CORE.arm(self.session, self.cursor is STOPPED)
            if self.cursor is not STOPPED:
                self._choose_track(CORE)

    def decide(self, ended: Entry) -> Begin:
        """Ask the policy how the recording behind an entry runs."""
        begins = self.policy.begin(ended.ended_path)
        if begins is not self.begins:
            show_begin(self.policy, ended.ended_path, self.begins, begins)
        return begins

    def is_of_this_dtype(self) -> bool:
        """Return True if the paths are those of torch's present default dtype."""
        return self.roots.get(torch.get_default_dtype()) is self.root

    def pass_cut(self, ended: Entry, begins: Begin) -> None:
        """Begin another recording; its calls go on in the session that there is."""
        self.before, self.ended, self.begins, self.decided = self.ended, ended, begins, None
        self.optimizer_steps.clear()
        self.recordings += 1

    # --- in the core

    def _start(self) -> Start:
        """Return what the core has learned of recordings that begin where this one has."""
        place = self.before.ended_path.place_behind(self.ended.ended_path)
        if place.learned is None:
            place.learned = Start()
        start: Start = place.learned
        return start

    def _choose_track(self, core: Core) -> None:
        """Leave the recording to the core, if it knows what came here the last time; else have it learned."""
        place, self.is_unlearned = self._start(), False
        if watching or not self.device.has_one_recorder():
            return
        if place.track is not None and place.track.entries[0] is self.root:
            self.walk = Walk(place.track)
            core.walk(self.session, place.track.handle, capabilities().host_tensors)
            self.cursor, self.interrupted = STOPPED, True
        elif self.cursor is not END and place.is_to_be_learned():
            self.learner = Learner(self)
            core.learn(self.session)
        else:
            self.is_unlearned = place.is_refused

    def catch_up(self) -> None:
        """Follow the recording in Python from here on; what the core has followed is known then."""
        walk, self.walk = self.walk, None
        if walk is None:
            return
        with plain_functions():  # nothing is recorded meanwhile by a mode of the user's
            walk.catch_up(self, torch.ops.ltc_core.end_walk(self.session))
        self.walked = None if walk.is_left_early else walk
        if walk.is_left_early and self.last is not self.root:
            self.has_left_track = True
            metrics.count("TracksLeft")
            self._start().leave()

    def walk_again(self, recording: int) -> None:
        """Leave the recording of that number to the core again, unless something is recorded in it by now."""
        is_untouched = self.recordings == recording and self.last is self.root and not self.inputs
        is_free = self.walk is None and self.learner is None and self.immediate is None
        if CORE is not None and is_untouched and is_free and not self.interrupted:
            self._choose_track(CORE)

    def stop_walk(self) -> None:
        """The core's kernels follow no call from now on; one that is under way is over by then."""
        if self.walk is not None and CORE is not None:
            CORE.leave(self.session)

    def _keep_track(self, learner: Learner) -> None:
        """The recording has ended: what was learned of it leads from where it began."""
        self.learner = None
        track, place = learner.track(), self._start()
        place.is_refused = track is None
        if track is not None and track.entries[-1] is self.last:
            metrics.count("TracksLearned")
            place.track = track

    def _expected(self) -> Entry:
        """The entry that a recording begins with; STOPPED where its calls run at once."""
        return STOPPED if self.runs_at_once() else self.expected_entry()

    def expected_entry(self) -> Entry:
        """The entry that came first the last time that this recording came behind the one before."""
        return self.ended.follow if self.ended.follow is not END else self.root.next

    def runs_at_once(self) -> bool:
        """Return True if the first call of a recording would run when it is made."""
        return (is_forced() or self.begins is not Begin.FOLLOW) and self.may_run_at_once()

    # --- along the path

    def advance(self, key: tuple, make_call: Callable[[], Call]) -> Any:
        """Move to the entry of `key`, made by `make_call() -> Call` where it is new there."""
        assert self.immediate is None  # its notes are the session's
        last = self.last
        entry = last.next
        if entry.key != key:
            entry = last.branch(key)
        if entry is None or self.cursor is STOPPED:
            entry = self._unexpected(last, key, entry, make_call)
        if entry is None:
            call = make_call()  # one that raises is run eagerly: no path is left by it
            self._note_fork(last, key)
            entry = self.add_entry(last, key, call)
        last.next = entry
        if last is self.root:
            self.ended.follow = entry  # the best guess for the recording after the one just ended
        self.last = entry
        self.cursor = entry.next
        return entry

    def _note_fork(self, last: Entry, key: tuple) -> None:
        if self.fork_evidence is None:
            following = last.next if last is not self.root else self._expected()
            self.fork_evidence = fork_at(last, following, key)

    def _unexpected(
        self, last: Entry, key: tuple, known: Entry | None, make_call: Callable[[], Call]
    ) -> Entry | None:
        """Return the entry of a call that was not expected; None where it is to be recorded.

        Raises:
            RunsAtOnce: the call, and what comes behind it, runs when it is made.
            TakesOtherPath: what was followed so far is the beginning of another path of symbols.
        """
        if last is self.root and self.runs_at_once():
            raise RunsAtOnce(self)
        if known is not None:
            return known
        may_run_at_once = self.may_run_at_once()
        if not may_run_at_once and last.of is None:
            return None
        entry: Entry | None = entry_for(self, last, key)
        if entry is None:
            self._note_fork(last, key)
            way = None if last.of is None else other_way(self, last, key)
            if way is not None:
                raise TakesOtherPath(self, way)
            if may_run_at_once:
                make_call()  # an error is the call's own, and leaves no path
                raise RunsAtOnce(self)
        return entry

    def may_run_at_once(self) -> bool:
        """Return True if nothing here needs a program, and no setting asks for one."""
        return not self.exchanges and self.thread not in watching and may_run()

    def begins_at_once(self) -> bool:
        """Return True if the call that comes next is the first of a recording, and runs at once."""
        return self.nothing_pending and self.runs_at_once()

    def run_at_once(self, part: FollowedPart | None = None) -> None:
        """Run every call when it is made until the recording ends; nothing is pending.

        Args:
            part: what was followed before a side exit.
        """
        self.catch_up()
        self.learner = None
        self.live, self.bound = LivingStates(), LivingStates()
        self.immediate = ImmediateSession(self, part)
        if spans.timeline is None:  # as in run_now.run
            self.immediate.go_on()
        self.cursor, self.interrupted = STOPPED, True

    def end_immediate(self) -> None:
        """End the calls that an ended thread has run: they become buffers; the caller holds the
        lock.
        """
        if self.immediate is not None:
            self.immediate.end()
            self.restart()

    def move_to(self, entry: Entry, values: dict[CallResult, CallResult]) -> None:
        """Go on behind another entry, whose path has other values in place of these."""
        if self.immediate is not None:
            assert self.immediate.notes is not None
            self.immediate.notes.move_to(entry, values)
            return
        for state in (*self.live, *self.bound):
            if state.value is not None:
                state.value = values.get(state.value, state.value)
        for state, value in self.foreign.items():
            self.foreign[state] = values.get(value, value)
        self.last, self.cursor = entry, entry.next

    def add_entry(self, last: Entry, key: tuple, call: Call) -> Entry:
        """Return a new entry behind `last`."""
        if call.line:
            call.module, call.forward = place_of_call(call.line)
        entry = Entry(key, last, call)
        last.add_branch(entry)
        self.entries, self.has_grown = self.entries + 1, True
        metrics.count("RecordedEntries")
        return entry

    def values(self, call: Call, types: Sequence[Any]) -> None:
        """Give `call` its results: a Value for each (shape, dtype); None for an undefined one."""
        call.results = tuple(
            [
                None if one is None else CallResult(self, call, index, one[0], one[1])
                for index, one in enumerate(types)
            ]
        )
        call.default = default_of(call)

    def bind(self, state: State) -> CallResult:
        """Make the buffer of `state` an input of this recording; returns the input's value.

        What the state itself holds is the caller's business.
        """
        buffer = state.buffer
        assert buffer is not None
        if self.immediate is not None:
            return self.immediate.bind(state)
        execution = buffer.execution
        if execution is not None and execution.failure is not None:
            buffer = state.buffer = buffer.settled()
        entry = self.cursor
        if entry.key is buffer.key:
            self.last, self.cursor = entry, entry.next
        else:
            with self.lock:
                if self.interrupted:
                    raise Interrupted
                entry = self.advance(buffer.key, lambda: self._input_call(buffer))
        self.inputs.append(buffer)
        self.bound.append(state)
        value: CallResult = entry.value
        return value

    def bind_as_before(self, states: list[State]) -> list[CallResult] | None:
        """`bind` all of a list whose like was bound here before; None where it was not.

        The states get their values.  One comparison for the list takes the place of one for each.
        """
        first = self.cursor
        if first.run is None:
            return None
        keys, values, last = first.run
        buffers: list[Any] = [state.buffer for state in states]
        if None in buffers or [buffer.key for buffer in buffers] != keys:
            return None
        if len(set(states)) < len(states):
            return None  # the second time it has a value
        for execution in {buffer.execution for buffer in buffers}:
            if execution is not None and execution.failure is not None:
                return None
        self.last, self.cursor = last, last.next
        self.inputs += buffers
        self.bound += states
        for state, value in zip(states, values):
            state.value = value
        return values

    def note_run(self, values: list[CallResult]) -> list[CallResult]:
        """Let `bind_as_before` know these values, where they are the inputs recorded last."""
        entry: Entry = self.last
        following = entry
        for value in reversed(values):
            if entry.value is not value or value.call.overload != INPUT:
                return values
            entry, following = entry.parent, entry
        if (following.of is None) is not (self.last.of is None):
            return values  # sizes of the latter change, the former is not told
        following.run = [input_key(v.shape, v.dtype) for v in values], values, self.last
        return values

    def _input_call(self, buffer: Buffer) -> Call:
        call = Call(INPUT, (len(self.inputs),), {})
        self.values(call, [(buffer.shape, buffer.dtype)])
        return call

    def bind_foreign(self, state: State) -> CallResult:
        """The value here of a state that another thread has bound, whose own is left alone."""
        value = self.foreign.get(state)
        if value is None:
            assert state.buffer is not None
            state.buffer.shared = True
            value = self.foreign[state] = self.bind(state)
        return value

    # --- bounds

    @property
    def too_long(self) -> bool:
        """Return True if the recording has reached LTC_MAX_PENDING_NODES or LTC_MAX_PENDING_BYTES."""
        last, (nodes, nbytes) = self.last, _most_pending()
        return last.depth >= nodes or last.size >= nbytes

    @property
    def nothing_pending(self) -> bool:
        if self.walk is not None and CORE is not None:
            return self.walk.track.entries[CORE.walked(self.session)] is self.root
        return self.last is self.root and self.immediate is None

    @property
    def nothing_awaited(self) -> bool:
        """Return True if no living tensor is pending here, and no replica waits for one."""
        if self.immediate is not None:
            return not any(self.live)
        states = self.live + [state for state in self.bound if state.buffer is None]
        gone = [IN_TWO_LISTS] * len(states)
        return self.token is None and reference_counts(states) == gone

    def leaves_nothing(self) -> bool:
        """True if nothing can read a pending value of this recording, whose thread has ended."""
        return self.immediate is not None or self.nothing_pending or self.nothing_awaited

    def path(self) -> list[Call]:
        """The calls of the recording so far, in recorded order."""
        return self.last.path_to()

    def note_mark(self) -> None:
        """The user marks the end of a step; a mark without an optimizer's step says nothing of a loop."""
        self.marked_by = None
        if self.steps_since_mark:
            self.steps_between_marks = (self.steps_between_marks[1], self.steps_since_mark)
            self.steps_since_mark = {}

    def restart(self) -> None:
        """Begin a new recording; forget every path where LTC_MAX_RECORDED entries are exceeded."""
        self.live, self.bound, self.inputs, self.scalars = [], [], [], []
        self.immediate = self.now = self.walked = None
        self.foreign.clear()
        self.token = self.replica = None
        self.fork_evidence = self.cut_by = self.cut_here = None
        self.exchanges = self.has_left_track = False
        if not self.is_left:  # a side exit ends no step
            self.optimizer_steps.clear()
        if self.learner is not None:
            self._keep_track(self.learner)
        self.recordings += 1
        self.before, self.ended = self.ended, self.last
        self.choose_paths()  # first: the number may not be readable, and the old one has ended
        if self.has_grown:
            self.has_grown = False
            if self.entries > config.value("LTC_MAX_RECORDED"):
                metrics.count("RecordedPathsForgotten")
                self._plant()


# Held at the end of the program, where a thread that has no recorder waits for ever for its first.
beginnings = renewed_lock(globals(), "beginnings")


class Device:
    """One ltc device of this process, with a recorder for each thread that uses it."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.torch_device = torch.device(DEVICE_TYPE, index)
        self.random = RandomState()
        self.recorders: dict[int, Recorder | None] = {}  # None: of an ended thread, being dropped
        self._recorders_lock = threading.RLock()  # a finaliser may want it in its own thread
        self.warned_of_no_mark = False

    def new_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return empty_tensor(shape, dtype, self.index)

    def recorder(self) -> Recorder:
        """The calling thread's recorder."""
        return self.recorders.get(get_ident()) or self._add_recorder()

    def has_one_recorder(self) -> bool:
        """Return True if a single thread uses the device, as far as running threads go."""
        if len(self.recorders) == 1:
            return True
        self._drop_recorders_of_ended_threads()
        return len(self.recorders) == 1

    def _add_recorder(self) -> Recorder:
        with beginnings:
            pass
        self._drop_recorders_of_ended_threads()
        with self._recorders_lock:
            left = self.recorders.get(get_ident())
            if left is not None:  # by a thread that had the number before; it was just looked at
                return left
            for other in self.all_recorders():
                if other.immediate is not None:
                    other.immediate.share_inputs()
                other.stop_walk()
            recorder = self.recorders[get_ident()] = Recorder(self)
            return recorder

    def all_recorders(self) -> list[Recorder]:
        return [recorder for recorder in list(self.recorders.values()) if recorder is not None]

    def left_by_ended_threads(self) -> list[Recorder]:
        """Return the recorders of ended threads that still have pending values, which may be read."""
        self._drop_recorders_of_ended_threads()
        return [recorder for _, recorder in self._of_ended_threads()]

    def _of_ended_threads(self) -> list[tuple[int, Recorder]]:
        """Return (thread, recorder) for each recorder of a thread that has ended."""
        known = list(self.recorders.items())  # first: no thread that begins meanwhile is among them
        running = _threads_that_record()
        return [
            (thread, recorder)
            for thread, recorder in known
            if recorder is not None and thread not in running
        ]

    def _drop_recorders_of_ended_threads(self) -> None:
        for thread, recorder in self._of_ended_threads():
            if recorder.immediate is None:
                if recorder.leaves_nothing():
                    self._drop(thread, recorder)
            elif recorder.lock.acquire(blocking=False):  # else another thread sees to it
                try:
                    self._drop(thread, recorder)
                finally:
                    recorder.lock.release()

    def _drop(self, thread: int, recorder: Recorder) -> None:
        """Forget the recorder, unless a thread that began meanwhile got the number, and so the recorder.

        Such a thread has found it before it is hidden here, and then it runs when that is looked at,
        or it waits in `_add_recorder` until that is known.
        """
        with self._recorders_lock:
            if self.recorders.get(thread) is not recorder:
                return  # another thread has dropped it meanwhile
            self.recorders[thread] = None
            if thread in _threads_that_record() or not recorder.leaves_nothing():
                self.recorders[thread] = recorder
                return
            recorder.thread = NOBODY
            sessions.pop(thread, None)
        try:
            recorder.end_immediate()
        finally:
            with self._recorders_lock:
                if self.recorders.get(thread) is None:
                    self.recorders.pop(thread, None)

    def after_fork_in_child(self) -> None:
        self._recorders_lock = threading.RLock()
        for thread, recorder in list(self.recorders.items()):
            if recorder is None:
                del self.recorders[thread]
            else:
                recorder.lock = threading.RLock()

    def __repr__(self) -> str:
        return str(self.torch_device)


def _threads_that_record() -> set[int]:
    """The numbers of the threads that run, but for those that record nothing.

    Numbers alone: a frame that is kept keeps alive what its function had in hand.
    """
    running = set(thread_frames())
    # These may have the number of one that did record.
    running.difference_update([executor.thread for executor in all_executors()])
    return running


class _FirstDevice(Device):
    """ltc:0: torch makes its tensors without the detour that other indices need."""

    new_tensor = staticmethod(create_empty_tensor)


_devices: list[Device] = []


def devices_in_use() -> list[Device]:
    """Return `devices()`; none before the first use of one."""
    return _devices


def devices() -> list[Device]:
    """This process's devices, in index order; LTC_NUM_DEVICES of them, read at the first use."""
    if not _devices:
        config.check_environment()
        count = config.value("LTC_NUM_DEVICES") or len(backend().devices())
        _devices.extend([_FirstDevice(0), *(Device(index) for index in range(1, count))])
        _tell_misspelled_variables()
    return _devices


def _tell_misspelled_variables() -> None:
    if config.value("XRT_SHARD_ORDINAL"):
        return  # one of several processes of one environment is enough
    for name, meant in config.misspelled_variables():
        warn_user(f"{name} is set, and ltc does not read it. Did you mean {meant}?")


def device_at(index: int) -> Device:
    """The device of that index; raises RuntimeError where there is none."""
    try:
        if index >= 0:
            return _devices[index]
    except IndexError:  # or nobody has asked for one yet
        pass
    known = devices()
    if 0 <= index < len(known):
        return known[index]
    raise RuntimeError(
        f"ltc:{index} does not exist: this process has {len(known)} ltc device(s), "
        f"ltc:0 to ltc:{len(known) - 1}. Set LTC_NUM_DEVICES before the first use for more."
    )


def _leave_walks() -> None:
    """A setting has changed: Python follows what the calling thread records now."""
    for device in devices_in_use():
        recorder = device.recorders.get(get_ident())
        if recorder is not None and recorder.walk is not None:
            with recorder.lock:
                recorder.catch_up()


def _comes_back() -> bool:
    """Return True if the calling thread's last recording went along a path that has come back."""
    recorders = [device.recorders.get(get_ident()) for device in devices_in_use()]
    return any([one is not None and one.ended.ended_path.returns > 0 for one in recorders])


hints.comes_back = _comes_back
config.call_after_override(_leave_walks)
