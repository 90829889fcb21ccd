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
from ltc.debug import metrics
from ltc.device.call_observer import watching
from ltc.device.call_place import place_of_call
from ltc.device.evidence.forks_explained import Fork, fork_at
from ltc.device.op_by_op import forks
from ltc.device.op_by_op.computed import LivingStates
from ltc.device.op_by_op.short_reads import ShortReads
from ltc.device.op_by_op.unrecorded import OpByOp, sessions
from ltc.device.random_state import RandomState
from ltc.device.recording.state import State
from ltc.device.recording.user_line import warn_user
from ltc.device.symbolic.going_on import entry_for, other_way, wants_another
from ltc.device.torch_device import empty_tensor
from ltc.explaining.explanation import Explanation
from ltc.profiling import spans
from ltc.runtime.buffer import Buffer, byte_size, input_key
from ltc.runtime.executor import all_executors
from ltc.support.process.thread_frames import thread_frames
from ltc.support.reference_counts import IN_TWO_LISTS, reference_counts
from ltc.support.torch_private import DEVICE_TYPE, create_empty_tensor

INPUT = "ltc::input"
KERNEL_FILE = "<ltc kernel>"  # the file name of generated kernels, as frames show it


_NONE: dict = {}  # of an entry at which no recording has ended: never changed
_most_pending = config.reader("LTC_MAX_PENDING_NODES", "LTC_MAX_PENDING_BYTES")


class Entry:
    """One call on a recorded path.

    key          what the kernel compares: overload, producers, attributes, kinds of numbers
    next         the entry that followed the last time; END where none has
    branches     every entry that has ever followed, by its key; None while `next` is the only one
    parent       the entry before it
    call         what was recorded
    value        the first of `call.results`; most calls have one
    link         of a view: the link it adds to its chain
    depth, size  entries and bytes of results on the path up to here
    bindings     programs for recordings that end here, by what was alive
    ended        what the end of the latest of these came to, or None
    run          of the first of some inputs that a list was bound to: their types, their values
                 and the last entry; else None
    follow       the entry that began the recording after one that ended here
    passed       what went on from here and was not recorded; None where all was
    follows_default  whether a call on the path up to here depends on torch's default dtype
    symbolic     the path of symbols that goes on from here, or why there is none; None: nobody asked
    of           of an entry of a path of symbols: that path, and its position there
    """

    __slots__ = (
        "key",
        "next",
        "branches",
        "parent",
        "call",
        "value",
        "link",
        "depth",
        "size",
        "bindings",
        "ended",
        "run",
        "follow",
        "passed",
        "follows_default",
        "symbolic",
        "of",
    )
    next: Entry
    parent: Any  # an Entry; None of a root
    call: Any  # a Call; None of a root
    link: Any
    ended: Any  # of exit_liveness.py
    follow: Entry
    branches: dict[Any, Entry] | None
    depth: int
    size: int
    value: Any  # a CallResult, but where the call has no result at all
    run: tuple[list[Any], list[CallResult], Entry] | None
    passed: forks.PassedBy | None
    symbolic: Any
    of: Any  # of device/symbolic/

    def __init__(self, key: Any, parent: Entry | None, call: Call | None) -> None:
        self.key, self.parent, self.call = key, parent, call
        self.next, self.branches, self.follow = END, None, END
        self.bindings, self.ended, self.run, self.passed = _NONE, None, None, None
        self.symbolic = self.of = None
        self.value = call.results[0] if call is not None and call.results else None
        self.link = None
        self.follows_default: bool = (parent is not None and parent.follows_default) or (
            call is not None and call.default is not None
        )
        self.depth = 0 if parent is None else parent.depth + 1
        self.size = 0 if parent is None or call is None else parent.size + _bytes_of(call)

    def branch(self, key: tuple) -> Entry | None:
        """The entry that has followed under this key, if any has; `next` is not looked at."""
        return self.branches.get(_hashable(key)) if self.branches is not None else None

    @property
    def ways(self) -> int:
        """In how many ways it has gone on."""
        if self.branches is not None:
            return len(self.branches)
        return 0 if self.next is END else 1

    def expect_for_itself(self, key: tuple) -> None:
        """Let what goes on from here with `key` be recorded the next time, at its size alone."""
        if self.passed is None:
            self.passed = forks.PassedBy()
        self.passed.expect(_hashable(key))
        if self.branches:
            self.next = next(iter(self.branches.values()))

    def add_branch(self, entry: Entry) -> None:
        """Let `entry` follow this one; the caller makes it `next`."""
        if self.next is END:
            return  # most entries are only ever followed by one: it needs no table
        if self.branches is None:
            self.branches = {_hashable(self.next.key): self.next}
        self.branches[_hashable(entry.key)] = entry


