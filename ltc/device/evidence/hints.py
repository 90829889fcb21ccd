"""One line on stderr, once, where a loop has run for seconds slower than eager PyTorch would.

An iteration ends where the same line marks a step, makes an optimizer step or reads a value. Of a loop
that has run long enough a few iterations are timed, and eager PyTorch's time is estimated from the next
few: those of seconds before may have been another network's. Where programs are launched, the recorded
calls run once more on PyTorch's kernels: eager PyTorch takes at least that time, and two such runs that
are far above the iterations are enough. Behind them, in a row of iterations of its own, Python's profiler
tells the time in ltc's own functions from the program's: eager PyTorch takes the latter as well. (In the
same iterations it would find the cold memory that the runs leave.) The loop is slower than eager if the
lower quartile of its iterations is a tenth above the sum of the two, which is rather too high: ltc's C++
counts as the program's. Iterations before its first launch tell nothing of those behind it.

Nothing here decides how a step runs: the times go into the line on stderr, and nowhere else.
"""

from __future__ import annotations

import contextlib
import cProfile
import enum
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch

from ltc import config
from ltc.aten.call import Call, CallResult, Scalar
from ltc.aten.expansion import values_read_by
from ltc.backends.interpreter.recorded_call import OWN_CALLS, run_by_kernel
from ltc.backends.kernel_call import REFUSALS, kernel_call
from ltc.backends.plain_dispatch import PlainDispatch
from ltc.device.evidence.reads_explained import (
    BEFORE_THE_MARK,
    BEHIND_THE_MARK,
    NO_MARK,
    READING_LOOP,
    is_behind_a_mark,
)
from ltc.explaining import faults, history
from ltc.explaining.explanation import Explanation
from ltc.explaining.user_stack import UserFrame
from ltc.runtime.background import compile_behind
from ltc.runtime.transfers import capabilities
from ltc.support.bounded_table import BoundedTable
from ltc.support.observation import spans
from ltc.support.torch_private import FILE_OF_OPS
from ltc.support.user_frame import innermost_user_frame
from ltc.tracebacks import is_ltcs, is_of_python

PATIENCE_SECONDS = 5.0  # of a loop before it is judged; twice as long each time it is not slower
SAMPLES = 8  # iterations of either kind, below which quartiles say nothing
MARGIN = 1.1  # times eager's time: less is noise, above all in a loop that waits for something else
FEW_SAMPLES, FAR = 2, 1.25  # so many that are so many times an iteration leave no doubt
RUNS = 2  # of a kernel, of which the faster one counts
_SLOW_SETTINGS = ("LTC_CHECK", "LTC_VERIFY", "LTC_DEBUG_NANS", "LTC_DUMP", "LTC_SYNC_WAIT")
_asked = config.reader("LTC_HINTS", "XRT_SHARD_ORDINAL")


class End(enum.IntEnum):
    """The end of an iteration; the greatest that a loop has is the one that counts."""

    READ = 0
    OPTIMIZER_STEP = 1
    MARK = 2


class Iteration(NamedTuple):
    """The nanoseconds and the launches of an iteration."""

    spent: int
    launches: int


