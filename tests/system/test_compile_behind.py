"""Programs are compiled by another process, while their calls run at once."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.backends.interpreter.interpreted import InterpretedComputation
from ltc.debug import metrics
from ltc.ir import ops
from ltc.ir.graph import Graph, Origin, schedule
from ltc.ir.json_codec import Unrecordable
from ltc.ir.node import make
from ltc.native.core import CORE
from ltc.runtime import compile, core_reservation
from ltc.runtime.background import compile_behind, worker_process
from ltc.runtime.background.graph_record import graph_of_record, record_of_graph
from ltc.support.process import processors
from tests.marks import NOTES_AT_ONCE
from tests.recorders import process_of_one_device

pytestmark = pytest.mark.noted_at_once(
    "steps are counted until a program is asked for, and is there"
)


@pytest.fixture(autouse=True)
def auto(monkeypatch, tmp_path):
    """As in a process of one device that was told nothing, with an empty disk cache."""
    settings = {"LTC_TIER": "auto", "LTC_CACHE": 1, "LTC_CACHE_DIR": str(tmp_path)}
    settings["LTC_COPY_PROCESS"] = 0  # a new process answers later than the next few steps end
    compile_behind.end()  # one that another test has begun keeps its programs elsewhere
    with process_of_one_device(LTC_NUM_DEVICES=1, **settings):
        yield
        compile_behind.end()


def run(x: torch.Tensor) -> torch.Tensor:
    y = (x * 2).tanh().sum(0)
    ltm.mark_step(wait=True)
    torch.testing.assert_close(y.cpu(), (x.cpu() * 2).tanh().sum(0))
    return y


def fresh(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to("ltc:0")


@pytest.mark.skipif(CORE is not None, reason="the core counts a step where the next one begins")
def test_steps_go_on_until_another_process_has_compiled_their_program():
    x = fresh(3, 3001)
    with metrics.counted() as grown:
        for _ in range(5):
            run(x)
        assert (grown["CompileBehind"], grown["UncachedCompile"]) == (1, 0)
        compile_behind.wait()
        for _ in range(3):
            run(x)
    assert (grown["ImmediateSteps"], grown["ExecuteTime"], grown["UncachedCompile"]) == (6, 2, 1)
    assert grown["CallByCallRuns"] == 0
    assert grown["RecalledPrograms"] == 1
    assert grown["CompileBehindFailed"] == 0


def test_steps_leave_the_other_process_a_processor_while_it_compiles(monkeypatch):
    """A kernel with a thread for each would wait for the one whose place the compiler has taken."""
    launch, threads = InterpretedComputation.launch, []

    def seen(*arguments):
        threads.append(torch.get_num_threads())
        return launch(*arguments)

    monkeypatch.setattr(InterpretedComputation, "launch", seen)
    monkeypatch.setattr(processors, "count", lambda: 2)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x = fresh(3, 3013)
        for _ in range(3):
            run(x)
        compile_behind.wait()
        for _ in range(2):
            run(x)
        kept = x * 2  # so what is followed has another program at its end
        total = kept.tanh().sum(0)
        ltm.mark_step(wait=True)
        del kept, total
    finally:
        torch.set_num_threads(before)
    assert threads == [1]
    compile_behind.wait()
    assert core_reservation._compiling == 0


def test_what_is_updated_in_place_is_by_the_compiled_program_too():
    weight = torch.zeros(3002).to("ltc:0")
    for _ in range(3):
        weight.add_(1).mul_(2)
        ltm.mark_step(wait=True)
    compile_behind.wait()
    for _ in range(3):
        weight.add_(1).mul_(2)
        ltm.mark_step(wait=True)
    assert weight[0].item() == 126


def test_where_the_process_is_gone_the_program_is_compiled_here():
    x = fresh(3, 3003)
    with metrics.counted() as grown:
        for _ in range(3):
            run(x)
        os.kill(compile_behind._worker._process.pid, signal.SIGKILL)
        compile_behind.wait()
        for _ in range(2):  # of the first it was decided before
            run(x)
    assert (grown["CompileBehind"], grown["UncachedCompile"]) == (1, 1)
    assert grown["RecalledPrograms"] == 0


def test_where_it_goes_while_a_program_is_written_down_that_is_compiled_here(monkeypatch):
    """Nobody would answer the request: the steps would run interpreted, on fewer threads, for ever."""

    def late(graph):
        compile_behind._worker._process.kill()
        while not compile_behind._worker._has_ended:
            time.sleep(0.01)
        return record_of_graph(graph)

    monkeypatch.setattr(compile, "record_of_graph", late)
    x = fresh(3, 3014)
    with metrics.counted() as grown:
        for _ in range(4):
            run(x)
    assert (grown["CompileBehind"], grown["UncachedCompile"]) == (1, 1)
    assert core_reservation._compiling == 0


def test_an_interrupt_leaves_no_request_that_nobody_answers(monkeypatch):
    def interrupted(request):
        raise KeyboardInterrupt

    x = fresh(3, 3015)
    with monkeypatch.context() as patched:
        patched.setattr(compile_behind, "dumped", interrupted)
        with pytest.raises(KeyboardInterrupt):
            for _ in range(3):
                run(x)
    assert core_reservation._compiling == 0
    run(x)
    compile_behind.wait()
    run(x)
    assert core_reservation._compiling == 0


@pytest.mark.parametrize("copies", [0, 1])
def test_where_the_system_starts_no_process_the_program_is_compiled_here(copies, monkeypatch):
    def refuse(*arguments, **keywords):
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(worker_process, "_may_copy", lambda: True)
    monkeypatch.setattr(worker_process, "_forked", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    x = fresh(3, 3016 + copies)
    with config.override(LTC_COPY_PROCESS=copies), metrics.counted() as grown:
        for _ in range(3):
            run(x)
    assert (grown["CompileBehind"], grown["UncachedCompile"]) == (0, 1)
    files = os.listdir("/dev/fd")
    with pytest.raises(BlockingIOError):
        worker_process.Copy(dict)
    assert os.listdir("/dev/fd") == files


def test_what_cannot_be_written_down_is_compiled_here(monkeypatch):
    def refuse(graph):
        raise Unrecordable("a user's object")

    monkeypatch.setattr(compile, "record_of_graph", refuse)
    x = fresh(3, 3004)
    with metrics.counted() as grown:
        for _ in range(3):
            run(x)
    assert (grown["CompileBehind"], grown["UncachedCompile"]) == (0, 1)


@pytest.mark.parametrize(("setting", "rows"), [("LTC_COMPILE_BEHIND", 4), ("LTC_CACHE", 5)])
def test_without_it_the_third_step_waits(setting, rows):
    x = fresh(rows, 3005)
    with config.override(**{setting: 0}), metrics.counted() as grown:
        for _ in range(3):
            run(x)
    assert (grown["CompileBehind"], grown["UncachedCompile"]) == (0, 1)


@pytest.mark.skipif(CORE is not None, reason="the core counts a step where the next one begins")
def test_under_deterministic_algorithms_the_second_step_waits_for_the_program():
    """So the run that takes over depends on counts alone."""
    x = fresh(3, 3006)
    torch.use_deterministic_algorithms(True)
    try:
        with metrics.counted() as grown:
            for _ in range(4):
                run(x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert (grown["CompileBehind"], grown["ImmediateSteps"], grown["ExecuteTime"]) == (1, 2, 2)


def test_a_child_of_fork_has_a_process_of_its_own():
    for _ in range(3):
        run(fresh(3, 3007))
    child = os.fork()
    if child == 0:
        x = fresh(3, 3008)
        with metrics.counted() as grown:
            for _ in range(4):
                run(x)
            compile_behind.wait()
            for _ in range(2):
                run(x)
        os._exit(0 if grown["RecalledPrograms"] == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


PROGRAM = f"""
import torch, ltc, ltc.core.lazy_model as ltm
{NOTES_AT_ONCE}
from ltc.runtime.background import compile_behind
x = torch.ones(3009).to("ltc")
for _ in range(3):
    y = x.exp().sum()
    ltm.mark_step(wait=True)
