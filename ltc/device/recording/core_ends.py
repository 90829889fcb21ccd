"""Ends of followed recordings that the core makes: it launches their program, and tells Python.

Where a walk has gone along the whole track, and the same tensors are alive as at an end in Python, the
program is the same one.  The core hands it their memory, and keeps what it computes; values go to Python
where it asks for them.  That takes a tenth of an end in Python, which makes a State of each tensor first.

A launch that LTC_CHECK looks at is launched here as well: its checks are kernels among the others.  Of a
launch in a profile, the kernels that tell their times run in place of those that do not, and the profile is
told behind it.  Python ends a recording whose calls are to be seen one by one (by ltc.compile, which
observes a call; by a hint's sample), its kernels (PyTorch's profiler), or the buffers of a new peak of memory.
"""

from __future__ import annotations

from math import inf
from time import thread_time_ns
from typing import Any
from weakref import ref

from ltc import config
from ltc.backends.capabilities import FrameLaunch
from ltc.device.call_observer import watching
from ltc.device.evidence import hints
from ltc.device.recording.recorder import Recorder
from ltc.device.user_line import told_of_lack, user_line
from ltc.native.core import CORE
from ltc.runtime import core_reservation
from ltc.runtime.account import account_of
from ltc.runtime.compile import ProgramBinding, kept_program
from ltc.runtime.dump import save_graph
from ltc.runtime.executor import SHORT_SECONDS, executor_of
from ltc.runtime.program import ProfiledFrame, Program
from ltc.runtime.program_cache import note_use
from ltc.support.observation import spans
from ltc.support.observation.often import Often
from ltc.support.process.held_signals import held
from ltc.support.torch_private import is_profiled, plain_functions

_ENDS = Often(
    ("CoreLaunches", "CachedCompile"),
    (("TensorsGraphSize", "value"), ("DeviceLockWait", "time"), ("ExecuteTime", "time")),
    ("CreateLtcTensor", "DestroyLtcTensor"),
)
_saves = config.reader("LTC_SAVE_TENSORS_FILE")
_NO_VALUE, _GONE, _LAUNCHED = -1, -2, -1  # as in exits.h


class CoreEnd:
    """The end of a track's recordings in the core.

    Attributes:
        longest: Seconds that a launch may take: a longer program runs behind its caller, since that
        gains more than an end in Python takes.
        leaf: The last entry of the path.
        weight: The policy's weight of the path.
    """

    def __init__(self, recorder: Recorder, ended: Any, launch: FrameLaunch, longest: float) -> None:
        self.longest = longest
        binding: ProgramBinding = ended.binding
        self._made = ended.made, ended.died
        self._binding = binding
        # The launch itself would keep the program, which the cache may drop.
        self._words = launch.kernels, launch.frame, launch.threads
        self._computation = ref(_computation(binding.program()))
        self.leaf = recorder.last
        self.weight = recorder.policy.weight(
            _calls(binding.program()), self.leaf.size, len(recorder.inputs), in_core=True
        )

    def program(self) -> Program | None:
        """Return the program if it is to be launched as it was, in the caller's thread."""
        program = kept_program(self._binding)
        if program is None or program.seconds > self.longest:
            return None
        return program if self.is_of(program) else None

    def is_of(self, program: Program) -> bool:
        """Return True if the program is what it was when the end was learned."""
        return _computation(program) is self._computation()

    def save(self, program: Program) -> None:
        """Append the program's graph to the file that LTC_SAVE_TENSORS_FILE names, if it names one."""
        if any(_saves()):
            with told_of_lack("LTC_SAVE_TENSORS_FILE"):
                save_graph(program, self._binding.key[0], user_line())

    @staticmethod
    def _raise_findings(program: Program, failed: int, frame: int) -> None:
        launch = program.in_frame()
        if launch is not None:
            launch.failed(failed, frame)

    def launch(self, recorder: Recorder, program: Program) -> bool:
        """End the recording; return False where Python has to.

        Raises:
            MemoryFault: LTC_CHECK has found what a kernel has done.
        """
        core: Any = CORE
        device = recorder.device.index
        (kernels, frame, threads), profiled = self._words, None
        if spans.timeline is not None:
            profiled = ProfiledFrame(program, device)
            if profiled.launch is None:
                return False
            kernels, frame = profiled.launch.kernels, profiled.launch.frame
        core_reservation.use_all()
        began = spans.now()
        outcome = core.finish(recorder.session, kernels, frame, threads())
        elapsed = spans.now() - began
        if outcome >= 0:
            recorder.catch_up()  # Python ends it
            self._raise_findings(program, outcome, core.frame())
        if outcome != _LAUNCHED:
            return False
        if profiled is not None:
            profiled.ran(began, core.frame())
        program.seconds = elapsed * 1e-9
        note_use(program)
        _ENDS.happened(program.calls, 0, elapsed, *self._made)
        account_of(device).add(0, 0)  # the core's values may be the most so far
        return True