class Loop:
    """The iterations that end at one line.

    Attributes:
        begun: When the present window began.
        times: Nanoseconds of the iterations that were timed at its end; launched: their launches.
        kernels: Nanoseconds of PyTorch's kernels in the launched iterations behind these.
        profiles: The profiles of the iterations behind those; to read one takes long, so they are read together.
        outside: Nanoseconds in which these iterations were not in ltc's functions.
        reads: Values read at other lines meanwhile; read_at: the latest such line.
        events_between: The most other ends that came between two of its own.
    """

    def __init__(self, place: UserFrame, end: End) -> None:
        self.place, self.end = place, end
        self.read_at = place
        self.times: list[int] = []
        self.kernels: list[int] = []
        self.profiles: list[cProfile.Profile] = []
        self.outside: list[int] = []
        self.events_between = 0
        self.patience = PATIENCE_SECONDS * 1e9
        self.begin_window()

    def begin_window(self) -> None:
        """Begin to wait until the loop has run long enough."""
        self.begun = spans.now()
        self.begin_timing()

    def begin_timing(self) -> None:
        """Time iterations, and count the events that are to blame, from here on."""
        self.launched, self.reads, self.events = 0, 0, history.counts()
        samples: tuple[list, ...] = self.times, self.kernels, self.profiles, self.outside
        for one in samples:
            one.clear()

    def add(self, taken: Iteration) -> None:
        """Add an iteration that was not sampled."""
        if taken.launches and self.times and not self.launched:
            self.begin_window()
        self.times.append(taken.spent)
        self.launched += taken.launches

    def note_read(self, place: UserFrame) -> None:
        """Note a read at another line."""
        self.reads, self.read_at = self.reads + 1, place

    @property
    def is_launched(self) -> bool:
        """True if the timed iterations launched programs."""
        return self.launched > 0

    @property
    def iterations(self) -> int:
        """The iterations that were looked at since their timing began; at least one."""
        return max(1, len(self.times) + len(self.kernels) + len(self.outside))

    @property
    def awaits_kernels(self) -> bool:
        """True if kernels are to be timed next: those of launches are."""
        return self.is_launched and len(self.kernels) < SAMPLES

    @property
    def eager(self) -> float:
        """The estimate of eager PyTorch's nanoseconds."""
        return median(self.outside) + median(self.kernels or [0])

    def read_profiles(self) -> None:
        """Know `outside` of what was profiled."""
        self.outside = [time_outside(profile, self.is_launched) for profile in self.profiles]

    def awaits_program(self) -> bool:
        """Return True if it has launched nothing, and a program came in this window or is on its way."""
        return not self.is_launched and compile_behind.has_compiled_since(self.begun)

    def is_slower(self) -> bool:
        """Return True if it takes a tenth longer than eager PyTorch."""
        if min(len(self.outside), len(self.times)) < SAMPLES:
            return False
        return quantiles(self.times)[0] > MARGIN * self.eager

    def is_far_quicker(self) -> bool:
        """Return True if the kernels so far leave no doubt that eager PyTorch takes longer."""
        if len(self.kernels) < FEW_SAMPLES or len(self.times) < SAMPLES:
            return False
        return min(self.kernels) > FAR * quantiles(self.times)[0]


# --- the time of eager PyTorch ----------------------------------------------------------------------


def time_outside(profile: cProfile.Profile, has_launched: bool) -> int:
    """Return the nanoseconds that a profiled thread was not in functions of ltc's.

    Args:
        has_launched: True to leave a backward out, which another thread records meanwhile.
    """
    seconds = 0.0
    for entry in profile.getstats():
        code = entry.code
        if isinstance(code, str):
            seconds += 0.0 if has_launched and _BACKWARD in code else entry.inlinetime
        elif not is_ltcs(code.co_filename):
            seconds += entry.inlinetime
        else:
            seconds -= sum(one.inlinetime for one in entry.calls or () if _is_own_call(one.code))
    return max(0, int(seconds * 1e9))


_BACKWARD = "run_backward"


def _is_own_call(code: Any) -> bool:
    """Return True if what a function of ltc's calls is no part of the program: no kernel, no code of the user's."""
    if isinstance(code, str):
        return "ltc_core" in code or not ("PyCapsule" in code or "torch._ops" in code)
    return is_of_python(code.co_filename) or code.co_filename == FILE_OF_OPS


