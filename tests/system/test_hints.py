"""A loop that is slower than eager PyTorch says so: one line on stderr, once."""

import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch

import ltc.core.lazy_model as ltm
from ltc.device.evidence import hints
from ltc.device.evidence.hints import End, Loop, time_outside
from ltc.device.immediate.immediate_session import ImmediateSession
from ltc.device.recording.tensors import current_device
from ltc.explaining import history
from ltc.explaining.explanation import CUTS, Explanation
from ltc.explaining.user_stack import UserFrame
from tests.recorders import process_of_one_device

BEGIN = """
    import sys
    import torch
    from torch import nn
    import ltc
    import ltc.core.lazy_model as ltm
    from ltc.device.evidence import hints
    from ltc.runtime.background import compile_behind

    hints.PATIENCE_SECONDS = float(sys.argv[1])
"""
SAMPLING = """
    model, state = nn.GRUCell(64, 64).to("ltc"), torch.zeros(1, 64).to("ltc")
    loops = hints._watch.loops
    with torch.no_grad():
        for step in range(200_000):
            state = model(state, state).sin().cos().tanh().exp().log1p().sigmoid()
            state.argmax().item()
            if hints._has_said or any(loop.patience > 3e9 for loop in loops.values()):
                break
"""
LINE_OF_READ = (BEGIN + SAMPLING).splitlines().index("            state.argmax().item()") + 1
LARGE_STEPS = """
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).to("ltc")
    x = torch.randn(512, 512).to("ltc")
    for step in range(20):
        model(x).sum().backward()
        ltm.mark_step()
        compile_behind.wait()  # a loop is not judged before
    hints._watch.loop.is_slower = lambda: False  # whatever this machine's figures are
    for step in range(60):
        model(x).sum().backward()
        ltm.mark_step()
    print(hints._watch.loop.patience > 1e7)
"""


def run(script: str, patience: float, **environment: str) -> subprocess.CompletedProcess:
    settings = os.environ | {"LTC_CHECK": "", "LTC_HINTS": "1"} | environment
    command = [sys.executable, "-c", textwrap.dedent(BEGIN + script), str(patience)]
    return subprocess.run(command, env=settings, capture_output=True, text=True, check=True)


@pytest.fixture
def loop():
    return Loop(UserFrame("train.py", 12, "train"), End.MARK)


def taken(loop, spent: int, launches: int) -> None:
    for _ in range(hints.SAMPLES):
        loop.add(hints.Iteration(spent, launches))


def test_a_sampling_loop_says_once_that_it_is_slower_and_the_cure():
    said = run(SAMPLING, 0.5, LTC_NATIVE="0").stderr  # the native core takes half the time
    assert said.count("ltc hint") == 1 and len(said.splitlines()) == 1
    assert "ms an iteration, at most about" in said
    assert "run this loop on the CPU" in said and f":{LINE_OF_READ} in <module>" in said


def test_a_judged_loop_that_is_not_slower_is_silent_and_judged_later():
    done = run(LARGE_STEPS, 0.01)
    assert done.stderr == "" and done.stdout == "True\n"


def test_hints_can_be_turned_off():
    script = SAMPLING.replace("200_000", "3000")
    assert run(script, 0.1, LTC_HINTS="0").stderr == ""


def test_a_rank_other_than_the_first_is_silent():
    script = SAMPLING.replace("200_000", "3000")
    assert run(script, 0.1, RANK="1").stderr == ""


def test_a_loop_is_slower_if_its_faster_quarter_is_a_tenth_above_the_median_of_eager(loop):
    taken(loop, 2_000, 1)
    loop.kernels, loop.outside = [900] * hints.SAMPLES, [100] * hints.SAMPLES
    assert loop.is_slower()
    loop.outside = [1_000] * hints.SAMPLES  # it waits for files, say: as eager PyTorch would
    assert not loop.is_slower()
    loop.kernels = [3_000] * hints.SAMPLES
    assert not loop.is_slower()


def test_few_samples_say_nothing(loop):
    taken(loop, 2_000, 1)
    loop.outside = [1_000] * (hints.SAMPLES - 1)
    assert not loop.is_slower()


def test_two_runs_of_the_kernels_far_above_the_iterations_are_enough(loop):
    taken(loop, 2_000, 1)
    loop.kernels = [5_000]
    assert not loop.is_far_quicker()
    loop.kernels = [5_000, 4_500]
    assert loop.is_far_quicker()
    loop.kernels = [5_000, 2_400]
    assert not loop.is_far_quicker()


