"""Ctrl-C, or another signal whose handler raises: it comes out between two steps of ltc's work."""

import argparse
import collections
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import ltc
import ltc.core.lazy_model as ltm
from ltc import config
from ltc.device.torch_device import DeviceGuard
from ltc.support.process.held_signals import held

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "stress"))
import interrupts


class Alarmed(Exception):
    pass


def raise_alarmed(number, frame):
    raise Alarmed


@pytest.fixture
def alarmed():
    """SIGALRM raises Alarmed, as far as ltc lets it."""
    before = signal.signal(signal.SIGALRM, raise_alarmed)
    ltm.mark_step()
    yield lambda: signal.raise_signal(signal.SIGALRM)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("way", ["steady", "op_by_op", "replay"])
def test_an_interrupt_leaves_parameters_from_before_or_after_its_step(way, tmp_path):
    """36 of the 1000 instants of scripts/stress/interrupts.py."""
    before = signal.signal(signal.SIGALRM, interrupts.alarm)
    try:
        chosen = argparse.Namespace(seed=1, limit=600.0)
        instants = interrupts.Instants(way, chosen, tmp_path)
        instants.run(12)
    finally:
        interrupts.alarm.stop()
        signal.signal(signal.SIGALRM, before)
    assert not instants.wrong


def test_an_interrupt_within_an_optimizers_step_comes_out_behind_it(alarmed):
    weights = [torch.zeros(2, device="ltc", requires_grad=True) for _ in range(2)]

    class Interrupting(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self):
            for weight in weights:
                alarmed()
                weight.add_(1)

    optimizer = Interrupting(weights, {})
    with pytest.raises(Alarmed):
        optimizer.step()
        time.sleep(1)
    assert [weight.tolist() for weight in weights] == [[1.0, 1.0], [1.0, 1.0]]


def test_a_handler_that_was_set_since_waits_from_the_next_mark_on():
    before = signal.getsignal(signal.SIGUSR2)
    went_on = []

    class Interrupting(torch.optim.Optimizer):
        def step(self):
            signal.raise_signal(signal.SIGUSR2)
            went_on.append(True)

    signal.signal(signal.SIGUSR2, raise_alarmed)
    try:
        ltm.mark_step()
        with pytest.raises(Alarmed):
            Interrupting([torch.zeros(2)], {}).step()
            time.sleep(1)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert went_on


NEXT_CALLS = {
    "a mark": lambda x: ltm.mark_step(),
    "a number": lambda x: x[0].item(),
    "a copy": lambda x: x.cpu(),
    "a list": lambda x: x.tolist(),
    "a replayed call": ltc.compile(lambda x: x * 2),
}


def interrupted_within_ltc(signal_number: int, x: torch.Tensor) -> torch.Tensor:
    """A call that is recorded, and pending where the handler is called."""
    with held:
        signal.raise_signal(signal_number)
        return x + 1


@pytest.mark.parametrize("name", NEXT_CALLS)
def test_an_interrupt_that_came_within_ltc_comes_out_before_the_next_call_begins(alarmed, name):
    """The program's own code is hardly ever at work: no signal that is sent again meets it."""
    x = torch.ones(2, device="ltc")
    for _ in range(10):
        with pytest.raises(Alarmed):
            y = interrupted_within_ltc(signal.SIGALRM, x)
            NEXT_CALLS[name](y)
            time.sleep(60)
        ltm.mark_step()
        assert (x + 1).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("tier", ["auto", "native", "op_by_op"])
@pytest.mark.parametrize("name", NEXT_CALLS)
def test_a_handler_may_read_and_mark_and_the_training_goes_on(name, tier):
    """As one that saves a checkpoint: the call before which it runs finds what it has left."""
    weight, kept = torch.zeros(2, device="ltc"), []

    def save(*_):
        kept.append(weight.tolist())
        weight.add_(10)
        ltm.mark_step()

    before = signal.signal(signal.SIGUSR2, save)
    try:
        with config.override(LTC_TIER=tier):
            ltm.mark_step()
            for count in range(1, 11):
                weight = interrupted_within_ltc(signal.SIGUSR2, weight)
                NEXT_CALLS[name](weight)
                while len(kept) < count:
                    time.sleep(0.001)
                assert kept[-1] == [11.0 * count - 10.0] * 2
                assert weight.tolist() == [11.0 * count] * 2
                ltm.mark_step()
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_signals_that_wait_together_are_all_delivered(alarmed):
    delivered = []
    before = signal.signal(signal.SIGUSR2, lambda *_: delivered.append(True))
    try:
        ltm.mark_step()
        with pytest.raises(Alarmed):
            with held:
                signal.raise_signal(signal.SIGUSR2)
                signal.raise_signal(signal.SIGALRM)
            time.sleep(60)
        while not delivered:
            time.sleep(0.001)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert delivered == [True]