def kernel_time(recorder: Any) -> int | None:
    """Return the nanoseconds that PyTorch's kernels take for the recorded calls, apart from all else.

    Their results are dropped, and the CPU's stream of random numbers is set back.

    Returns:
        None if a call has no kernel that makes the recorded result: it begins with undefined memory, say; or if the
        values are on a device that PyTorch's kernels do not reach.
    """
    if recorder.last.of is not None or recorder.exchanges or not capabilities().host_tensors:
        return None
    stream = torch.get_rng_state()
    try:
        return _KernelTimes(recorder).total
    except Exception as error:
        if faults.is_own(error):
            faults.note(error, "a hint's run of the recorded calls")
        return None
    finally:
        torch.set_rng_state(stream)


class _KernelTimes:
    """One run of the recorded calls.

    Attributes:
        total: The nanoseconds in kernels; None if a call has none.
    """

    def __init__(self, recorder: Any) -> None:
        self._inputs, self._numbers = recorder.inputs, recorder.scalars
        self._values: dict[Any, Any] = {}  # tensors, by the CallResult that they are
        self.total: int | None = 0
        calls = recorder.path()
        last_reader = {value: call for call in calls for value in values_read_by(call)}
        with PlainDispatch():
            for call in calls:
                if not self._run(call):
                    self.total = None
                    break
                for value in values_read_by(call):
                    if last_reader[value] is call:
                        del self._values[value]

    def _run(self, call: Call) -> bool:
        if call.overload == "ltc::input":
            self._values[call.results[0]] = self._inputs[call.args[0]].ready()
            return True
        if isinstance(call.overload, str):
            write = OWN_CALLS.get(call.overload)
            made = None if write is None else write(call, self._values, ())
        else:
            is_undefined = kernel_call(call.overload).leaves_undefined
            made = None if is_undefined else run_by_kernel(call, self._values, self._numbers)
            if made is not None:
                self._time(call)
        self._values.update(zip(call.results, made or ()))
        return made is not None

    def _time(self, call: Call) -> None:
        """Time the kernel alone, at its fastest: the first run finds cold memory.

        One that writes gets copies to write to.
        """
        kernel = kernel_call(call.overload)

        def given(argument: Any) -> Any:
            if argument.__class__ is CallResult:
                value = kernel.laid(self._values[argument])
                return value.clone() if call.mutated else value
            return self._numbers[argument.slot] if argument.__class__ is Scalar else argument

        args, kwargs = call.filled(given)
        try:
            function = kernel.quick
            function(*args, **kwargs)
        except REFUSALS:
            function = kernel.function
        self.total += min(_time_of(function, args, kwargs) for _ in range(RUNS))  # type: ignore[operator]