print(compile_behind._worker._process.pid)
"""


def test_the_process_ends_with_the_one_that_started_it():
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    pid = int(ended.stdout)
    while _lives(pid):  # it may be importing yet
        time.sleep(0.05)


def test_the_other_process_ends_with_this_one_while_it_imports(tmp_path, monkeypatch):
    """Importing torch takes long on a busy machine; here it takes for ever."""
    (tmp_path / "ltc.py").write_text("import threading\nthreading.Event().wait()\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    worker = compile_behind.Worker(compile_behind.Job(keep=dict, record=dict))
    time.sleep(0.5)
    worker._process.stdin.close()  # as when this process ends
    assert worker._process.wait() == 0


COPIED = f"""
import os, signal, sys, threading, time, torch, ltc, ltc.core.lazy_model as ltm
{NOTES_AT_ONCE}
from ltc import config
from ltc.debug import metrics
from ltc.runtime.background import compile_behind, worker_process
x = torch.arange(3011.0).to("ltc")

def run(factor):
    y = (x * factor).exp().sum()
    ltm.mark_step(wait=True)
    torch.testing.assert_close(y.cpu(), (x.cpu() * factor).exp().sum())

def until_asked_for():
    while compile_behind._worker is None:
        run(1e-4)

def until_answered():
    compile_behind.wait()
    run(1e-4)  # of this one it was decided before that its calls run