def test_iterations_before_the_first_launch_are_not_compared(loop):
    taken(loop, 9_000, 0)
    begun = loop.begun
    taken(loop, 2_000, 1)
    assert loop.times == [2_000] * hints.SAMPLES and loop.begun > begun
    loop.add(hints.Iteration(9_000, 0))
    loop.add(hints.Iteration(2_000, 1))
    # One that launches now and then is judged as a whole.
    assert len(loop.times) == hints.SAMPLES + 2


def test_iterations_of_a_network_before_are_not_compared(loop, monkeypatch):
    """A function that trains one network after the other is one loop, with pauses between."""
    monkeypatch.setenv("LTC_HINTS", "1")
    watch = hints._ThreadLoops()
    watch.loop = loop
    for _ in range(hints.SAMPLES):
        watch._add(loop, hints.Iteration(300_000, 1))
    assert watch.is_asleep()
    watch.sleeps_until = 1  # the window is over
    assert watch.is_asleep()  # in the middle of an iteration
    assert not loop.times and not loop.launched
    assert not watch.is_asleep()
    loop.begun -= int(2 * loop.patience)
    for _ in range(hints.SAMPLES):
        watch._add(loop, hints.Iteration(1_000, 1))
    assert loop.times == [1_000] * hints.SAMPLES and watch.is_sampling
    watch.stop_sample()


@pytest.mark.parametrize("times_kernels", [True, False])
def test_a_sample_ends_where_another_thread_has_given_its_hint(loop, times_kernels, monkeypatch):
    """Else the thread was profiled for good, or its programs kept out of the native core."""
    monkeypatch.setenv("LTC_HINTS", "1")
    monkeypatch.setattr(hints, "_watch", watch := hints._ThreadLoops())
    taken(loop, 2_000, 1 if times_kernels else 0)
    watch._begin_sample(loop)
    assert watch.is_timing_kernels is times_kernels and (sys.getprofile() is None) is times_kernels
    monkeypatch.setattr(hints, "_has_said", True)
    hints.iteration_ended(End.MARK)
    assert not watch.is_sampling and sys.getprofile() is None


def test_the_end_of_a_sample_leaves_a_profile_that_the_user_has_begun(loop, monkeypatch):
    import cProfile

    monkeypatch.setenv("LTC_HINTS", "1")
    hints._watch.stop_sample()  # a loop of the tests before may be in the midst of one
    hints.compile_behind.wait()  # or have programs on their way
    watch, theirs = hints._ThreadLoops(), cProfile.Profile()
    taken(loop, 2_000, 0)
    loop.begin_window()
    watch._begin_sample(loop)
    assert watch.is_sampling
    if sys.version_info >= (3, 12):  # there is one place for both, which is taken
        watch.stop_sample()
    theirs.enable()
    watch.stop_sample()
    "".join(reversed("seen"))
    theirs.disable()
    assert any("join" in str(entry.code) for entry in theirs.getstats())


def test_the_cause_is_the_event_that_came_in_most_iterations(loop, monkeypatch):
    monkeypatch.setenv("LTC_CHECK", "0")
    taken(loop, 2_000, 1)
    place = (UserFrame("train.py", 9, "train"),)
    told = history.note(Explanation(CUTS, place, "the step was cut", "why", "keep it"))
    told.times += hints.SAMPLES
    cause = hints.cause_of(loop)
    assert cause.line == "train.py:9 in train" and cause.cure == "keep it"


@pytest.mark.parametrize(
    ("end", "reads", "launches", "cure"),
    [
        (End.READ, 0, 0, hints.READING_LOOP),
        (End.OPTIMIZER_STEP, hints.SAMPLES, 0, hints.NO_MARK),
        (End.MARK, hints.SAMPLES, 1, hints.BEFORE_THE_MARK),
        (End.MARK, 0, 1, hints._LARGER_STEPS),
        (End.MARK, 0, 0, hints._SAME_CALLS),
        (End.MARK, 0, 0, hints._FEW_CALLS),
    ],
)
def test_each_cause_has_its_own_cure(end, reads, launches, cure, monkeypatch):
    monkeypatch.setenv("LTC_CHECK", "0")
    monkeypatch.setattr(hints, "comes_back", lambda: cure == hints._FEW_CALLS)
    loop = Loop(UserFrame("train.py", 12, "train"), end)
    taken(loop, 2_000, launches)
    for _ in range(reads):
        loop.note_read(UserFrame("train.py", 10, "train"))
    assert hints.cause_of(loop).cure == cure