@pytest.mark.parametrize("ends_by", ["a read", "a mark"])
def test_a_signal_is_delivered_once_however_often_it_was_sent_again(ends_by):
    delivered = []
    before = signal.signal(signal.SIGUSR2, lambda *_: delivered.append(True))
    try:
        ltm.mark_step()
        for count in range(1, 31):
            with held:
                signal.raise_signal(signal.SIGUSR2)
                [0 for _ in range(9)]
            time.sleep(0.0001 * count)
            x = torch.ones(2, device="ltc") + 1
            x.tolist() if ends_by == "a read" else ltm.mark_step()
            while len(delivered) < count:
                time.sleep(0.001)
        time.sleep(0.1)
        assert len(delivered) == 30
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_an_interrupt_is_not_lost_while_torch_imports(alarmed, tmp_path, monkeypatch):
    """As mpmath is imported, which torch asks for: `except:` where something is tried."""
    Path(tmp_path, "tries_one_thing.py").write_text(
        "import signal\ntry:\n    signal.raise_signal(signal.SIGALRM)\n    [0 for _ in range(9)]\n"
        "except:\n    pass\nfor _ in range(9):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    torch_s = {"__name__": "torch.of_this_test"}
    exec("def load():\n    import tries_one_thing", torch_s)
    with pytest.raises(Alarmed):
        torch_s["load"]()
        time.sleep(1)
    assert "tries_one_thing" in sys.modules  # it was imported to its end
    del sys.modules["tries_one_thing"]


def test_an_interrupt_while_ltc_makes_a_named_tuple_comes_out_behind_it(alarmed):
    """Its constructor is of no module that anybody wrote: it was taken for the program's own code."""
    made_for = collections.namedtuple("Point", "x").__new__.__globals__["__name__"]
    of_tuple, ltc_s, went_on = {"__name__": made_for, "signal": signal}, {}, []
    exec("def new():\n    signal.raise_signal(signal.SIGALRM)\n    [0 for _ in range(9)]", of_tuple)
    ltc_s |= {"__name__": "ltc.of_this_test", "new": of_tuple["new"], "went_on": went_on}
    exec("def make():\n    new()\n    went_on.append(True)", ltc_s)
    with pytest.raises(Alarmed):
        ltc_s["make"]()
        time.sleep(1)
    assert went_on


def test_an_interrupt_comes_out_behind_the_locks_of_a_thread_that_starts(alarmed):
    """Called as a lock is to be taken again, it let go of one that nobody had: RuntimeError."""
    for _ in range(20):
        thread = threading.Thread(target=alarmed)
        with pytest.raises(Alarmed):
            thread.start()
            for _ in range(10_000):  # what is sent to another thread ends no sleep of this one
                time.sleep(0.001)
        thread.join()


def test_an_interrupt_comes_out_of_waiting_for_a_thread(alarmed):
    ended = threading.Event()

    def interrupt_and_wait():
        time.sleep(0.2)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)
        ended.wait()

    thread = threading.Thread(target=interrupt_and_wait)
    thread.start()
    with pytest.raises(Alarmed):
        thread.join()
    ended.set()
    thread.join()


READS = """
import signal, sys
import torch, ltc

class Came(Exception):
    pass

def handler(number, frame):
    raise Came

signal.signal(signal.SIGALRM, handler)
heard, x = 0, torch.ones(2, device="ltc")
for _ in range(100):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005)
        while True:
            x = x.cpu().to("ltc")
    except Came:
        heard += 1
print(heard)
"""


def test_interrupts_come_through_in_a_loop_of_reads_without_a_mark():
    done = subprocess.run([sys.executable, "-c", READS], capture_output=True, text=True)
    assert done.stdout == "100\n", done.stderr