def process():
    return compile_behind._worker._process

def is_copy():
    return process().__class__ is worker_process.Copy

"""


def in_a_process(text: str, **settings: object) -> None:
    """Where no thread but the main one is, as pytest's may have some."""
    settings = {"LTC_COPY_PROCESS": 1, "LTC_PREFAULT_MB": 0, **settings}
    environment = {key: str(value) for key, value in settings.items()}
    ended = subprocess.run(
        [sys.executable, "-c", COPIED + text],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert ended.returncode == 0, ended.stderr


linux = pytest.mark.skipif(sys.platform != "linux", reason="a process is copied on Linux alone")


@linux
def test_a_copy_of_the_process_compiles():
    in_a_process("""
with metrics.counted() as grown:
    until_asked_for()
    until_answered()
    run(1e-4)
assert is_copy()
assert (grown["CompileBehind"], grown["UncachedCompile"]) == (1, 1), dict(grown)
assert (grown["RecalledPrograms"], grown["CompileBehindFailed"]) == (1, 0), dict(grown)
pid = process().pid
compile_behind.end()
assert process().poll() == -signal.SIGKILL and compile_behind._worker.is_usable() is False
""")


@linux
def test_threads_that_wait_do_not_keep_a_process_from_being_copied():
    in_a_process("""
threading.Thread(target=threading.Event().wait, daemon=True).start()
trains = threading.Thread(target=until_asked_for)  # and the main thread waits for it
trains.start()
trains.join()
assert is_copy()
until_answered()
""")


@linux
def test_a_copy_is_in_none_of_the_modes_of_the_thread_that_makes_it():
    in_a_process("""
torch.set_default_device("ltc")
with torch.inference_mode(), metrics.counted() as grown:
    x = torch.arange(3011.0).to("ltc")
    until_asked_for()
    until_answered()
    run(1e-4)
assert is_copy()
assert (grown["RecalledPrograms"], grown["CompileBehindFailed"]) == (1, 0), dict(grown)
""")


@linux
@pytest.mark.parametrize(
    ("setup", "settings"),
    [
        (
            "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start(); time.sleep(0.1)",
            {},
        ),
        ("worker_process.MOST_BYTES = 0", {}),
        ("", {"LTC_COPY_PROCESS": 0}),
    ],
    ids=["a thread", "large", "switched off"],
)
def test_what_may_not_be_copied_is_begun_anew(setup, settings):
    in_a_process(
        f"""
{setup}
until_asked_for()
assert not is_copy()
""",
        **settings,
    )


@linux
def test_a_copy_keeps_none_of_the_users_files_open_and_calls_none_of_their_handlers(tmp_path):
    in_a_process(
        """
read, write = os.pipe()
place = os.environ["PLACE"]
signal.signal(signal.SIGTERM, lambda *_: open(place, "w").close())
until_asked_for()
assert is_copy()
os.close(write)
assert os.read(read, 1) == b""  # else another process may write to it yet
os.kill(process().pid, signal.SIGTERM)
assert process().wait() == -signal.SIGTERM
assert not os.path.exists(place)
run(1e-4)
""",
        PLACE=tmp_path / "handled",
    )


@linux
def test_a_copy_traces_the_program_itself():
    """The process that it was copied from goes on at once."""
    in_a_process("""
from ltc.runtime import compile
traced = []
expand = compile.expand
compile.expand = lambda *arguments: traced.append(os.getpid()) or expand(*arguments)
until_asked_for()
until_answered()
assert is_copy()
run(1e-4)
assert metrics.counter_value("CompileBehind") == metrics.counter_value("UncachedCompile") == 1
assert metrics.counter_value("RecalledPrograms") == 1
assert not traced
""")


@linux
def test_what_a_copy_cannot_compile_is_told():
    in_a_process("""
from ltc.runtime import compile
here, expand = os.getpid(), compile.expand

def failing(*arguments):
    if os.getpid() != here:
        raise RuntimeError("no such rule")
    return expand(*arguments)

compile.expand = failing
until_asked_for()
until_answered()
assert is_copy()
assert metrics.counter_value("CompileBehindFailed") == 1
run(1e-4)  # by a program that was compiled here
assert metrics.counter_value("UncachedCompile") == 1
""")


@linux
def test_launches_under_way_are_over_before_the_process_is_copied():
    in_a_process("""
worker_process.PATIENCE_SECONDS = 100  # however busy the machine is
with config.override(LTC_SYNC_WAIT=0):
    weight = torch.zeros(1 << 20).to("ltc")
    for _ in range(40):
        weight.add_(1).mul_(0.5)
        ltm.mark_step()
    assert (weight.cpu() - 1).abs().max() < 1e-3
until_answered()
assert is_copy()
""")


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:  # one that nobody has waited for is over as well
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_graph_is_read_as_it_was_written():
    x = make(ops.INPUT, index=0, dtype=torch.float32, shape=(2, 3))
    rate = make(ops.SCALAR, slot=0, dtype=torch.float64)
    y = make(ops.PERMUTE, x, dims=(1, 0))
    unused = make(ops.INPUT, index=1, dtype=torch.bool, shape=())
    graph = Graph((x, unused), (rate,), (y, x), {y: Origin("aten::t", "a.py:1", 4)}, torch.bfloat16)
    read = graph_of_record(json.loads(json.dumps(record_of_graph(graph))))
    assert read.inputs == graph.inputs
    assert read.scalars == graph.scalars
    assert read.outputs == graph.outputs
    assert schedule(*read.outputs) == schedule(*graph.outputs)
    assert {node: origin.position for node, origin in read.origins.items()} == {y: 4}
    assert read.scratch is torch.bfloat16


def test_the_process_that_compiles_knows_no_device():
    start = worker_process.START.format(paths=sys.path, package=worker_process.PACKAGE)
    telling = "print('ltc.device' in sys.modules, gc.isenabled())\n"
    asked = start[: start.index("answers =")] + telling
    process = subprocess.Popen(
        [sys.executable, "-c", asked], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:  # its input stays open: it would end with it
        assert process.stdout.read() == "False True\n"