def _computation(program: Program | None) -> Any:
    return None if program is None else program.computation


def _calls(program: Program | None) -> int:
    return 0 if program is None else program.calls


def ends_in_core(recorder: Recorder, is_read: bool) -> bool:
    """End the calling thread's recording in the core; return False where Python has to."""
    walk = recorder.walk
    end: CoreEnd | None = None if walk is None else walk.track.end
    if end is None or watching or is_profiled() or hints.is_sampling():
        return False  # its calls or its kernels are to be seen one by one
    executor = executor_of(recorder.device.index)
    if not executor.is_done and end.program() is not None:
        executor.wait_within(end.longest)  # no longer than Python would take to hand this one over
    with recorder.lock, held, plain_functions():
        program = end.program() if recorder.walk is walk else None
        if program is None or not executor.is_done or not end.launch(recorder, program):
            return False
        core_reservation.recording_is_over()
        hints.launched()
        recorder.walk, recorder.last = None, end.leaf
        try:
            end.save(program)
            _tell_policy(recorder, end.weight, is_read)
        finally:
            recorder.restart()
    return True


def _tell_policy(recorder: Recorder, weight: int, is_read: bool) -> None:
    """The recording has been followed to the end of its path."""
    is_trained = bool(recorder.optimizer_steps)
    if is_trained:
        recorder.policy.trained()
    path, behind = recorder.last.ended_path, recorder.ended.ended_path
    recorder.policy.followed(path, behind, weight, is_read and not is_trained, in_core=True)


def learn(recorder: Recorder, ended: Any, alive: list[Any]) -> None:
    """A walk has gone along its whole track, and Python has ended the recording: learn to end it.

    Args:
        ended: The Ended of exit_liveness.py.
        alive: The states that `ended` numbers.
    """
    walk: Any = recorder.walked  # a Walk
    track, binding = walk.track, ended.binding
    program = None if binding is None else binding.program()
    if program is None or not program.is_ready or recorder.last is not track.entries[-1]:
        return
    if track.tried is ended and (track.end is None or track.end.is_of(program)):
        return
    path = recorder.last.ended_path
    track.tried, track.end, path.ends_in_core = ended, None, False
    launch = None if program.exchanges or program.is_verified else program.in_frame()
    words = None if launch is None else _words(walk, ended, alive, launch)
    if launch is not None and words is not None:
        CORE.keep_exit(track.handle, words)  # type: ignore[union-attr]
        track.end = CoreEnd(recorder, ended, launch, _longest(walk, program, launch))
        path.ends_in_core = True


def _longest(walk: Any, program: Program, launch: FrameLaunch) -> float:
    """Return the seconds that Python took to end the recording, or else of a program that runs at once.

    A checked program takes several times as long as the user's: nothing is gained by its time.
    """
    if launch.guard:
        return inf
    took = (thread_time_ns() - walk.caught_up) * 1e-9
    ran_here = 0 if core_reservation.records_beside() else program.seconds
    return max(SHORT_SECONDS, took - ran_here)


def _words(walk: Any, ended: Any, alive: list[Any], launch: FrameLaunch) -> list[int] | None:
    """Return what the core has to know of an end: see Exit in exits.h; None where it cannot make it."""
    signature, binding = ended.signature, ended.binding
    if ended.own or ended.shared or ended.several or not signature.alone:
        return None
    values = dict.fromkeys(range(walk.count), _GONE) | walk.values
    holders = [walk.names[id(alive[one[0]])] for one in ended.holders if one]
    with_values = [
        name for name, value in values.items() if value > _NO_VALUE and name not in walk.views
    ]
    if len(holders) != len(ended.outputs) or sorted(holders) != sorted(with_values):
        return None
    inputs = [walk.inputs[binding.inputs[position]] for position in launch.inputs]
    made: dict[int, int] = {}  # number among the outputs in new memory -> name
    in_place = set()
    for output, name in enumerate(holders):
        place, value = launch.outputs[binding.outputs[output]], ended.outputs[output]
        if place < len(inputs):
            in_place.add(place)
            if inputs[place] != name:
                return None
        elif launch.made[place - len(inputs)] == (tuple(value.shape), value.dtype):
            made[place - len(inputs)] = name
    written = {k for k, position in enumerate(launch.inputs) if position in launch.written}
    if in_place != written or sorted(made) != list(range(len(launch.made))):
        return None
    return launch.exit_words(
        [(name, k in written) for k, name in enumerate(inputs)],
        [made[k] for k in range(len(made))],
        [(binding.scalars[slot], word, ord(letter)) for slot, letter, word in launch.cells],
        [values[name] for name in range(len(values))],
    )
