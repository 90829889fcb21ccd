"""A process that is asked prints where each of its threads and replicas is, and goes on."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import ltc
from ltc.command_line import main
from ltc.debug import whereabouts

ROOT = Path(__file__).parents[2]

PROGRAM = """
import threading, torch, ltc
made, leave = threading.Event(), threading.Event()

def works():
    x = torch.ones(3, device="ltc") + 1
    made.set() or leave.wait()

thread = threading.Thread(target=works, name="worker")
thread.start()
made.wait()

print("ready", flush=True)
input()
leave.set()
thread.join()
"""


def start(program, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
    )


def test_a_process_prints_where_its_threads_are_and_goes_on(capsys):
    process = start(PROGRAM)
    assert process.stdout.readline() == "ready\n"
    assert main(["dump", str(process.pid)]) == 0
    assert capsys.readouterr().out == f"printed to the standard error of {process.pid}\n"
    _, said = process.communicate("\n")
    assert said.startswith(f"ltc process {process.pid}, replica 0 of 1, after 0 step marks"), said
    # neither thread may have come to its next line yet
    assert re.search("thread worker at <string>:[67] in works", said), said
    assert "2 calls run on ltc:0" in said
    assert re.search("thread MainThread at <string>:1[34] in <module>", said), said
    assert process.returncode == 0


RANKS = """
import os, time, torch, ltc
import ltc.core.lazy_model as ltm

def train(rank):
    ltm.rendezvous("begin")
    if rank == 1:
        print("ready", flush=True)
        while not os.path.exists(FLAG):
            time.sleep(0.05)
    ltm.rendezvous("end")

if __name__ == "__main__":
    ltc.launch(train, nprocs=2)
"""


def wait_for(condition, process):
    """Until it holds, or the process has ended, in whose output the test then looks in vain."""
    while not condition() and process.poll() is None:
        time.sleep(0.05)


def test_replicas_print_which_collective_each_is_in(tmp_path):
    flag = tmp_path / "go on"
    script = tmp_path / "train.py"
    script.write_text(RANKS.replace("FLAG", repr(str(flag))))
    said = tmp_path / "said"
    with open(said, "w") as file:
        process = subprocess.Popen(
            [sys.executable, str(script)],
            stdout=file,
            stderr=file,
            env=os.environ | {"PYTHONPATH": str(ROOT), "LTC_NUM_DEVICES": "1"},
        )
        wait_for(lambda: "ready" in said.read_text(), process)
        asked = whereabouts.ask(process.pid)
        wait_for(lambda: said.read_text().count("ltc process") == 3, process)
        flag.touch()
        process.wait()
    text = said.read_text()
    assert len(asked) == 3  # the ranks, and who has started them
    assert "replica 0 of 2" in text and "replica 1 of 2" in text
    assert f"{script}:10 in train" in text  # where the second sleeps
    assert "rendezvous '" in text  # the board of both
    assert process.returncode == 0


def test_a_process_that_does_not_listen_is_left_alone(capsys):
    with subprocess.Popen(["bash", "-c", "trap : USR1; echo ready; read"], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as process:  # fmt: skip
        assert process.stdout.readline() == b"ready\n"
        assert main(["dump", str(process.pid)]) == 1
        assert "No signal was sent." in capsys.readouterr().err
        process.stdin.close()
    assert process.returncode in (0, 1)  # it was not ended by a signal


def test_a_process_that_is_not_there_is_told(capsys):
    assert main(["dump", "999999999"]) == 1
    assert "There is no process 999999999" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "variable", "left"),
    [
        ("signal.signal(signal.SIGUSR1, signal.SIG_IGN)", "1", "SIG_IGN"),
        ("pass", "0", "SIG_DFL"),
    ],
)
def test_the_signal_is_left_to_who_has_it(before, variable, left):
    program = f"import signal; {before}\nimport ltc\nprint(signal.getsignal(signal.SIGUSR1).name)"
    process = start(program, LTC_ANSWER_SIGNAL=variable)
    assert process.communicate()[0] == f"{left}\n"


def test_the_text_names_the_line_of_this_thread():
    pending = torch.ones(5, device="ltc").exp()
    text = whereabouts.describe_threads()
    assert f"at {__file__}" in text and "test_the_text_names_the_line_of_this_thread" in text
    assert "2 calls run on ltc:0" in text
    assert pending.shape == (5,)


def test_a_signal_in_this_process_is_answered_and_changes_nothing(capfd):
    assert threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGUSR1)
    x = torch.ones(3, device="ltc") * 2
    os.kill(os.getpid(), signal.SIGUSR1)
    assert x.tolist() == [2.0] * 3
    assert "ltc process" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGUSR1) is before
    assert ltc.device_count()