END: Any = None  # compared with every key, equal to none
END = Entry(None, None, None)
END.next = END.follow = END
NOBODY = 0  # a number that no thread has
STOPPED = Entry(None, None, None)  # the cursor while another thread ends the recording: see sync.py


def _bytes_of(call: Call) -> int:
    return sum([byte_size(v.shape, v.dtype) for v in call.results if v is not None])


def _hashable(key: Any):
    """`key` with its lists as tuples: attributes arrive as lists, which compare but do not hash."""
    return tuple([_hashable(p) if p.__class__ is list or p.__class__ is tuple else p for p in key])


class Interrupted(AttributeError):
    """Another thread ended the recording while a kernel was reading its operands.

    An AttributeError, as kernels meet it with every operand that is not theirs: they then go the
    thorough way, which reads all of them again.
    """


class GoesOpByOp(Interrupted):
    """What comes next is not to be recorded, but run at once, as all that follows it is."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder


class TakesOtherPath(Interrupted):
    """What was recorded so far becomes the beginning of another path, by `way`."""

    def __init__(self, recorder: Recorder, way: Callable[[], object]) -> None:
        super().__init__()
        self.recorder, self.way = recorder, way


# By id, since an optimizer may have no hash: which one it is, and its count.
OptimizerSteps: TypeAlias = "dict[int, tuple[ref[torch.optim.Optimizer], int]]"


class Recorder:
    """The recording of one thread on one device.

    cursor   the entry expected next
    last     the entry recorded last
    live     states made by calls of this recording, newest last
    bound    states whose buffer is an input of this recording, parallel to `inputs`
    inputs   Buffers, in the order of the path's input entries
    scalars  numbers, 0-dim CPU tensors and seeds, in the order the entries refer to them
    foreign  values in this recording of states that another thread's recording uses as well
    token    of the collective recorded last, or None: alive at the recording's end, so that all of
             them run, read or not
    replica  who the thread is to the collectives it records
    exchanges  whether it has collectives: then it is one program
    roots    where paths begin, by torch's default dtype: it decides types that no call names
    recordings   how many have ended
    interrupted  whether another thread ended the recording: a kernel under way must read anew
    optimizer_steps  how many steps each optimizer has made in this recording, or since a read
             that did not end it
    steps_since_mark  how many steps each has made since the user's last mark
    steps_between_marks  the same between the last marks but one, and between the last two
    marked_by    weakly the optimizer whose step ends a recording, where nobody else does; else None
    drawn        the seed of the random call that is being recorded, which may have to begin anew
    fork_evidence  the first place where it left every known path; else None
    cut_by       the Explanation of the read that ended the recording before, where none had; else None
    cut_here     the Explanation of the read that ends this one; else None
    short_reads  whether programs are so short that their calls cost less by themselves
    novelty      how much of what was recorded lately was new
    entries_before  how many entries there were when this recording began
    fork         where this recording is about to go on op by op, and with which key; else None
    op_by_op     runs every call of this recording at once; None where calls are recorded
    now          the same, as kernels see it: None while another thread ends the recording
    """

    __slots__ = (
        "device",
        "thread",
        "new_tensor",
        "roots",
        "root",
        "cursor",
        "last",
        "live",
        "bound",
        "inputs",
        "scalars",
        "foreign",
        "token",
        "replica",
        "exchanges",
        "recordings",
        "interrupted",
        "op_by_op",
        "now",
        "drawn",
        "optimizer_steps",
        "steps_since_mark",
        "steps_between_marks",
        "marked_by",
        "short_reads",
        "novelty",
        "entries_before",
        "fork",
        "fork_evidence",
        "cut_by",
        "cut_here",
        "ended",
        "entries",
        "has_grown",
        "lock",
        "draw",
        "__weakref__",
    )

    def __init__(self, device: Device) -> None:
        self.device, self.thread = device, get_ident()
        self.new_tensor, self.draw = device.new_tensor, device.random.draw
        self.live: Any = []  # of State; LivingStates where calls run at once
        self.bound: Any = []
        self.op_by_op: OpByOp | None = None
        self.now: OpByOp | None = None
        self.drawn: int | None = None
        self.optimizer_steps: OptimizerSteps = {}
        self.steps_since_mark: OptimizerSteps = {}
        self.steps_between_marks: tuple[OptimizerSteps, OptimizerSteps] = ({}, {})
        self.marked_by: ref[torch.optim.Optimizer] | None = None
        self.fork: tuple[Entry, tuple] | None = None
        self.fork_evidence: Fork | None = None
        self.cut_by: Explanation | None = None
        self.cut_here: Explanation | None = None
        self.inputs: list[Buffer] = []
        self.scalars: list = []
        self.foreign: dict[State, CallResult] = {}
        self.token: CallResult | None = None
        self.replica: Any = None
        self.exchanges = False
        self.recordings = 0
        self.lock = threading.RLock()
        self._plant()

    def _plant(self) -> None:
        self.roots: dict[torch.dtype, Entry] = {}
        self.short_reads, self.novelty = ShortReads(), forks.Novelty()
        self.root: Any = None  # an Entry, from the next line on
        self.entries, self.entries_before, self.has_grown = 0, 0, False
        self.choose_paths()

    def choose_paths(self) -> None:
        """Begin a recording among the paths recorded under torch's present default dtype.

        Where another thread begins it, no kernel may go on in it at once: one that is under way may
        have read values of the recording that has ended.
        """
        dtype = torch.get_default_dtype()
        root = self.roots.get(dtype)
        if root is None:
            root = self.roots[dtype] = Entry(None, None, None)
        if root is not self.root:
            self.root = self.ended = root
        self.last = root
        self.interrupted = self.thread != get_ident()
        self.cursor = STOPPED if self.interrupted else self._expected()

    def _expected(self) -> Entry:
        """The entry that a recording begins with, as far as the one before tells."""
        if forks.is_forced() or self.short_reads.run_at_once:
            return STOPPED
        return self.ended.follow if self.ended.follow is not END else self.root.next

    # --- along the path

    def advance(self, key: tuple, make_call: Callable[[], Call]) -> Any:
        """Move to the entry of `key`, made by `make_call() -> Call` where it is new there."""
        if self.op_by_op is not None:
            return self.op_by_op.advance(key, make_call)
        last = self.last
        entry = last.next
        if entry.key != key:
            entry = last.branch(key)
        if entry is None or self.cursor is STOPPED:
            entry = self._not_recorded(last, key, entry, make_call)
        if entry is None:
            call = make_call()  # one that raises is run eagerly: no path is left by it
            self._note_fork(last, key)
            entry = self._add(key, call)
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

    def _not_recorded(
        self, last: Entry, key: tuple, known: Entry | None, make_call: Callable[[], Call]
    ) -> Entry | None:
        """What comes next without being recorded: a known entry, or one of a path of symbols.

        None where it is to be recorded.  Raises where it is to be run at once, or to go on elsewhere,
        and what `make_call` raises where nothing of it can be: then the path was not left, but ended.
        """
        if forks.is_forced() or (last is self.root and self.short_reads.run_at_once):
            if self.may_go_op_by_op():
                raise GoesOpByOp(self)
            return known
        has_forked = last.next is not END and self.novelty.has_forked(last.ways)
        if known is not None or (last.of is None and not has_forked):
            return known
        if last.of is None and not self.may_go_op_by_op():
            return None
        if last.passed is not None and last.passed.is_expected(_hashable(key)):
            return None
        may_be_symbolic = last.of is not None or last.branches is not None
        entry: Entry | None = entry_for(self, last, key) if may_be_symbolic else None
        if entry is None:
            if last.of is not None:
                make_call()
            self._leave(last, key)
        return entry

    def _leave(self, last: Entry, key: tuple) -> None:
        """Raise how what comes next is run, unless it is to be recorded here."""
        self._note_fork(last, key)
        if last.of is not None:
            way = other_way(self, last, key)
            raise GoesOpByOp(self) if way is None else TakesOtherPath(self, way)
        is_looking = not self.novelty.patience and wants_another(last)
        if not is_looking and self._passes(last, key):
            raise GoesOpByOp(self)

    def _passes(self, last: Entry, key: tuple) -> bool:
        """Whether what comes next is run op by op this time."""
        if self.fork != (last, key):  # else a kernel has asked, and its call goes the thorough way
            if last.passed is None:
                last.passed = forks.PassedBy()
            passes = last.passed.passes(_hashable(key), self.novelty.patience)
            self.fork = (last, key) if passes else None
        return self.fork is not None

    def may_go_op_by_op(self) -> bool:
        """Whether nothing here needs a program, and no setting asks for one."""
        return not self.exchanges and self.thread not in watching and forks.may_run()

    def begins_at_once(self) -> bool:
        """Whether whatever comes next is the first call of a recording that runs at once."""
        if not self.nothing_pending or not (self.short_reads.run_at_once or forks.is_forced()):
            return False
        return self.may_go_op_by_op()

    def go_op_by_op(self) -> None:
        """Run every call at once until the recording ends; nothing is pending."""
        self.live, self.bound = LivingStates(), LivingStates()
        self.op_by_op = OpByOp(self)
        self.now = self.op_by_op if spans.timeline is None else None  # as in run_now.run
        self.cursor, self.interrupted, self.fork = STOPPED, True, None

    def end_op_by_op(self) -> None:
        """What an ended thread left has run: it becomes buffers; the caller holds the lock then."""
        if self.op_by_op is not None:
            self.op_by_op.end()
            self.restart()

    def _add(self, key: tuple, call: Call) -> Entry:
        if call.line:
            call.module, call.forward = place_of_call(call.line)
        entry = Entry(key, self.last, call)
        self.last.add_branch(entry)
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
        if self.op_by_op is not None:
            return self.op_by_op.bind(state)
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
        """Whether the recording has reached LTC_MAX_PENDING_NODES or LTC_MAX_PENDING_BYTES."""
        last, (nodes, nbytes) = self.last, _most_pending()
        return last.depth >= nodes or last.size >= nbytes

    @property
    def nothing_pending(self) -> bool:
        return self.last is self.root and self.op_by_op is None

    @property
    def nothing_awaited(self) -> bool:
        """Whether nobody holds a tensor that is pending here, and no replica waits for it."""
        if self.op_by_op is not None:
            return not any(self.live)
        states = self.live + [state for state in self.bound if state.buffer is None]
        gone = [IN_TWO_LISTS] * len(states)
        return self.token is None and reference_counts(states) == gone

    def leaves_nothing(self) -> bool:
        """True if nothing can read a pending value of this recording, whose thread has ended."""
        return self.op_by_op is not None or self.nothing_pending or self.nothing_awaited

    def path(self) -> list[Call]:
        """The calls of the recording so far, in recorded order."""
        calls, entry = [], self.last
        while entry.call is not None:
            calls.append(entry.call)
            entry = entry.parent
        calls.reverse()
        return calls

    def note_mark(self) -> None:
        """The user marks the end of a step; a mark without an optimizer's step says nothing of a loop."""
        self.marked_by = None
        if self.steps_since_mark:
            self.steps_between_marks = (self.steps_between_marks[1], self.steps_since_mark)
            self.steps_since_mark = {}

    def restart(self) -> None:
        """Begin a new recording; forget every path where LTC_MAX_RECORDED entries are exceeded."""
        self.live, self.bound, self.inputs, self.scalars = [], [], [], []
        self.op_by_op = self.now = None
        self.foreign.clear()
        self.token = self.replica = None
        self.fork_evidence = self.cut_by = self.cut_here = None
        self.exchanges = False
        self.optimizer_steps.clear()
        self.recordings += 1
        self.ended = self.last
        if self.ended is not self.root:
            self.novelty.note(self.entries - self.entries_before, self.ended.depth)
        self.entries_before = self.entries
        self.choose_paths()  # first: the number may not be readable, and the old one has ended
        if self.has_grown:
            self.has_grown = False
            if self.entries > config.value("LTC_MAX_RECORDED"):
                metrics.count("RecordedPathsForgotten")
                self._plant()


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
        """Whether a single thread uses the device, as far as running threads go."""
        if len(self.recorders) == 1:
            return True
        self._drop_recorders_of_ended_threads()
        return len(self.recorders) == 1

    def _add_recorder(self) -> Recorder:
        self._drop_recorders_of_ended_threads()
        with self._recorders_lock:
            left = self.recorders.get(get_ident())
            if left is not None:  # by a thread that had the number before; it was just looked at
                return left
            for other in self.all_recorders():
                if other.op_by_op is not None:
                    other.op_by_op.share_inputs()
            recorder = self.recorders[get_ident()] = Recorder(self)
            return recorder

    def all_recorders(self) -> list[Recorder]:
        return [recorder for recorder in list(self.recorders.values()) if recorder is not None]

    def left_by_ended_threads(self) -> list[Recorder]:
        """Recorders with something pending that nobody adds to any more, and somebody may read."""
        self._drop_recorders_of_ended_threads()
        return [recorder for _, recorder in self._of_ended_threads()]

    def _of_ended_threads(self) -> list[tuple[int, Recorder]]:
        """Recorders by the thread that each belonged to."""
        known = list(self.recorders.items())  # first: no thread that begins meanwhile is among them
        running = _threads_that_record()
        return [
            (thread, recorder)
            for thread, recorder in known
            if recorder is not None and thread not in running
        ]

    def _drop_recorders_of_ended_threads(self) -> None:
        for thread, recorder in self._of_ended_threads():
            if recorder.op_by_op is None:
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
            recorder.end_op_by_op()
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
    """Those of `devices()`; none before the first use of one."""
    return _devices


def devices() -> list[Device]:
    """This process's devices, in index order; LTC_NUM_DEVICES of them, read at the first use."""
    if not _devices:
        count = config.value("LTC_NUM_DEVICES")
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