@pytest.mark.native("the recorded calls are timed, not run when they are made")
def test_recorded_calls_are_timed_whose_operands_have_other_strides():
    x = torch.ones(6, 5).to("ltc").requires_grad_()
    weight = torch.ones(2, 1, 2).to("ltc").requires_grad_()
    torch.conv1d((x * 2).mT.reshape(-1)[None, None], weight, padding=1).sum().backward()
    assert hints.kernel_time(current_device().recorder()) > 0


@pytest.mark.parametrize("are_alike", [True, False])
def test_calls_that_come_back_are_not_said_to_differ(quick_calls, are_alike):
    with process_of_one_device(LTC_TIER="auto"):
        x = torch.ones(4).to("ltc")
        for k in range(12):
            y = x + 1
            for _ in range(1 if are_alike else 1 + k):
                y = y * 2
            ltm.mark_step()
        assert hints.comes_back() is are_alike


def test_a_setting_that_slows_each_step_is_the_cause(loop, monkeypatch):
    monkeypatch.setenv("LTC_CHECK", "0")
    monkeypatch.setenv("LTC_DEBUG_NANS", "1")
    assert hints.cause_of(loop).cure == "unset LTC_DEBUG_NANS"


def test_time_in_ltcs_functions_is_not_the_programs():
    import cProfile

    import torch

    x = torch.ones(8, device="ltc")
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(50):
        (x * 2).sum().item()
    profile.disable()
    whole = sum(entry.inlinetime for entry in profile.getstats()) * 1e9
    assert 0 < time_outside(profile, has_launched=True) < whole


def test_what_ltc_calls_of_pythons_library_is_not_the_programs():
    import cProfile
    import logging

    from ltc import tracebacks

    profile = cProfile.Profile()
    namespace = {"log": logging.getLogger("ltc"), "getpid": os.getpid}
    exec(compile("def own():\n log.isEnabledFor(10)\n getpid()", "<ltc test>", "exec"), namespace)
    assert tracebacks.is_ltcs("<ltc test>")
    namespace["own"]()  # logging keeps what it finds
    profile.enable()
    for _ in range(100):
        namespace["own"]()
    profile.disable()
    mine = sum(one.inlinetime for one in profile.getstats() if "disable" in str(one.code))
    assert time_outside(profile, has_launched=True) <= mine * 1e9


SAMPLES_APART = """
    seen, judge = [], hints.Loop.is_slower

    def is_slower(loop):
        seen.append((len(loop.times), len(loop.kernels), len(loop.profiles), len(loop.outside)))
        assert min(loop.kernels) > 0 and min(loop.outside) > 0
        return judge(loop)

    hints.Loop.is_slower, hints.FAR = is_slower, 1e9
    model, x = nn.Sequential(*[nn.Linear(64, 64) for _ in range(9)]).to("ltc"), torch.ones(8, 64).to("ltc")
    for step in range(2000):
        model(x).sum().backward()
        ltm.mark_step()
        if seen:
            break
    print(seen)
"""


def test_kernels_are_timed_in_other_iterations_than_the_program():
    assert run(SAMPLES_APART, 0.01, LTC_TIER="native").stdout == f"{[(hints.SAMPLES,) * 4]}\n"


def test_a_line_in_another_loop_takes_over_after_a_while():
    watch = hints._ThreadLoops()
    first, second = UserFrame("train.py", 1, "train"), UserFrame("train.py", 2, "evaluate")
    watch.ended(End.READ, first)
    for _ in range(hints.SAMPLES):
        watch.ended(End.READ, second)
    assert watch.loop.place == first
    watch.ended(End.READ, second)
    assert watch.loop.place == second


def test_a_mark_is_the_end_of_an_iteration_that_has_reads():
    watch = hints._ThreadLoops()
    read, mark = UserFrame("train.py", 1, "train"), UserFrame("train.py", 2, "train")
    for _ in range(3):
        watch.ended(End.READ, read)
        watch.ended(End.MARK, mark)
    assert watch.loop.place == mark and watch.loop.reads == 2


