"""Large programs are compiled by another process, while they run interpreted."""

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
from ltc.debug import metrics
from ltc.device.op_by_op import forks
from ltc.device.recording.recorder import device_at
from ltc.ir import ops
from ltc.ir.graph import Graph, Origin, schedule
from ltc.ir.json_codec import Unrecordable
from ltc.ir.node import make
from ltc.runtime import tiers
from ltc.runtime.background import compile_behind
from ltc.runtime.background.graph_record import graph_of_record, record_of_graph


@pytest.fixture(autouse=True)
def auto(monkeypatch, tmp_path):
    """As in a process of one device that was told nothing, where every program is large."""
    device_at(0).recorder()._plant()  # what other tests have read is no reason to run at once
    monkeypatch.setattr(tiers, "_has_replicas", lambda: False)
    monkeypatch.setattr(tiers, "LARGE_CALLS", 1)
    monkeypatch.setattr(forks, "RECORDED", 1 << 30)
    settings = {"LTC_TIER": "auto", "LTC_CACHE": 1, "LTC_CACHE_DIR": str(tmp_path)}
    with config.override(LTC_BACKEND="llvm", LTC_NUM_DEVICES=1, **settings):
        yield
        compile_behind.end()


def run(x: torch.Tensor) -> torch.Tensor:
    y = (x * 2).tanh().sum(0)
    ltm.mark_step(wait=True)
    torch.testing.assert_close(y.cpu(), (x.cpu() * 2).tanh().sum(0))
    return y


def fresh(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to("ltc:0")


def until_none_is_asked_for() -> None:
    """Wait for the process; a test that hangs here says that it never answers."""
    while compile_behind._worker._requests:
        time.sleep(0.01)


def test_steps_go_on_until_another_process_has_compiled_their_program():
    x = fresh(3, 3001)
    with metrics.counted() as grown:
        for _ in range(5):
            run(x)
        assert (grown["CompileBehind"], grown["UncachedCompile"]) == (1, 0)
        until_none_is_asked_for()
        runs = grown["InterpretedRuns"]
        for _ in range(3):
            run(x)
    assert (grown["InterpretedRuns"], grown["UncachedCompile"]) == (runs, 1)
    assert grown["RecalledPrograms"] == 1
    assert grown["CompileBehindFailed"] == 0


def test_what_is_updated_in_place_is_by_the_compiled_program_too():
    weight = torch.zeros(3002).to("ltc:0")
    for _ in range(3):
        weight.add_(1).mul_(2)
        ltm.mark_step(wait=True)
    until_none_is_asked_for()
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
        until_none_is_asked_for()
        run(x)
    assert (grown["CompileBehind"], grown["UncachedCompile"]) == (1, 1)
    assert grown["RecalledPrograms"] == 0


def test_what_cannot_be_written_down_is_compiled_here(monkeypatch):
    def refuse(graph):
        raise Unrecordable("a user's object")

    monkeypatch.setattr(compile_behind, "record_of_graph", refuse)
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


def test_a_small_program_is_compiled_here(monkeypatch):
    monkeypatch.setattr(tiers, "LARGE_CALLS", 100)
    x = fresh(3, 3006)
    with metrics.counted() as grown:
        for _ in range(3):
            run(x)
    assert (grown["CompileBehind"], grown["UncachedCompile"]) == (0, 1)


def test_a_child_of_fork_has_a_process_of_its_own():
    for _ in range(3):
        run(fresh(3, 3007))
    child = os.fork()
    if child == 0:
        x = fresh(3, 3008)
        with metrics.counted() as grown:
            for _ in range(4):
                run(x)
            until_none_is_asked_for()
            run(x)
        os._exit(0 if grown["RecalledPrograms"] == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


PROGRAM = """
import torch, ltc, ltc.core.lazy_model as ltm
from ltc.runtime import tiers
from ltc.runtime.background import compile_behind
tiers.LARGE_CALLS = 1
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
    worker = compile_behind.Worker()
    time.sleep(0.5)
    worker._process.stdin.close()  # as when this process ends
    assert worker._process.wait() == 0


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
    start = compile_behind._START.format(paths=sys.path, package=compile_behind._PACKAGE)
    asked = start.replace("\nserve()\n", "\nprint('ltc.device' in sys.modules, gc.isenabled())\n")
    process = subprocess.Popen(
        [sys.executable, "-c", asked], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:  # its input stays open: it would end with it
        assert process.stdout.read() == "False True\n"