FORKS = """
import os, signal, sys, time
def interrupt():
    signal.raise_signal(signal.SIGUSR2)

os.register_at_fork(after_in_parent=interrupt, after_in_child=interrupt)
import ltc

signal.signal(signal.SIGUSR2, lambda number, frame: sys.exit(5))
parent, heard = os.getpid(), False
try:
    os.fork()
    time.sleep(60)
except SystemExit:
    heard = True
if os.getpid() != parent:
    os._exit(5 if heard else 1)
print("in the parent", heard, "in the child", os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_an_interrupt_is_not_lost_within_the_hooks_of_a_fork():
    """Python prints what a hook raises, and goes on; that of `logging` locks and unlocks."""
    # From 3.12 on it warns of a fork beside threads: those that libraries start on some machines.
    quiet = "-Wignore:This process:DeprecationWarning"
    done = subprocess.run([sys.executable, quiet, "-c", FORKS], capture_output=True, text=True)
    assert done.stdout == "in the parent True in the child 5\n" and not done.stderr


def test_an_interrupt_ends_a_wait(alarmed):
    # Python calls no handler of a signal that comes just before `sleep` begins to wait, until another
    # comes: on a busy machine once in thousands of times, without ltc as well.
    signal.setitimer(signal.ITIMER_REAL, 0.01, 30)
    with pytest.raises(Alarmed):
        time.sleep(600)


def test_who_insists_is_heard_within_a_step_as_well(alarmed):
    class Waiting(torch.optim.Optimizer):
        def step(self):
            end = time.monotonic() + 600
            signal.setitimer(signal.ITIMER_REAL, 0.01, 1.1)
            while time.monotonic() < end:
                pass

    with pytest.raises(Alarmed):
        Waiting([torch.zeros(2, device="ltc")], {}).step()


def test_the_device_guard_answers_while_an_error_is_on_its_way():
    """C++ asks it while it unwinds, and an exception from it would end the process."""
    weight = torch.ones(2, device="ltc", requires_grad=True)
    product = weight * 2

    def fail(gradient):
        raise KeyError("of a hook")

    for _ in range(2):
        hook = product.register_hook(fail)
        with pytest.raises(KeyError, match="of a hook"):
            product.sum().backward(retain_graph=True)
        hook.remove()
    assert DeviceGuard.type_() == DeviceGuard.type_()


ENDS = """
import atexit, sys, threading
import torch, ltc
import ltc.core.lazy_model as ltm

def multiply():
    x = torch.randn(64, 64).to("ltc")
    while True:
        x = (x @ x).tanh()
        ltm.mark_step()

if "uses" in sys.argv or "leaves" in sys.argv:
    atexit.register(lambda: 1 / 0)
    threading.Thread(target=multiply, daemon=True).start()
    if "uses" in sys.argv:
        (torch.ones(3).to("ltc") + 1).tolist()
    sys.exit(3)
print("ready", flush=True)
multiply()
"""


def ended(*arguments: str, sent: int = 0) -> tuple[int, str]:
    """The exit code of ENDS and what it has said."""
    command = [sys.executable, "-c", ENDS, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True) as program:
        if sent:
            assert program.stdout.readline() == "ready\n"
            time.sleep(0.5)
            program.send_signal(sent)
        _, said = program.communicate()
    return program.returncode, said


def test_ctrl_c_ends_a_loop_that_is_nearly_always_within_ltc():
    code, said = ended(sent=signal.SIGINT)
    assert code == -signal.SIGINT and said.strip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize("main_thread", ["uses", "leaves"])  # or the other one is at its first use
def test_a_program_ends_while_a_thread_records_and_an_atexit_raises(main_thread):
    code, said = ended(main_thread)
    assert code == 3 and "ZeroDivisionError" in said and "terminate" not in said


@pytest.mark.parametrize("is_on", [True, False])
def test_handlers_stay_where_they_are_when_told(is_on, monkeypatch):
    def handler(*_):
        """The program's own."""

    monkeypatch.setattr(held, "_is_on", is_on)  # LTC_HOLD_SIGNALS, at import
    before = signal.signal(signal.SIGUSR2, handler)
    try:
        held.watch()
        assert (signal.getsignal(signal.SIGUSR2) is handler) is not is_on
    finally:
        signal.signal(signal.SIGUSR2, before)