FEW_CALLS = """
    seen = []
    add = hints.Loop.add
    hints.Loop.add = lambda loop, taken: (seen.append(taken), add(loop, taken))
    x = torch.ones(4).to("ltc")
    for _ in range(LOOPS):  # fewer calls than a session notes: the native core could answer these reads
        (x + 1).sum().item()
    print(len(seen))
"""


@pytest.mark.parametrize(("loops", "looked_at"), [(6, 5), (60, hints.SAMPLES)])
def test_reads_that_the_native_core_could_answer_end_iterations_too(loops, looked_at):
    """Until the loop is known: then the core answers them by itself, up to the end of the window."""
    program = FEW_CALLS.replace("LOOPS", str(loops))
    assert run(program, 60.0, LTC_NATIVE="auto").stdout == f"{looked_at}\n"


def test_the_native_core_answers_reads_by_itself_only_while_no_iteration_is_counted(monkeypatch):
    monkeypatch.setenv("LTC_HINTS", "1")
    monkeypatch.setattr(hints, "_has_said", False)
    session = SimpleNamespace(is_sketched=False, calls=0, _began_at=0)
    monkeypatch.setattr(hints._watch, "sleeps_until", 0)
    assert ImmediateSession._unheard_reads(session) == (0, False)
    monkeypatch.setattr(hints._watch, "sleeps_until", 2**62)
    assert ImmediateSession._unheard_reads(session) > (0, False)
    session.is_sketched = True
    assert ImmediateSession._unheard_reads(session) == (0, True)


def test_a_loop_whose_first_program_is_being_compiled_is_not_judged(loop, monkeypatch):
    monkeypatch.setenv("LTC_HINTS", "1")
    monkeypatch.setattr(hints.compile_behind, "is_compiling", lambda: True)
    watch = hints._ThreadLoops()
    taken(loop, 2_000, 0)
    watch._begin_sample(loop)
    assert watch.profile is None and not loop.times


@pytest.mark.parametrize(("answered_after", "says"), [(1, False), (-1, True)])
def test_a_loop_whose_program_has_just_come_is_judged_in_the_next_window(
    loop, answered_after, says, monkeypatch
):
    said = []
    monkeypatch.setattr(hints, "_say", said.append)
    taken(loop, 2_000, 0)
    worker = SimpleNamespace(answered_at=loop.begun + answered_after, requests=list)
    monkeypatch.setattr(hints.compile_behind, "_worker", worker)
    watch, begun, patience = hints._ThreadLoops(), loop.begun, loop.patience
    loop.profiles = [hints.cProfile.Profile()] * (hints.SAMPLES - 1)
    monkeypatch.setattr(hints, "time_outside", lambda profile, has_launched: 1_000)
    watch.profile = hints.cProfile.Profile()
    watch._end_sample(loop, hints.Iteration(2_000, 0))
    assert said == ([loop] if says else []) and loop.begun > begun
    assert loop.patience == patience * (2 if says else 1)


READS_NAN = """
    x = torch.full((3,), float("nan")).to("ltc")
    for _ in range(3):
        x.sum().item()  # here
"""


def test_a_number_that_is_read_and_is_nan_names_the_setting_once():
    said = run(READS_NAN, 60.0).stderr
    line = (BEGIN + READS_NAN).splitlines().index("        x.sum().item()  # here") + 1
    assert said.count("ltc hint") == 1 and len(said.splitlines()) == 1
    assert "LTC_DEBUG_NANS=1" in said and f":{line} in <module>" in said


def test_a_number_that_is_not_nan_says_nothing():
    assert run(READS_NAN.replace("nan", "inf"), 60.0).stderr == ""


def test_the_hint_of_nan_can_be_turned_off():
    assert run(READS_NAN, 60.0, LTC_HINTS="0").stderr == ""


DRAWS = """
    found = []
    timed = hints.kernel_time

    def kernel_time(recorder):
        before = torch.get_rng_state()
        found.append(timed(recorder))
        assert torch.equal(before, torch.get_rng_state())
        return found[-1]

    hints.kernel_time = kernel_time
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 1)).to("ltc")
    x = torch.randn(32, 64).to("ltc")
    for step in range(400):
        (model(x) + torch.randn_like(x[:, :1])).sum().backward()
        ltm.mark_step()
        if len(found) >= hints.SAMPLES:
            break
    print(len(found), None in found)
"""


def test_calls_that_draw_are_timed_too_and_leave_the_cpus_stream_where_it_was():
    done = run(DRAWS, 0.01, LTC_TIER="native")
    assert done.stdout == "8 False\n"