def _time_of(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    begin = spans.now()
    function(*args, **kwargs)
    return spans.now() - begin


# --- the loops of a thread --------------------------------------------------------------------------


class _ThreadLoops(threading.local):
    """The loops of one thread, and the iteration under way."""

    def __init__(self) -> None:
        self.loops: BoundedTable[UserFrame, Loop] = BoundedTable("HintLoops", 32)
        self.loop: Loop | None = None
        self.begin, self.sleeps_until = spans.now(), 0
        self.others = self.launches = 0
        self.is_timing_kernels = False
        self.kernels: int | None = 0  # nanoseconds of the calls since then; None: not known
        self.profile: cProfile.Profile | None = None

    def ended(self, end: End, place: UserFrame) -> None:
        """An iteration may have ended."""
        loop = self.loop
        if loop is None or place != loop.place:
            if loop is not None and end is End.READ:
                loop.note_read(place)
            if loop is None or self._is_left(loop, end):
                self._enter(self.loops.get(place) or self.loops.keep(place, Loop(place, end)))
            return
        loop.events_between, self.others = max(loop.events_between, self.others), 0
        taken = Iteration(spans.now() - self.begin, self.launches)
        if self.is_sampling:
            self._end_sample(loop, taken)
        elif spans.timeline is None:
            self._add(loop, taken)
        self._begin()

    def _add(self, loop: Loop, taken: Iteration) -> None:
        loop.add(taken)
        if len(loop.times) < SAMPLES:
            return
        ready = loop.begun + int(loop.patience)
        if spans.now() > ready:
            self._begin_sample(loop)
        else:
            self.sleeps_until = ready

    def _begin(self) -> None:
        self.launches, self.begin = 0, spans.now()

    def is_asleep(self) -> bool:
        """Return True until the loop has run long enough: its iterations are not looked at before."""
        if not self.sleeps_until:
            return False
        if spans.now() < self.sleeps_until:
            return True
        self.sleeps_until = 0
        if self.loop is not None:
            self.loop.begin_timing()
        self._begin()  # in the middle of an iteration: its end is nearer than that of a whole one
        return True

    def _is_left(self, loop: Loop, end: End) -> bool:
        """Return True if an end at another line means that the loop is over, or is no loop."""
        self.others += 1
        if end > loop.end:
            return True
        if self.others <= 2 * loop.events_between + SAMPLES:
            return False
        loop.events_between = self.others  # if it comes back, it is a loop with that many
        return True

    def _enter(self, loop: Loop) -> None:
        self.stop_sample()
        self.loop, self.others = loop, 0
        loop.begin_window()
        self._begin()

    # --- samples

    @property
    def is_sampling(self) -> bool:
        return self.is_timing_kernels or self.profile is not None

    def _begin_sample(self, loop: Loop) -> None:
        if loop.awaits_program() or not is_on() or sys.getprofile() is not None:
            loop.begin_window()
            return
        self.is_timing_kernels, self.kernels = loop.awaits_kernels, 0
        if self.is_timing_kernels:
            return
        self.profile = cProfile.Profile()
        with contextlib.suppress(ValueError):  # another tool profiles: then nothing is found
            self.profile.enable()

    def _end_sample(self, loop: Loop, taken: Iteration) -> None:
        profile = self.profile
        self.stop_sample()
        is_unlike = loop.is_launched != (taken.launches > 0)
        if is_unlike or self.kernels is None or spans.timeline is not None:
            self._wait_longer(loop)
            return
        if profile is None:
            loop.kernels.append(self.kernels)
        else:
            loop.profiles.append(profile)
        if loop.is_far_quicker() or len(loop.profiles) == SAMPLES:
            self._judge(loop)
        else:
            self._begin_sample(loop)

    def _judge(self, loop: Loop) -> None:
        loop.read_profiles()
        if loop.awaits_program():
            loop.begin_window()
            return
        if loop.is_slower():
            _say(loop)
        self._wait_longer(loop)
        self.sleeps_until = loop.begun + int(loop.patience)

    @staticmethod
    def _wait_longer(loop: Loop) -> None:
        loop.patience *= 2
        loop.begin_window()

    def stop_sample(self) -> None:
        """End the sample under way, if one is."""
        if self.profile is not None:
            _disable(self.profile)
        self.profile, self.is_timing_kernels = None, False

    def launch(self, recorder: Any, end: Callable[[Any], None]) -> None:
        """End a followed recording."""
        self.launches += 1
        if self.is_timing_kernels and self.kernels is not None:
            spent = kernel_time(recorder)
            self.kernels = None if spent is None else self.kernels + spent
        end(recorder)


def _disable(profile: cProfile.Profile) -> None:
    """End the profile; one that the user has begun meanwhile, which Python 3.11 ends as well, goes on."""
    other = sys.getprofile()
    profile.disable()
    if isinstance(other, cProfile.Profile):
        if other is not profile:
            other.enable()
    else:
        sys.setprofile(other)


_watch = _ThreadLoops()
_has_said = False
# True if what the calling thread recorded last goes along a known path; recorder.py, which knows, sets it
comes_back: Callable[[], bool] = bool


def iteration_ended(end: End) -> None:
    """Note that a step was marked, an optimizer has made its step, or a value was read."""
    if _has_said:
        _watch.stop_sample()  # a loop of another thread may have said it in the midst of this one's
        return
    if _watch.is_asleep():
        return
    frame = innermost_user_frame()
    if frame is not None:
        code = frame.f_code
        _watch.ended(end, UserFrame(code.co_filename, frame.f_lineno, code.co_name))


def hears_reads() -> bool:
    """Return True if each read counts: the native core answers none by itself then."""
    return not (_has_said or _watch.is_asleep()) and is_on()


def launching(recorder: Any, end: Callable[[Any], None]) -> None:
    """Call `end(recorder)`, which launches what a followed recording holds."""
    if _has_said:
        end(recorder)
    else:
        _watch.launch(recorder, end)


def is_sampling() -> bool:
    """Return True if a sample wants to see the calls of a followed recording when it ends."""
    return _watch.is_timing_kernels


def launched() -> None:
    """A followed recording has ended in the core."""
    _watch.launches += 1


def is_on() -> bool:
    """Return True if hints are asked for, and this process is the one that prints them."""
    is_on, ordinal = _asked()
    return bool(is_on and ordinal == 0)


# --- saying it --------------------------------------------------------------------------------------


class Cause(NamedTuple):
    """The cause of a loop's slowness, the user's line, and the cure."""

    what: str
    line: str
    cure: str


def _say(loop: Loop) -> None:
    global _has_said
    _has_said = True
    print(sentence(loop), file=sys.stderr, flush=True)


def sentence(loop: Loop) -> str:
    """Return the hint: figures, the cause, the user's line, the cure."""
    ours, eager, cause = median(loop.times), loop.eager, cause_of(loop)
    return (
        f"ltc hint: this loop is slower than eager PyTorch: {ours * 1e-6:.3g} ms an iteration, at most about "
        f"{eager * 1e-6:.3g} ms in eager. {cause.what}, at {cause.line}. Cure: {cause.cure}. "
        f"LTC_HINTS=0 turns hints off."
    )


def cause_of(loop: Loop) -> Cause:
    """Return the cause of a loop's slowness in the present window."""
    place = str(loop.place)
    for name in _SLOW_SETTINGS:
        if config.value(name):
            return Cause(f"{name} is set, which slows each step", place, f"unset {name}")
    if config.value("LTC_TIER") == "op_by_op":
        return Cause("LTC_TIER=op_by_op compiles nothing", place, "set LTC_TIER=auto")
    frequent = _most_frequent(loop)
    if frequent is not None:
        return Cause(_sentence_case(frequent.what), frequent.line or place, frequent.cure)
    if loop.end is End.READ or 2 * loop.reads >= loop.iterations:
        return Cause("A value is read in each iteration", str(loop.read_at), _cure_of_read(loop))
    if loop.is_launched:
        return Cause("Launches take longer than their kernels", place, _LARGER_STEPS)
    if comes_back():
        return Cause("Its calls are few and small: they run one by one", place, _FEW_CALLS)
    return Cause("Its calls differ from step to step: nothing is compiled", place, _SAME_CALLS)


_LARGER_STEPS = "mark less often or use larger batches; else run this loop on the CPU"
_FEW_CALLS = (
    "call the whole step through ltc.compile, or use larger batches; else run this loop on the CPU"
)
_SAME_CALLS = "use the same calls and fixed shapes in each step; else run this loop on the CPU"


def _cure_of_read(loop: Loop) -> str:
    if loop.end is End.MARK:
        return BEHIND_THE_MARK if is_behind_a_mark(loop.read_at) else BEFORE_THE_MARK
    return NO_MARK if loop.end is End.OPTIMIZER_STEP else READING_LOOP


def _sentence_case(text: str) -> str:
    return text[:1].upper() + text[1:]


def _most_frequent(loop: Loop) -> Explanation | None:
    """Return the event with a cure that came most often, if it came in half of the iterations."""
    grown = [
        (times - loop.events.get(one, 0), number, one)
        for number, (one, times) in enumerate(history.counts().items())
        if one.cure
    ]
    times, _, found = max(grown, default=(0, 0, None))
    return found if times and 2 * times >= loop.iterations else None
